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
from lightning_nm.functional.masks import nm_mask
from lightning_nm.functional.pattern import NMPattern, PatternLike

MAX_M = 256
"""The longest block that is packed."""

PACKED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of matrices that are packed."""

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_CHUNK = 1 << 20  # entries that are handled at a time: it bounds the temporaries


def uses_bitmap(pattern: NMPattern) -> bool:
    """Whether positions are one bit for each entry of a block, not a number for each stored entry."""
    return pattern.m < pattern.n * _width(pattern)


def position_bits(pattern: NMPattern) -> int:
    """Bits of the positions of one block."""
    return min(pattern.m, pattern.n * _width(pattern))


def position_bytes(pattern: NMPattern, blocks: int) -> int:
    """Bytes of the positions of so many blocks."""
    return (blocks * position_bits(pattern) + 7) // 8


def pack_nm(matrix: Tensor, pattern: PatternLike) -> tuple[Tensor, Tensor]:
    """Pack a matrix that is N:M along its last axis into its values and their positions.

    A block with fewer than N nonzeros also stores negative zeros, first position first, and then zeros, likewise. So
    :func:`unpack_nm` returns the same bits, but for the negative zeros of a block that already stores N entries: they
    become zeros. NaN and infinities are nonzeros.

    Args:
        matrix: ``[..., depth]``, float64, float32, float16 or bfloat16; M divides the depth.
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
    if matrix.dtype not in PACKED_DTYPES:
        raise TypeError(f"a matrix to pack is {_names(PACKED_DTYPES)}, not {matrix.dtype}")
    _check_pattern(pattern)
    if not matrix.dim() or matrix.shape[-1] % pattern.m:
        raise ValueError(
            f"the last axis of a matrix of shape {tuple(matrix.shape)} is no multiple of M = {pattern.m}"
        )
    blocks = matrix.detach().reshape(-1, pattern.m)
    values, positions = [], []
    for chunk in blocks.split(_chunk(pattern)):
        nonzero = chunk != 0
        too_many = nonzero.sum(1) > pattern.n
        crowded = int(too_many.sum())
        if crowded:
            raise ValueError(
                f"{crowded} or more of {len(blocks)} blocks hold more than {pattern.n} nonzeros"
            )
        # Of the entries that are zero, -0 alone has bits: the score is 2 for a nonzero, 1 for -0 and 0 for +0.
        bits = chunk.contiguous().view(_INTEGERS[chunk.itemsize])
        scores = nonzero.byte() + bits.ne(0).byte()
        mask = nm_mask(scores, pattern)
        values.append(chunk[mask].view(-1, pattern.n))
        positions.append(_encode(mask, pattern))
    size = (*matrix.shape[:-1], matrix.shape[-1] // pattern.m, pattern.n)
    if not values:
        return matrix.new_empty(size), torch.empty(0, dtype=torch.uint8, device=matrix.device)
    return torch.cat(values).view(size), torch.cat(positions)


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
    if values.dtype not in PACKED_DTYPES:
        raise TypeError(f"packed values are {_names(PACKED_DTYPES)}, not {values.dtype}")
    if positions.dtype != torch.uint8:
        raise TypeError(f"packed positions are {torch.uint8}, not {positions.dtype}")
    _check_pattern(pattern)
    check_packed_sizes(tuple(values.shape), tuple(positions.shape), pattern, shape)
    blocks = values.numel() // pattern.n
    used = blocks * position_bits(pattern) % 8  # bits of the last byte
    if used and int(positions[-1]) >> used:
        raise ValueError("the bits after the positions of the last block are not all zero")
    for first, count, part in _parts(positions, pattern, blocks, _chunk(pattern)):
        if uses_bitmap(pattern):
            wrong = unpack_mask(part, (count, pattern.m)).sum(1) != pattern.n
        else:
            numbers = _numbers(part, pattern, count)
            outside = numbers[:, -1] >= pattern.m
            unordered = numbers[:, 1:] <= numbers[:, :-1]
            wrong = outside | unordered.any(1)
        if wrong.any():
            block = first + int(wrong.int().argmax())
            raise ValueError(
                f"block {block} does not have {pattern.n} different ascending positions below {pattern.m}: the "
                "positions are damaged"
            )


def check_packed_sizes(
    values: tuple[int, ...],
    positions: tuple[int, ...],
    pattern: NMPattern,
    shape: Sequence[int],
) -> None:
    """Refuse shapes of values and positions that are not those of a matrix of a shape, by a ``ValueError``."""
    if not shape or shape[-1] % pattern.m:
        raise ValueError(
            f"a matrix of shape {list(shape)} has no blocks of {pattern.m} along its last axis"
        )
    blocks = math.prod(shape) // pattern.m
    of_values = (*shape[:-1], shape[-1] // pattern.m, pattern.n)
    of_positions = (position_bytes(pattern, blocks),)
    for what, found, right in (
        ("values", values, of_values),
        ("positions", positions, of_positions),
    ):
        if found != right:
            raise ValueError(
                f"a matrix of shape {list(shape)} in {pattern} has {what} of {right}, not {found}"
            )


def expand(values: Tensor, positions: Tensor, pattern: NMPattern, shape: Sequence[int]) -> Tensor:
    """:func:`unpack_nm` of what :func:`check_packed` accepted; graphs that are traced or exported can hold it."""
    # A graph that is traced holds one operation for all blocks, not one for each chunk.
    tracing = torch.compiler.is_compiling() or type(values) not in (Tensor, torch.nn.Parameter)
    blocks = math.prod(shape) // pattern.m
    step = blocks if tracing else _chunk(pattern)
    rows = values.reshape(blocks, pattern.n)
    if blocks <= step:
        return _expand(rows, positions, pattern).view(tuple(shape))
    dense = values.new_empty(blocks, pattern.m)
    for first, count, part in _parts(positions, pattern, blocks, step):
        last = first + count
        dense[first:last] = _expand(rows[first:last], part, pattern)
    return dense.view(tuple(shape))


def _parts(
    positions: Tensor,
    pattern: NMPattern,
    blocks: int,
    step: int,
) -> Iterator[tuple[int, int, Tensor]]:
    """Chunks of at most ``step`` blocks: the first block, the number of blocks, their positions."""
    for first in range(0, blocks, step):
        count = min(step, blocks - first)
        begin = position_bytes(pattern, first)
        end = position_bytes(pattern, first + count)
        yield first, count, positions[begin:end]


def _expand(values: Tensor, positions: Tensor, pattern: NMPattern) -> Tensor:
    bits = values.contiguous().view(
        _INTEGERS[values.itemsize]
    )  # torch's scatter gives NaN in bfloat16 other bits
    blocks = len(values)
    zeros = bits.new_zeros(blocks, pattern.m)
    if uses_bitmap(pattern):
        mask = unpack_mask(positions, (blocks, pattern.m))
        found = zeros.masked_scatter(mask, bits)
    else:
        numbers = _numbers(positions, pattern, blocks)
        found = zeros.scatter_(1, numbers, bits)
    return found.view(values.dtype)


def _encode(mask: Tensor, pattern: NMPattern) -> Tensor:
    """The positions of the entries of ``mask [blocks, M]``."""
    if uses_bitmap(pattern):
        return pack_mask(mask)
    device = mask.device
    entries = torch.arange(pattern.m, device=device, dtype=torch.uint8)
    numbers = entries.expand_as(mask)[mask]
    width = _width(pattern)
    together, octets = _word(width)
    words = math.ceil(len(numbers) / together)
    padded = torch.zeros(words * together, dtype=torch.int64, device=device)
    padded[: len(numbers)] = numbers
    # Numbers of different bits: their sum is their union.
    placed = padded.view(words, together) << _steps(together, width, device)
    joined = placed.sum(1, keepdim=True)
    encoded = joined >> _steps(octets, 8, device) & 255
    size = position_bytes(pattern, len(mask))
    return encoded.to(torch.uint8).view(-1)[:size]


def _numbers(positions: Tensor, pattern: NMPattern, blocks: int) -> Tensor:
    """The positions ``[blocks, N]`` of the stored entries, int64."""
    width = _width(pattern)
    together, octets = _word(width)
    shifts = _steps(together, width, positions.device)
    if octets == 1:  # the bytes are the words: fewer passes
        words = positions.unsqueeze(1)
        shifts = shifts.byte()
    else:
        missing = -positions.shape[0] % octets
        padded = torch.cat([positions, positions.new_zeros(missing)]) if missing else positions
        placed = padded.view(-1, octets).long() << _steps(octets, 8, positions.device)
        words = placed.sum(1, keepdim=True)
    numbers = words >> shifts & ((1 << width) - 1)
    stored = numbers.view(-1)[: blocks * pattern.n]
    return stored.view(blocks, pattern.n).long()


def _word(width: int) -> tuple[int, int]:
    """How many numbers of so many bits fill how many bytes without a rest; at most seven bytes."""
    common = math.gcd(width, 8)
    return 8 // common, width // common


def _steps(count: int, width: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * width, width, device=device)


def _width(pattern: NMPattern) -> int:
    return (pattern.m - 1).bit_length()


def _chunk(pattern: NMPattern) -> int:
    """Blocks that are handled at a time: eight or a multiple, whose positions fill whole bytes."""
    blocks = _CHUNK // pattern.m
    return max(blocks - blocks % 8, 8)


def _check_pattern(pattern: NMPattern) -> None:
    if pattern.m > MAX_M:
        raise ValueError(f"pattern {pattern} has blocks of more than {MAX_M}, which are not packed")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
