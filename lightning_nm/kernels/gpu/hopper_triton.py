"""The Triton kernel of :mod:`lightning_nm.kernels.gpu.hopper`: reads a matrix once, and writes its packed form.

It has run in Triton's interpreter alone, and was compiled for an H100: its speed is not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_nm.kernels.gpu.two_four import packed_width

ROWS = 64
"""Rows of a tile of codes."""

TILES = 4
"""Tiles of a program, next to each other."""


def compress(matrix: Tensor) -> Tensor:
    """Launch :func:`lightning_nm.kernels.gpu.hopper.compress` on a checked matrix."""
    rows, depth = matrix.shape
    packed = torch.empty(
        rows, packed_width(depth, matrix.dtype), dtype=matrix.dtype, device=matrix.device
    )
    numbers = packed.view(torch.int16).flatten()
    count = rows * depth // 2
    # A group of four is one number of 64 bits, its two values one of 32.
    groups, values, words = (
        matrix.view(torch.int64),
        numbers[:count].view(torch.int32),
        numbers[count:],
    )
    grid = (rows // ROWS, triton.cdiv(depth // ROWS, TILES))
    # Triton launches on the current device, which need not be that of the matrix.
    with torch.cuda.device_of(matrix):
        _compress[grid](groups, values, words, depth // 4, TILES=TILES)
    return packed


@triton.jit
def _compress(groups, values, words, groups_of_row, TILES: tl.constexpr):
    """Pack 64 rows of some tiles; see :func:`lightning_nm.kernels.gpu.hopper.compress` for the order of the codes."""
    # A word belongs to a row with r3 = 0 and a group with g2 = 0, the first of the four that it holds.
    i = tl.arange(0, 32)  # r5 r4 r2 r1 r0
    j = tl.arange(0, 8 * TILES)  # the tile, then g3 g1 g0
    tiles = groups_of_row // 16
    tile = tl.program_id(1) * TILES + j // 8
    # Numbers with a gap where r3 and g2 belong: the loops below add these two bits.
    first_row = tl.program_id(0).to(tl.int64) * 64 + i // 8 * 16 + i % 8
    first_group = tile * 16 + j // 4 % 2 * 8 + j % 4
    inside = (tile < tiles)[None, :]
    word = tl.zeros((32, 8 * TILES), tl.int32)
    for g2 in tl.static_range(2):
        for r3 in tl.static_range(2):
            at = ((first_row + 8 * r3) * groups_of_row)[:, None] + (first_group + 4 * g2)[None, :]
            group = tl.load(groups + at, mask=inside, other=0)
            is_1 = (group >> 16 & 0xFFFF) != 0
            is_2 = (group >> 32 & 0xFFFF) != 0
            is_3 = (group >> 48 & 0xFFFF) != 0
            # Without nonzeros the places are 2 and 3, as in `compress_reference`.
            first = tl.where((group & 0xFFFF) != 0, 0, tl.where(is_1, 1, 2))
            # Of these three lines the last that holds decides: the second place is that of the last nonzero.
            second = tl.where(is_1 & (first < 1), 1, 3)
            second = tl.where(is_2 & (first < 2), 2, second)
            second = tl.where(is_3, 3, second)
            low = group >> (16 * first).to(tl.int64) & 0xFFFF
            high = group >> (16 * second).to(tl.int64) & 0xFFFF
            # A group of 64 bits becomes 32 bits of values, so its number stays the same.
            tl.store(values + at, (low | high << 16).to(tl.int32), mask=inside)
            # g2 and r3 are the lowest bits of a code's number: they say which four bits of the word it takes.
            word = word | (first | second << 2) << (4 * r3 + 8 * g2)
    # A tile is 256 words, whose numbers are g3, i and g1 g0, from the highest bit to the lowest.
    tile_at = (tl.program_id(0).to(tl.int64) * tiles + tile) * 256 + j // 4 % 2 * 128 + j % 4
    tl.store(words + (i * 4)[:, None] + tile_at[None, :], word.to(tl.int16), mask=inside)
