"""A packed weight: what kind of weight it is, and its tensors, as files and packed layers hold them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional.int8 import (
    INT8_DTYPES,
    check_quantised,
    dequantise_weight,
    quantise_weight,
)
from lightning_nm.functional.nm_format import check_packed, expand, pack_nm, packed_sizes
from lightning_nm.nn.weight import Layout
from lightning_nm.pattern import NMPattern

LAYOUTS = (Layout.PLAIN, Layout.FLAT, Layout.TRANSPOSED)
"""Where blocks lie in packed weights: those of experts are as in :data:`SAME_BLOCKS`."""

SAME_BLOCKS = {Layout.EXPERTS: Layout.FLAT, Layout.EXPERTS_TRANSPOSED: Layout.PLAIN}
"""The layouts of experts, and those in which a weight of three axes has the same blocks in files."""


class _EveryEntry(NMPattern):
    """Blocks of one entry, which is stored, so that there are no positions: of dense matrices in int8."""

    def __post_init__(self) -> None:
        """Accept numbers that no mask may have."""

    def __str__(self) -> str:
        return "dense"


EVERY_ENTRY = _EveryEntry(1, 1)
"""The pattern of a dense matrix in int8, such as an embedding, with a scale for each of its rows."""


class PackedKind(NamedTuple):
    """Metadata of a packed weight, as in the header of a file: pattern, layout, shape and dtypes.

    Args:
        pattern: The pattern of the blocks, or :data:`EVERY_ENTRY`.
        layout: Where they lie in the weight, one of :data:`LAYOUTS`.
        shape: Of the weight.
        dtype: Of the weight.
        int8: Whether the values are int8.
    """

    pattern: NMPattern
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    int8: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors in files and state dicts, after the key of the weight and a dot."""
        return ("values", "positions", "scales") if self.int8 else ("values", "positions")

    @property
    def part_shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """The shapes that the tensors may have: values, positions, scales ``[out]``, and last ``[experts, out]``.

        A weight of three axes may be of experts, whose rows are then those of each expert.

        Raises:
            ValueError: If M does not divide the axis of the blocks.

        Example::

            >>> PackedKind(NMPattern(2, 4), Layout.FLAT, (8, 32, 16), torch.float32).part_shapes
            {'values': [(8, 128, 2)], 'positions': [(512,)], 'scales': [(8,), (8, 32)]}
        """
        shape, layout = self.shape, self.layout
        blocked = shape_of_blocks(shape, layout)
        values, positions = packed_sizes(self.pattern, blocked)
        scales = [blocked[:1]]
        # [experts, out, in]: if M divides `in`, no block lies across two rows.
        if layout == "flat" and len(shape) == 3 and shape[2] % self.pattern.m == 0:
            scales.append(shape[:2])
        # [experts, in, out], which is [experts, out, in] once its blocks come last.
        elif layout == "plain" and len(shape) == 3:
            scales.append(blocked[:2])
        return {"values": [values], "positions": [positions], "scales": scales}

    @property
    def taps(self) -> int:
        """Taps of a convolution that lie between its rows and its blocks."""
        return math.prod(self.shape[2:]) if self.layout == "plain" else 1


