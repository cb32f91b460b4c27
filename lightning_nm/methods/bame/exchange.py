"""The exchange of entries in one weight that an adaptation makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional.evolution import (
    Swaps,
    as_blocks,
    best_swaps,
    block_index,
    evidence_scores,
    expected_loss_change,
    look_ahead_scores,
    select_blocks,
)
from lightning_nm.functional.select import mask_, masked
from lightning_nm.kernels.blocks import MOST_STATES, Exchanged
from lightning_nm.kernels.evolution import passes_for
from lightning_nm.methods.bame.evidence import Evidence
from lightning_nm.methods.bame.optimizer_state import (
    SECOND_MOMENTS,
    entry_states,
    moment_correction,
    step_size,
)
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.weight import gather, is_sharded, local_shard, local_values

Index = tuple[Tensor, ...]

_CHUNK = 1 << 20
"""Weights that an adaptation handles at a time, which bounds the memory for temporaries."""


@dataclass
class Exchange:
    """The entries to exchange.

    Args:
        blocks: Block of each exchange, as :func:`~lightning_nm.functional.evolution.as_blocks` counts, int64 ``[K]``.
        pruned: Index of the pruned entries into the weight.
        regrown: Index of the regrown entries.
        held: Number of blocks that do not change, though an exchange would raise their score.
        loss_change: The expected change of the loss; ``None`` where nothing was expected of a certain batch.
    """

    blocks: Tensor
    pruned: Index
    regrown: Index
    held: Tensor
    loss_change: Tensor | None = None


@dataclass
class PendingStep:
    """The state that one call of a step leaves to the next."""

    fresh: bool = False  # the masks are new: pruned entries of the weight and the optimizer's state may be nonzero
    ready: bool = False  # before_step() has run for the coming step
    # To be made after that step; afterwards the last one, until the batch ends.
    exchange: Exchange | None = None
    # With the coming step's gradient: it counts once the optimizer has stepped.
    evidence: Evidence | None = None
    due: bool = False  # an exchange by evidence follows the coming step


def dense_gradient_was_used(layer: NMLayer, mask: Tensor) -> bool:
    """Whether an earlier call before the same step used this dense gradient: it left zeros at pruned entries.

    An optimizer that computes the gradient several times in a step, as with a closure, brings a new one.
    """
    progress = layer.progress
    if not progress.shaped or not progress.dense_gradient:
        return False
    grad = layer.weight.grad
    return grad is not None and not masked(grad, ~mask).any()


def gradient_of_window(layer: NMLayer, grad: Tensor) -> Tensor:
    """The gradient at kept entries, in place; all of it in a window that needs the dense one."""
    mask = layer.masks.forward_view
    if layer.progress.dense_gradient or mask is None:
        return grad
    return mask_(grad, mask)


@torch.no_grad()
def exchange_by_gradient(
    layer: NMLayer, optimizer: Optimizer, mask: Tensor, budget: Callable[[int], int]
) -> Exchange:
    """Find the exchanges that one dense gradient speaks for, before the optimizer's step.

    ``budget`` gives the number of blocks that may change for the number of all.
    """
    assert layer.weight.grad is not None
    size = step_size(optimizer, layer.param)

    # All are blocks [B, M].
    def best(weight: Tensor, grad: Tensor, keep: Tensor, *moments: Tensor) -> tuple[Swaps, Tensor]:
        if size.maximize:
            grad = -grad
        step = size.of_blocks(grad, keep, *moments)
        swaps = best_swaps(look_ahead_scores(weight, grad, keep, step), keep)
        return swaps, expected_loss_change(weight, grad, keep, step, swaps)

    tensors = [layer.weight.detach(), layer.weight.grad, mask, *size.tensors]
    return _find(layer, best, tensors, budget)


@torch.no_grad()
def exchange_by_evidence(
    layer: NMLayer, mask: Tensor, evidence: Evidence, budget: Callable[[int], int]
) -> Exchange:
    """Find the exchanges that the accumulated evidence speaks for, after the optimizer's step."""

    # All are blocks [B, M].
    def best(weight: Tensor, value: Tensor, keep: Tensor) -> tuple[Swaps, None]:
        swaps = best_swaps(evidence_scores(weight, value, keep), keep)
        return swaps, None

    return _find(layer, best, [layer.weight.detach(), evidence.value, mask], budget)


