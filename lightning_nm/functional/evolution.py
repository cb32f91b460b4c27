"""Prune and regrow within blocks: which entries to exchange, the expected gain, and which blocks may change.

Blocks are ``[B, M]``: one row for each M consecutive entries of a weight.

Source: BAME (Yang et al., ICML 2025, OpenReview XAZKPGUcQm). The scores and the selection are a reconstruction from its
abstract and its reviews.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Score = Literal["virtual", "taylor-abs"]
Selection = Literal["ratio", "quantile"]

FROZEN_QUANTILE = 0.9
"""Under ``selection="quantile"``, blocks that oscillate more than this quantile do not change."""


class Swaps(NamedTuple):
    """The best exchanges of every block, best first; S is the largest number of them.

    Args:
        pruned: Entry to prune, int16 ``[B, S]``.
        regrown: Entry to regrow, int16 ``[B, S]``.
        ahead: What the regrown entry would hold had it made the coming step, -eta G, ``[B, S]``.
        improving: How many of the S raise the score, int16 ``[B]``.
        gain: What these raise the score by, ``[B]``, 0 or more.
        loss_change: First-order change of the loss that these should cause, ``[B]``.
    """

    pruned: Tensor
    regrown: Tensor
    ahead: Tensor
    improving: Tensor
    gain: Tensor
    loss_change: Tensor


def as_blocks(rows: Tensor, m: int) -> Tensor:
    """Cut ``[out, in, *taps]`` into blocks of ``m`` consecutive entries along `in`: ``[out * taps * in / m, m]``.

    Block ``(o * taps + t) * in / m + c`` holds the entries ``rows[o, c m : (c + 1) m, t]``.
    """
    return rows.movedim(1, -1).reshape(-1, m)


def from_blocks(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo :func:`as_blocks` of a tensor of shape ``[out, in, *taps]``."""
    return blocks.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def block_index(shape: Sequence[int], m: int, blocks: Tensor, entries: Tensor) -> tuple[Tensor, ...]:
    """The index, one int64 tensor per axis, of entries of blocks in what :func:`as_blocks` cut, ``[out, in, *taps]``.

    ``blocks`` are numbers of blocks, ``entries`` the entry within each of them, both int64 of one shape.
    """
    per_row = shape[1] // m
    outer = torch.unravel_index(blocks // per_row, (shape[0], *shape[2:]))
    return outer[0], blocks % per_row * m + entries, *outer[1:]


def swap_scores(weight: Tensor, grad: Tensor, mask: Tensor, step: Tensor | float, score: Score = "virtual") -> Tensor:
    r"""How much each entry is worth keeping, pruned entries as candidates to regrow.

    ``"virtual"``: :math:`|m W - \eta G|`, the magnitude one dense step ahead. ``"taylor-abs"``: :math:`|G W|` for kept
    entries and :math:`\eta G^2` for pruned ones. All tensors are of one shape; ``step`` is :math:`\eta`.
    """
    if score == "virtual":
        return (torch.where(mask, weight, 0) - step * grad).abs()
    return torch.where(mask, (grad * weight).abs(), step * grad.square())


def best_swaps(
    weight: Tensor, grad: Tensor, mask: Tensor, step: Tensor | float, score: Score = "virtual", max_swaps: int = 1
) -> Swaps:
    r"""The exchanges of a kept and a pruned entry that raise a block's score most, and what they do to the loss.

    The s-th exchange prunes the kept entry of the s-th lowest score and regrows the pruned entry of the s-th highest;
    it counts if that raises the score strictly; equal scores go to the lower entry. The predicted loss change is the
    first-order one, after one step of size :math:`\eta`:

    .. math:: \Delta L = \sum_{pruned} (-G W + \eta G^2) - \sum_{regrown} \eta G^2.

    Args:
        weight: W in blocks ``[B, M]``.
        grad: The dense gradient G ``[B, M]``.
        mask: Bool ``[B, M]``.
        step: The effective step size :math:`\eta`, a number or ``[B, M]``.
        score: See :func:`swap_scores`.
        max_swaps: Exchanges per block at most.
    """
    scores = swap_scores(weight, grad, mask, step, score)
    if max_swaps == 1:
        low = scores.masked_fill(~mask, torch.inf).min(1, keepdim=True)
        high = scores.masked_fill(mask, -torch.inf).max(1, keepdim=True)
        lost, pruned, won, regrown = low.values, low.indices, high.values, high.indices
    else:
        lost, pruned = scores.masked_fill(~mask, torch.inf).sort(dim=1, stable=True)
        won, regrown = scores.masked_fill(mask, -torch.inf).sort(dim=1, stable=True, descending=True)
        lost, pruned, won, regrown = (x[:, :max_swaps] for x in (lost, pruned, won, regrown))
    # A prefix of the swaps, also if a NaN is among them; never a place that holds an infinity of the wrong kind.
    better = (won > lost).cumprod(1).bool()
    absence = step * grad.square() - torch.where(mask, grad * weight, 0)
    change = absence.gather(1, pruned) - absence.gather(1, regrown)
    return Swaps(
        pruned.to(torch.int16),
        regrown.to(torch.int16),
        -(step * grad).gather(1, regrown),
        better.sum(1, dtype=torch.int16),
        torch.where(better, won - lost, 0).sum(1),
        torch.where(better, change, 0).sum(1),
    )


def swap_budget(blocks: int, share: float, progress: float) -> int:
    r"""How many of B blocks may change: :math:`\lceil B \rho (1 + \cos \pi p) / 2 \rceil`, with p from 0 to 1."""
    return math.ceil(round(blocks * share * 0.5 * (1 + math.cos(math.pi * progress)), 6))  # 7.000000000000001 is 7


def select_blocks(value: Tensor, oscillation: Tensor, budget: int, selection: Selection = "ratio") -> Tensor:
    """Choose the blocks that change by their value and by how often they went back and forth.

    Only blocks of positive, finite value are candidates. ``"ratio"`` orders them by :math:`R_b / (1 + f_b)`;
    ``"quantile"`` leaves out the tenth of all blocks that oscillated most and orders the others by :math:`R_b`.

    Args:
        value: R, ``[B]``.
        oscillation: f, accumulated oscillations, uint8 ``[B]``.
        budget: How many blocks may change.
        selection: See above.

    Returns:
        The numbers of the chosen blocks, ascending int64 ``[at most budget]``; of equal blocks the first.
    """
    candidates = (value > 0) & value.isfinite()
    if selection == "quantile":
        counts = torch.bincount(oscillation, minlength=1).cumsum(0)
        candidates &= oscillation <= (counts < FROZEN_QUANTILE * len(oscillation)).sum()
        joint = value
    else:
        joint = value / (1 + oscillation.to(value.dtype))
    if budget == 0:
        candidates = torch.zeros_like(candidates)
    elif int(candidates.sum()) > budget:
        joint = torch.where(candidates, joint, -torch.inf)
        last = joint.topk(budget, sorted=False).values.min()  # the least that is chosen; a sort would take more memory
        candidates = joint > last
        ties = (joint == last).nonzero().squeeze(1)
        candidates[ties[: budget - int(candidates.sum())]] = True
    return candidates.nonzero().squeeze(1)


def chosen_swaps(swaps: Swaps, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block, pruned entry and regrown entry of each exchange of the chosen blocks, int64 ``[K]``, and its ``ahead``."""
    counted = torch.arange(swaps.pruned.shape[1], device=chosen.device) < swaps.improving[chosen].unsqueeze(1)
    blocks = chosen.unsqueeze(1).expand_as(counted)[counted]
    pruned, regrown, ahead = (each[chosen][counted] for each in (swaps.pruned, swaps.regrown, swaps.ahead))
    return blocks, pruned.long(), regrown.long(), ahead
