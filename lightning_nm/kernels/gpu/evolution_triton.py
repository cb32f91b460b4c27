"""BAME's passes over a weight as Triton kernels; ``passes_for`` of :mod:`lightning_nm.methods.bame.exchange` says when.

Each operation is rounded on its own, in the order of the library of CPU kernels, by divisions and roots that are
rounded to nearest: U and V have the same bits as on a CPU. On a GPU the torch operations differ in one of them, their
``rsqrt``, which may be off by two units in the last place there. So U may be off by a few, and two exchanges whose
gains are equal but for that may be ranked the other way round. For equal U and V, :func:`best` and :func:`exchange`
return the bits of the torch operations: they compare, subtract once, divide once and copy.

Nothing here is tuned or timed on a GPU. Where the entries of a block follow each other in memory, as in a linear layer,
accesses are vectorised. Elsewhere a program reads single entries, and programs that run at the same time share what
memory and caches move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_nm.functional.evolution import (
    DECAY,
    EPSILON,
    SCALE,
    BlockGrid,
    count_oscillations,
    select_blocks,
)

TILE = 1024
"""Entries of a program."""


def _launch(kernel: Any, count: int, *arguments: Any, tile: int = TILE, **constants: Any) -> None:
    """Run a kernel on the device of its first argument, in programs of ``tile`` of its ``count`` entries or blocks."""
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(arguments[0]):
        # A fused multiply-add would round once where the other implementations round twice.
        kernel[(triton.cdiv(count, tile),)](
            *arguments, count, TILE=tile, enable_fp_fusion=False, **constants
        )


@torch.no_grad()
def gather_evidence(
    bits: Tensor,
    grad: Tensor | None,
    old_value: Tensor,
    old_square: Tensor,
    *,
    fraction: float,
    own_ratio: float,
    limit: Tensor,
    correction: Tensor,
    size: Tensor,
) -> tuple[Tensor, Tensor]:
    """Do what :func:`lightning_nm.kernels.cpu.mask_passes.gather_evidence` does."""
    new = torch.empty_like(old_value), torch.empty_like(old_square)
    tensors = bits, grad, old_value, old_square, *new, limit, correction, size
    _launch(
        _gather,
        bits.numel(),
        *tensors,
        own_ratio,
        SCALE * fraction,
        decay=DECAY,
        # Subtracted in double precision and rounded once, as csrc/evolve.c does.
        take=1 - DECAY,
        epsilon=EPSILON,
    )
    if grad is not None:
        increment_version(grad)
    return new


@torch.no_grad()
def keep_evidence(
    bits: Tensor,
    value: Tensor,
    square: Tensor,
    kept_value: Tensor,
    kept_square: Tensor,
    *,
    whole_value: bool,
    whole_square: bool,
) -> None:
    """Do what :func:`lightning_nm.kernels.cpu.mask_passes.keep_evidence` does."""
    tensors = bits, value, square, kept_value, kept_square
    _launch(
        _keep,
        bits.numel(),
        *tensors,
        # Exact, because SCALE is a power of two.
        fraction=1 / SCALE,
        whole_value=whole_value,
        whole_square=whole_square,
    )
    increment_version(kept_value)
    increment_version(kept_square)


@torch.no_grad()
def best(
    grid: BlockGrid, bits: Tensor, weight: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best exchange of every block, as :func:`lightning_nm.functional.evolution.best_swaps` does.

    Args:
        grid: The blocks of the weight.
        bits: The masks, uint8.
        weight: The weight, whose pruned entries become +0.0.
        value: U.

    Returns:
        The kept entry to prune and the pruned one to regrow, uint8 ``[blocks]`` each, and float32 ``[blocks]`` what
        that raises the score by: 0 where it does not.
    """
    blocks = weight.numel() // grid.m
    gain = torch.empty(blocks, dtype=torch.float32, device=weight.device)
    # A byte holds a place: blocks of more than LONGEST_BLOCK entries do not come here.
    pruned, regrown = torch.empty(2, blocks, dtype=torch.uint8, device=weight.device)
    # A range has a power of two as its length, so that a block is filled up.
    width = triton.next_power_of_2(grid.m)
    tensors = bits, weight, value, gain, pruned, regrown
    # So many blocks that a program has as many entries as in the other passes.
    _launch(_best, blocks, *tensors, tile=TILE // width, width=width, **vars(grid))
    increment_version(weight)
    return pruned, regrown, gain


@torch.no_grad()
def exchange(
    grid: BlockGrid,
    bits: Tensor,
    weight: Tensor,
    grad: Tensor | None,
    value: Tensor,
    square: Tensor,
    oscillation: Tensor,
    exchanged: Tensor,
    states: Sequence[Tensor],
    are_squares: Sequence[bool],
    budget: int,
    correction: Tensor,
    moment: float,
) -> tuple[int, int | Tensor]:
    """Do what :func:`lightning_nm.kernels.cpu.mask_passes.exchange` does; which blocks change is chosen by torch."""
    pruned, regrown, gain = best(grid, bits, weight, value)
    chosen = select_blocks(gain, oscillation, budget)
    # It stays a tensor: reading it would wait for the device.
    held = (gain > 0).sum() - len(chosen)
    if not len(chosen):
        return 0, held
    pruned_places = grid.places(chosen, pruned[chosen].long())
    regrown_places = grid.places(chosen, regrown[chosen].long())
    places = pruned_places, regrown_places
    tensors = bits, weight, grad, value, square, tuple(states), correction
    _launch(_exchange, len(chosen), *places, *tensors, moment, are_squares=tuple(are_squares))
    count_oscillations(oscillation, exchanged, chosen, *places)
    for tensor in (bits, weight, grad, value, *states):
        if tensor is not None:
            increment_version(tensor)
    return len(chosen), held


@triton.jit
def _places(TILE: tl.constexpr):
    """The places of this program, in 64 bits as those in memory: a weight may have more than 2^31 entries."""
    return tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)


