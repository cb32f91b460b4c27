"""N:M matrices as the values of each block and the positions of these values, in few bits.

A block of M entries has exactly N stored entries, in the order of their positions. The positions of a block take
``N ceil(log2 M)`` bits, one number for each, or M bits, one for each entry of the block, whichever is less; numbers
where both are equal. Bits follow each other without gaps, across blocks and rows, the first one in the lowest bit of
the first byte, as in :func:`~lightning_nm.functional.mask_storage.pack_mask`. docs/format.md has examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_nm.functional.mask_storage import pack_mask, unpack_mask
from lightning_nm.functional.masks import check_blocks, nm_mask
from lightning_nm.functional.select import WORDS
from lightning_nm.pattern import NMPattern, PatternLike

MAX_M = 256
"""The longest block that is packed."""

PACKED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of matrices that are packed."""

STORED_DTYPES = (*PACKED_DTYPES, torch.int8)
"""Dtypes of packed values: matrices in int8 have a scale for each row next to them."""

_CHUNK = 1 << 20  # entries that are handled at a time: it bounds the temporaries


def uses_bitmap(pattern: NMPattern) -> bool:
    """Tell whether positions are one bit for each entry of a block, not a number for each stored entry."""
    number_bits = pattern.n * _width(pattern)
    return pattern.m < number_bits


def position_bits(pattern: NMPattern) -> int:
    """Return how many bits the positions of one block take."""
    number_bits = pattern.n * _width(pattern)
    return min(pattern.m, number_bits)


def position_bytes(pattern: NMPattern, blocks: int) -> int:
    """Return how many bytes the positions of so many blocks take."""
    bits = blocks * position_bits(pattern)
    return (bits + 7) // 8  # rounded up


