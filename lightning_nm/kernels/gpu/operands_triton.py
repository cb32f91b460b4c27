"""Triton kernels of :mod:`lightning_nm.kernels.operands`: each reads its input once and writes a GEMM's operand.

Tiles and warps are chosen from the assembly that Triton 3.6 makes for an H100 (vectorised accesses, no spills); they
are neither tuned nor timed on one. There are some 20 instructions per weight, likely bound by memory, and 80 per entry
of an output gradient, likely bound by arithmetic.

Columns are gathered a row at a time: a program reads a row into shared memory, gathers there, and writes it. Gathering
from or to global memory would access single entries of 2 bytes, where memory and caches move 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_nm.kernels.operands import TOKENS, permuted_columns_reference
from lightning_nm.pattern import NMPattern

TILE = 64
"""Rows and columns of a tile: 128 bytes of a half type, a cache line, on both sides of the transposition."""

SAMPLING = {"num_warps": 8, "enable_fp_fusion": False}
"""Options of the estimate: a fused multiply-add would round once where the torch operations round twice."""

ROWS = 8
"""Rows that a program gathers, with one read of its indices of 8 bytes."""

ROW_BYTES = 1 << 16
"""The longest row, rounded up to a power of two, that a program gathers without spills; torch gathers longer ones."""


def masked(
    weight: Tensor,
    marks: Tensor,
    dtype: torch.dtype,
    bit: int,
    permutation: Tensor | None,
    transposed: bool,
) -> Tensor:
    """Launch ``masked_operand`` on checked arguments."""
    out, columns = weight.shape
    result = torch.empty(
        (columns, out) if transposed else (out, columns), dtype=dtype, device=weight.device
    )
    grid, constants = (
        (triton.cdiv(out, TILE), triton.cdiv(columns, TILE)),
        {"BIT": bit, "TRANSPOSED": transposed},
    )
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(weight):
        _masked[grid](
            weight,
            marks,
            permutation,
            result,
            out,
            columns,
            *weight.stride(),
            **constants,
            TILE=TILE,
        )
    return result


def permuted_columns(grad: Tensor, permutation: Tensor) -> Tensor:
    """Launch ``permuted_columns`` on checked arguments."""
    if not _gatherable(grad):
        return permuted_columns_reference(grad, permutation)
    tokens, out = grad.shape
    result = torch.empty_like(grad)
    width = triton.next_power_of_2(out)
    with torch.cuda.device_of(grad):
        _permuted_columns[(triton.cdiv(tokens, ROWS),)](
            grad,
            permutation,
            result,
            tokens,
            out,
            ROWS=ROWS,
            WIDTH=width,
            num_warps=_warps(width, 4),
        )
    return result


def mvue_transposed(
    grad: Tensor, seed: Tensor, pattern: NMPattern, gather: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Launch ``mvue_transposed`` on checked arguments."""
    tokens, out = grad.shape
    padded = triton.cdiv(tokens, TOKENS) * TOKENS
    result = torch.empty(out, padded, dtype=grad.dtype, device=grad.device)
    # A strip is TILE tokens. Its parts are the tiles to sample, and then, if columns are gathered in the same launch,
    # groups of ROWS rows to gather.
    parts, width, gathered, options = triton.cdiv(out, TILE), None, None, SAMPLING
    if gather is not None and _gatherable(grad):
        parts, width, gathered = (
            parts + TILE // ROWS,
            triton.next_power_of_2(out),
            torch.empty_like(grad),
        )
        options = SAMPLING | {"num_warps": _warps(width, SAMPLING["num_warps"])}
    with torch.cuda.device_of(grad):
        _mvue_transposed[(triton.cdiv(padded, TILE) * parts,)](
            grad,
            # Its four words are read by their address.
            seed.to(grad.device).contiguous(),
            result,
            gather,
            gathered,
            tokens,
            out,
            padded,
            N=pattern.n,
            M=pattern.m,
            TILE=TILE,
            # One call of Philox makes four words: with 4 dividing `out` they belong to four columns of one block.
            SHARED=out % 4 == 0,
            ROWS=ROWS,
            WIDTH=width,
            **options,
        )
    if gather is None:
        return result, None
    # Rows that are too long for a program are left to torch.
    return result, permuted_columns_reference(grad, gather) if gathered is None else gathered


def _gatherable(grad: Tensor) -> bool:
    return triton.next_power_of_2(grad.shape[1]) * grad.element_size() <= ROW_BYTES


