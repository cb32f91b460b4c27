"""Products of int8 weights on CPUs: their layout, and the kernel that packed layers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional.int8 import MOST_TERMS, check_quantised, int8_linear, quantise_weight
from lightning_nm.functional.masks import nm_mask
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.kernels.api import GemmKernel, GemmKey, MaskedMatrix
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.cpu.library import DTYPES, LINEAR

# As csrc/nm.h has them.
ROWS = 16
"""Rows of a tile."""
BLOCK = 64
"""Inputs that a register holds."""
ENTRIES = 4
"""Entries of a row that one instruction multiplies."""
INSTRUCTIONS = ("baseline", "AVX2", "AVX-512 with VBMI and VNNI")
"""What the library has int8 products for, by its numbers."""


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
    """A matrix in int8 that is N:M along its depth, for register permutations; the same for every instruction set.

    ``values`` is int8 ``[tiles, blocks, groups, 16, 4]``: of each block of 64 inputs the entries of 16 rows, four at a
    time, in the order of their positions, and zeros up to whole groups, blocks and tiles. ``positions`` is uint8
    ``[tiles, blocks, groups, bytes]`` with :func:`position_width` bits for each value: its place among its M inputs.
    """

    values: Tensor
    positions: Tensor
    scale: Tensor  # float32 [rows]
    offset: Tensor  # int32 [tiles * 16]: -128 times the sum of a row's values
    rows: int
    depth: int
    pattern: NMPattern

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
        cls, values: Tensor, positions: Tensor, scale: Tensor, depth: int, pattern: NMPattern
    ) -> Int8Layout:
        """Lay out the N entries of every block of M.

        Args:
            values: int8 ``[rows, depth / M, N]``.
            positions: uint8 of the same shape: below M, ascending in a block.
            scale: float32 ``[rows]``.
            depth: Of the matrix.
            pattern: N:M.

        Raises:
            ValueError: If there is no such layout, or the tensors are not those of a matrix in int8.
        """
        rows = len(values)
        reason = cls.reason_against(rows, depth, pattern)
        if reason:
            raise ValueError(reason)
        check_quantised(values, scale)
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
        return cls(ordered_values, packed_positions, scale, offset, rows, depth, pattern)

    @property
    def tensors(self) -> list[Tensor]:
        """Values, positions, offsets and scales."""
        return [self.values, self.positions, self.offset, self.scale]

    def part(self, first: int, end: int) -> Int8Layout | None:
        """Rows ``first .. end`` on the same memory; ``None`` if they are not whole tiles."""
        if first % ROWS or (end % ROWS and end != self.rows):
            return None
        tiles = slice(first // ROWS, -(-end // ROWS))
        offset = self.offset[tiles.start * ROWS : tiles.stop * ROWS]
        values, positions = self.values[tiles], self.positions[tiles]
        scale = self.scale[first:end]
        return Int8Layout(values, positions, scale, offset, end - first, self.depth, self.pattern)

    def operand(self) -> library.Int8Operand:
        """Return the matrix as the library takes it; the tensors must outlive the call."""
        return library.Int8Operand(
            self.values.data_ptr(),
            self.positions.data_ptr(),
            self.scale.data_ptr(),
            self.offset.data_ptr(),
            self.pattern.n,
            self.pattern.m,
            position_width(self.pattern),
        )


def int8_matrix(
    values: Tensor, positions: Tensor, rows: int, depth: int, pattern: NMPattern
) -> Tensor:
    """The matrix ``[rows, depth]`` of a layout, in int8; graphs that are traced or exported can hold it."""
    width = position_width(pattern)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=positions.device)
    places = (positions[..., None] >> shifts) & ((1 << width) - 1)
    blocks = depth // pattern.m
    values_rbn = _unordered(values.flatten(3), rows, blocks, pattern)
    places_rbn = _unordered(places.flatten(3), rows, blocks, pattern)
    found = values.new_zeros(rows, blocks, pattern.m)
    return found.scatter_(2, places_rbn.long(), values_rbn).view(rows, depth)


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


class PackedInt8(NamedTuple):
    """A matrix as :class:`CpuInt8Kernel` takes it."""

    layout: Int8Layout


class CpuInt8Kernel(GemmKernel):
    """Products of a weight in int8 that is N:M along its depth with tokens that it rounds to int8.

    Sums are exact in 32 bits, so all instruction sets and numbers of threads give the same bits; the rounding of
    weights and tokens is that of :mod:`lightning_nm.functional.int8`. For inference: training never takes it.
    """

    name = "cpu-int8"
    device_type = "cpu"
    tolerance = 0.04
    """Of rounding both sides to 127 steps of their largest value."""

    def probe(self, device: torch.device) -> str:
        """Return why the kernel does not work: another device, no library, or a small product that is wrong."""
        if device.type != "cpu":
            return f"it is for CPUs, not {device.type}"
        return library.unavailable() or self._self_check()

    def supports(self, key: GemmKey) -> str:
        """Return why a product cannot run; empty if it can."""
        return self.static_reason(key)

    def static_reason(self, key: GemmKey) -> str:
        """Return why no CPU runs a product: its dtype, its sizes, or blocks that do not fit registers."""
        if key.dtype not in DTYPES:
            return f"{key.dtype} is not one of its dtypes, {', '.join(map(str, DTYPES))}"
        if 0 in (key.rows, key.depth, key.columns):
            return f"the product {key} is empty"
        if key.gemm != "forward":
            return "it is for inference"
        return Int8Layout.reason_against(key.rows, key.depth, key.pattern)

    def pack_masked(self, matrix: MaskedMatrix, layout: None) -> PackedInt8:
        """Round a weight to int8, and lay it out."""
        if matrix.pattern is None:
            raise ValueError(f"{self.name} takes a mask of a pattern")
        return packed_int8(matrix.dense(), matrix.pattern)

    def linear(self, packed: PackedInt8, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x A^T + bias``: ``x [tokens, depth]``, ``bias [rows]``, result ``[tokens, rows]``.

        All are contiguous, in float32 or bfloat16.
        """
        layout = packed.layout
        tokens = len(x)
        library.check_operand(x, (tokens, layout.depth))
        if bias is not None:
            library.check_operand(bias, (layout.rows,), x.dtype)
        y = x.new_empty(tokens, layout.rows)
        dense = library.operands(layout.rows, layout.depth, tokens, x, y, bias)
        library.run(library.load().nm_int8_product, LINEAR, dense, layout.operand())
        return y

    def _self_check(self) -> str:
        """Compare small products with those of torch, which round alike and add exactly."""
        generator = torch.Generator().manual_seed(0)
        # A tile that is not whole, a block that is not, and tokens that leave some over.
        rows, depth, tokens = 40, 96, 11
        for pattern in (NMPattern(2, 4), NMPattern(1, 16), NMPattern(1, 32)):
            weight = torch.randn(rows, depth, generator=generator)
            weight = torch.where(nm_mask(weight.abs(), pattern), weight, 0)
            packed = packed_int8(weight, pattern)
            integers, scale = quantise_weight(weight)
            # Integers up to 127 are rounded to themselves.
            x = torch.randint(-127, 128, (tokens, depth), generator=generator).float()
            x[:, 0] = 127
            if not torch.equal(self.linear(packed, x), int8_linear(x, integers, scale)):
                return f"its linear product in {pattern} is wrong on this CPU"
        return ""


def packed_int8(weight: Tensor, pattern: NMPattern) -> PackedInt8:
    """Round a weight ``[rows, depth]`` that is N:M along its depth to int8, and lay it out."""
    integers, scale = quantise_weight(weight)
    blocks_rbm = integers.view(len(weight), -1, pattern.m)
    mask_rbm = nm_mask(blocks_rbm.abs(), pattern)
    places = torch.arange(pattern.m, dtype=torch.uint8).expand_as(blocks_rbm)
    shape = (*blocks_rbm.shape[:2], pattern.n)
    values, positions = blocks_rbm[mask_rbm].view(shape), places[mask_rbm].view(shape)
    return PackedInt8(Int8Layout.of(values, positions, scale, weight.shape[1], pattern))


def instructions() -> str:
    """The instruction set that int8 products take on this CPU."""
    return INSTRUCTIONS[library.load().nm_int8_level(library.level())]
