"""Prune and regrow within blocks: which entries to exchange, the expected gain, and which blocks may change.

Blocks are ``[B, M]``: one row for each M consecutive entries of a weight.

Source: BAME (Yang et al., ICML 2025, OpenReview XAZKPGUcQm). The scores and the selection are a reconstruction from its
abstract and its reviews; accumulated evidence is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Swaps(NamedTuple):
    """The best exchange of every block.

    Args:
        pruned: The kept entry to prune, int16 ``[B]``.
        regrown: The pruned entry to regrow, int16 ``[B]``.
        gain: What the exchange raises the score by, ``[B]``; 0 where none does.
    """

    pruned: Tensor
    regrown: Tensor
    gain: Tensor


def as_blocks(rows: Tensor, m: int) -> Tensor:
    """Cut ``[out, in, *taps]`` into blocks of ``m`` consecutive entries along `in`: ``[out * taps * in / m, m]``.

    Block ``(o * taps + t) * in / m + c`` holds the entries ``rows[o, c m : (c + 1) m, t]``.
    """
    return rows.movedim(1, -1).reshape(-1, m)


def from_blocks(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo :func:`as_blocks` of a tensor of shape ``[out, in, *taps]``."""
    return blocks.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def block_index(
    shape: Sequence[int], m: int, blocks: Tensor, entries: Tensor
) -> tuple[Tensor, ...]:
    """The index, one int64 tensor per axis, of entries of blocks in what :func:`as_blocks` cut, ``[out, in, *taps]``.

    ``blocks`` are numbers of blocks, ``entries`` the entry within each of them, both int64 of one shape.
    """
    per_row = shape[1] // m
    out, *taps = torch.unravel_index(blocks // per_row, (shape[0], *shape[2:]))
    column = blocks % per_row * m + entries
    return out, column, *taps


def look_ahead_scores(weight: Tensor, grad: Tensor, mask: Tensor, step: Tensor | float) -> Tensor:
    r"""The magnitude of each entry one dense step ahead, :math:`|m W - \eta G|`; ``step`` is :math:`\eta`."""
    masked = torch.where(mask, weight, 0)
    return (masked - step * grad).abs()


def evidence_scores(weight: Tensor, evidence: Tensor, mask: Tensor) -> Tensor:
    """:math:`|W|` of kept entries, and of pruned ones :math:`|U|`, their accumulated evidence."""
    return torch.where(mask, weight, evidence).abs()


def best_swaps(scores: Tensor, mask: Tensor) -> Swaps:
    """For each block, the kept entry of the lowest score and the pruned entry of the highest.

    The exchange counts if that raises the score strictly; of equal scores the lower entry is taken.

    Args:
        scores: ``[B, M]``.
        mask: The kept entries, bool ``[B, M]``.
    """
    low = scores.masked_fill(~mask, torch.inf).min(1)
    high = scores.masked_fill(mask, -torch.inf).max(1)
    better = high.values > low.values  # also if a NaN is among them
    gain = torch.where(better, high.values - low.values, 0)
    return Swaps(low.indices.to(torch.int16), high.indices.to(torch.int16), gain)


def expected_loss_change(
    weight: Tensor, grad: Tensor, mask: Tensor, step: Tensor | float, swaps: Swaps
) -> Tensor:
    r"""The first-order change of the loss that each block's exchange causes, after one step of size :math:`\eta`.

    .. math:: \Delta L = -G_p W_p + \eta_p G_p^2 - \eta_r G_r^2

    for the pruned entry p and the regrown entry r, which starts at 0; 0 for a block without a gain.

    Args:
        weight: W in blocks ``[B, M]``.
        grad: The dense gradient G ``[B, M]``.
        mask: Bool ``[B, M]``.
        step: The effective step size :math:`\eta`, a number or ``[B, M]``.
        swaps: The exchanges.
    """
    absence = step * grad.square() - torch.where(mask, grad * weight, 0)
    pruned = _entry(absence, swaps.pruned)
    regrown = _entry(absence, swaps.regrown)
    return torch.where(swaps.gain > 0, pruned - regrown, 0)


def _entry(blocks: Tensor, entries: Tensor) -> Tensor:
    """One entry ``[B]`` of every block ``[B, M]``."""
    index = entries.long().unsqueeze(1)
    return blocks.gather(1, index).squeeze(1)


def swap_budget(blocks: int, share: float, progress: float) -> int:
    r"""How many of B blocks may change: :math:`\lceil B \rho (1 + \cos \pi p) / 2 \rceil`, with p from 0 to 1."""
    decay = 1 + math.cos(math.pi * progress)
    budget = blocks * share * 0.5 * decay
    # Rounding errors must not add a block: 7.000000000000001 is 7.
    return math.ceil(round(budget, 6))


def select_blocks(value: Tensor, oscillation: Tensor, budget: int) -> Tensor:
    """Choose the blocks that change, in the order of :math:`R_b / (1 + f_b)`.

    Only blocks of positive, finite value are candidates.

    Args:
        value: R, ``[B]``.
        oscillation: f, accumulated oscillations, uint8 ``[B]``.
        budget: How many blocks may change.

    Returns:
        The numbers of the chosen blocks, ascending int64 ``[at most budget]``; of equal blocks the first.
    """
    candidates = (value > 0) & value.isfinite()
    if budget == 0:
        candidates = torch.zeros_like(candidates)
    elif int(candidates.sum()) > budget:
        damping = 1 + oscillation.to(value.dtype)
        joint = torch.where(candidates, value / damping, -torch.inf)
        last = joint.topk(
            budget, sorted=False
        ).values.min()  # the least that is chosen; a sort would take more memory
        candidates = joint > last
        ties = (joint == last).nonzero().squeeze(1)
        missing = budget - int(candidates.sum())
        candidates[ties[:missing]] = True
    return candidates.nonzero().squeeze(1)