def exchange_in_one_pass(
    layer: NMLayer, optimizer: Optimizer, evidence: Evidence, budget: Callable[[int], int]
) -> Exchanged | None:
    """Find and make the exchanges that the accumulated evidence speaks for, by kernels.

    Weights, evidence, optimizer state, masks and counts of oscillation change as by the code for other tensors.

    Returns:
        What was done; ``None``, and nothing changed, where no kernel takes the tensors.
    """
    masks = layer.masks
    if masks.bits is None or masks.has_backward:
        return None
    weight = layer.param.detach()
    tensors = [weight, masks.bits, evidence.value, evidence.square]
    states = [
        (state, key in SECOND_MOMENTS)
        for key, state in entry_states(optimizer, layer.param, layer.name)
    ]
    passes = passes_for(*tensors, *(state for state, _ in states))
    if passes is None or len(states) > MOST_STATES:
        return None
    grid = layer.view.blocks(layer.pattern.m)
    if grid is None:
        return None
    grad = layer.weight.grad
    grad_is_plain = grad is not None and grad.dtype == weight.dtype and passes_for(grad) is passes
    found: Exchanged = passes.exchange(
        grid,
        masks.bits,
        weight,
        grad if grad_is_plain else None,
        evidence.value,
        evidence.square,
        layer.buffers["oscillation"],
        layer.buffers["exchanged"],
        states,
        budget(weight.numel() // layer.pattern.m),
        evidence.correction(),
        moment_correction(optimizer, layer.param),
    )
    masks.count_moved(2 * found.blocks)
    if grad is not None and not grad_is_plain:
        mask = masks.forward_view
        assert mask is not None
        mask_(grad, mask)
    return found


def _find(
    layer: NMLayer,
    best: Callable[..., tuple[Swaps, Tensor | None]],
    tensors: Sequence[Tensor],
    budget: Callable[[int], int],
) -> Exchange:
    """Choose the exchanges, a few rows of the weight at a time; ``best`` gets blocks of the tensors."""
    m = layer.pattern.m
    rows = [
        layer.view.rows(tensor) for tensor in tensors
    ]  # [out, in] each, convolutions with their taps
    shape = rows[0].shape
    rows_of_chunk = max(1, _CHUNK * len(rows[0]) // rows[0].numel())
    found: list[Swaps] = []
    loss_changes: list[Tensor] = []
    for chunk in zip(*(tensor.split(rows_of_chunk) for tensor in rows), strict=True):
        blocks = [_in_single_precision(as_blocks(tensor, m)) for tensor in chunk]
        swaps, loss_change = best(*blocks)
        found.append(swaps)
        if loss_change is not None:
            loss_changes.append(loss_change)
    swaps = Swaps(*(torch.cat(column) for column in zip(*found, strict=True)))

    chosen = select_blocks(swaps.gain, layer.buffers["oscillation"], budget(len(swaps.gain)))

    def index_of(entry: Tensor) -> Index:
        """Where an entry of each chosen block lies in the weight."""
        return layer.view.locate(block_index(shape, m, chosen, entry[chosen].long()))

    return Exchange(
        blocks=chosen,
        pruned=index_of(swaps.pruned),
        regrown=index_of(swaps.regrown),
        held=(swaps.gain > 0).sum() - len(chosen),
        loss_change=torch.cat(loss_changes)[chosen].sum() if loss_changes else None,
    )


def _in_single_precision(tensor: Tensor) -> Tensor:
    """At least float32: half precision would make ties of scores that differ. Masks stay bool."""
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def exchange_state(
    optimizer: Optimizer,
    layer: NMLayer,
    mask: Tensor,
    exchange: Exchange,
    evidence: Evidence | None,
) -> None:
    """Set the optimizer's state: 0 for pruned entries; regrown ones start at 0, but for what scales steps.

    That is the mean square of the entry's gradients in the evidence; without evidence, the mean over the entries of the
    block that ``mask`` kept before the exchange.
    """
    m = layer.pattern.m
    for key, kept_state in entry_states(optimizer, layer.param, layer.name):
        state = gather(kept_state)
        start: Tensor | float = 0.0
        if key in SECOND_MOMENTS and evidence is not None:
            scale = moment_correction(optimizer, layer.param)
            start = (evidence.mean_square()[exchange.regrown] * scale).to(state.dtype)
        elif key in SECOND_MOMENTS:
            kept = as_blocks(layer.view.rows(mask), m)[exchange.blocks]  # [K, M]
            state_of_blocks = as_blocks(layer.view.rows(state), m)[exchange.blocks]
            start = torch.where(kept, state_of_blocks, 0).sum(1) / kept.sum(1)
        state[exchange.pruned] = 0
        state[exchange.regrown] = start
        if is_sharded(kept_state):
            local_values(kept_state).copy_(local_shard(state, kept_state))
