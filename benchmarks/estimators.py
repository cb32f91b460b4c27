"""Time the unbiased N:M estimators against a plain copy of the tensor, interleaved in one process.

``python -m benchmarks.estimators`` prints medians and their ratios to the copy. The random numbers are given: what it
takes to draw them, one per block, stands next to it. ``--compile`` times compiled versions, the compilation apart.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables.markdown import line, table
from benchmarks.tables.matrices import ESTIMATORS, estimators
from benchmarks.timing import begin, interleaved, matrix_parser, write
from lightning_nm.functional import approx_mvue, counter_uniform, fold_seed, mvue
from lightning_nm.pattern import NMPattern

PATTERNS = ("2:4", "1:2", "4:8", "1:16")


def uniform(x: Tensor, pattern: NMPattern, dim: int, rows: Sequence[int] = ()) -> Tensor:
    """Draw the numbers an estimator needs."""
    blocks = list(x.shape)
    blocks[dim] //= pattern.m
    shape = (*rows, *blocks)
    return counter_uniform(torch.Size(shape).numel(), fold_seed(0)).view(shape)


def compiled(
    function: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return the compiled function, and the seconds of its first call."""
    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True)
    start = time.perf_counter()
    fast(x)
    return fast, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = matrix_parser(__doc__, 5, PATTERNS)
    parser.add_argument(
        "--compile", action="store_true", help="time what torch.compile makes of them"
    )
    args = parser.parse_args(argv)

    full = begin(args)
    mode = "compiled" if args.compile else "eager"
    print(f"{args.size} x {args.size} {args.dtype}, {mode}, medians of {args.repeats}\n")
    print(table([*ESTIMATORS, "first call s", "load"], []))
    rows: list[dict[str, Any]] = []
    for pattern in map(NMPattern.parse, args.patterns):
        size = args.size // pattern.m * pattern.m
        x = full[:size, :size].contiguous()
        cases: list[tuple[str, int, Callable[[Tensor], Tensor], tuple[int, ...]]] = []
        for dim in (-1, 0):
            numbers = uniform(x, pattern, dim)
            cases.append(
                ("mvue", dim, partial(mvue, pattern=pattern, dim=dim, uniform=numbers), ())
            )
            if pattern == NMPattern(2, 4):
                pairs = uniform(x, pattern, dim, (2,))
                cases.append(
                    ("approx_mvue", dim, partial(approx_mvue, dim=dim, uniform=pairs), (2,))
                )
        first = [0.0] * len(cases)
        functions = [function for _, _, function, _ in cases]
        if args.compile:
            made = [compiled(function, x) for function in functions]
            for (fast, _), function in zip(made, functions, strict=True):
                assert torch.equal(fast(x), function(x)), (
                    f"{pattern}: the compiled estimator differs"
                )
            functions, first = [fast for fast, _ in made], [seconds for _, seconds in made]
        draws = [partial(uniform, x, pattern, dim, rows) for _, dim, _, rows in cases]
        runs: list[Callable[[], object]] = [
            x.clone,
            *(partial(function, x) for function in functions),
            *draws,
        ]
        copy, *times = map(statistics.median, interleaved(runs, args.repeats))
        own, drawn = times[: len(cases)], times[len(cases) :]
        for (name, dim, _, _), seconds, draw, start in zip(cases, own, drawn, first, strict=True):
            row: dict[str, Any] = {"pattern": str(pattern), "estimator": name, "dim": dim}
            row["seconds"] = {"estimator": seconds, "copy": copy, "random numbers": draw}
            rows.append(row | {"first call s": start, "load": os.getloadavg()[0]})
            waited = f"{start:.1f}" if args.compile else "-"
            print(line([*estimators(row), waited, f"{rows[-1]['load']:.1f}"]), flush=True)
    write(args, rows)


if __name__ == "__main__":
    main()
