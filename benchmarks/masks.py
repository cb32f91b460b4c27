"""Time `nm_mask(w.abs())` and `magnitude_mask(w)` against `w.abs() -> topk -> scatter_`, interleaved in one process.

``python -m benchmarks.masks`` prints medians and their ratios; noise hits all sides of an interleaved ratio alike.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables.markdown import line, table
from benchmarks.tables.matrices import MASKS, masks
from benchmarks.timing import begin, interleaved, matrix_parser, write
from lightning_nm.functional.masks import magnitude_mask, nm_mask
from lightning_nm.pattern import NMPattern

PATTERNS = ("2:4", "1:2", "1:4", "2:8", "4:8", "1:16", "2:16", "4:16", "8:16", "16:32", "3:5")


def topk_mask(weight: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Make the mask as one would by hand: `topk` in blocks, then `scatter_`."""
    blocks = weight.abs().unflatten(dim, (-1, pattern.m))
    axis = dim if dim < 0 else dim + 1
    kept = blocks.topk(pattern.n, dim=axis, sorted=False).indices
    return torch.zeros(blocks.shape, dtype=torch.bool).scatter_(axis, kept, True).view(weight.shape)


def score_mask(weight: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Make the mask from the stored absolute values."""
    return nm_mask(weight.abs(), pattern, dim)


def main(argv: Sequence[str] | None = None) -> None:
    parser = matrix_parser(__doc__, 5, PATTERNS)
    parser.add_argument("--dim", type=int, default=-1, choices=[-1, 0])
    args = parser.parse_args(argv)

    full = begin(args)
    print(
        f"{args.size} x {args.size} {args.dtype}, blocks along dim {args.dim}, medians of {args.repeats}\n"
    )
    print(table([*MASKS, "load"], []))
    rows: list[dict[str, Any]] = []
    for pattern in map(NMPattern.parse, args.patterns):
        size = args.size // pattern.m * pattern.m
        weight = full.narrow(args.dim, 0, size).contiguous()
        makers = [
            partial(make, weight, pattern, args.dim)
            for make in (topk_mask, score_mask, magnitude_mask)
        ]
        # Which of several equal entries topk keeps is open; what it keeps of the magnitude is not.
        kept = torch.stack([torch.where(make(), weight.abs(), 0).double().sum() for make in makers])
        assert torch.allclose(kept, kept[0], rtol=1e-12, atol=0), (
            f"{pattern}: the masks keep {kept} of the magnitude"
        )
        names, times = ("topk", "nm_mask", "magnitude_mask"), interleaved(makers, args.repeats)
        seconds = dict(zip(names, map(statistics.median, times), strict=True))
        rows.append({"pattern": str(pattern), "seconds": seconds, "load": os.getloadavg()[0]})
        print(line([*masks(rows[-1]), f"{rows[-1]['load']:.1f}"]), flush=True)
    write(args, rows)


if __name__ == "__main__":
    main()
