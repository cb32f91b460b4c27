"""Bandwidth of the preprocessing kernels against a plain copy on a CUDA device, interleaved in one process.

    python -m benchmarks.gpu.preprocess [--shapes 4096x11008 ...] [--tokens 16384] [--repeats 30] [--json FILE]
    python -m benchmarks.gpu preprocess

Each row is one input; its bytes are those that must be read and written once. An input that fits the L2 cache is
refused: it would stay there from one repeat to the next. ``of copy`` is the bandwidth relative to that of
``Tensor.copy_`` moving the same number of bytes: a kernel that is bound by memory alone reaches about 1. ``torch x`` is
how many times longer the torch operations take.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.report import Report
from benchmarks.gpu.setting import NotAsked, Setting
from benchmarks.timing import interleaved
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
SHAPES = ((11008, 4096), (4096, 11008), (8192, 8192))
TOKENS_OF_GRADIENTS = 16384


def milliseconds(functions: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """Median time of each function on the device, called in turn after three calls each to warm up."""
    if device.type != "cuda":
        return [1e3 * statistics.median(times) for times in interleaved(functions, repeats)]
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


class Input(NamedTuple):
    """A matrix, the kernel and its torch twin on it, and the bytes that must be read and written."""

    name: str
    matrix: Tensor
    kernel: Callable[[], object]
    twin: Callable[[], object]
    size: int


def inputs(shapes: Sequence[tuple[int, int]], tokens: int, device: torch.device) -> Iterator[Input]:
    """Make weights ``[out, in]`` in two dtypes, in order and permuted, and output gradients ``[tokens, out]``."""
    for out, columns in shapes:
        marks = torch.randint(4, (out, columns), dtype=torch.uint8, device=device)
        permutation = torch.randperm(out, device=device)
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.randn(out, columns, device=device).to(dtype)
            size = weight.numel() * (weight.element_size() + 1 + 2 + 2)
            for order in (None, permutation):
                name = f"W {str(dtype).removeprefix('torch.')}" + ("" if order is None else ", permuted")
                kernel = partial(masked_pair, weight, marks, torch.bfloat16, order, own_backward=True)
                twin = partial(masked_pair_reference, weight, marks, torch.bfloat16, BACKWARD, order)
                yield Input(name, weight, kernel, twin, size)
        grad, seed = torch.randn(tokens, out, device=device).bfloat16(), fold_seed(0).to(device)
        size = (tokens + -(-tokens // TOKENS) * TOKENS) * out * 2
        estimate = partial(mvue_transposed, grad, seed, PATTERN)
        reference = partial(mvue_transposed_reference, grad, seed, PATTERN, None)
        yield Input("dY bfloat16", grad, estimate, reference, size)


def measure(given: Input, repeats: int) -> dict[str, object]:
    """Time a kernel, its torch twin and a copy that moves as many bytes.

    Raises:
        ValueError: If the input fits the L2 cache.
    """
    matrix, size = given.matrix, given.size
    shape, device = tuple(matrix.shape), matrix.device
    if device.type == "cuda":
        own, cache = matrix.numel() * matrix.element_size(), torch.cuda.get_device_properties(device).L2_cache_size
        if own <= cache:
            raise ValueError(
                f"{given.name} {shape} has {own} bytes, no more than the L2 cache ({cache}): pass larger shapes"
            )
    source = torch.empty(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ours, slow, copy = milliseconds([given.kernel, given.twin, lambda: target.copy_(source)], repeats, device)
    rates = [size / time / 1e6 for time in (ours, copy)]
    print(
        f"| {given.name} | {shape[0]} x {shape[1]} | {size / 1e6:.0f} | {ours:.3f} | {rates[0]:.0f} | {rates[1]:.0f} "
        f"| {copy / ours:.2f} | {slow / ours:.1f} |",
        flush=True,
    )
    return {"name": given.name, "shape": shape, "bytes": size, "ms": ours, "torch ms": slow, "copy ms": copy}


def run(report: Report) -> None:
    """Measure all inputs, each as one question."""
    setting = report.setting
    shapes, tokens, repeats = setting.pick((SHAPES, TOKENS_OF_GRADIENTS, 30), (((64, 32),), 48, 1))

    def rates(setting: Setting, given: Input) -> dict[str, object]:
        if triton_kernels() is None and not setting.dry_run:
            raise NotAsked("Triton is not installed, and without its kernels there is nothing to compare")
        row = measure(given, repeats)
        return row | {"GB/s": given.size / float(str(row["ms"])) / 1e6}

    for given in inputs(shapes, tokens, setting.device):
        report.ask(f"V14 {given.name} {'x'.join(map(str, given.matrix.shape))}", partial(rates, given=given))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES], help="out x in")
    parser.add_argument("--tokens", type=int, default=TOKENS_OF_GRADIENTS)
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
    shapes = [(int(out), int(columns)) for out, columns in (text.split("x") for text in options.shapes)]
    try:
        rows = [measure(given, options.repeats) for given in inputs(shapes, options.tokens, torch.device("cuda"))]
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        setup = {"device": device.name, "torch": torch.__version__, "repeats": options.repeats, "pattern": str(PATTERN)}
        options.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
