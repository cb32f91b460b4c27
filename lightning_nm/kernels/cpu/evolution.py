"""Passes over a weight and its forward mask on CPUs, each of which reads and writes every tensor once.

They compute what BAME and :func:`lightning_nm.functional.select.mask_` compute by torch. Every operation is rounded on
its own, as torch does. Only the sum of squares adds up in another order, in float64.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_nm.functional.mask_bits import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.kernels.blocks import (
    LONGEST_BLOCK,
    BlockGrid,
    EvidenceStep,
    Exchanged,
    count_writes,
)
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.cpu.library import Evolution

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes of weights, gradients and optimizer state, by their numbers in the library."""
_FEW = 4096  # entries up to which calls of torch are as fast
_KEPT_SIZE, _GATHER, _BEST, _EXCHANGE, _KEEP, _MASK, _DECAY, _LARGEST, _LARGEST_OF_COLUMNS = range(
    9
)

# The library reads and writes the two lowest bits.
assert FORWARD_BIT == 1
assert BACKWARD_BIT == 2


def runs(*tensors: Tensor | None) -> bool:
    """Tell whether the library takes these tensors: on the CPU, in row-major order, of a dtype that it knows."""
    if torch.compiler.is_compiling() or library.unavailable():
        return False
    return all(tensor is None or is_row_major(tensor) for tensor in tensors)


