"""The layout of int8 weights for the CPU kernel: the same for every instruction set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional.int8 import MOST_TERMS, check_quantised, dequantise_weight
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.kernels.cpu.library import address, ffi

# As csrc/nm.h has them.
ROWS = 16
"""Rows of a tile."""
BLOCK = 64
"""Inputs that a register holds."""
ENTRIES = 4
"""Entries of a row that one instruction multiplies."""


def position_width(pattern: NMPattern) -> int:
    """Bits of a position in a layout: 2, 4 or 8, so that a byte holds whole ones.

    Example::

        >>> [position_width(NMPattern.parse(text)) for text in ("2:4", "1:8", "1:16", "1:32")]
        [2, 4, 4, 8]
    """
    needed = (pattern.m - 1).bit_length()
    return next(width for width in (2, 4, 8) if needed <= width)


@dataclass(frozen=True, eq=False)
class Int8Layout:
    """A matrix in int8 that is N:M along its depth, for permutations of registers.

    Its values are int8 ``[tiles, blocks, groups, 16, 4]``: of each block of 64 inputs the entries of 16 rows, four at a
    time, in the order of their positions, and zeros up to whole groups, blocks and tiles. ``positions`` is uint8
    ``[tiles, blocks, groups, bytes]`` with :func:`position_width` bits for each value: its place among its M inputs.

    The weight of a convolution, ``[out, in / groups, *taps]``, is a matrix of the depth ``taps * in / groups``, in this
    order if its blocks lie along the inputs of a tap: `taps` is then their number. It is 1 if the depth has the order
    of the weight's memory.
    """

    positions: Tensor
    scale: Tensor  # float32 [rows]
    offset: Tensor  # int32 [tiles * 16]: -128 times the sum of a row's values
    rows: int
    depth: int
    pattern: NMPattern
    taps: int = 1

    @staticmethod
    def reason_against(rows: int, depth: int, pattern: NMPattern) -> str:
        """Why a matrix has no such layout; empty if it has one."""
        if BLOCK % pattern.m:
            return f"blocks of {pattern.m} do not fit registers of {BLOCK} bytes"
        if depth % pattern.m:
            return f"a depth of {depth} has no whole blocks of {pattern.m}"
        terms = depth // pattern.m * pattern.n
        if terms > MOST_TERMS:
            return f"a sum of {terms} products may exceed 32 bits"
        return ""

    @classmethod
    def of(
        cls,
        values: Tensor,
        positions: Tensor,
        scale: Tensor,
        depth: int,
        pattern: NMPattern,
        taps: int = 1,
    ) -> tuple[Int8Layout, Tensor]:
        """Lay out the N entries of every block of M.

        Args:
            values: int8 ``[rows, depth / M, N]``.
            positions: uint8 of the same shape: below M, ascending in a block.
            scale: float32 ``[rows]``.
            depth: Of the matrix.
            pattern: N:M.
            taps: As the attribute.

        Returns:
            The layout, and the values in its order.

        Raises:
            ValueError: If there is no such layout, or the tensors are not those of a matrix in int8.
        """
        rows = len(values)
        reason = cls.reason_against(rows, depth, pattern)
        if reason:
            raise ValueError(reason)
        check_quantised(values, scale)
        scale = scale.contiguous()
        if positions.numel() and int(positions.max()) >= pattern.m:
            raise ValueError(f"a position is not below {pattern.m}")
        width = position_width(pattern)
        ordered_positions = _ordered(positions, pattern).flatten(3)  # [tiles, blocks, groups, 64]
        by_byte = ordered_positions.unflatten(3, (-1, 8 // width))
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)
        # Positions of different bits: their sum is their union.
        packed_positions = (by_byte << shifts).sum(-1, dtype=torch.uint8)
        ordered_values = _ordered(values, pattern)
        tiles = len(ordered_values)
        offset = torch.zeros(tiles * ROWS, dtype=torch.int32)
        offset[:rows] = -128 * values.flatten(1).sum(1, dtype=torch.int32)
        layout = cls(packed_positions, scale, offset, rows, depth, pattern, taps)
        return layout, ordered_values

    @property
    def nbytes(self) -> int:
        """Bytes of the layout and its values."""
        values = self.positions.numel() * 8 // position_width(self.pattern)
        return self.positions.nbytes + values + self.offset.nbytes + self.scale.nbytes

    def part(self, tiles: slice, rows: int) -> Int8Layout:
        """The rows of some tiles on the same memory, `rows` of which exist."""
        first = tiles.start * ROWS
        offset = self.offset[first : tiles.stop * ROWS]
        scale = self.scale[first : first + rows]
        return Int8Layout(
            self.positions[tiles], scale, offset, rows, self.depth, self.pattern, self.taps
        )

    def dense(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrix ``[rows, depth]``, its depth in the order of the weight's memory."""
        integers = int8_matrix(
            values, self.positions, self.rows, self.depth, self.pattern, self.taps
        )
        return dequantise_weight(integers, self.scale, dtype)

    def operand(self, values: Tensor | None = None) -> Any:
        """Return the matrix as the library takes it; the tensors must outlive the call."""
        tensors = values, self.positions, self.scale, self.offset
        n, m = self.pattern.n, self.pattern.m
        fields = (*map(address, tensors), n, m, position_width(self.pattern))
        return ffi.new("nm_int8 *", fields)


