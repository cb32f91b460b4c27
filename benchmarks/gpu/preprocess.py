"""Bandwidth of the preprocessing kernels against a plain copy on a CUDA device, interleaved in one process.

    python -m benchmarks.gpu.preprocess [--shapes 4096x11008 ...] [--tokens 16384] [--repeats 30] [--json FILE]

Each row is one input; its bytes are those that must be read and written once. An input that fits the L2 cache is
refused: it would stay there from one repeat to the next. ``of copy`` is the bandwidth relative to that of
``Tensor.copy_`` moving the same number of bytes: a kernel that is bound by memory alone reaches about 1. ``torch x`` is
how many times longer the torch operations take.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_nm.functional import fold_seed
from lightning_nm.kernels.preprocess import (
    BACKWARD,
    TOKENS,
    masked_pair,
    masked_pair_reference,
    mvue_transposed,
    mvue_transposed_reference,
    triton_kernels,
)
from lightning_nm.pattern import NMPattern

PATTERN = NMPattern(2, 4)


def milliseconds(functions: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median time of each function on the device, called in turn after three calls each to warm up."""
    for function in functions:
        for _ in range(3):
            function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        events = []
        for function in functions:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        for row, (start, end) in zip(times, events, strict=True):
            row.append(start.elapsed_time(end))
    return [statistics.median(row) for row in times]


def measure(
    name: str, matrix: Tensor, kernel: Callable[[], object], twin: Callable[[], object], size: int, repeats: int
) -> dict[str, object]:
    """Time a kernel, its torch twin and a copy that moves as many bytes."""
    shape, given = tuple(matrix.shape), matrix.numel() * matrix.element_size()
    cache = torch.cuda.get_device_properties("cuda").L2_cache_size
    if given <= cache:
        raise SystemExit(f"{name} {shape} has {given} bytes, no more than the L2 cache ({cache}): pass larger shapes")
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    own, slow, copy = milliseconds([kernel, twin, lambda: target.copy_(source)], repeats)
    rates = [size / time / 1e6 for time in (own, copy)]
    print(
        f"| {name} | {shape[0]} x {shape[1]} | {size / 1e6:.0f} | {own:.3f} | {rates[0]:.0f} | {rates[1]:.0f} "
        f"| {copy / own:.2f} | {slow / own:.1f} |",
        flush=True,
    )
    return {"name": name, "shape": shape, "bytes": size, "ms": own, "torch ms": slow, "copy ms": copy}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["11008x4096", "4096x11008", "8192x8192"], help="out x in")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(1, "No CUDA device: this measures the bandwidth of GPU kernels.\n")
    if triton_kernels() is None:
        parser.exit(1, "Triton is not installed, and without its kernels there is nothing to compare.\n")
    device = torch.cuda.get_device_properties("cuda")
    print(f"{device.name}, torch {torch.__version__}, medians of {options.repeats}, bfloat16 results, {PATTERN}\n")
    print("| input | shape | MB | ms | GB/s | copy GB/s | of copy | torch x |\n|---|---|---|---|---|---|---|---|")
    rows = []
    for text in options.shapes:
        out, columns = map(int, text.split("x"))
        marks = torch.randint(4, (out, columns), dtype=torch.uint8, device="cuda")
        permutation = torch.randperm(out, device="cuda")
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.randn(out, columns, device="cuda").to(dtype)
            size = weight.numel() * (weight.element_size() + 1 + 2 + 2)
            for order in (None, permutation):
                name = f"W {str(dtype).removeprefix('torch.')}" + ("" if order is None else ", permuted")
                kernel = partial(masked_pair, weight, marks, torch.bfloat16, order, own_backward=True)
                twin = partial(masked_pair_reference, weight, marks, torch.bfloat16, BACKWARD, order)
                rows.append(measure(name, weight, kernel, twin, size, options.repeats))
        grad, seed = torch.randn(options.tokens, out, device="cuda").bfloat16(), fold_seed(0).cuda()
        size = (options.tokens + -(-options.tokens // TOKENS) * TOKENS) * out * 2
        estimate = partial(mvue_transposed, grad, seed, PATTERN)
        reference = partial(mvue_transposed_reference, grad, seed, PATTERN, None)
        rows.append(measure("dY bfloat16", grad, estimate, reference, size, options.repeats))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        setup = {"device": device.name, "torch": torch.__version__, "repeats": options.repeats, "pattern": str(PATTERN)}
        options.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
