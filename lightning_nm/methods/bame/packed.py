"""Evidence and exchanges of a packed weight: a few rows at a time, so that its dense gradient need not be whole.

Kept entries, their gradient and the optimizer's state are packed. Dense are U and V alone, which are buffers of the
layer. Its weight is ``[out, in]``: it has no taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional.evolution import (
    Swaps,
    as_blocks,
    best_swaps,
    block_index,
    count_oscillations,
    evidence_scores,
    select_blocks,
)
from lightning_nm.kernels.blocks import BlockGrid, Exchanged
from lightning_nm.kernels.evolution import passes_for
from lightning_nm.methods.bame.evidence import (
    COUNT,
    SCALE,
    SQUARE,
    VALUE,
    Evidence,
    advance_rows,
    bias_correction,
    own_squares,
    step_and_limit,
)
from lightning_nm.methods.bame.optimizer_state import (
    SECOND_MOMENTS,
    entry_states,
    moment_correction,
)
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.storage import PackedStorage
from lightning_nm.training.distributed.consistency import processes

_CHUNK = 1 << 20
"""Entries of the rows that are handled at a time, which bounds the memory for dense gradients."""


class PackedStep(NamedTuple):
    """What the evidence of a packed weight advances by, once the optimizer has stepped.

    Attributes:
        size: r.
        limit: The largest plausible magnitude of U.
    """

    size: Tensor
    limit: Tensor


@torch.no_grad()
def begin_packed_step(layer: NMLayer, optimizer: Optimizer, rate: float) -> PackedStep | None:
    """Prepare the evidence for the coming step; ``None`` if that brings no dense gradient.

    Args:
        layer: A packed layer.
        optimizer: Holds its gradient, and its state of before the step.
        rate: The largest r relative to the size of kept weights.
    """
    storage = _storage(layer)
    buffers = layer.buffers
    if COUNT not in buffers:
        none = Evidence.none(layer.weight)
        buffers.update({COUNT: none.count, VALUE: none.value, SQUARE: none.square})
    # An entry that is pruned after the step goes on with V of before it.
    own = own_squares(layer, optimizer)
    if own is not None:
        for begin, end in _chunks(storage):
            kept = storage.bits_of_rows(begin, end).bool()
            own_of_rows = storage.unpack_rows(own, begin, end)
            square = layer.view.rows(buffers[SQUARE])[begin:end]
            square.copy_(torch.where(kept, own_of_rows, square))
    if not layer.progress.dense_gradient or layer.param.grad is None:
        return None
    mask = layer.masks.forward_view
    assert mask is not None
    return PackedStep(*step_and_limit(layer, optimizer, mask, rate))


@torch.no_grad()
def finish_packed_step(
    layer: NMLayer,
    optimizer: Optimizer,
    step: PackedStep | None,
    budget: Callable[[int], int] | None,
) -> Exchanged | None:
    """Advance the evidence by the gradient of the step that was made, and make the exchanges it speaks for.

    Args:
        layer: A packed layer.
        optimizer: Holds its state of after the step.
        step: What :func:`begin_packed_step` returned.
        budget: Gives the number of blocks that may change for the number of all; ``None`` for no exchange.

    Returns:
        What was exchanged; ``None`` without a budget.
    """
    if step is None and budget is None:
        return None
    storage = _storage(layer)
    buffers = layer.buffers
    values = layer.view.rows(buffers[VALUE])
    squares = layer.view.rows(buffers[SQUARE])
    found: list[Swaps] = []
    for begin, end in _chunks(storage):
        bits = storage.bits_of_rows(begin, end)
        if step is None:
            value = values[begin:end] * SCALE
        else:
            kept_value = values[begin:end].contiguous()
            kept_square = squares[begin:end].contiguous()
            grad = _gradient_of_rows(layer, storage, begin, end)
            evidence = Evidence(kept_value, kept_square, buffers[COUNT])
            evidence = advance_rows(evidence, bits, grad, step.size, step.limit)
            value = evidence.value
            values[begin:end] = value / SCALE
            squares[begin:end] = evidence.square
        if budget is not None:
            weight = storage.unpack_rows(layer.param.detach(), begin, end)
            found.append(_best_swaps(weight, value, bits, layer.pattern.m))
    if step is not None:
        storage.factors.clear()
        buffers[COUNT] = buffers[COUNT] + 1
    if budget is None:
        return None
    swaps = Swaps(*(torch.cat(column) for column in zip(*found, strict=True)))
    return _exchange(layer, optimizer, swaps, budget(len(swaps.gain)))


def _storage(layer: NMLayer) -> PackedStorage:
    assert layer.storage is not None
    return layer.storage


def _chunks(storage: PackedStorage) -> list[tuple[int, int]]:
    """The first row and the row after the last of each part of the weight."""
    out, width = storage.rows_shape
    rows = max(1, _CHUNK // width)
    return [(begin, min(begin + rows, out)) for begin in range(0, out, rows)]


def _gradient_of_rows(layer: NMLayer, storage: PackedStorage, begin: int, end: int) -> Tensor:
    """These rows of the dense gradient, averaged over all processes."""
    grad = storage.factors.rows(begin, end)
    world = processes()
    if grad is None:
        if world == 1:
            raise RuntimeError(
                f"the weight of layer '{layer.name}' has a gradient that its module's own products did not make, "
                "which storage='packed' cannot use while its mask moves: use storage='dense'"
            )
        # This process did not use the layer; others did.
        grad = layer.param.new_zeros(end - begin, storage.rows_shape[1])
    if world > 1:
        grad.div_(world)
        dist.all_reduce(grad)
    return grad


def _best_swaps(weight: Tensor, value: Tensor, bits: Tensor, m: int) -> Swaps:
    """The best exchange of every block of some rows; ``weight`` may be changed at pruned entries."""
    grid = BlockGrid.of(weight, m)
    passes = passes_for(weight, value, bits) if value.dtype == torch.float32 else None
    if grid is not None and passes is not None:
        pruned, regrown, gain = passes.best(grid, bits, weight, value)
        return Swaps(pruned.to(torch.int16), regrown.to(torch.int16), gain)
    kept = as_blocks(bits.bool(), m)
    scores = evidence_scores(as_blocks(weight.to(value.dtype), m), as_blocks(value, m), kept)
    return best_swaps(scores, kept)


def _exchange(layer: NMLayer, optimizer: Optimizer, swaps: Swaps, budget: int) -> Exchanged:
    """Exchange entries: values, positions, the optimizer's state, evidence and counts of oscillation."""
    storage = _storage(layer)
    buffers = layer.buffers
    blocks = select_blocks(swaps.gain, buffers["oscillation"], budget)
    pruned = swaps.pruned[blocks].long()
    regrown = swaps.regrown[blocks].long()
    m = layer.pattern.m
    regrown_index = block_index(storage.rows_shape, m, blocks, regrown)
    values = layer.view.rows(buffers[VALUE])
    squares = layer.view.rows(buffers[SQUARE])
    mean_square = squares[regrown_index] / bias_correction(buffers[COUNT].clamp(min=1))
    moved: list[tuple[Tensor, Tensor | float]] = [(layer.param, values[regrown_index] * SCALE)]
    if layer.param.grad is not None:
        # A loop may go on adding to gradients that it does not zero.
        moved.append((layer.param.grad, 0.0))
    for key, state in entry_states(optimizer, layer.param, layer.name):
        is_square = key in SECOND_MOMENTS
        start = mean_square * moment_correction(optimizer, layer.param) if is_square else 0.0
        moved.append((state, start))
    values[regrown_index] = 0
    storage.exchange(blocks, pruned, regrown, moved)
    layer.masks.count_moved(2 * len(blocks))
    pruned_index = block_index(storage.rows_shape, m, blocks, pruned)
    count_oscillations(
        buffers["oscillation"],
        buffers["exchanged"],
        blocks,
        _place(layer, pruned_index),
        _place(layer, regrown_index),
    )
    held = int((swaps.gain > 0).sum()) - len(blocks)
    return Exchanged(blocks=len(blocks), held=held)


def _place(layer: NMLayer, index: tuple[Tensor, ...]) -> Tensor:
    """The number of each entry of the weight in row-major order, from an index into its rows."""
    row, column = layer.view.locate(index)
    return row * layer.view.shape[1] + column