def pack_nm(matrix: Tensor, pattern: PatternLike) -> tuple[Tensor, Tensor]:
    """Pack a matrix that is N:M along its last axis into its values and their positions.

    A block with fewer than N nonzeros also stores negative zeros, first position first, and then zeros. So
    :func:`unpack_nm` returns the same bits, but for the negative zeros of a block that already stores N entries: they
    become zeros. NaN and infinities are nonzeros.

    Args:
        matrix: ``[..., depth]``, float64, float32, float16, bfloat16 or int8; M divides the depth.
        pattern: What :meth:`NMPattern.parse` reads; M is at most 256.

    Returns:
        Values ``[..., depth / M, N]`` of the dtype of `matrix`, and uint8 positions
        ``[ceil(blocks * bits / 8)]`` with the bits of a block as this module's first lines say.

    Raises:
        TypeError: For another dtype.
        ValueError: If M is larger than 256 or does not divide the depth, or a block has more than N nonzeros.

    Example:
        >>> values, positions = pack_nm(torch.tensor([[0.0, 5.0, 0.0, 7.0], [0.0, 0.0, 2.0, 0.0]]), "2:4")
        >>> values.tolist(), positions.tolist()  # positions 1, 3 and 0, 2, two bits each
        ([[[5.0, 7.0]], [[0.0, 2.0]]], [141])
    """
    pattern = NMPattern.parse(pattern)
    _check_stored("a matrix to pack is", matrix, pattern)
    check_blocks(matrix, pattern, -1)
    if pattern.m == 1:  # every entry is stored: there are no positions
        return matrix.detach().unsqueeze(-1), matrix.new_empty(0, dtype=torch.uint8)
    blocks_bm = matrix.detach().reshape(-1, pattern.m)
    values = []
    positions = []
    for chunk_bm in blocks_bm.split(_chunk(pattern)):
        nonzero_bm = chunk_bm != 0
        crowded = int((nonzero_bm.sum(1) > pattern.n).sum())
        if crowded:
            raise ValueError(
                f"{crowded} or more of {len(blocks_bm)} blocks hold more than {pattern.n} nonzeros"
            )
        # Of the entries that are zero, -0 alone has bits: the score is 2 for a nonzero, 1 for -0 and 0 for +0.
        bits_bm = chunk_bm.contiguous().view(WORDS[chunk_bm.itemsize])
        mask_bm = nm_mask(nonzero_bm.byte() + bits_bm.ne(0).byte(), pattern)
        values.append(chunk_bm[mask_bm].view(len(chunk_bm), pattern.n))
        bits = mask_bm
        if not uses_bitmap(pattern):
            entries = torch.arange(pattern.m, device=mask_bm.device, dtype=torch.uint8)
            numbers = entries.expand_as(mask_bm)[mask_bm]  # N of each block, ascending
            places = torch.arange(_width(pattern), device=mask_bm.device, dtype=torch.uint8)
            bits = (numbers.unsqueeze(1) >> places & 1).bool()
        positions.append(pack_mask(bits))
    blocks_shape = (*matrix.shape[:-1], matrix.shape[-1] // pattern.m, pattern.n)
    return torch.cat(values).view(blocks_shape), torch.cat(positions)


def unpack_nm(
    values: Tensor,
    positions: Tensor,
    pattern: PatternLike,
    shape: Sequence[int],
) -> Tensor:
    """Undo :func:`pack_nm`.

    Args:
        values: ``[..., depth / M, N]``.
        positions: uint8, as :func:`pack_nm` made them.
        pattern: The pattern of the matrix.
        shape: ``[..., depth]``.

    Returns:
        The matrix, of the dtype of `values`.

    Raises:
        TypeError: If a tensor has another dtype.
        ValueError: If a size is wrong, or positions of a block are equal, descend or lie outside of it.

    Example:
        >>> unpack_nm(torch.tensor([[[5.0, 7.0]]]), torch.tensor([13], dtype=torch.uint8), "2:4", (1, 4)).tolist()
        [[0.0, 5.0, 0.0, 7.0]]
    """
    pattern = NMPattern.parse(pattern)
    check_packed(values, positions, pattern, shape)
    return expand(values, positions, pattern, shape)


def check_packed(
    values: Tensor,
    positions: Tensor,
    pattern: NMPattern,
    shape: Sequence[int],
) -> None:
    """Refuse what :func:`pack_nm` did not make of a matrix of this shape; nothing of its size is allocated.

    Raises:
        TypeError: If a tensor has another dtype.
        ValueError: If a size is wrong, or positions of a block are equal, descend or lie outside of it.
    """
    _check_stored("packed values are", values, pattern)
    if positions.dtype != torch.uint8:
        raise TypeError(f"packed positions are {torch.uint8}, not {positions.dtype}")
    sizes = tuple(values.shape), tuple(positions.shape)
    for what, found, right in zip(
        ("values", "positions"), sizes, packed_sizes(pattern, shape), strict=True
    ):
        if found != right:
            raise ValueError(
                f"a matrix of shape {list(shape)} in {pattern} has {what} of {right}, not {found}"
            )
    if pattern.m == 1:
        return
    blocks = values.numel() // pattern.n
    used_bits = blocks * position_bits(pattern) % 8  # of the last byte; 0 if it is full
    if used_bits and int(positions[-1]) >> used_bits:
        raise ValueError("the bits after the positions of the last block are not all zero")
    for first, count, part in _parts(positions, pattern, blocks, _chunk(pattern)):
        if uses_bitmap(pattern):
            wrong_b = unpack_mask(part, (count, pattern.m)).sum(1) != pattern.n
        else:
            numbers_bn = _numbers(part, pattern, count)
            descends_b = (numbers_bn[:, 1:] <= numbers_bn[:, :-1]).any(1)
            # Where positions ascend, the last one is the largest.
            wrong_b = descends_b | (numbers_bn[:, -1] >= pattern.m)
        if wrong_b.any():
            block = first + int(wrong_b.int().argmax())
            raise ValueError(
                f"block {block} does not have {pattern.n} different ascending positions below {pattern.m}: the "
                "positions are damaged"
            )


def packed_sizes(
    pattern: NMPattern, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the values and the positions of a matrix.

    Raises:
        ValueError: If M does not divide its last axis.
    """
    if not shape or shape[-1] % pattern.m:
        raise ValueError(
            f"a matrix of shape {list(shape)} has no blocks of {pattern.m} along its last axis"
        )
    blocks = math.prod(shape) // pattern.m
    values = (*shape[:-1], shape[-1] // pattern.m, pattern.n)
    return values, (position_bytes(pattern, blocks),)


def expand(values: Tensor, positions: Tensor, pattern: NMPattern, shape: Sequence[int]) -> Tensor:
    """Return what :func:`unpack_nm` does, without its checks: graphs that are traced or exported can hold it."""
    if pattern.m == 1:
        return values.view(tuple(shape))
    # A graph that is traced holds one operation for all blocks, not one for each chunk.
    plain = type(values) in (Tensor, torch.nn.Parameter)
    tracing = torch.compiler.is_compiling() or not plain
    blocks = math.prod(shape) // pattern.m
    step = blocks if tracing else _chunk(pattern)
    values_bn = values.reshape(blocks, pattern.n)
    if blocks <= step:
        dense_bm = _expand(values_bn, positions, pattern)
        return dense_bm.view(tuple(shape))
    dense_bm = values.new_empty(blocks, pattern.m)
    for first, count, part in _parts(positions, pattern, blocks, step):
        last = first + count
        dense_bm[first:last] = _expand(values_bn[first:last], part, pattern)
    return dense_bm.view(tuple(shape))


def position_numbers(positions: Tensor, pattern: NMPattern, blocks: int) -> Tensor:
    """Return the positions ``[blocks, N]`` of the stored entries in their blocks, uint8, of sound `positions`."""
    found = [positions.new_empty(0, pattern.n)]
    for _, count, part in _parts(positions, pattern, blocks, _chunk(pattern)):
        if uses_bitmap(pattern):
            mask_bm = unpack_mask(part, (count, pattern.m))
            places = torch.arange(pattern.m, dtype=torch.uint8, device=part.device)
            found.append(places.expand_as(mask_bm)[mask_bm].view(count, pattern.n))
        else:
            found.append(_numbers(part, pattern, count).byte())
    return torch.cat(found)


def _parts(
    positions: Tensor,
    pattern: NMPattern,
    blocks: int,
    step: int,
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield chunks of at most ``step`` blocks: the first block, the number of blocks, their positions."""
    # A step is a multiple of 8 blocks (see _chunk), so that a chunk begins with a byte.
    for first in range(0, blocks, step):
        count = min(step, blocks - first)
        begin = position_bytes(pattern, first)
        end = position_bytes(pattern, first + count)
        yield first, count, positions[begin:end]


def _expand(values_bn: Tensor, positions: Tensor, pattern: NMPattern) -> Tensor:
    """Return the blocks ``[blocks, M]`` of values ``[blocks, N]``."""
    # As integers: torch's scatter gives NaN in bfloat16 other bits.
    bits_bn = values_bn.contiguous().view(WORDS[values_bn.itemsize])
    blocks = len(values_bn)
    zeros_bm = bits_bn.new_zeros(blocks, pattern.m)
    if uses_bitmap(pattern):
        mask_bm = unpack_mask(positions, (blocks, pattern.m))
        dense_bm = zeros_bm.masked_scatter(mask_bm, bits_bn)
    else:
        numbers_bn = _numbers(positions, pattern, blocks)
        dense_bm = zeros_bm.scatter_(1, numbers_bn, bits_bn)
    return dense_bm.view(values_bn.dtype)


def _numbers(positions: Tensor, pattern: NMPattern, blocks: int) -> Tensor:
    """Return the positions ``[blocks, N]`` of the stored entries, int64."""
    device = positions.device
    width = _width(pattern)
    # So many numbers fill so many bytes without a rest: a word of at most seven bytes.
    common = math.gcd(width, 8)
    together, octets = 8 // common, width // common
    # Where each begins in its word.
    shifts = torch.arange(0, together * width, width, dtype=torch.int64, device=device)
    if octets == 1:  # the bytes are the words: fewer passes
        words = positions.unsqueeze(1)
        shifts = shifts.byte()
    else:
        missing = -positions.shape[0] % octets
        padded = torch.nn.functional.pad(positions, (0, missing))
        placed = padded.view(-1, octets).long() << torch.arange(
            0, 8 * octets, 8, dtype=torch.int64, device=device
        )
        words = placed.sum(1, keepdim=True)
    # [words, 1] >> [together], without the bits of the numbers above.
    lowest_bits = (1 << width) - 1
    numbers = words >> shifts & lowest_bits
    stored = numbers.view(-1)[: blocks * pattern.n]
    return stored.view(blocks, pattern.n).long()


def _width(pattern: NMPattern) -> int:
    """Return the bits of a position within a block."""
    return (pattern.m - 1).bit_length()


def _chunk(pattern: NMPattern) -> int:
    """Return how many blocks are handled at a time: a multiple of eight, whose positions fill whole bytes."""
    blocks = _CHUNK // pattern.m
    multiple = blocks - blocks % 8
    return max(multiple, 8)


def _check_stored(what: str, values: Tensor, pattern: NMPattern) -> None:
    """Refuse a dtype of values, and a length of blocks, that are not packed."""
    if values.dtype not in STORED_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES)
        raise TypeError(f"{what} {names}, not {values.dtype}")
    if pattern.m > MAX_M:
        raise ValueError(f"pattern {pattern} has blocks of more than {MAX_M}, which are not packed")