class PackedTensor(NamedTuple):
    """A weight whose blocks are packed along one axis, or a dense matrix in int8.

    Args:
        values: ``[..., depth / M, N]``, see :func:`lightning_nm.functional.pack_nm`.
        positions: uint8.
        kind: What they are of.
        scales: Of int8 values: float32 ``[out]``, one for each output, or ``[experts, out]``.
    """

    values: Tensor
    positions: Tensor
    kind: PackedKind
    scales: Tensor | None = None

    @classmethod
    def of(
        cls,
        weight: Tensor,
        pattern: NMPattern,
        layout: Layout = Layout.PLAIN,
        *,
        int8: bool = False,
        scales: Tensor | None = None,
        experts: bool = False,
    ) -> PackedTensor:
        """Pack a weight.

        Args:
            weight: In float32 or bfloat16 for int8.
            pattern: N:M.
            layout: Where the blocks lie.
            int8: Round the values to int8, see :func:`quantise_weight`.
            scales: Those of a weight that was unpacked from int8.
            experts: Whether it is the weight of experts, each of which has scales of its own.

        Raises:
            TypeError: For a dtype that is not packed.
            ValueError: If it is not of the pattern, or :func:`int8_fault` tells why it has no int8 form.
        """
        if int8 and weight.dtype not in INT8_DTYPES:
            raise ValueError(int8_fault(weight))
        kind = PackedKind(pattern, layout, tuple(weight.shape), weight.dtype, int8)
        shape_of_blocks(kind.shape, layout)  # refuses an impossible layout
        values, positions = pack_nm(blocks_last(weight.detach(), layout), pattern)
        if not int8:
            return cls(values, positions, kind)
        if scales is None:
            # The shape for experts is the last one.
            shape = kind.part_shapes["scales"][-1 if experts else 0]
        else:
            shape = tuple(scales.shape)
            scales = scales.flatten()
        # Of the stored values alone: what is left out is zero, and changes no largest value of a row.
        integers, found = quantise_weight(_rows_first(values, shape), scales)
        return cls(integers.view(values.shape), positions, kind, found.view(shape))

    def check(self) -> None:
        """Refuse tensors that do not belong to the shape, or values or positions that are damaged.

        Raises:
            TypeError: If a tensor has another dtype.
            ValueError: If it has another shape, or its content is wrong.
        """
        shape = shape_of_blocks(self.kind.shape, self.kind.layout)
        check_packed(self.values, self.positions, self.kind.pattern, shape)
        if self.scales is not None:
            shapes = self.kind.part_shapes["scales"]
            if tuple(self.scales.shape) not in shapes:
                raise ValueError(f"scales are of shape {list(self.scales.shape)}, not {shapes}")
            rows = _rows_first(self.values, self.scales.shape)
            check_quantised(rows, self.scales.flatten())
        # As of an int8 model's state dict, for a weight that is not int8.
        elif self.values.dtype == torch.int8:
            raise TypeError("int8 values have scales, and there are none")

    def check_scales(self, experts: bool) -> None:
        """Refuse int8 scales that are not those of experts, or of one layer, by a ``ValueError``."""
        expected = 2 if experts else 1
        if self.scales is not None and self.scales.dim() != expected:
            raise ValueError(
                f"scales of shape {list(self.scales.shape)} have {self.scales.dim()} axes: for the weight of "
                f"{'experts' if experts else 'one layer'} they have {expected}"
            )

    def unpack(self) -> Tensor:
        """The weight, contiguous."""
        values, (pattern, layout, own_shape, dtype, _) = self.values, self.kind
        if self.scales is not None:
            rows = _rows_first(values, self.scales.shape)
            values = dequantise_weight(rows, self.scales.flatten(), dtype).view(values.shape)
        shape = shape_of_blocks(own_shape, layout)
        blocks = expand(values, self.positions, pattern, shape)
        if layout == "flat":
            return blocks.view(own_shape)
        return (blocks.movedim(-1, 1) if layout == "plain" else blocks.t()).contiguous()

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors, by the names that they have in files and state dicts."""
        return {name: getattr(self, name) for name in self.kind.parts}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.parts.values())

    def to(self, device: torch.device) -> PackedTensor:
        """The same on a device."""
        moved: dict[str, Any] = {name: each.to(device) for name, each in self.parts.items()}
        return self._replace(**moved)


def int8_fault(weight: Tensor) -> str:
    """Why a weight has no values in int8; empty if it has.

    Example::

        >>> int8_fault(torch.ones(2, 4)), int8_fault(torch.ones(2, 4).half())
        ('', 'float16 is not float32 or bfloat16, which the inputs of int8 GEMMs are')
    """
    if weight.dtype not in INT8_DTYPES:
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"{dtype} is not float32 or bfloat16, which the inputs of int8 GEMMs are"
    try:
        # Only the values tell whether there are scales for them.
        quantise_weight(weight)
    except ValueError as error:
        return str(error)
    return ""


def _rows_first(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values as ``[rows, entries]``, with a row for each scale."""
    return values.reshape(math.prod(shape), -1)


def blocks_last(weight: Tensor, layout: Layout) -> Tensor:
    """A weight as a tensor whose blocks lie along the last axis.

    ``"plain"``: ``[out, in, *taps]`` as ``[out, *taps, in]``; ``"flat"``: as ``[out, in * taps]``; ``"transposed"``:
    ``[in, out]`` as ``[out, in]``.
    """
    # Blocks of rows lie along axis 1, before the taps of a convolution.
    return Layout(layout).rows(weight).movedim(1, -1)


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
