"""Time `transposable_mask(w)` next to `nm_mask(w.abs())`, interleaved in one process, and say what both keep.

``python -m benchmarks.transposable`` prints medians, the magnitude kept relative to the mask of the rows alone, and, on
a sample of tiles, relative to the optimum that a linear-programming solver finds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from benchmarks.masks import score_mask
from benchmarks.tables.markdown import line, table
from benchmarks.tables.matrices import TRANSPOSABLE, transposable
from benchmarks.timing import begin, interleaved, matrix_parser, write
from lightning_nm.functional import transposable_mask
from lightning_nm.pattern import NMPattern

PATTERNS = ("2:4", "4:8", "1:16", "8:16")


def optimum(tile: np.ndarray, n: int) -> float:
    """Solve the linear program of one tile of magnitudes; its vertices are masks."""
    m = len(tile)
    line = np.ones((1, m))
    sums = np.vstack([np.kron(np.eye(m), line), np.kron(line, np.eye(m))])
    return -float(linprog(-tile.ravel(), A_eq=sums, b_eq=np.full(2 * m, n), bounds=(0, 1)).fun)


def ratios_to_optimum(weight: Tensor, mask: Tensor, pattern: NMPattern, tiles: int) -> list[float]:
    """Return the kept magnitude over the optimum, for the first tiles of a row of tiles."""
    n, m = pattern.n, pattern.m
    magnitudes = weight[:m, : tiles * m].abs().double().numpy()
    kept = np.where(mask[:m, : tiles * m].numpy(), magnitudes, 0)
    starts = range(0, magnitudes.shape[1], m)
    return [
        kept[:, start : start + m].sum() / optimum(magnitudes[:, start : start + m], n)
        for start in starts
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = matrix_parser(__doc__, 3, PATTERNS)
    parser.add_argument("--sample", type=int, default=50, help="tiles to solve exactly")
    args = parser.parse_args(argv)

    full = begin(args)
    print(
        f"{args.size} x {args.size} {args.dtype}, normal, medians of {args.repeats}, {args.sample} tiles sampled\n"
    )
    print(table([*TRANSPOSABLE, "load"], []))
    found: list[dict[str, Any]] = []
    for pattern in map(NMPattern.parse, args.patterns):
        size = args.size // pattern.m * pattern.m
        weight = full[:size, :size].contiguous()
        makers = [
            partial(score_mask, weight, pattern, -1),
            partial(transposable_mask, weight, pattern),
        ]
        rows, both = (torch.where(maker(), weight.abs(), 0).double().sum() for maker in makers)
        names, times = ("nm_mask", "transposable_mask"), interleaved(makers, args.repeats)
        ratios = ratios_to_optimum(weight, transposable_mask(weight, pattern), pattern, args.sample)
        row: dict[str, Any] = {"pattern": str(pattern)}
        row["seconds"] = dict(zip(names, map(statistics.median, times), strict=True))
        row |= {
            "kept / rows": (both / rows).item(),
            "kept / optimum": [statistics.mean(ratios), min(ratios)],
        }
        found.append(row | {"load": os.getloadavg()[0]})
        print(line([*transposable(found[-1]), f"{found[-1]['load']:.1f}"]), flush=True)
    write(args, found)


if __name__ == "__main__":
    main()
