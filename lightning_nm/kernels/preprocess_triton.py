"""Triton kernels of :mod:`lightning_nm.kernels.preprocess`: each reads its input once and writes what a GEMM takes.

Tiles and warps are chosen from the assembly that Triton 3.6 makes for an H100 (vectorised reads and writes, no spills),
but not tuned, nor timed on one. It has some 20 instructions per weight and 80 per entry of an output gradient: the
former should be bound by memory, the latter is likely bound by its arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_nm.kernels.preprocess import TOKENS
from lightning_nm.pattern import NMPattern

TILE = 64
"""Rows and columns of a tile: 128 bytes of a half type, a whole cache line, on both sides of the transposition."""

SAMPLING = {"num_warps": 8, "enable_fp_fusion": False}
"""How the estimate is compiled: a fused multiply-add would round once where the torch operations round twice."""


def masked_pair(
    weight: Tensor, marks: Tensor, dtype: torch.dtype, backward_bit: int, permutation: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch :func:`lightning_nm.kernels.preprocess.masked_pair` on checked arguments."""
    out, columns = weight.shape
    forward = torch.empty(out, columns, dtype=dtype, device=weight.device)
    backward = torch.empty(columns, out, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(out, TILE), triton.cdiv(columns, TILE))
    with torch.cuda.device_of(weight):
        _masked_pair[grid](weight, marks, permutation, forward, backward, out, columns, BIT=backward_bit, TILE=TILE)
    return forward, backward


def mvue_transposed(grad: Tensor, seed: Tensor, pattern: NMPattern, permutation: Tensor | None) -> Tensor:
    """Launch :func:`lightning_nm.kernels.preprocess.mvue_transposed` on checked arguments."""
    tokens, out = grad.shape
    padded = triton.cdiv(tokens, TOKENS) * TOKENS
    result = torch.empty(out, padded, dtype=grad.dtype, device=grad.device)
    place = None  # of each column of dY in the result
    if permutation is not None:
        place = torch.empty_like(permutation)
        place[permutation] = torch.arange(out, device=grad.device)
    grid = (triton.cdiv(padded, TILE), triton.cdiv(out, TILE))
    with torch.cuda.device_of(grad):
        _mvue_transposed[grid](
            grad,
            seed.to(grad.device).contiguous(),
            place,
            result,
            tokens,
            out,
            padded,
            N=pattern.n,
            M=pattern.m,
            TILE=TILE,
            SHARED=out % 4 == 0,
            **SAMPLING,
        )
    return result


@triton.jit
def _masked_pair(weight, marks, permutation, forward, backward, out, columns, BIT: tl.constexpr, TILE: tl.constexpr):
    """Mask one tile; its rows are gathered, so that W_B^T is written without gaps."""
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = position.to(tl.int64)
    if permutation is not None:
        row = tl.load(permutation + position, mask=position < out, other=0)
    inside = (position < out)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    value = tl.load(weight + at, mask=inside, other=0.0)
    mark = tl.load(marks + at, mask=inside, other=0)
    masked = tl.where((mark & 1) != 0, value, 0.0)
    tl.store(forward + at, masked.to(forward.dtype.element_ty), mask=inside)
    masked = tl.where((mark & BIT) != 0, value, 0.0)
    at = column[:, None] * out + position[None, :]
    tl.store(backward + at, tl.trans(masked.to(backward.dtype.element_ty)), mask=tl.trans(inside))


