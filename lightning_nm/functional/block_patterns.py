"""All N:M patterns of one block, for methods that learn which of them to keep."""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from lightning_nm.functional.pattern import NMPattern, PatternLike

MOST_PATTERNS = 256
"""The largest number of patterns of a block that is enumerated; 4:8 has 70, 2:16 has 120 and 8:16 has 12870."""


def block_patterns(pattern: PatternLike) -> Tensor:
    """Return all C(M, N) ways to keep N of the M entries of a block, in lexicographic order of the kept positions.

    Args:
        pattern: What :meth:`NMPattern.parse` reads, for example ``"2:4"``.

    Returns:
        A bool tensor ``[C(M, N), M]`` on the CPU.

    Raises:
        ValueError: If there are more than :data:`MOST_PATTERNS`.

    Example:
        >>> block_patterns("2:4").int().tolist()[:3]
        [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    """
    pattern = NMPattern.parse(pattern)
    count = math.comb(pattern.m, pattern.n)
    if count > MOST_PATTERNS:
        per_weight = count / pattern.m
        raise ValueError(
            f"a block of {pattern} has C({pattern.m}, {pattern.n}) = {count} patterns, and each takes a number in "
            f"every block, {per_weight:.0f} for each weight; at most {MOST_PATTERNS} are enumerated: use a smaller M, "
            "such as 2:4, 4:8 or 1:16, or another method"
        )
    kept = torch.zeros(count, pattern.m, dtype=torch.bool)
    for row, positions in zip(kept, combinations(range(pattern.m), pattern.n), strict=True):
        row[list(positions)] = True
    return kept


def patterns_of_layer(name: str, pattern: NMPattern) -> Tensor:
    """Return :func:`block_patterns`, or raise its error with the name of the layer."""
    try:
        return block_patterns(pattern)
    except ValueError as error:
        raise ValueError(f"layer '{name}': {error}") from None


def surviving(total: int, step: int, stop: int) -> int:
    r"""Return how many patterns of a block are left after a step, of ``total`` at first and one from ``stop`` on.

    :math:`1 + \lceil (C - 1) (1 - t / t_f)^3 \rceil`, in integers: no rounding moves a removal to another step.

    Args:
        total: C, the patterns at first.
        step: t, the training steps so far.
        stop: t_f, the step from which one is left.

    Example:
        >>> [surviving(6, step, 4) for step in range(5)]
        [6, 4, 2, 2, 1]

    Source: Zhang et al., Learning Best Combination for Efficient N:M Sparsity, NeurIPS 2022, arXiv:2206.06662.
    """
    if step >= stop:
        return 1
    left = stop - step
    numerator = (total - 1) * left**3
    # The ceiling of a quotient of integers.
    return 1 - (-numerator // stop**3)
