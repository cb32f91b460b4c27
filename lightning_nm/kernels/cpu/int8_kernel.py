"""int8 weights on CPUs, for packed layers alone: their layout, the same for every instruction set, and their kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.functional.int8 import MOST_TERMS, check_quantised, conv_patches, quantise_weight
from lightning_nm.functional.masks import nm_mask
from lightning_nm.functional.nm_format import pack_nm, position_numbers
from lightning_nm.kernels.api import Convolution, GemmKey, MaskedMatrix
from lightning_nm.kernels.cpu.kernels import CpuKernel, Packed
from lightning_nm.kernels.cpu.library import ffi, run
from lightning_nm.pattern import NMPattern

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
    def reason_against(depth: int, pattern: NMPattern) -> str:
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
        pattern: NMPattern,
        taps: int = 1,
    ) -> tuple[Int8Layout, Tensor]:
        """Lay out the N entries of every block of M.

        Args:
            values: int8 ``[rows, depth / M, N]``.
            positions: uint8 of the same shape: below M, ascending in a block.
            scale: float32 ``[rows]``.
            pattern: N:M.
            taps: As the attribute.

        Returns:
            The layout, and the values in its order.

        Raises:
            ValueError: If there is no such layout, or the tensors are not those of a matrix in int8.
        """
        rows, blocks, _ = values.shape
        depth = blocks * pattern.m
        reason = cls.reason_against(depth, pattern)
        if reason:
            raise ValueError(reason)
        check_quantised(values, scale)
        scale = scale.contiguous()
        # The kernels do not check a position: a larger one would name an input of another block.
        if positions.numel() and int(positions.max()) >= pattern.m:
            raise ValueError(f"a position is not below {pattern.m}")
        width = position_width(pattern)
        ordered_positions = _ordered(positions, pattern).flatten(3)  # [tiles, blocks, groups, 64]
        by_byte = ordered_positions.unflatten(3, (-1, 8 // width))
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)
        # Positions of different bits: their sum is their union.
        packed_positions = (by_byte << shifts).sum(-1, dtype=torch.uint8)
        ordered_values = _ordered(values, pattern)
        # It may exceed 32 bits and wrap. So do the sums that begin with it: the result, which fits, comes out right.
        of_rows = -128 * values.flatten(1).sum(1, dtype=torch.int32)
        # The kernels read offsets of whole tiles, but scales of existing rows alone.
        offset = F.pad(of_rows, (0, -rows % ROWS))
        layout = cls(packed_positions, scale, offset, rows, depth, pattern, taps)
        return layout, ordered_values

    @property
    def nbytes(self) -> int:
        """Bytes of the layout and its values."""
        values = self.positions.numel() * 8 // position_width(self.pattern)
        return self.positions.nbytes + values + self.offset.nbytes + self.scale.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors next to the values and their scales."""
        return [self.positions, self.offset]

    @property
    def tile(self) -> int:
        """Rows that lie together."""
        return ROWS

    def part(self, tiles: slice, rows: int) -> Int8Layout:
        """The rows of some tiles on the same memory, `rows` of which exist."""
        first = tiles.start * ROWS
        return replace(
            self,
            positions=self.positions[tiles],
            scale=self.scale[first : first + rows],
            offset=self.offset[first : tiles.stop * ROWS],
            rows=rows,
        )

    def operand(self, values: Tensor) -> Any:
        """Return the matrix as the library takes it; the tensors must outlive the call."""
        tensors = values, self.positions, self.scale, self.offset
        n, m = self.pattern.n, self.pattern.m
        fields = (*map(Tensor.data_ptr, tensors), n, m, position_width(self.pattern))
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
    slots = BLOCK // pattern.m * pattern.n  # of a row in a block
    entries = entries_rbn.flatten(1)
    rows, count = entries.shape
    # Zeros fill up the tiles, the blocks and the groups.
    in_tiles = F.pad(entries, (0, -count % slots, 0, -rows % ROWS))
    in_groups = F.pad(in_tiles.unflatten(1, (-1, slots)), (0, -slots % ENTRIES))
    by_group = in_groups.unflatten(2, (-1, ENTRIES)).unflatten(0, (-1, ROWS))
    return by_group.permute(0, 2, 3, 1, 4).contiguous()


