"""How the blocks of a weight lie: the weight as rows of outputs, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Layout = Literal["plain", "flat", "transposed", "experts", "experts-transposed"]
"""``"plain"``: forward blocks along dimension 1, dgrad blocks along dimension 0. ``"flat"``: the same after
``flatten(1)`` (the order of some papers' convolutions). ``"transposed"``: the same for the transposed weight.
``"experts"``: ``[experts, out, in]``, each expert's matrix plain. ``"experts-transposed"``: ``[experts, in, out]``,
each expert's matrix transposed."""

ConvLayout = Literal["channels", "flat"]
"""How the blocks of convolutions lie: along `in` for a fixed kernel tap, or along the flattened ``(in, *kernel)``."""


def misfit(axis: str, size: int, block: int, cuts: int = 1) -> str:
    """Why blocks do not fit into each of the equal parts of an axis, and which would; empty if they do.

    Example:
        >>> misfit("in", 30, 4)
        'in 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)'
    """
    if size % (cuts * block) == 0:
        return ""
    divided = f"{size}" if cuts == 1 else f"{size} / {cuts} processes"
    # Larger blocks are rarely wanted: only a width without a divisor up to 16 is told its smallest one.
    fitting = [m for m in range(2, size + 1) if size % (cuts * m) == 0]
    shown = [str(m) for m in fitting if m <= 16] or [str(m) for m in fitting[:1]]
    advice = f" (M = {', '.join(shown)} would fit)" if shown else ""
    return f"{axis} {divided} % {block} != 0{advice}"


def known_shape(tensor: Tensor) -> tuple[int, ...] | None:
    """The shape of a parameter; ``None`` for a lazy one before its first batch, whose shape torch refuses to tell."""
    return None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def known_size(tensor: Tensor) -> int:
    """The number of entries of a parameter; 0 for a lazy one before its first batch."""
    return 0 if nn.parameter.is_lazy(tensor) else tensor.numel()


# Every function below has one case for each layout, in the order of `Layout`.


def rows_of(tensor: Tensor, layout: Layout) -> Tensor:
    """The tensor with dimension 0 as `out` and forward blocks along dimension 1; the rows of experts one after another.

    A view where memory allows one: that of ``"experts-transposed"`` is a copy.
    """
    if layout == "plain":
        return tensor
    if layout == "flat":
        return tensor.flatten(1)
    if layout == "transposed":
        return tensor.t()
    if layout == "experts":
        return tensor.flatten(0, 1)
    return tensor.transpose(1, 2).flatten(0, 1)


def row_sizes(shape: Sequence[int], layout: Layout) -> tuple[int, int]:
    """The first two sizes of :func:`rows_of` a tensor of this shape."""
    if layout == "plain":
        return shape[0], shape[1]
    if layout == "flat":
        return shape[0], math.prod(shape[1:])
    if layout == "transposed":
        return shape[1], shape[0]
    experts, second, third = shape
    if layout == "experts":
        return experts * second, third
    return experts * third, second


def from_rows(rows: Tensor, layout: Layout, shape: Sequence[int]) -> Tensor:
    """Undo :func:`rows_of` for a tensor of this shape, whose dimension 0 may be cut."""
    if layout == "plain":
        return rows
    if layout == "flat":
        return rows.unflatten(1, shape[1:])
    if layout == "transposed":
        return rows.t()
    if layout == "experts":
        return rows.unflatten(0, (-1, shape[1]))
    return rows.unflatten(0, (-1, shape[2])).transpose(1, 2)


def locate(index: tuple[Tensor, ...], layout: Layout, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Turn an index into :func:`rows_of` a tensor of this shape into one of the tensor itself."""
    if layout == "plain":
        return index  # with further dimensions for the taps of a convolution
    row, column = index
    if layout == "flat":
        return row, *torch.unravel_index(column, tuple(shape[1:]))
    if layout == "transposed":
        return column, row
    if layout == "experts":
        rows_of_expert = shape[1]
        return row // rows_of_expert, row % rows_of_expert, column
    rows_of_expert = shape[2]
    return row // rows_of_expert, column, row % rows_of_expert