def is_row_major(tensor: Tensor, device_type: str = "cpu") -> bool:
    """Tell whether a pass can read a tensor by its address: on a device of this type, row-major, of a known dtype."""
    return (
        library.is_plain(tensor, device_type)
        and (tensor.dtype in DTYPES or tensor.dtype in (torch.uint8, torch.bool))
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


def _job(bits: Tensor, weight: Tensor | None = None, grad: Tensor | None = None) -> Evolution:
    job = Evolution(library.parallel(), library.threads(), bits.numel(), bits.data_ptr())
    if weight is not None:
        job.weight = weight.data_ptr()
        job.dtype = DTYPES[weight.dtype]
    if grad is not None:
        job.grad = grad.data_ptr()
        job.dtype = DTYPES[grad.dtype]
    return job


def _run(number: int, job: Evolution) -> None:
    if library.load().nm_evolution_pass(library.level(), number, ctypes.byref(job)):
        raise MemoryError("there is no memory for a pass over a weight")


def _write_grid(grid: BlockGrid, job: Evolution) -> None:
    """Describe the blocks of a weight to the library."""
    job.blocks = job.entries // grid.m
    job.blocks_per_row = grid.per_row
    job.taps = grid.taps
    job.m = grid.m
    job.out_stride = grid.out_stride
    job.tap_stride = grid.tap_stride
    job.in_stride = grid.in_stride
    job.in_line = grid.in_line


@torch.no_grad()
def mask_(x: Tensor, bits: Tensor) -> bool:
    """Set the entries of ``x`` whose forward bit is not set to +0.0 in place.

    Returns:
        Whether this was done; ``False`` for tensors that the library does not take, or that are small.
    """
    if x.numel() <= _FEW or x.shape != bits.shape or not runs(x, bits):
        return False
    _run(_MASK, _job(bits, x))
    count_writes(x)
    return True


@torch.no_grad()
def decay_(grad: Tensor, weight: Tensor, bits: Tensor, factor: float) -> None:
    """Add ``factor`` times the entries of a weight whose forward bit is not set to its gradient, in place."""
    job = _job(bits, weight, grad)
    job.size = factor
    _run(_DECAY, job)
    count_writes(grad)


@torch.no_grad()
def keep_largest(grid: BlockGrid, n: int, weight: Tensor, bits: Tensor) -> int:
    """Set the forward bits of the N entries of largest magnitude in every block, and clear the others, in place.

    Of equal entries the first are kept; NaN is below all numbers. Returns how many bits changed.
    """
    job = _job(bits, weight)
    _write_grid(grid, job)
    job.n = n
    _run(_LARGEST, job)
    count_writes(bits)
    return int(job.better)


@torch.no_grad()
def keep_largest_of_columns(
    rows: Tensor, order: Tensor, n: int, m: int, weight: Tensor, bits: Tensor
) -> None:
    """Set the backward bits that :func:`lightning_nm.functional.backward_mask` sets, and clear the others, in place.

    Args:
        rows: ``[out, ...]``, a view of the weight that :func:`has_whole_rows` accepts.
        order: int64 ``[out]``, the row at each position: a permutation.
        n: Entries of a block that are kept.
        m: Rows of a block, a divisor of ``out``.
        weight: The weight.
        bits: uint8 of its shape, whose forward bits are read.
    """
    order = order.to(torch.int64).contiguous()
    job = _job(bits, weight)
    job.n = n
    job.m = m
    job.order = order.data_ptr()
    job.columns = rows[0].numel()
    _run(_LARGEST_OF_COLUMNS, job)
    count_writes(bits)


def has_whole_rows(rows: Tensor, weight: Tensor, m: int) -> bool:
    """Tell whether each row of these rows of a row-major weight is one run of its memory, and blocks of rows fit."""
    out = rows.shape[0]
    # Some layouts have rows that no view can show: then they are a copy.
    if rows.data_ptr() != weight.data_ptr():
        return False
    if m > LONGEST_BLOCK or not weight.numel() or out % m:
        return False
    return rows.stride(0) == weight.numel() // out


def size_of_kept(weight: Tensor, bits: Tensor) -> float:
    """The root mean square of the entries of a weight whose forward bit is set; 0 if there are none."""
    job = _job(bits, weight)
    _run(_KEPT_SIZE, job)
    return math.sqrt(job.kept_square / max(job.kept, 1))


@torch.no_grad()
def gather_evidence(
    bits: Tensor,
    grad: Tensor | None,
    old_value: Tensor,
    old_square: Tensor,
    step: EvidenceStep,
    *,
    mask_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return U, which is 0 at kept entries, and V after one more gradient; without one, as they were.

    Args:
        bits: The masks, uint8.
        grad: The dense gradient of the weight; with ``mask_grad`` its pruned entries become +0.0 afterwards.
        old_value: What :func:`keep_evidence` kept of U, float32.
        old_square: The same of V.
        step: The numbers.
        mask_grad: Whether to mask the gradient, in place.
    """
    value = torch.empty_like(old_value)
    square = torch.empty_like(old_square)
    job = _job(bits, grad=grad)
    job.old_value = old_value.data_ptr()
    job.old_square = old_square.data_ptr()
    job.value = value.data_ptr()
    job.square = square.data_ptr()
    job.unit = step.unit
    job.own_ratio = step.own_ratio
    job.limit = float(step.limit)
    job.decay = step.decay
    job.take = 1 - step.decay
    job.correction = float(step.correction)
    job.epsilon = step.epsilon
    job.size = float(step.size)
    _run(_GATHER, job)
    if mask_grad and grad is not None:
        _run(_MASK, _job(bits, grad))
        count_writes(grad)
    return value, square


def keep_evidence(
    bits: Tensor,
    value: Tensor,
    square: Tensor,
    kept_value: Tensor,
    kept_square: Tensor,
    unit: float,
    *,
    whole_value: bool,
    whole_square: bool,
) -> None:
    """Write U divided by ``unit``, and V: all entries, or only those whose forward bit is not set."""
    job = _job(bits)
    job.value = value.data_ptr()
    job.square = square.data_ptr()
    job.old_value = kept_value.data_ptr()
    job.old_square = kept_square.data_ptr()
    job.unit = unit
    job.whole_value = whole_value
    job.whole_square = whole_square
    _run(_KEEP, job)
    count_writes(kept_value, kept_square)


def exchange(
    grid: BlockGrid,
    bits: Tensor,
    weight: Tensor,
    grad: Tensor | None,
    value: Tensor,
    square: Tensor,
    oscillation: Tensor,
    exchanged: Tensor,
    states: Sequence[tuple[Tensor, bool]],
    budget: int,
    correction: Tensor,
    moment: float,
) -> Exchanged:
    r"""Exchange entries by evidence, in place, and set the entries of the weight that were pruned before to +0.0.

    Args:
        grid: The blocks of the weight.
        bits: The masks, uint8.
        weight: The weight.
        grad: Its gradient, which becomes 0 at pruned entries; ``None`` if there is none.
        value: U.
        square: V.
        oscillation: Oscillations of each block, uint8.
        exchanged: Whether each entry was exchanged before, one bit each.
        states: Tensors of the optimizer's state, and whether each is a second moment. Those of a regrown entry become
            :math:`V / (1 - \beta^t)` times ``moment``; all others become 0.
        budget: How many blocks may change.
        correction: :math:`1 - \beta^t` of the evidence, without axes.
        moment: The same of the optimizer's second moment.
    """
    blocks = weight.numel() // grid.m
    gain = torch.empty(blocks, dtype=torch.float32)
    pruned, regrown, chosen = torch.empty(3, blocks, dtype=torch.uint8)
    job = _job(bits, weight)
    job.grad = None if grad is None else grad.data_ptr()
    job.value = value.data_ptr()
    job.square = square.data_ptr()
    _write_grid(grid, job)
    job.gain = gain.data_ptr()
    job.pruned = pruned.data_ptr()
    job.regrown = regrown.data_ptr()
    job.chosen = chosen.data_ptr()
    job.oscillation = oscillation.data_ptr()
    job.exchanged = exchanged.data_ptr()
    job.states = len(states)
    for k, (state, is_square) in enumerate(states):
        job.state[k] = state.data_ptr()
        job.state_dtype[k] = DTYPES[state.dtype]
        job.state_is_square[k] = is_square
    job.correction = float(correction)
    job.moment = moment
    job.budget = budget
    _run(_BEST, job)
    count = int(library.load().nm_choose_blocks(ctypes.byref(job)))
    _run(_EXCHANGE, job)
    count_writes(bits, weight, grad, oscillation, exchanged, *(state for state, _ in states))
    return Exchanged(blocks=count, held=int(job.better) - count)
