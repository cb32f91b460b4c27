"""A packed weight in the layout of a CPU kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.kernels.api import GemmKey, MaskedMatrix
from lightning_nm.kernels.cpu import CsrLayout, Int8Layout, PermuteLayout
from lightning_nm.kernels.cpu.int8 import ROWS
from lightning_nm.kernels.cpu.library import DTYPES, EMPTY, PANEL
from lightning_nm.nn.packed.kernel_choice import registry_of
from lightning_nm.nn.packed.tensor import PackedTensor
from lightning_nm.pattern import NMPattern

_CHUNK = 1 << 20
"""Entries that are unpacked at a time."""

Layout: TypeAlias = PermuteLayout | CsrLayout | Int8Layout
"""Of a kernel."""

_KERNELS = {PermuteLayout: "cpu-permute", CsrLayout: "cpu-csr", Int8Layout: "cpu-int8"}

LARGEST = 0.75
"""A kernel's layout that takes more than this share of the dense weight's memory is not made."""


@dataclass(eq=False)
class Operand:
    """A matrix ``[rows, depth]`` in a kernel's layout; the dense and the packed weight are not kept next to it.

    Attributes:
        layout: Where the nonzeros are.
        values: Their values, in the layout's order.
        pattern: The pattern of the blocks.
        tag: An empty tensor whose size is the handle of the weight that has this operand, as graphs take it.
    """

    layout: Layout
    values: Tensor
    pattern: NMPattern
    tag: Tensor | None = None
    _parts: dict[tuple[int, int], Operand] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        """The kernel that takes the layout."""
        return _KERNELS[type(self.layout)]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the layout; the scales of int8 values are those of the packed weight."""
        layout = self.layout
        if isinstance(layout, PermuteLayout):
            return [self.values, layout.inputs]
        if isinstance(layout, Int8Layout):
            return [self.values, layout.positions, layout.offset]
        return [self.values, layout.start, layout.offset]

    def part(self, rows: tuple[int, int] | None) -> Operand | None:
        """Some rows as an operand on the same memory; ``None`` if they are not whole tiles."""
        layout = self.layout
        if rows is None or rows == (0, layout.rows):
            return self
        if rows in self._parts:
            return self._parts[rows]
        if isinstance(layout, CsrLayout):
            return None
        first, end = rows
        # The rows that lie together.
        tile = ROWS if isinstance(layout, Int8Layout) else 2 * layout.lanes
        if first % tile or (end % tile and end != layout.rows):
            return None
        tiles = slice(first // tile, math.ceil(end / tile))
        own: Layout
        if isinstance(layout, Int8Layout):
            own = layout.part(tiles, end - first)
        else:
            own = PermuteLayout(layout.inputs[tiles], end - first, layout.depth)
        return self._parts.setdefault(rows, Operand(own, self.values[tiles], self.pattern))


def dense_matrix(tensors: Sequence[Tensor], rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    """The matrix of :attr:`Operand.tensors`, not of int8; graphs that are traced or exported can hold it."""
    if len(tensors) == 3:
        values, start, offset = tensors
        return _dense_of_csr(values, start, offset, rows, depth, dtype)
    values, index = tensors
    tiles = len(index)
    rows_of_tile = index.shape[3]
    tiles_at_a_time = max(_CHUNK // (rows_of_tile * depth), 1)
    # Graphs hold no loop over sizes; fake tensors are no plain tensors.
    in_graph = torch.compiler.is_compiling() or type(values) is not Tensor
    if tiles <= tiles_at_a_time or in_graph:
        return _dense_of_tiles(values, index, depth, dtype)[:rows]
    found = values.new_empty(rows, depth, dtype=dtype)
    for first in range(0, tiles, tiles_at_a_time):
        end = first + tiles_at_a_time
        part = _dense_of_tiles(values[first:end], index[first:end], depth, dtype)
        first_row = first * rows_of_tile
        # The last tile may be filled up with rows that the matrix does not have.
        found[first_row : end * rows_of_tile] = part[: rows - first_row]
    return found


def _dense_of_tiles(values: Tensor, index: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    """The rows of whole tiles of a permute layout, those that only fill the last tile included."""
    tiles, blocks, _, tile = index.shape[:4]
    is_paired = index.dim() == 5
    block = tile if is_paired else tile // 2
    # As [tiles, tile, blocks, slots], from [tiles, blocks, slots, tile] or [tiles, blocks, slots / 2, tile, 2].
    if is_paired:
        index = index.permute(0, 3, 1, 2, 4).flatten(3)
        values = values.permute(0, 3, 1, 2, 4).flatten(3)
    else:
        index = index.permute(0, 3, 1, 2)
        values = values.permute(0, 3, 1, 2)
    slots = index.shape[3]
    # Empty slots go to one more column, which is cut off.
    places = torch.where(index == EMPTY, block, index).reshape(-1, slots).long()
    found = torch.zeros(tiles * tile * blocks, block + 1, dtype=dtype, device=values.device)
    found.scatter_(1, places, values.reshape(-1, slots).to(dtype))
    return found[:, :block].reshape(tiles * tile, blocks * block)[:, :depth]


def _dense_of_csr(
    values: Tensor, start: Tensor, offset: Tensor, rows: int, depth: int, dtype: torch.dtype
) -> Tensor:
    first = torch.arange(rows, dtype=torch.int64, device=values.device) * depth
    row = torch.repeat_interleave(first, start.diff(), output_size=len(offset))
    found = torch.zeros(rows * depth, dtype=dtype, device=values.device)
    # The layout keeps offsets into the input, whose rows are panels.
    column = offset // PANEL
    return found.scatter_(0, row + column, values.to(dtype)).view(rows, depth)


def lay_out(matrix: Tensor, pattern: NMPattern | None, *, convolution: bool) -> Operand | None:
    """The matrix of a packed weight in the layout of the kernel for it.

    Args:
        matrix: ``[rows, depth]``, contiguous.
        pattern: Its pattern along the depth; ``None`` if it has none.
        convolution: Whether its products are convolutions.

    Returns:
        ``None`` if no kernel takes it, the layout would be larger than :data:`LARGEST`, or the matrix holds NaN, whose
        bits a layout does not keep.
    """
    if matrix.device.type != "cpu" or matrix.dtype not in DTYPES:
        return None
    if not matrix.numel() or bool(matrix.isnan().any()):
        return None
    integers = matrix.view(torch.int32 if matrix.itemsize == 4 else torch.int16)
    bits = integers.ne(0).view(torch.uint8)  # negative zeros are kept
    given = NMPattern(1, 2) if pattern is None else pattern
    masked = MaskedMatrix(matrix, bits, FORWARD_BIT, given, matrix.dtype, None, lambda: matrix)
    key = GemmKey("forward", *masked.shape, 1, matrix.dtype, given, "cpu")
    # The faster one first.
    for name in ["cpu-csr"] if pattern is None or convolution else ["cpu-permute", "cpu-csr"]:
        registry = registry_of(name)
        if registry.reason_against(name, key):
            continue
        try:
            layout = registry.kernels[name].layout(masked)
        except ValueError:
            continue  # the matrix is too large for the kernel
        if isinstance(layout, CsrLayout):
            size = layout.start.nbytes + 2 * layout.offset.nbytes
        else:
            # One byte of the position, two or four of the value.
            size = layout.inputs.numel() * (3 if layout.paired else 5)
        if size > LARGEST * matrix.nbytes:
            continue
        values = layout.values(masked)
        if isinstance(layout, CsrLayout):
            # The places in the weight's memory are for reading other values.
            none = layout.source.new_empty(0)
            layout = replace(layout, source=none, slot=none)
        return Operand(layout, values, given)
    return None


def lay_out_int8(packed: PackedTensor) -> Operand | None:
    """A packed weight with int8 values in the layout of the kernel for it.

    Args:
        packed: The weight; the rows of its blocks are those of the product, but a convolution's may have taps between
            them and the blocks.

    Returns:
        ``None`` if the kernel does not take it, or the layout would be larger than :data:`LARGEST`.
    """
    if packed.scales is None or packed.values.device.type != "cpu":
        return None
    values = packed.values.flatten(1, -2)
    rows, blocks, _ = values.shape
    depth = blocks * packed.pattern.m
    name = _KERNELS[Int8Layout]
    key = GemmKey("forward", rows, depth, 1, packed.dtype, packed.pattern, "cpu")
    if registry_of(name).reason_against(name, key):
        return None
    numbers = packed.numbers().view(values.shape)
    arguments = (values, numbers, packed.scales, packed.pattern, packed.taps)
    layout, ordered = Int8Layout.of(*arguments)
    if layout.nbytes > LARGEST * rows * depth * packed.dtype.itemsize:
        return None
    return Operand(layout, ordered, packed.pattern)