def _warps(width: int, least: int) -> int:
    """Warps of a program that gathers: at most 32 entries, and as many indices, in the registers of a thread."""
    return max(least, width // 1024)


@triton.jit
def _masked(
    weight,
    marks,
    permutation,
    result,
    out,
    columns,
    row_stride,
    column_stride,
    BIT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Mask one tile; its rows are gathered, so that the writes are contiguous.

    The reads of a weight stored as [in, out] under a permutation are not; programs that run at the same time share them
    through the L2 cache.
    """
    # In 64 bits, as places in memory are: a weight may have more than 2^31 entries.
    position = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    # `position` is a row of the result, `row` the row of the weight that goes there.
    row = position
    if permutation is not None:
        row = tl.load(permutation + position, mask=position < out, other=0)
    inside = (position < out)[:, None] & (column < columns)[None, :]
    at = (row * row_stride)[:, None] + (column * column_stride)[None, :]
    mark = tl.load(marks + at, mask=inside, other=0)
    # A select and not a product: a pruned infinity is 0, and a pruned negative weight is +0.
    value = tl.where((mark & BIT) != 0, tl.load(weight + at, mask=inside, other=0.0), 0.0)
    masked = value.to(result.dtype.element_ty)
    if TRANSPOSED:
        tl.store(
            result + (column * out)[:, None] + position[None, :],
            tl.trans(masked),
            mask=tl.trans(inside),
        )
    else:
        tl.store(result + (position * columns)[:, None] + column[None, :], masked, mask=inside)


@triton.jit
def _permuted_columns(grad, order, result, tokens, out, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    _gather(grad, order, result, tl.program_id(0).to(tl.int64) * ROWS, tokens, out, ROWS, WIDTH)


@triton.jit
def _gather(grad, order, result, first, tokens, out, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Bring the columns of some rows into order."""
    # A range has a power of two as its length, so the row is filled up.
    column = tl.arange(0, WIDTH)
    inside = column < out
    # Read once for all rows.
    source = tl.load(order + column, mask=inside, other=0).to(tl.int32)
    for i in range(ROWS):
        at = (first + i) * out + column
        mask = inside & (first + i < tokens)
        entry = tl.load(grad + at, mask=mask, other=0.0)
        tl.store(result + at, tl.gather(entry, source, 0), mask=mask)


@triton.jit
def _mvue_transposed(
    grad,
    seed,
    result,
    gather,
    gathered,
    tokens,
    out,
    padded,
    N: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sample one tile, or gather some rows.

    The tiles and the rows of the same tokens follow each other, so the second read finds them in the L2 cache.
    """
    tiles = tl.cdiv(out, TILE)
    # Known when the kernel is compiled: an argument that is None makes a kernel of its own.
    if gathered is None:
        strip, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        _mvue_tile(grad, seed, result, strip, part, tokens, out, padded, N, M, TILE, SHARED)
    else:
        parts = tiles + TILE // ROWS
        strip, part = tl.program_id(0) // parts, tl.program_id(0) % parts
        if part < tiles:
            _mvue_tile(grad, seed, result, strip, part, tokens, out, padded, N, M, TILE, SHARED)
        else:
            first = strip.to(tl.int64) * TILE + (part - tiles) * ROWS
            _gather(grad, gather, gathered, first, tokens, out, ROWS, WIDTH)


@triton.jit
def _mvue_tile(
    grad,
    seed,
    result,
    strip,
    part,
    tokens,
    out,
    padded,
    N: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Sample the blocks of one tile as M planes [blocks, columns], and store them as rows."""
    # M divides 16, which divides TILE: no block is cut.
    block = strip.to(tl.int64) * (TILE // M) + tl.arange(0, TILE // M)
    column = part * TILE + tl.arange(0, TILE)
    # Plane i holds the i-th token of each block, so the entries of a block meet in one thread. Half types are widened.
    planes = ()
    for i in tl.static_range(M):
        token = block * M + i
        inside = (token < tokens)[:, None] & (column < out)[None, :]
        # Zeros stand for the tokens that pad the last block and the result.
        entry = tl.load(grad + (token * out)[:, None] + column[None, :], mask=inside, other=0.0)
        planes = planes + (entry.to(tl.float32),)
    # The block b of column o takes word b * out + o: it is the word (b * out + o) % 4 of the counter (b * out + o) / 4.
    if SHARED:
        quarter = part * (TILE // 4) + tl.arange(0, TILE // 4)
        words = _interleave(_philox(seed, (block * (out // 4))[:, None] + quarter[None, :]), 4)
    else:
        index = (block * out)[:, None] + column[None, :]
        words = _select(_philox(seed, index >> 2), index & 3)
    # The upper 24 bits of a word, as many as float32 has, are a number in [0, 1).
    sample = _sample(planes, (words >> 8).to(tl.float32) * (1 / (1 << 24)), N, M)
    rows = ()
    for i in tl.static_range(M):
        rows = rows + (tl.trans(sample[i]),)  # [columns, blocks]
    token = strip.to(tl.int64) * TILE + tl.arange(0, TILE)
    row = column.to(tl.int64)
    # The padding is written, too: the memory of the result is not zero.
    tl.store(
        result + (row * padded)[:, None] + token[None, :],
        _interleave(rows, M).to(result.dtype.element_ty),
        mask=(column < out)[:, None] & (token < padded)[None, :],
    )


@triton.jit
def _philox(seed, index):
    """Return the four words of each counter, as ``functional.random`` makes them."""
    # Two words of the seed are the key, the other two the upper half of the counter.
    key = (tl.load(seed) & 0xFFFFFFFF) | (tl.load(seed + 1) << 32)
    # As above, the low 32 bits of a word count, as for `counter_uniform`.
    word2, word3 = tl.load(seed + 2).to(tl.uint32), tl.load(seed + 3).to(tl.uint32)
    return tl.philox(key, index.to(tl.uint32), (index >> 32).to(tl.uint32), word2, word3)


@triton.jit
def _select(words, lane):
    """Return the word of four that the lane names."""
    return tl.where(
        lane < 2, tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3])
    )


@triton.jit
def _interleave(planes, M: tl.constexpr):
    """Join M tensors [rows, columns], M a power of two, so that entry ``M q + i`` of a row is entry q of plane i."""
    # tl.interleave joins two tensors. Planes i and i + M / 2 first: later calls bring i and i + 1 next to each other.
    half: tl.constexpr = M // 2
    joined = ()
    for i in tl.static_range(half):
        joined = joined + (tl.interleave(planes[i], planes[i + half]),)
    if half == 1:
        return joined[0]
    else:
        return _interleave(joined, half)


@triton.jit
def _sum(planes, M: tl.constexpr):
    total = planes[0]
    for i in tl.static_range(1, M):
        total = total + planes[i]
    return total


@triton.jit
def _top(planes, M: tl.constexpr):
    """Return the largest magnitude of each block, or NaN."""
    top = tl.abs(planes[0])
    for i in tl.static_range(1, M):
        # By default the maximum of a number and NaN may be the number.
        top = tl.maximum(top, tl.abs(planes[i]), propagate_nan=tl.PropagateNan.ALL)
    return top


@triton.jit
def _scale(planes, M: tl.constexpr):
    """Scale blocks whose sum might overflow by a power of two; return the scaled planes and what undoes it."""
    large = _top(planes, M) > 3.4028234663852886e38 / (4 * M)  # the largest float32
    # M is a power of two, so scaling rounds nothing.
    unit = tl.where(large, 1 / (4 * M), 1.0)
    scaled = ()
    for i in tl.static_range(M):
        scaled = scaled + (planes[i] * unit,)
    return scaled, tl.where(large, 4.0 * M, 1.0)


@triton.jit
def _sample(planes, uniform, N: tl.constexpr, M: tl.constexpr):
    """Draw what ``functional.mvue`` draws, by the same roundings in the same order."""
    finite = _top(planes, M) < float("inf")  # false of NaN
    # The tail is the magnitudes of a block that are still to be drawn. One that is not finite is drawn as if of ones,
    # and its level is NaN.
    tail = ()
    nonzeros = tl.zeros_like(uniform)
    for i in tl.static_range(M):
        tail = tail + (tl.where(finite, tl.abs(planes[i]), 1.0),)
        nonzeros += (tail[i] > 0).to(tl.float32)
    # A block of at most N nonzeros is kept as it is: nothing is due to be drawn.
    few = nonzeros <= N
    due = tl.where(few, 0.0, 1.0 * N)

    # Take the entries that exceed the level of their block, until none does: they leave the tail.
    # N - 1 rounds are enough: if one entry is due, the level is the total, which none exceeds.
    for _ in tl.static_range(N - 1):
        part, unit = _scale(tail, M)
        total = _sum(part, M)
        left = due
        rest = ()
        for i in tl.static_range(M):
            # That is part > total / due, without a division by 0.
            over = total < due * part[i]
            left = left - over.to(tl.float32)
            rest = rest + (tl.where(over, 0.0, tail[i]),)
        due, tail = left, rest
    part, unit = _scale(tail, M)
    total = _sum(part, M)
    # The magnitude of each drawn entry. Divided as torch divides, to the nearest, and not by an approximate reciprocal.
    level = tl.where(finite, tl.div_rn(total, tl.maximum(due, 1.0)) * unit, float("nan"))

    # Draw the others: an entry survives if one of u, u + 1, ... falls into its part of the line.
    # `wanted` entries must be drawn so far for the other nonzeros to make up what is due, whatever the rounding.
    wanted = due
    for i in tl.static_range(M):
        wanted = wanted - (tail[i] > 0).to(tl.float32)
    reach = part[0]
    drawn = tl.zeros_like(uniform)
    # What is not larger than this stays: all entries of a block with few, elsewhere those that left the tail.
    drawable = tl.where(few, float("inf"), 0.0)
    result = ()
    for i in tl.static_range(M):
        if i > 0:
            reach = reach + part[i]
        end = due
        if i < M - 1:  # after the last, reach is the total
            end = tl.div_rn(reach, total) * due
        # How many of u, u + 1, ... lie below the end of this entry's part.
        whole = tl.floor(end)
        count = whole + (uniform < end - whole).to(tl.float32)
        wanted = wanted + (tail[i] > 0).to(tl.float32)
        take = (tail[i] > 0) & (drawn < tl.maximum(count, wanted))
        drawn = drawn + take.to(tl.float32)
        value = tl.where(take, tl.where(planes[i] < 0, -level, level), 0.0)
        result = result + (tl.where(tail[i] > drawable, value, planes[i] + 0.0),)  # -0 + 0 is +0
    return result
