"""What an adaptation exchanges in one weight, and what that really did to the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional.evolution import as_blocks
from lightning_nm.functional.mask_bits import FORWARD_BIT
from lightning_nm.methods.bame.optimizer_state import SIZES, entry_states
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.sharding import gather, held, is_sharded, part

Index = tuple[Tensor, ...]


@dataclass
class Move:
    """What an adaptation exchanges: found before the optimizer's step, applied after it, then kept until batch end.

    Args:
        blocks: Block of each exchange, numbered as :func:`~lightning_nm.functional.evolution.as_blocks` does, int64
            ``[K]``.
        pruned: Index of the pruned entries into the weight.
        regrown: Index of the regrown entries.
        ahead: What each regrown entry would hold had it been there for this step, ``[K]``.
        adapted: Number of blocks that change.
        held: Number of blocks that do not, though an exchange would raise their score.
        loss_change: What the exchanges should change the loss by.
        before: What the pruned entries held, ``[K]``; ``None`` until applied.
    """

    blocks: Tensor
    pruned: Index
    regrown: Index
    ahead: Tensor
    adapted: int
    held: Tensor
    loss_change: Tensor
    before: Tensor | None = None


@dataclass
class Handover:
    """What one call of a step tells the next.

    Args:
        fresh: The masks are new: pruned entries of the weight and of the optimizer's state may hold something yet.
        ready: ``before_step`` has run for the step to come.
        move: What to exchange after that step; afterwards what was exchanged, until the batch ends.
    """

    fresh: bool = False
    ready: bool = False
    move: Move | None = None


@torch.no_grad()
def exchange_entries(optimizer: Optimizer, layer: NMLayer, mask: Tensor, move: Move) -> None:
    """Set the optimizer's state: 0 for pruned entries; regrown ones start at 0, or at the mean where it scales steps.

    Args:
        optimizer: The optimizer of the weight.
        layer: The layer.
        mask: The forward mask before the exchange, whose entries the mean over a block is taken of.
        move: What is exchanged.
    """
    m = layer.pattern.m
    for key, kept_state in entry_states(optimizer, layer.param, layer.name):
        state = gather(kept_state)
        start: Tensor | int = 0
        if key in SIZES:
            kept = as_blocks(layer.rows(mask), m)[move.blocks]
            start = torch.where(kept, as_blocks(layer.rows(state), m)[move.blocks], 0).sum(1) / kept.sum(1)
        state[move.pruned] = 0
        state[move.regrown] = start
        if is_sharded(kept_state):
            held(kept_state).copy_(part(state, kept_state))


def adapted_now(layer: NMLayer) -> bool:
    """Whether the optimizer step just made was followed by an adaptation of this layer."""
    handed = layer.handover
    return isinstance(handed, Handover) and handed.move is not None and handed.move.before is not None


@torch.no_grad()
def achieved_loss_change(layers: Sequence[NMLayer], loss: Callable[[], Tensor]) -> float | None:
    """What the exchanges of the last step really changed the loss by, to be compared with the predicted change.

    Both losses are taken after the step: with the old masks, and with the new ones where a regrown entry holds what
    it would have gained in that step. To be called after the optimizer's step and before the masks' ``update``.

    Args:
        layers: Masked layers.
        loss: Computes the loss of one and the same batch each time.

    Returns:
        New minus old loss, or ``None`` if no layer of BAME adapted in this step.
    """
    moved = [layer for layer in layers if adapted_now(layer)]
    if not moved:
        return None
    losses = []
    for new in (True, False):
        with ExitStack() as stack:
            for layer in moved:
                stack.enter_context(_trial(layer, layer.handover.move, new))
            losses.append(float(loss()))
    return losses[0] - losses[1]


@contextmanager
def _trial(layer: NMLayer, move: Move, new: bool) -> Iterator[None]:
    """Within, the layer computes as after the step with the new or the old masks."""
    weight, marks = layer.weight.detach(), layer.marks
    assert marks is not None
    assert move.before is not None
    if new:
        weight[move.regrown] = move.ahead.to(weight.dtype)
    else:
        old = marks.clone()
        old[move.regrown] &= ~FORWARD_BIT
        old[move.pruned] |= FORWARD_BIT
        layer.marks = old
        weight[move.pruned] = move.before
    try:
        yield
    finally:
        weight[move.regrown if new else move.pruned] = 0
        layer.marks = marks
