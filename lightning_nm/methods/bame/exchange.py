"""The exchange of entries in one weight: finding it by evidence or by a gradient, and making it."""

from __future__ import annotations

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
from lightning_nm.functional.select import masked
from lightning_nm.kernels.cpu.evolution import MOST_STATES
from lightning_nm.kernels.evolution import passes_for
from lightning_nm.methods.bame.evidence import Evidence
from lightning_nm.methods.optimizer_state import (
    SECOND_MOMENTS,
    entry_states,
    group_of,
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
        loss_change: The expected change of the loss; 0 where nothing was expected of a certain batch.
    """

    blocks: Tensor
    pruned: Index
    regrown: Index
    held: Tensor
    loss_change: Tensor | float = 0.0


def exchange_of(
    layer: NMLayer,
    blocks: Tensor,
    pruned: Tensor,
    regrown: Tensor,
    held: Tensor,
    loss_change: Tensor | float = 0.0,
) -> Exchange:
    """The exchange of one entry of each of some blocks for another one of it, int64 ``[K]`` each."""
    shape = layer.view.rows(layer.weight).shape  # [out, in, *taps]
    pruned_at, regrown_at = (
        layer.view.locate(block_index(shape, layer.pattern.m, blocks, entries))
        for entries in (pruned, regrown)
    )
    return Exchange(blocks, pruned_at, regrown_at, held, loss_change)


def dense_gradient_was_used(layer: NMLayer, mask: Tensor) -> bool:
    """Whether an earlier call before the same step used this dense gradient: it left zeros at pruned entries.

    An optimizer that computes the gradient several times in a step, as with a closure, brings a new one.
    """
    progress = layer.progress
    if not progress.shaped or not progress.dense_gradient:
        return False
    grad = layer.weight.grad
    return grad is not None and not masked(grad, ~mask).any()


def forgotten_call(layer: NMLayer, lost: str) -> RuntimeError:
    """The error of a step whose dense gradient no ``before_step`` has used; ``lost``: what the mask cannot do."""
    return RuntimeError(
        f"the optimizer stepped without before_step() for layer '{layer.name}', so its mask cannot {lost}: "
        "call sparsifier.before_step(optimizer) first; with Lightning, step the optimizer of "
        "self.optimizers()"
    )


@torch.no_grad()
def find_exchange(
    layer: NMLayer, optimizer: Optimizer, mask: Tensor, evidence: Evidence | None, budget: int
) -> Exchange:
    """Find the exchanges that the evidence speaks for, after the optimizer's step.

    Without evidence, those that one dense gradient speaks for, before it. At most ``budget`` blocks change.
    """
    size = None
    if evidence is None:
        assert layer.weight.grad is not None
        size = step_size(optimizer, layer.param)
        tensors = [mask, layer.weight.detach(), layer.weight.grad, *size.tensors]
    else:
        tensors = [mask, layer.weight.detach(), evidence.value]
    m = layer.pattern.m
    # [out, in] each, convolutions with their taps
    rows = [layer.view.rows(tensor) for tensor in tensors]
    # A few rows of the weight at a time.
    rows_of_chunk = max(1, _CHUNK * len(rows[0]) // rows[0].numel())
    found: list[Swaps] = []
    loss_changes: list[Tensor] = []
    for chunk in zip(*(tensor.split(rows_of_chunk) for tensor in rows), strict=True):
        keep, *values = (as_blocks(tensor, m) for tensor in chunk)
        # At least float32: half precision would make ties of scores that differ.
        weight, *others = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in values)
        if size is None:
            swaps = best_swaps(evidence_scores(weight, others[0], keep), keep)
        else:
            # One step ahead of the optimizer.
            grad, *moments = others
            if size.maximize:
                grad = -grad
            step = size.of_blocks(grad, keep, *moments)
            swaps = best_swaps(look_ahead_scores(weight, grad, keep, step), keep)
            loss_changes.append(expected_loss_change(weight, grad, keep, step, swaps))
        found.append(swaps)
    swaps = Swaps(*(torch.cat(column) for column in zip(*found, strict=True)))
    chosen = select_blocks(swaps.gain, layer.buffers["oscillation"], budget)
    return exchange_of(
        layer,
        chosen,
        swaps.pruned[chosen].long(),
        swaps.regrown[chosen].long(),
        held=(swaps.gain > 0).sum() - len(chosen),
        loss_change=torch.cat(loss_changes)[chosen].sum() if loss_changes else 0.0,
    )


@torch.no_grad()
def make_exchange(
    layer: NMLayer,
    optimizer: Optimizer,
    mask: Tensor,
    exchange: Exchange,
    evidence: Evidence | None = None,
) -> Tensor:
    """Make the exchanges in weight, gradient, evidence and the optimizer's state; returns the forward mask after them.

    Pruned entries become 0. Regrown ones start at their evidence, or at 0, and their state at 0, but for what scales
    steps: that is the mean square of the entry's gradients in the evidence; without evidence, the mean over the entries
    of the block that ``mask`` kept before the exchange.
    """
    m = layer.pattern.m
    param = layer.param
    for key, kept_state in entry_states(optimizer, param, layer.name).items():
        state = gather(kept_state)
        start: Tensor | float = 0.0
        if key in SECOND_MOMENTS and evidence is not None:
            scale = moment_correction(group_of(optimizer, param), optimizer.state[param])
            start = (evidence.mean_square()[exchange.regrown] * scale).to(state.dtype)
        elif key in SECOND_MOMENTS:
            kept = as_blocks(layer.view.rows(mask), m)[exchange.blocks]  # [K, M]
            state_of_blocks = as_blocks(layer.view.rows(state), m)[exchange.blocks]
            start = torch.where(kept, state_of_blocks, 0).sum(1) / kept.sum(1)
        state[exchange.pruned] = 0
        state[exchange.regrown] = start
        if is_sharded(kept_state):
            local_values(kept_state).copy_(local_shard(state, kept_state))

    weight = layer.weight.detach()
    weight[exchange.pruned] = 0
    if evidence is not None:
        weight[exchange.regrown] = evidence.value[exchange.regrown].to(weight.dtype)
        evidence.value[exchange.regrown] = 0
    if layer.weight.grad is not None:
        # A loop may go on adding to gradients that it does not zero.
        layer.weight.grad[exchange.pruned] = 0
    forward = mask.clone()
    forward[exchange.pruned] = False
    forward[exchange.regrown] = True
    return forward


def exchange_in_one_pass(
    layer: NMLayer, optimizer: Optimizer, evidence: Evidence, budget: int
) -> tuple[int, int | Tensor] | None:
    """Find and make the exchanges that the evidence speaks for, by kernels.

    Weight, gradient, evidence, optimizer state, masks and counts of oscillation change as by :func:`find_exchange` and
    :func:`make_exchange`.

    Returns:
        The number of blocks that changed, and of those that did not, though an exchange would raise their score;
        ``None``, and nothing changed, where no kernel takes the tensors.
    """
    masks = layer.masks
    passes = evidence.passes
    if passes is None or masks.has_backward:
        return None
    param = layer.param
    weight = param.detach()
    states = entry_states(optimizer, param, layer.name)
    grid = layer.view.blocks(layer.pattern.m)
    grad = param.grad
    if grad is not None and not (grad.is_contiguous() and grad.dtype == weight.dtype):
        grad = None  # it is masked apart
    fits = grid is not None and len(states) <= MOST_STATES
    if not fits or passes_for(weight, grad, *states.values()) is not passes:
        return None
    state = optimizer.state.get(param, {})
    blocks, held = passes.exchange(
        grid,
        masks.bits,
        weight,
        grad,
        evidence.value,
        evidence.square,
        layer.buffers["oscillation"],
        layer.buffers["exchanged"],
        list(states.values()),
        [name in SECOND_MOMENTS for name in states],
        budget,
        evidence.correction(),
        moment_correction(group_of(optimizer, param), state),
    )
    masks.count_moved(2 * blocks)
    if grad is None and param.grad is not None:
        layer.zero_pruned(param.grad)
    return blocks, held