@triton.jit
def _mvue_transposed(
    grad,
    seed,
    place,
    result,
    tokens,
    out,
    padded,
    N: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Sample the blocks of one tile as M planes [blocks, columns], and store them as rows."""
    block = tl.program_id(0).to(tl.int64) * (TILE // M) + tl.arange(0, TILE // M)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    planes = ()
    for i in tl.static_range(M):
        token = block * M + i
        inside = (token < tokens)[:, None] & (column < out)[None, :]
        entry = tl.load(grad + (token * out)[:, None] + column[None, :], mask=inside, other=0.0)
        planes = planes + (entry.to(tl.float32),)
    if SHARED:
        quarter = tl.program_id(1) * (TILE // 4) + tl.arange(0, TILE // 4)
        words = _interleave(_philox(seed, (block * (out // 4))[:, None] + quarter[None, :]), 4)
    else:
        index = (block * out)[:, None] + column[None, :]
        words = _select(_philox(seed, index >> 2), index & 3)
    sample = _sample(planes, (words >> 8).to(tl.float32) * (1 / (1 << 24)), N, M)
    rows = ()
    for i in tl.static_range(M):
        rows = rows + (tl.trans(sample[i]),)
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = column.to(tl.int64)
    if place is not None:
        row = tl.load(place + column, mask=column < out, other=0)
    tl.store(
        result + (row * padded)[:, None] + token[None, :],
        _interleave(rows, M).to(result.dtype.element_ty),
        mask=(column < out)[:, None] & (token < padded)[None, :],
    )


@triton.jit
def _philox(seed, index):
    """Return the four words of each counter, as ``functional.random`` makes them."""
    key = (tl.load(seed) & 0xFFFFFFFF) | (tl.load(seed + 1) << 32)
    word2, word3 = tl.load(seed + 2).to(tl.uint32), tl.load(seed + 3).to(tl.uint32)
    return tl.philox(key, index.to(tl.uint32), (index >> 32).to(tl.uint32), word2, word3)


@triton.jit
def _select(words, lane):
    """Return the word of four that the lane names."""
    return tl.where(lane < 2, tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3]))


@triton.jit
def _interleave(planes, M: tl.constexpr):
    """Join M tensors [rows, columns], M a power of two, so that entry ``M q + i`` of a row is entry q of plane i."""
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
        top = tl.maximum(top, tl.abs(planes[i]), propagate_nan=tl.PropagateNan.ALL)
    return top


@triton.jit
def _scale(planes, M: tl.constexpr):
    """Scale blocks whose sum might overflow by a power of two; return the scaled planes and what undoes it."""
    large = _top(planes, M) > 3.4028234663852886e38 / (4 * M)
    unit = tl.where(large, 1 / (4 * M), 1.0)
    scaled = ()
    for i in tl.static_range(M):
        scaled = scaled + (planes[i] * unit,)
    return scaled, tl.where(large, 4.0 * M, 1.0)


@triton.jit
def _sample(planes, uniform, N: tl.constexpr, M: tl.constexpr):
    """Draw what ``functional.mvue`` draws, by the same roundings in the same order."""
    finite = _top(planes, M) < float("inf")
    tail = ()
    nonzeros = tl.zeros_like(uniform)
    for i in tl.static_range(M):
        tail = tail + (tl.where(finite, tl.abs(planes[i]), 1.0),)
        nonzeros += (tail[i] > 0).to(tl.float32)
    few = nonzeros <= N
    due = tl.where(few, 0.0, 1.0 * N)

    # Take the entries that exceed the level of their block, until none does: they leave the tail.
    for _ in tl.static_range(N - 1):
        part, unit = _scale(tail, M)
        total = _sum(part, M)
        left = due
        rest = ()
        for i in tl.static_range(M):
            over = total < due * part[i]
            left = left - over.to(tl.float32)
            rest = rest + (tl.where(over, 0.0, tail[i]),)
        due, tail = left, rest
    part, unit = _scale(tail, M)
    total = _sum(part, M)
    level = tl.where(finite, tl.div_rn(total, tl.maximum(due, 1.0)) * unit, float("nan"))

    # Draw the others: an entry survives if one of u, u + 1, ... falls into its part of the line.
    wanted = due
    for i in tl.static_range(M):
        wanted = wanted - (tail[i] > 0).to(tl.float32)
    reach = part[0]
    drawn = tl.zeros_like(uniform)
    drawable = tl.where(few, float("inf"), 0.0)
    result = ()
    for i in tl.static_range(M):
        if i > 0:
            reach = reach + part[i]
        end = due
        if i < M - 1:  # after the last, reach is the total
            end = tl.div_rn(reach, total) * due
        whole = tl.floor(end)
        count = whole + (uniform < end - whole).to(tl.float32)
        wanted = wanted + (tail[i] > 0).to(tl.float32)
        take = (tail[i] > 0) & (drawn < tl.maximum(count, wanted))
        drawn = drawn + take.to(tl.float32)
        value = tl.where(take, tl.where(planes[i] < 0, -level, level), 0.0)
        result = result + (tl.where(tail[i] > drawable, value, planes[i] + 0.0),)  # -0 + 0 is +0
    return result
