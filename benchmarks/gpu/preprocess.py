"""Bandwidth of the Triton kernels on a CUDA device, in GB/s of the least traffic, interleaved in one process.

    python -m benchmarks.gpu.preprocess [--shapes 4096x11008 ...] [--tokens 16384] [--repeats 20] [--json FILE]
    [TRITON_INTERPRET=1] python -m benchmarks.gpu.preprocess --dry-run    # tiny, on a CPU: shows that it runs

Each row is one way to make something of one input; its bytes are those that must be read and written once. ``gather,
then estimate`` and ``gather and estimate`` make the same and have the same bytes, so their GB/s compare. ``of copy`` is
the bandwidth relative to that of ``Tensor.copy_`` moving the same number of bytes: a kernel that is bound by memory
alone reaches about 1. ``torch x`` is how many times longer the torch operations take. ``BAME`` has the passes over a
weight that an adaptation makes. An input that fits the L2 cache is refused: it would stay there from one repeat to the
next.
No measurement begins after ``--seconds``; what is left out then is said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.report import Report
from benchmarks.gpu.setting import NotAsked, Setting
from benchmarks.timing import interleaved
from lightning_nm.functional import fold_seed, nm_mask
from lightning_nm.functional.evolution import (
    SCALE,
    BlockGrid,
    as_blocks,
    best_swaps,
    evidence_scores,
)
from lightning_nm.functional.mask_storage import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.functional.select import mask_
from lightning_nm.kernels.operands import (
    TOKENS,
    masked_operand,
    masked_reference,
    mvue_transposed,
    mvue_transposed_reference,
    permuted_columns,
    permuted_columns_reference,
    triton_kernels,
)
from lightning_nm.methods.bame.exchange import Evidence, passes_for
from lightning_nm.pattern import NMPattern

PATTERN = NMPattern(2, 4)
SHAPES = ["11008x4096", "4096x11008"]
TWIN_REPEATS = 3
"""Torch operations take many times as long, and to know how many needs no precision."""


class Way(NamedTuple):
    """One way to make something: the bytes it must move, the kernels, and the torch operations."""

    name: str
    size: int
    kernel: Callable[[], object]
    twin: Callable[[], object]


def milliseconds(
    functions: Sequence[Callable[[], object]], repeats: int, device: str
) -> list[float]:
    """Median time of each function on the device, called in turn after two calls each to warm up."""
    if device == "cpu":
        return [1e3 * statistics.median(row) for row in interleaved(functions, repeats)]
    for function in functions:
        for _ in range(2):
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


def both(*functions: Callable[[], object]) -> Callable[[], object]:
    """Call one after the other, and keep both results while doing so."""
    return lambda: [function() for function in functions]


def ways_of_a_weight(weight: Tensor, marks: Tensor, permutation: Tensor | None) -> list[Way]:
    half, read = 2 * weight.numel(), (weight.element_size() + 1) * weight.numel()
    dtype = torch.bfloat16
    forward = partial(masked_operand, weight, marks, dtype)
    backward = partial(
        masked_operand, weight, marks, dtype, BACKWARD_BIT, permutation, transposed=True
    )
    forward_twin = partial(masked_reference, weight, marks, dtype, FORWARD_BIT, None, False)
    backward_twin = partial(masked_reference, weight, marks, dtype, BACKWARD_BIT, permutation, True)
    return [
        Way(
            "W_F, then W_B",
            2 * (read + half),
            both(forward, backward),
            both(forward_twin, backward_twin),
        ),
        Way("W_F", read + half, forward, forward_twin),
        Way("W_B", read + half, backward, backward_twin),
    ]


def ways_of_a_gradient(grad: Tensor, permutation: Tensor) -> list[Way]:
    seed, (tokens, out) = fold_seed(0).to(grad.device), grad.shape
    read, padded = 2 * tokens * out, 2 * -(-tokens // TOKENS) * TOKENS * out
    estimate = partial(mvue_transposed, grad, seed, PATTERN)
    gather = partial(permuted_columns, grad, permutation)
    fused = partial(mvue_transposed, grad, seed, PATTERN, gather=permutation)
    estimate_twin = partial(mvue_transposed_reference, grad, seed, PATTERN)
    gather_twin = partial(permuted_columns_reference, grad, permutation)
    return [
        Way("estimate", read + padded, estimate, estimate_twin),
        Way("gather", 2 * read, gather, gather_twin),
        Way("gather and estimate", 2 * read + padded, fused, both(gather_twin, estimate_twin)),
        Way(
            "gather, then estimate",
            2 * read + padded,
            both(gather, estimate),
            both(gather_twin, estimate_twin),
        ),
    ]


def ways_of_an_adaptation(weight: Tensor, pattern: NMPattern) -> list[Way]:
    entries, size, m = weight.numel(), weight.element_size(), pattern.m
    mask = nm_mask(torch.rand_like(weight), pattern)
    bits, grad = mask.to(torch.uint8), torch.randn_like(weight)
    value = torch.where(mask, 0, 0.1 * torch.randn_like(weight).float())
    old = Evidence(value / SCALE, value.square(), torch.ones((), device=weight.device))
    rate, limit = torch.tensor([1e-3, 1e3], device=weight.device)
    correction = replace(old, count=old.count + 1).correction()
    step = {
        "correction": correction,
        "limit": limit,
        "size": rate,
        "own_ratio": 1.0,
        "fraction": 1.0,
    }
    grid = BlockGrid.of(weight, m)
    passes = passes_for(weight, bits, value)

    def advance() -> object:
        if passes is None:
            return advance_twin()
        return passes.gather_evidence(bits, grad, old.value, old.square, **step)

    def advance_twin() -> object:
        value = torch.where(mask, 0, old.value * SCALE)
        plausible = torch.where(value.abs() > limit, 0, value)
        advanced = Evidence(plausible, old.square.clone(), old.count)
        advanced.add(grad, mask, rate)
        mask_(grad, mask)
        return advanced

    def best() -> object:
        # On CPUs an exchange is found and made in one call.
        if passes is None or weight.device.type == "cpu":
            return best_twin()
        return passes.best(grid, bits, weight, value)

    def best_twin() -> object:
        mask_(weight, mask)
        kept = as_blocks(mask, m)
        scores = evidence_scores(as_blocks(weight.float(), m), as_blocks(value, m), kept)
        return best_swaps(scores, kept)

    # U and V are read and written, as is the gradient; of each block a gain and two bytes are written.
    return [
        Way("evidence", entries * (1 + 2 * size + 4 * 4), advance, advance_twin),
        Way("best exchange", entries * (1 + 2 * size + 4) + entries // m * 6, best, best_twin),
    ]


def inputs(
    shapes: Sequence[str], tokens: int, device: str
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], list[Way]]]]:
    """Yield the name and the shape of each input, and what makes it and the ways that start from it."""
    for text in shapes:
        out, columns = map(int, text.split("x"))

        def gradient(out: int = out) -> list[Way]:
            grad = torch.randn(tokens, out, device=device).bfloat16()
            return ways_of_a_gradient(grad, torch.randperm(out, device=device))

        def weight(
            dtype: torch.dtype,
            permuted: bool,
            transposed: bool,
            out: int = out,
            columns: int = columns,
        ) -> list[Way]:
            shape = (columns, out) if transposed else (out, columns)
            weight = torch.randn(shape, device=device).to(dtype)
            marks = torch.randint(4, shape, dtype=torch.uint8, device=device)
            if transposed:
                weight, marks = weight.t(), marks.t()
            return ways_of_a_weight(
                weight, marks, torch.randperm(out, device=device) if permuted else None
            )

        def adaptation(
            dtype: torch.dtype, pattern: NMPattern, out: int = out, columns: int = columns
        ) -> list[Way]:
            weight = torch.randn(out, columns, device=device).to(dtype)
            return ways_of_an_adaptation(weight, pattern)

        yield "dY bfloat16", (tokens, out), gradient
        for transposed in (False, True):
            for permuted in (False, True):
                for dtype in (torch.float32, torch.bfloat16):
                    name = f"W {str(dtype).removeprefix('torch.')}"
                    name += ", stored [in, out]" * transposed + ", permuted" * permuted
                    yield name, (out, columns), partial(weight, dtype, permuted, transposed)
        for pattern in (PATTERN, NMPattern(1, 16)):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"BAME {pattern} {str(dtype).removeprefix('torch.')}"
                yield name, (out, columns), partial(adaptation, dtype, pattern)


def measure(
    name: str, shape: tuple[int, ...], ways: Sequence[Way], repeats: int, device: str
) -> list[dict]:
    """Time all ways to use one input, interleaved with copies that move as many bytes, and their torch twins."""
    source = torch.empty(max(way.size for way in ways) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(size: int) -> None:
        target[: size // 2].copy_(source[: size // 2])

    times = milliseconds(
        [*(way.kernel for way in ways), *(partial(copy, way.size) for way in ways)], repeats, device
    )
    twins = milliseconds([way.twin for way in ways], min(repeats, TWIN_REPEATS), device)
    rows = []
    for way, own, plain, slow in zip(ways, times, times[len(ways) :], twins, strict=False):
        print(
            f"| {name} | {shape[0]} x {shape[1]} | {way.name} | {way.size / 1e6:.0f} | {own:.3f} "
            f"| {way.size / own / 1e6:.0f} | {way.size / plain / 1e6:.0f} | {plain / own:.2f} | {slow / own:.1f} |",
            flush=True,
        )
        rows.append(
            {
                "input": name,
                "shape": shape,
                "makes": way.name,
                "bytes": way.size,
                "ms": own,
                "GB/s": way.size / own / 1e6,
            }
            | {"copy ms": plain, "torch ms": slow}
        )
    return rows


def run(report: Report) -> None:
    """Measure every input, each as one question of V14."""
    shapes, tokens, repeats = report.setting.pick((SHAPES, 16384, 20), (["48x32"], 40, 1))
    device = report.setting.device.type

    def rates(
        setting: Setting, name: str, shape: tuple[int, ...], make: Callable[[], list[Way]]
    ) -> list[dict]:
        if triton_kernels() is None and not setting.dry_run:
            raise NotAsked(
                "Triton is not installed, and without its kernels there is nothing to compare"
            )
        return measure(name, shape, make(), repeats, device)

    for name, shape, make in inputs(shapes, tokens, device):
        question = partial(rates, name=name, shape=shape, make=make)
        report.ask(f"V14 {name} {'x'.join(map(str, shape))}", question)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="out x in")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=45, help="no measurement begins later")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU: shows that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.dry_run:
        options.shapes, options.tokens, options.repeats = ["48x32"], 40, 1
        device, name = "cpu", "dry run on a CPU, whose times mean nothing"
    elif not torch.cuda.is_available():
        parser.exit(
            1, "No CUDA device: this measures the bandwidth of GPU kernels. See --dry-run.\n"
        )
    elif triton_kernels() is None:
        parser.exit(
            1, "Triton is not installed, and without its kernels there is nothing to compare.\n"
        )
    else:
        device, name = "cuda", torch.cuda.get_device_name()
        sizes = [tuple(map(int, text.split("x"))) for text in options.shapes]
        smallest = min(out * min(columns, options.tokens) for out, columns in sizes)
        cache = torch.cuda.get_device_properties("cuda").L2_cache_size
        if 2 * smallest <= cache:
            parser.exit(
                1,
                f"An input has {2 * smallest} bytes, which the L2 cache ({cache}) holds: pass larger ones.\n",
            )
    print(
        f"{name}, torch {torch.__version__}, medians of {options.repeats}, bfloat16 results, {PATTERN}\n"
    )
    print("| input | shape | makes | MB | ms | GB/s | copy GB/s | of copy | torch x |")
    print("|---|---|---|---|---|---|---|---|---|")
    begin, rows, left_out = time.perf_counter(), [], []
    for input_name, shape, make in inputs(options.shapes, options.tokens, device):
        if time.perf_counter() - begin > options.seconds:
            left_out.append(f"{input_name} {shape[0]} x {shape[1]}")
        else:
            rows += measure(input_name, shape, make(), options.repeats, device)
    if left_out:
        print(f"\nLeft out after {options.seconds:g} seconds: {'; '.join(left_out)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        setup = {
            "device": name,
            "torch": torch.__version__,
            "repeats": options.repeats,
            "pattern": str(PATTERN),
        }
        options.json.write_text(
            json.dumps({"setup": setup, "rows": rows, "left out": left_out}, indent=1)
        )


if __name__ == "__main__":
    main()