@triton.jit
def _is_kept(places, inside):
    """Whether the forward bit is set at these places of the masks; outside it is not."""
    return (tl.load(places, mask=inside, other=0) & 1) != 0


@triton.jit
def _gather(
    bits,
    grad,
    old_value,
    old_square,
    value,
    square,
    limit,
    correction,
    size,
    own_ratio,
    unit,
    entries,
    decay: tl.constexpr,
    take: tl.constexpr,
    epsilon: tl.constexpr,
    TILE: tl.constexpr,
):
    """Advance U and V of some entries by one gradient, and mask it."""
    at = _places(TILE)
    inside = at < entries
    keep = _is_kept(bits + at, inside)
    v = tl.load(old_square + at, mask=inside, other=0.0)
    u = tl.load(old_value + at, mask=inside, other=0.0)
    # At kept entries these tensors may hold the optimizer's own state: a V of other steps, and momentum instead of U.
    v = tl.where(keep, v * own_ratio, v)
    u = tl.where(keep, 0.0, u * unit)
    u = tl.where(tl.abs(u) > tl.load(limit), 0.0, u)  # NaN stays
    if grad is not None:
        own = tl.load(grad + at, mask=inside, other=0.0)
        g = own.to(tl.float32)
        v = v * decay + g * g * take
        # As torch has the root of the mean square from its reciprocal.
        root = tl.sqrt_rn(tl.div_rn(v, tl.load(correction)))
        root = tl.div_rn(1.0, tl.div_rn(1.0, root))
        step = tl.div_rn(1.0, root + epsilon) * g * tl.load(size)
        u = tl.where(keep, 0.0, u - step)
        # A select and not a product: a pruned infinity is 0, and a pruned negative number is +0.
        tl.store(grad + at, tl.where(keep, own, 0.0), mask=inside)
    tl.store(value + at, u, mask=inside)
    tl.store(square + at, v, mask=inside)


