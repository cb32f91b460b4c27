"""A packed weight as plain tensors, with its layout: what files hold, and what packed layers hold."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from lightning_nm.functional.nm_format import (
    check_packed,
    check_packed_sizes,
    expand,
    pack_nm,
    position_bytes,
)
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.nn.layer.layout import Layout

LAYOUTS: tuple[Layout, ...] = ("plain", "flat", "transposed")


class PackedTensor(NamedTuple):
    """A weight whose blocks are packed along one axis.

    Args:
        values: ``[..., depth / M, N]``, see :func:`lightning_nm.functional.pack_nm`.
        positions: uint8.
        pattern: The pattern of the blocks.
        layout: Where they lie in the weight.
        shape: Of the weight.
    """

    values: Tensor
    positions: Tensor
    pattern: NMPattern
    layout: Layout
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor, pattern: NMPattern, layout: Layout = "plain") -> PackedTensor:
        """Pack a weight.

        Raises:
            TypeError: For a dtype that is not packed.
            ValueError: If it is not of the pattern.
        """
        shape_of_blocks(tuple(weight.shape), layout)
        return cls(
            *pack_nm(blocks_last(weight, layout), pattern), pattern, layout, tuple(weight.shape)
        )

    def check(self) -> None:
        """Refuse tensors that do not belong to the shape, or positions that are damaged, by a ``ValueError``."""
        check_packed(
            self.values, self.positions, self.pattern, shape_of_blocks(self.shape, self.layout)
        )

    def unpack(self) -> Tensor:
        """The weight, contiguous."""
        shape = shape_of_blocks(self.shape, self.layout)
        return from_blocks(
            expand(self.values, self.positions, self.pattern, shape), self.layout, self.shape
        )

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.values.nbytes + self.positions.nbytes


def blocks_last(weight: Tensor, layout: Layout) -> Tensor:
    """A weight as a tensor whose blocks lie along the last axis.

    ``"plain"``: ``[out, in, *taps]`` as ``[out, *taps, in]``; ``"flat"``: as ``[out, in * taps]``; ``"transposed"``:
    ``[in, out]`` as ``[out, in]``.
    """
    if layout == "plain":
        return weight.movedim(1, -1)
    return weight.flatten(1) if layout == "flat" else weight.t()


def from_blocks(tensor: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
    """Undo :func:`blocks_last`; the result is contiguous."""
    if layout == "flat":
        return tensor.view(shape)
    return (tensor.movedim(-1, 1) if layout == "plain" else tensor.t()).contiguous()


def shape_of_blocks(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The shape of :func:`blocks_last`.

    Raises:
        ValueError: If weights of this shape have no such layout.
    """
    if len(shape) < 2 or (layout == "transposed" and len(shape) != 2):
        raise ValueError(f"a weight of shape {list(shape)} has no layout '{layout}'")
    if layout == "flat":
        return shape[0], math.prod(shape[1:])
    return (
        (*shape[2:], shape[1], shape[0])
        if layout == "transposed"
        else (shape[0], *shape[2:], shape[1])
    )


def packed_shapes(
    shape: tuple[int, ...], pattern: NMPattern, layout: Layout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the values and the positions of a weight.

    Raises:
        ValueError: If M does not divide the axis of the blocks.
    """
    blocked = shape_of_blocks(shape, layout)
    count = math.prod(blocked) // pattern.m
    values, positions = (
        (*blocked[:-1], blocked[-1] // pattern.m, pattern.n),
        (position_bytes(pattern, count),),
    )
    check_packed_sizes(values, positions, pattern, blocked)
    return values, positions
