"""Passes over a weight and its forward mask on CPUs, each of which reads and writes every tensor once.

They compute what BAME and :func:`lightning_nm.functional.select.mask_` compute by torch. Every operation is rounded on
its own, as torch does. Only the sum of squares adds up in another order, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional import masks
from lightning_nm.functional.mask_storage import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.kernels.blocks import (
    LONGEST_BLOCK,
    BlockGrid,
    EvidenceStep,
    Exchanged,
    count_writes,
)
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.cpu.library import address

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes of weights, gradients and optimizer state, by their numbers in the library."""
_FEW = 4096  # entries up to which calls of torch are as fast

# The library reads and writes the two lowest bits.
assert FORWARD_BIT == 1
assert BACKWARD_BIT == 2


_SCORES = {**DTYPES, torch.float64: 3, torch.int32: 4, torch.int64: 5}
_LONGEST_RANKED = 64  # entries of a block


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


def _job(bits: Tensor, weight: Tensor | None = None, grad: Tensor | None = None) -> Any:
    """Describe a weight, its gradient and its masks to the library."""
    fields = bits.numel(), address(bits), address(weight), address(grad)
    given = weight if grad is None else grad
    dtype = 0 if given is None else DTYPES[given.dtype]
    return library.structure("nm_evolution *", *fields, dtype)


def _run(name: str, job: Any) -> None:
    """Run a pass by its name in csrc/nm.h."""
    lib = library.load()
    if lib.nm_evolution_pass(library.level(), getattr(lib, f"NM_{name}"), job):
        raise MemoryError("there is no memory for a pass over a weight")


def _write_grid(grid: BlockGrid, job: Any) -> None:
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
    _run("MASK", _job(bits, x))
    count_writes(x)
    return True


def top_n_mask(blocks_bmi: Tensor, n: int, magnitude: bool) -> Tensor | None:
    """Return the mask of the N largest scores, or magnitudes, of blocks ``[B, M, I]``, as :func:`nm_mask` defines it.

    ``None`` where the library cannot be used.
    """
    blocks, m, inner = blocks_bmi.shape
    if m > _LONGEST_RANKED or not library.is_plain(blocks_bmi) or library.unavailable():
        return None
    # A mode that records or counts torch's operators does not see what the library writes.
    if torch._C._len_torch_dispatch_stack():
        return None
    if not blocks_bmi.is_floating_point() and blocks_bmi.itemsize < 4:
        # Magnitudes first: of an int8, that of -128 is -128.
        blocks_bmi = (blocks_bmi.abs() if magnitude else blocks_bmi).int()
        magnitude = False
    if blocks_bmi.dtype not in _SCORES:
        return None
    scores = blocks_bmi.contiguous()
    mask_bmi = torch.empty_like(scores, dtype=torch.bool)
    fields = address(scores), address(mask_bmi), blocks * inner, inner, n, m, _SCORES[scores.dtype]
    top = library.structure("nm_top *", *fields, magnitude)
    library.load().nm_top_mask(library.level(), top)
    return mask_bmi


# `functional` lies below this package, and does not import it.
masks.by_library = top_n_mask


@torch.no_grad()
def decay_(grad: Tensor, weight: Tensor, bits: Tensor, factor: float) -> None:
    """Add ``factor`` times the entries of a weight whose forward bit is not set to its gradient, in place."""
    job = _job(bits, weight, grad)
    job.size = factor
    _run("DECAY", job)
    count_writes(grad)


@torch.no_grad()
def keep_largest(grid: BlockGrid, n: int, weight: Tensor, bits: Tensor) -> int:
    """Set the forward bits of the N entries of largest magnitude in every block, and clear the others, in place.

    Of equal entries the first are kept; NaN is below all numbers. Returns how many bits changed.
    """
    job = _job(bits, weight)
    _write_grid(grid, job)
    job.n = n
    _run("LARGEST", job)
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
    job.order = address(order)
    job.columns = rows[0].numel()
    _run("LARGEST_OF_COLUMNS", job)
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
    _run("KEPT_SIZE", job)
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
    job.old_value = address(old_value)
    job.old_square = address(old_square)
    job.value = address(value)
    job.square = address(square)
    job.unit = step.unit
    job.own_ratio = step.own_ratio
    job.limit = float(step.limit)
    job.decay = step.decay
    job.take = 1 - step.decay
    job.correction = float(step.correction)
    job.epsilon = step.epsilon
    job.size = float(step.size)
    _run("GATHER", job)
    if mask_grad and grad is not None:
        _run("MASK", _job(bits, grad))
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
    job.value = address(value)
    job.square = address(square)
    job.old_value = address(kept_value)
    job.old_square = address(kept_square)
    job.unit = unit
    job.whole_value = whole_value
    job.whole_square = whole_square
    _run("KEEP", job)
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
    job.grad = address(grad)
    job.value = address(value)
    job.square = address(square)
    _write_grid(grid, job)
    job.gain = address(gain)
    job.pruned = address(pruned)
    job.regrown = address(regrown)
    job.chosen = address(chosen)
    job.oscillation = address(oscillation)
    job.exchanged = address(exchanged)
    job.states = len(states)
    for k, (state, is_square) in enumerate(states):
        job.state[k] = address(state)
        job.state_dtype[k] = DTYPES[state.dtype]
        job.state_is_square[k] = is_square
    job.correction = float(correction)
    job.moment = moment
    job.budget = budget
    _run("BEST", job)
    count = int(library.load().nm_choose_blocks(job))
    _run("EXCHANGE", job)
    count_writes(bits, weight, grad, oscillation, exchanged, *(state for state, _ in states))
    return Exchanged(blocks=count, held=int(job.better) - count)
