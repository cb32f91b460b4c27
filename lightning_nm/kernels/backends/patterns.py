"""Which N:M patterns are 2:4 as well, and so run on hardware that knows 2:4 alone."""

from __future__ import annotations

from torch import Tensor

from lightning_nm.pattern import NMPattern, PatternLike


def two_four_reason(pattern: PatternLike, depth: int | None = None) -> str:
    """Say why matrices of a pattern are not all 2:4; empty if they are.

    Every aligned group of four may hold two nonzeros. A block of 1:M gives a group one, and a group meets at most two
    blocks. Two blocks of 2:M may give it more than two, unless no group lies across them: 4 must divide M. With three
    entries in a block, a group may hold them all.

    Args:
        pattern: What :meth:`NMPattern.parse` reads.
        depth: Size of the axis along which the blocks lie, if it is known: groups of four must fill it.

    Returns:
        The reason, or an empty string.

    Example::

        >>> [pattern for pattern in ("1:2", "2:4", "4:8", "1:16", "2:6") if not two_four_reason(pattern)]
        ['1:2', '2:4', '1:16']
        >>> two_four_reason("1:2", depth=6)
        'an axis of 6 is not made of groups of four, as 2:4 hardware needs it'
    """
    pattern = NMPattern.parse(pattern)
    if pattern.n > 2 or (pattern.n == 2 and pattern.m % 4):
        return (
            f"{pattern} may put more than two nonzeros into a group of four, and the hardware knows 2:4 alone: "
            "patterns 1:M and 2:M with 4 dividing M fit"
        )
    if depth is not None and depth % 4:
        return f"an axis of {depth} is not made of groups of four, as 2:4 hardware needs it"
    return ""


def two_four_violation(nonzero: Tensor) -> str:
    """Say where a matrix is not 2:4; empty if each group of four along its last axis holds at most two nonzeros.

    Args:
        nonzero: A bool tensor ``[rows, depth]``, 4 dividing `depth`. Reading the answer synchronises with its device.

    Example::

        >>> import torch
        >>> two_four_violation(torch.tensor([[False, True, False, True, True, True, True, False]]))
        '1 of 2 groups of four holds more than two nonzeros, the first at row 0, columns 4 to 7'
    """
    crowded = nonzero.unflatten(1, (-1, 4)).sum(2) > 2
    count = int(crowded.sum())
    if not count:
        return ""
    row, group = (int(index) for index in crowded.nonzero()[0])
    hold = "holds" if count == 1 else "hold"
    return (
        f"{count} of {crowded.numel()} groups of four {hold} more than two nonzeros, "
        f"the first at row {row}, columns {4 * group} to {4 * group + 3}"
    )
