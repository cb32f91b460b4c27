"""The exchange of entries in one weight that an adaptation makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional.evolution import as_blocks
from lightning_nm.methods.bame.optimizer_state import SECOND_MOMENTS, entry_states
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.sharding import gather, is_sharded, local_shard, local_values

Index = tuple[Tensor, ...]


@dataclass
class Exchange:
    """The entries to exchange: found before the optimizer's step, applied after it, then kept until the batch ends.

    Args:
        blocks: Block of each exchange, as :func:`~lightning_nm.functional.evolution.as_blocks` counts, int64 ``[K]``.
        pruned: Index of the pruned entries into the weight.
        regrown: Index of the regrown entries.
        adapted: Number of blocks that change.
        held: Number of blocks that do not, though an exchange would raise their score.
        loss_change: The expected change of the loss.
    """

    blocks: Tensor
    pruned: Index
    regrown: Index
    adapted: int
    held: Tensor
    loss_change: Tensor


@dataclass
class PendingExchange:
    """The state that one call of a step leaves to the next."""

    fresh: bool = False  # the masks are new: pruned entries of the weight and the optimizer's state may be nonzero
    ready: bool = False  # before_step() has run for the coming step
    exchange: Exchange | None = None  # to be made after that step; afterwards the last one, until the batch ends


@torch.no_grad()
def exchange_entries(optimizer: Optimizer, layer: NMLayer, mask: Tensor, exchange: Exchange) -> None:
    """Set the optimizer's state: 0 for pruned entries; regrown ones start at 0, or at the mean where it scales steps.

    The mean is taken over the entries of the block that ``mask`` kept before the exchange.
    """
    m = layer.pattern.m
    for key, kept_state in entry_states(optimizer, layer.param, layer.name):
        state = gather(kept_state)
        start: Tensor | int = 0
        if key in SECOND_MOMENTS:
            kept = as_blocks(layer.rows(mask), m)[exchange.blocks]
            start = torch.where(kept, as_blocks(layer.rows(state), m)[exchange.blocks], 0).sum(1) / kept.sum(1)
        state[exchange.pruned] = 0
        state[exchange.regrown] = start
        if is_sharded(kept_state):
            local_values(kept_state).copy_(local_shard(state, kept_state))