def int8_matrix(
    values: Tensor, positions: Tensor, rows: int, depth: int, pattern: NMPattern, taps: int = 1
) -> Tensor:
    """The matrix ``[rows, depth]`` of a layout, in int8; graphs that are traced or exported can hold it.

    Its depth has the order of the weight's memory: that of `taps` times inputs is transposed.
    """
    width = position_width(pattern)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=positions.device)
    places = (positions[..., None] >> shifts) & ((1 << width) - 1)
    blocks = depth // pattern.m
    values_rbn = _unordered(values.flatten(3), rows, blocks, pattern)
    places_rbn = _unordered(places.flatten(3), rows, blocks, pattern)
    found = values.new_zeros(rows, blocks, pattern.m)
    matrix = found.scatter_(2, places_rbn.long(), values_rbn).view(rows, depth)
    return matrix if taps == 1 else matrix.view(rows, taps, -1).transpose(1, 2).flatten(1)


def _ordered(entries_rbn: Tensor, pattern: NMPattern) -> Tensor:
    """Entries ``[rows, depth / M, N]`` in the order of a layout, ``[tiles, blocks, groups, 16, 4]``."""
    rows = len(entries_rbn)
    tiles = -(-rows // ROWS)
    together = BLOCK // pattern.m  # blocks of M in a register
    blocks = -(-entries_rbn.shape[1] // together)
    slots = together * pattern.n
    groups = -(-slots // ENTRIES)
    filled = entries_rbn.new_zeros(tiles * ROWS, blocks * slots)
    filled[:rows, : entries_rbn[0].numel()] = entries_rbn.flatten(1)
    whole = entries_rbn.new_zeros(tiles * ROWS, blocks, groups * ENTRIES)
    whole[:, :, :slots] = filled.view(-1, blocks, slots)
    by_group = whole.view(tiles, ROWS, blocks, groups, ENTRIES)
    return by_group.permute(0, 2, 3, 1, 4).contiguous()


def _unordered(ordered: Tensor, rows: int, count: int, pattern: NMPattern) -> Tensor:
    """Undo :func:`_ordered` for ``[tiles, blocks, groups, 64]``: the entries of `count` blocks of M of each row."""
    tiles, blocks, groups, _ = ordered.shape
    slots = BLOCK // pattern.m * pattern.n
    by_group = ordered.view(tiles, blocks, groups, ROWS, ENTRIES).permute(0, 3, 1, 2, 4)
    whole = by_group.reshape(tiles * ROWS, blocks, groups * ENTRIES)[:, :, :slots]
    return whole.reshape(tiles * ROWS, -1)[:rows, : count * pattern.n].view(rows, count, pattern.n)
