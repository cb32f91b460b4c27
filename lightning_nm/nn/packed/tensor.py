"""A packed weight as plain tensors, with its layout: what files hold, and what packed layers hold."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional.int8 import (
    INT8_DTYPES,
    check_quantised,
    dequantise_weight,
    quantise_weight,
)
from lightning_nm.functional.nm_format import (
    check_packed,
    check_packed_sizes,
    expand,
    pack_nm,
    position_bytes,
    position_numbers,
)
from lightning_nm.nn.weight import Layout
from lightning_nm.pattern import NMPattern

Role = Literal["linear", "transposed", "convolution", "experts", "experts-transposed", "embedding"]
"""Of a module: its weight is ``[out, in]``, ``[in, out]``, ``[out, in / groups, *taps]``, for experts
``[experts, out, in]`` or ``[experts, in, out]``, or ``[embeddings, in]``."""

EXPERTS: tuple[Role, ...] = ("experts", "experts-transposed")

LAYOUTS = (Layout.PLAIN, Layout.FLAT, Layout.TRANSPOSED)


class _EveryEntry(NMPattern):
    """Blocks of one entry, which is stored, so that there are no positions: of dense matrices in int8."""

    def __post_init__(self) -> None:
        """Accept numbers that no mask may have."""

    def __str__(self) -> str:
        return "dense"


EVERY_ENTRY = _EveryEntry(1, 1)
"""The pattern of a dense matrix in int8, such as an embedding, with a scale for each of its rows."""


class PackedTensor(NamedTuple):
    """A weight whose blocks are packed along one axis, or a dense matrix in int8.

    Args:
        values: ``[..., depth / M, N]``, see :func:`lightning_nm.functional.pack_nm`.
        positions: uint8.
        pattern: The pattern of the blocks, or :data:`EVERY_ENTRY`.
        layout: Where they lie in the weight.
        shape: Of the weight.
        scales: Of int8 values: float32 ``[out]``, one for each output, or ``[experts, out]``.
        dense_dtype: Of the weight that int8 values stand for.
    """

    values: Tensor
    positions: Tensor
    pattern: NMPattern
    layout: Layout
    shape: tuple[int, ...]
    scales: Tensor | None = None
    dense_dtype: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        weight: Tensor,
        pattern: NMPattern,
        layout: Layout = Layout.PLAIN,
        *,
        int8: bool = False,
        scales: Tensor | None = None,
        role: Role = "linear",
    ) -> PackedTensor:
        """Pack a weight.

        Args:
            weight: In float32 or bfloat16 for int8.
            pattern: N:M.
            layout: Where the blocks lie.
            int8: Round the values to int8, see :func:`quantise_weight`.
            scales: Those of a weight that was unpacked from int8.
            role: Of its module: each expert has scales of its own.

        Raises:
            TypeError: For a dtype that is not packed.
            ValueError: If it is not of the pattern, or :func:`int8_fault` tells why it has no int8 form.
        """
        if int8 and weight.dtype not in INT8_DTYPES:
            raise ValueError(int8_fault(weight))
        own_shape = tuple(weight.shape)
        shape_of_blocks(own_shape, layout)
        blocks = blocks_last(weight.detach(), layout)
        if pattern == EVERY_ENTRY:
            values = blocks.unsqueeze(-1)
            positions = torch.empty(0, dtype=torch.uint8, device=weight.device)
        else:
            values, positions = pack_nm(blocks, pattern)
        packed = cls(values, positions, pattern, layout, own_shape)
        if not int8:
            return packed
        shape = scale_shapes(own_shape, pattern, layout)[-1 if role in EXPERTS else 0]
        shape = shape if scales is None else tuple(scales.shape)
        rows = _rows_first(values, shape)
        integers, found = quantise_weight(rows, None if scales is None else scales.flatten())
        return packed._replace(
            values=integers.view(values.shape), scales=found.view(shape), dense_dtype=weight.dtype
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.dense_dtype or self.values.dtype

    def check(self) -> None:
        """Refuse tensors that do not belong to the shape, or values or positions that are damaged.

        Raises:
            TypeError: If a tensor has another dtype.
            ValueError: If it has another shape, or its content is wrong.
        """
        shape = shape_of_blocks(self.shape, self.layout)
        if isinstance(self.pattern, _EveryEntry):
            sizes = tuple(self.values.shape), tuple(self.positions.shape)
            check_packed_sizes(*sizes, self.pattern, shape)
        else:
            check_packed(self.values, self.positions, self.pattern, shape)
        if self.scales is not None:
            shapes = scale_shapes(self.shape, self.pattern, self.layout)
            if tuple(self.scales.shape) not in shapes:
                raise ValueError(f"scales are of shape {list(self.scales.shape)}, not {shapes}")
            rows = _rows_first(self.values, self.scales.shape)
            check_quantised(rows, self.scales.flatten())
        elif self.values.dtype == torch.int8:
            raise TypeError("int8 values have scales, and there are none")

    def unpack(self) -> Tensor:
        """The weight, contiguous."""
        shape = shape_of_blocks(self.shape, self.layout)
        values = self.values
        if self.scales is not None:
            rows = _rows_first(values, self.scales.shape)
            values = dequantise_weight(rows, self.scales.flatten(), self.dtype).view(values.shape)
        if isinstance(self.pattern, _EveryEntry):
            dense = values.view(shape)
        else:
            dense = expand(values, self.positions, self.pattern, shape)
        return from_blocks(dense, self.layout, self.shape)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors, by the names that they have in files and state dicts."""
        names = part_names(self.scales is not None)
        return {name: getattr(self, name) for name in names}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.parts.values())

    def to(self, device: torch.device) -> PackedTensor:
        """The same on a device."""
        moved: dict[str, Any] = {name: each.to(device) for name, each in self.parts.items()}
        return self._replace(**moved)

    @property
    def taps(self) -> int:
        """Taps of a convolution that lie between its rows and its blocks."""
        return math.prod(self.shape[2:]) if self.layout == "plain" else 1

    def numbers(self) -> Tensor:
        """The position of each value in its block, uint8 of the values' shape."""
        blocks = self.values.numel() // self.pattern.n
        return position_numbers(self.positions, self.pattern, blocks).view(self.values.shape)