@triton.jit
def _keep(
    bits,
    value,
    square,
    kept_value,
    kept_square,
    entries,
    fraction: tl.constexpr,
    whole_value: tl.constexpr,
    whole_square: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write U and V of some entries to where they are kept, of the optimizer's state to pruned entries alone."""
    at = _places(TILE)
    inside = at < entries
    keep = _is_kept(bits + at, inside)
    u = tl.load(value + at, mask=inside, other=0.0) * fraction
    v = tl.load(square + at, mask=inside, other=0.0)
    # What stays is read and written again: a write to some of the entries could not be vectorised.
    if not whole_value:
        u = tl.where(keep, tl.load(kept_value + at, mask=inside, other=0.0), u)
    if not whole_square:
        v = tl.where(keep, tl.load(kept_square + at, mask=inside, other=0.0), v)
    tl.store(kept_value + at, u, mask=inside)
    tl.store(kept_square + at, v, mask=inside)


@triton.jit
def _best(
    bits,
    weight,
    value,
    gain,
    pruned,
    regrown,
    blocks,
    blocks_per_row,
    taps,
    out_stride,
    tap_stride,
    in_stride,
    in_line: tl.constexpr,
    m: tl.constexpr,
    width: tl.constexpr,
    TILE: tl.constexpr,
):
    """Mask some blocks of the weight, and find the best exchange of each: tiles are [blocks, entries]."""
    block = _places(TILE)
    entry = tl.arange(0, width)
    if in_line:  # without the divisions, and with strides that the compiler knows
        at = (block * m)[:, None] + entry[None, :]
    else:
        row = block // blocks_per_row
        first = (
            row // taps * out_stride
            + row % taps * tap_stride
            + block % blocks_per_row * m * in_stride
        )
        at = first[:, None] + (entry * in_stride)[None, :]
    inside = (block < blocks)[:, None] & (entry < m)[None, :]
    keep = _is_kept(bits + at, inside)
    # `keep` is false outside, too: without `inside`, what fills up a block would count as pruned.
    prune = inside & (keep == 0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(weight + at, tl.where(keep, w, 0.0), mask=inside)

    # Without the sign, floats are ordered as the integers of their bits are, NaN beyond infinity.
    kept = _magnitude(w.to(tl.float32))
    virtual = _magnitude(tl.load(value + at, mask=inside, other=0.0))
    # Without a kept entry nothing exceeds `lowest`; without a pruned one `highest` exceeds nothing.
    lowest = tl.min(tl.where(keep, kept, 0x7FFFFFFF), 1)
    highest = tl.max(tl.where(prune, virtual, -1), 1)
    largest = tl.max(tl.where(keep, kept, tl.where(prune, virtual, 0)), 1)
    # A block with NaN, whose bits exceed those of infinity, stays as it is.
    infinity = 0x7F800000
    better = (highest > lowest) & (largest <= infinity)
    raised = highest.to(tl.float32, bitcast=True) - lowest.to(tl.float32, bitcast=True)
    # Of equal ones the first.
    is_lowest = keep & (kept == lowest[:, None])
    is_highest = prune & (virtual == highest[:, None])
    to_prune = tl.min(tl.where(is_lowest, entry[None, :], width), 1)
    to_regrow = tl.min(tl.where(is_highest, entry[None, :], width), 1)
    is_block = block < blocks
    tl.store(gain + block, tl.where(better, raised, 0.0), mask=is_block)
    tl.store(pruned + block, tl.where(better, to_prune, 0).to(tl.uint8), mask=is_block)
    tl.store(regrown + block, tl.where(better, to_regrow, 0).to(tl.uint8), mask=is_block)


@triton.jit
def _magnitude(x):
    """The bits of float32 numbers without their sign, int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["exchanges"])  # it differs in every step
def _exchange(
    pruned_places,
    regrown_places,
    bits,
    weight,
    grad,
    value,
    square,
    states,
    correction,
    moment,
    exchanges,
    are_squares: tl.constexpr,
    TILE: tl.constexpr,
):
    """Make some exchanges; all places differ, so that no write meets another."""
    index = _places(TILE)
    inside = index < exchanges
    out = tl.load(pruned_places + index, mask=inside, other=0)
    into = tl.load(regrown_places + index, mask=inside, other=0)
    zero = tl.zeros((TILE,), tl.float32)
    mean_square = tl.div_rn(tl.load(square + into, mask=inside, other=0.0), tl.load(correction))
    for i in tl.static_range(len(are_squares)):
        # The second moment goes on from the evidence, other state begins at 0.
        start = mean_square * moment if are_squares[i] else zero
        tl.store(states[i] + out, zero, mask=inside)
        tl.store(states[i] + into, start, mask=inside)
    tl.store(weight + out, zero, mask=inside)
    tl.store(weight + into, tl.load(value + into, mask=inside, other=0.0), mask=inside)
    tl.store(value + into, zero, mask=inside)
    if grad is not None:
        tl.store(grad + out, zero, mask=inside)
    bits_out = tl.load(bits + out, mask=inside, other=0)
    bits_into = tl.load(bits + into, mask=inside, other=0)
    # All bits but FORWARD_BIT, which is 1.
    tl.store(bits + out, bits_out & 0xFE, mask=inside)
    tl.store(bits + into, bits_into | 1, mask=inside)