def _unordered(ordered: Tensor, rows: int, count: int, pattern: NMPattern) -> Tensor:
    """Undo :func:`_ordered` for ``[tiles, blocks, groups, 64]``: the entries of `count` blocks of M of each row."""
    slots = BLOCK // pattern.m * pattern.n
    by_row = ordered.unflatten(3, (ROWS, ENTRIES)).permute(0, 3, 1, 2, 4).flatten(0, 1)
    entries = by_row.flatten(2)[:, :, :slots].flatten(1)  # [rows of tiles, entries of blocks]
    # Without what fills up the last tile and the last block of 64 inputs.
    return entries[:rows, : count * pattern.n].view(rows, count, pattern.n)


# ------------------------------------------------------------------------------------------------------ the kernel

PATCHES = 1 << 20
"""Entries of the patches of a convolution that are copied at a time."""


class CpuInt8Kernel(CpuKernel):
    """GEMMs of a weight in int8 that is N:M along its depth with tokens that it rounds to int8.

    Sums are exact in 32 bits, so all instruction sets and numbers of threads give the same bits; the rounding of
    weights and tokens is that of :mod:`lightning_nm.functional.int8`. For inference: training never takes it.

    A convolution is a GEMM with patches of its padded input, one for each output position and group, and rounds each
    patch to int8.
    """

    name = "cpu-int8"
    keeps_packs = True
    layouts = Int8Layout
    function = "nm_int8_product"
    convolutions = True
    tolerance = 0.04
    """Of rounding both sides to 127 steps of their largest value."""

    def supports(self, key: GemmKey) -> str:
        """Return why a GEMM cannot run: its dtype, its sizes, or blocks that do not fit registers."""
        reason = super().supports(key)
        if reason:
            return reason
        if key.gemm != "forward":
            return "it is for inference"
        # Each group has a part of the layout, which can be cut between tiles alone.
        if key.conv is not None and key.conv.groups > 1 and key.rows // key.conv.groups % ROWS:
            return f"{key.rows // key.conv.groups} outputs of a group are no whole tiles of {ROWS}"
        return Int8Layout.reason_against(key.depth, key.pattern)

    def layout(self, matrix: MaskedMatrix) -> Any:
        """Nothing: the layout depends on the values, too."""
        return None

    def pack_masked(self, matrix: MaskedMatrix, layout: None) -> Packed:
        """Round a weight to int8, and lay it out."""
        if matrix.pattern is None:
            raise ValueError(f"{self.name} takes a mask of a pattern")
        return packed_int8(matrix.dense(), matrix.pattern)

    def conv(
        self, packed: Packed, x: Tensor, conv: Convolution, bias: Tensor | None = None
    ) -> Tensor:
        """Convolve ``x [images, in, height, width]`` with ``W [out, in / groups * taps]``.

        x and the result, ``[images, out, *positions]``, are contiguous.
        """
        layout, values = _checked(packed, conv)
        if x.shape[1:] != (conv.inputs, *conv.size):
            raise ValueError(
                f"an operand of shape {tuple(x.shape)} is not of the convolution {conv}"
            )
        patches = conv_patches(x, conv.kernel, *conv.arguments)
        if layout.taps > 1:
            # The depth of the layout is [taps, in / groups].
            patches = patches.movedim(4, -1)
        # Channels last, because a GEMM writes all outputs of a position together; it is reordered once, at the end.
        y = x.new_empty(len(x), *conv.positions, conv.outputs)
        rows = conv.outputs // conv.groups
        for group, patches_nhwd in enumerate(patches):
            first = group * rows
            tiles = slice(first // ROWS, -(-(first + rows) // ROWS))
            own = Packed(layout.part(tiles, rows), values[tiles])
            own_bias = None if bias is None else bias[first : first + rows].clone()
            # The patches are a view, in which an input occurs for every tap. A copy of all of them could be that many
            # times as large as the input.
            for images, heights in _parts(patches_nhwd):
                tokens = patches_nhwd[images, heights].reshape(-1, layout.depth).contiguous()
                product = self.linear(own, tokens, own_bias)
                part = y[images, heights, :, first : first + rows]
                part.copy_(product.view_as(part))
        return y.permute(0, 3, 1, 2).contiguous()

    def _self_check(self) -> str:
        """Compare small GEMMs of integers with float64 ones, which are exact."""
        generator = torch.Generator().manual_seed(0)
        # A tile that is not whole, a block that is not, and tokens that leave some over.
        rows, depth, tokens = 40, 96, 11
        # One for each width of positions: 2, 4 and 8 bits.
        for pattern in (NMPattern(2, 4), NMPattern(1, 16), NMPattern(1, 32)):
            # Integers of which the largest is 127 are rounded to themselves.
            x = torch.randint(-127, 128, (tokens, depth), generator=generator).float()
            x[:, 0] = 127
            mask = nm_mask(
                torch.rand(rows, depth, generator=generator, dtype=torch.float32), pattern
            )
            weight = torch.randint(-127, 128, mask.shape, generator=generator).float() * mask
            # Also each row of the weight, at its first kept entry: its scale is 1.
            weight.scatter_(1, mask.int().argmax(1, keepdim=True), 127)
            found = self.linear(packed_int8(weight, pattern), x)
            if not torch.equal(found.double(), x.double() @ weight.double().t()):
                return f"its linear GEMM in {pattern} is wrong on this CPU"
        return ""


def _checked(packed: Packed, conv: Convolution) -> tuple[Int8Layout, Tensor]:
    """Refuse another layout than that of the convolution's weight, and a convolution without outputs."""
    layout, values = packed
    out, inputs, height, width = conv.weight_shape
    taps = height * width
    if not isinstance(layout, Int8Layout) or values is None:
        raise ValueError(f"an int8 convolution takes an Int8Layout, not a {type(layout).__name__}")
    fits = (layout.rows, layout.depth) == (out, inputs * taps)
    if not fits or layout.taps not in (1, taps):
        raise ValueError(
            f"a layout of {layout.rows} x {layout.depth} is not one of the convolution {conv}"
        )
    tiles = conv.groups == 1 or out // conv.groups % ROWS == 0
    if not tiles or min(conv.positions) < 1 or conv.inputs % conv.groups:
        raise ValueError(f"the convolution {conv} does not exist in int8")
    return layout, values


def _parts(patches: Tensor) -> Iterator[tuple[slice, slice]]:
    """Images and rows of output positions of patches ``[images, *positions, *depth]`` that are copied at a time."""
    images, height = patches.shape[:2]
    of_row = patches[0, 0].numel()
    rows = min(max(PATCHES // of_row, 1), height)
    # Several images only where each is taken whole.
    together = max(PATCHES // (of_row * height), 1) if rows == height else 1
    for image in range(0, images, together):
        for row in range(0, height, rows):
            yield slice(image, image + together), slice(row, row + rows)


def packed_int8(weight: Tensor, pattern: NMPattern) -> Packed:
    """Round a weight ``[rows, depth]`` that is N:M along its depth to int8, and lay it out."""
    integers, scale = quantise_weight(weight)
    values, packed_positions = pack_nm(integers, pattern)
    blocks = values.numel() // pattern.n
    positions = position_numbers(packed_positions, pattern, blocks).view(values.shape)
    return Packed(*Int8Layout.of(values, positions, scale, pattern))


# ------------------------------------------------------------------------------------------------- a dense matrix

MOST_DEPTH = 1 << 16
"""Of a dense matrix: sums of more products of a value and a byte may exceed 32 bits."""


def rows_linear(values: Tensor, scale: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias`` for a dense W in int8, by the library.

    Each token is rounded to 16 bits, ``nearest(x * 32767 / max |x|)``; sums are exact, and multiplied by both scales.

    Args:
        values: int8 ``[rows, depth]``, none of them -128, a depth of at most :data:`MOST_DEPTH`.
        scale: float32 ``[rows]``.
        x: ``[tokens, depth]``, float32 or bfloat16, contiguous.
        bias: ``[rows]``, as x.

    Raises:
        ValueError: For operands of other shapes or dtypes.
    """
    rows, depth = values.shape
    if depth > MOST_DEPTH or values.dtype != torch.int8 or scale.shape != (rows,):
        raise ValueError(
            f"{values.dtype} values of shape {tuple(values.shape)} with scales {tuple(scale.shape)} are not a dense "
            f"matrix in int8 of a depth up to {MOST_DEPTH}"
        )
    values, scale = values.contiguous(), scale.contiguous()
    y = x.new_empty(len(x), rows)
    # The third one is dY, which this GEMM does not have.
    inputs = (x, (len(x), depth)), (bias, (rows,)), (None, ())
    sparse = ffi.new("nm_rows *", (values.data_ptr(), scale.data_ptr()))
    run("nm_rows_product", "NM_LINEAR", "nm_operands *", (rows, depth, len(x)), inputs, y, sparse)
    return y