def part_names(is_int8: bool) -> tuple[str, ...]:
    """Names of the tensors of a packed weight in files and state dicts, after its key and a dot."""
    return ("values", "positions", "scales")[: 3 if is_int8 else 2]


def int8_fault(weight: Tensor) -> str:
    """Why a weight has no values in int8; empty if it has.

    Example::

        >>> int8_fault(torch.ones(2, 4)), int8_fault(torch.ones(2, 4).half())
        ('', 'float16 is not float32 or bfloat16, which the inputs of int8 products are')
    """
    if weight.dtype not in INT8_DTYPES:
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"{dtype} is not float32 or bfloat16, which the inputs of int8 products are"
    try:
        quantise_weight(weight)
    except ValueError as error:
        return str(error)
    return ""


def scale_shapes(
    shape: tuple[int, ...], pattern: NMPattern, layout: Layout
) -> list[tuple[int, ...]]:
    """The shapes that the scales of an int8 weight may have: ``[out]``, and last ``[experts, out]``.

    A weight of three axes may be of experts, whose rows are then those of each expert.

    Example::

        >>> scale_shapes((8, 32, 16), NMPattern(2, 4), "flat")
        [(8,), (8, 32)]
    """
    blocked = shape_of_blocks(shape, layout)
    found = [blocked[:1]]
    if layout == "flat" and len(shape) == 3 and shape[2] % pattern.m == 0:
        found.append(shape[:2])
    elif layout == "plain" and len(shape) == 3:
        found.append(blocked[:2])
    return found


def check_scales(packed: PackedTensor, role: Role) -> None:
    """Refuse int8 scales that are not those of a module, by a ``ValueError``."""
    if packed.scales is None:
        return
    expected = 2 if role in EXPERTS else 1
    if packed.scales.dim() != expected:
        raise ValueError(
            f"scales of shape {list(packed.scales.shape)} have {packed.scales.dim()} axes: for the weight of "
            f"{'experts' if expected == 2 else 'one layer'} they have {expected}"
        )


def _rows_first(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values as ``[rows, entries]``, with a row for each scale."""
    return values.reshape(math.prod(shape), -1)


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
    return shape[::-1] if layout == "transposed" else (shape[0], *shape[2:], shape[1])


def packed_shapes(
    shape: tuple[int, ...], pattern: NMPattern, layout: Layout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the values and the positions of a weight.

    Raises:
        ValueError: If M does not divide the axis of the blocks.
    """
    blocked = shape_of_blocks(shape, layout)
    values = (*blocked[:-1], blocked[-1] // pattern.m, pattern.n)
    positions = (position_bytes(pattern, math.prod(blocked) // pattern.m),)
    check_packed_sizes(values, positions, pattern, blocked)
    return values, positions
