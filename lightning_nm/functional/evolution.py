"""Prune and regrow within blocks: which entries to exchange, the expected gain, and which blocks may change.

Blocks are ``[B, M]``: one row for each M consecutive entries of a weight. Names of local tensors end in their axes:
``_bm`` is ``[B, M]``, one number per entry, and ``_b`` is ``[B]``, one number per block.

Source: BAME (Yang et al., ICML 2025, OpenReview XAZKPGUcQm). The scores and the selection are a reconstruction from its
abstract and its reviews; accumulated evidence is ours. :func:`drop_and_grow` is RigL's update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LONGEST_BLOCK = 32
"""The longest blocks that kernels exchange entries of."""

# Of accumulated evidence, see lightning_nm.methods.bame.exchange.Evidence.
DECAY = 0.999
"""Of the second moment V."""
EPSILON = 1e-12
"""What is added to its root."""
SCALE = 2.0**64
"""U is kept divided by this power of two, which loses no bit. Otherwise a step with other masks, or after ``detach()``,
would take U for momentum."""


class Swaps(NamedTuple):
    """The best exchange of every block.

    Args:
        pruned: The kept entry to prune, int64 ``[B]``.
        regrown: The pruned entry to regrow, int64 ``[B]``.
        gain: What the exchange raises the score by, ``[B]``; 0 where none does.
    """

    pruned: Tensor
    regrown: Tensor
    gain: Tensor


def as_blocks(rows: Tensor, m: int) -> Tensor:
    """Cut ``[out, in, *taps]`` into blocks of ``m`` consecutive entries along `in`: ``[out * taps * in / m, m]``.

    Block ``(o * taps + t) * in / m + c`` holds the entries ``rows[o, c m : (c + 1) m, t]``.
    """
    channels_last = rows.movedim(1, -1)  # [out, *taps, in]
    return channels_last.reshape(-1, m)


def from_blocks(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo :func:`as_blocks` of a tensor of shape ``[out, in, *taps]``."""
    out, columns, *taps = shape
    channels_last = blocks.view(out, *taps, columns)
    return channels_last.movedim(-1, 1)


@dataclass(frozen=True)
class BlockGrid:
    """Where the blocks that :func:`as_blocks` numbers lie in the memory of a row-major weight, in entries.

    Block ``(o * taps + t) * blocks_per_row + c`` has its entry k at
    ``o * out_stride + t * tap_stride + (c * m + k) * in_stride``.
    """

    m: int
    blocks_per_row: int
    taps: int
    out_stride: int
    tap_stride: int
    in_stride: int
    in_line: bool  # whether the blocks follow each other, and the entries of each

    @classmethod
    def of(cls, rows: Tensor, m: int) -> BlockGrid:
        """The blocks of ``rows [out, in, *taps]``, a view of a row-major tensor whose last axes are the taps."""
        _, columns, *taps = rows.shape
        out_stride, in_stride, *tap_strides = rows.stride()
        tap_stride = tap_strides[-1] if taps else 0
        number_of_taps = math.prod(taps)
        in_line = number_of_taps == 1 and in_stride == 1 and out_stride == columns
        return cls(m, columns // m, number_of_taps, out_stride, tap_stride, in_stride, in_line)

    def places(self, blocks: Tensor, entries: Tensor) -> Tensor:
        """Where entries of blocks lie in memory, in entries of the weight: their numbers in row-major order.

        Args:
            blocks: The number of each block, int64.
            entries: The entry within each block, of the same shape.

        Returns:
            int64 of the same shape.
        """
        row = blocks // self.blocks_per_row  # out * taps + tap
        column = blocks % self.blocks_per_row * self.m + entries
        out_place = row // self.taps * self.out_stride
        tap_place = row % self.taps * self.tap_stride
        return out_place + tap_place + column * self.in_stride


def look_ahead_scores(weight: Tensor, grad: Tensor, mask: Tensor, step: Tensor | float) -> Tensor:
    r"""Return each entry's magnitude one dense step ahead, :math:`|m W - \eta G|`; ``step`` is :math:`\eta`."""
    kept_weight = torch.where(mask, weight, 0)
    next_weight = kept_weight - step * grad
    return next_weight.abs()


def evidence_scores(weight: Tensor, evidence: Tensor, mask: Tensor) -> Tensor:
    """Return :math:`|W|` for kept entries, and for pruned ones :math:`|U|`, their accumulated evidence."""
    return torch.where(mask, weight, evidence).abs()


def best_swaps(scores: Tensor, mask: Tensor) -> Swaps:
    """Find for each block the kept entry of the lowest score and the pruned entry of the highest.

    The exchange counts if that raises the score strictly; of equal scores the lower entry is taken.

    Args:
        scores: ``[B, M]``.
        mask: The kept entries, bool ``[B, M]``.
    """
    # An infinity on the other side keeps an entry from being chosen, and min and max return the first of equals.
    lowest_b, pruned_b = scores.masked_fill(~mask, torch.inf).min(1)
    highest_b, regrown_b = scores.masked_fill(mask, -torch.inf).max(1)
    # A comparison with NaN is false: a block that holds one stays as it is.
    better_b = highest_b > lowest_b
    gain_b = torch.where(better_b, highest_b - lowest_b, 0)
    return Swaps(pruned_b, regrown_b, gain_b)


def expected_loss_change(
    weight: Tensor,
    grad: Tensor,
    mask: Tensor,
    step: Tensor | float,
    swaps: Swaps,
) -> Tensor:
    r"""Return the first-order change of the loss that each block's exchange causes, after one step of :math:`\eta`.

    .. math:: \Delta L = -G_p W_p + \eta_p G_p^2 - \eta_r G_r^2

    for the pruned entry p and the regrown entry r, which starts at 0; 0 for a block without a gain.

    Args:
        weight: W in blocks ``[B, M]``.
        grad: The dense gradient G ``[B, M]``.
        mask: Bool ``[B, M]``.
        step: The effective step size :math:`\eta`, a number or ``[B, M]``.
        swaps: The exchanges.
    """
    # What it costs that an entry is 0 after the step: it does not make its own step, which would have lowered the
    # loss by eta G^2, and a kept entry goes from W to 0, which changes the loss by -G W.
    step_gain_bm = step * grad.square()
    removal_bm = torch.where(mask, grad * weight, 0)
    absence_bm = step_gain_bm - removal_bm
    entries_b2 = torch.stack([swaps.pruned, swaps.regrown], 1)
    pruned_b, regrown_b = absence_bm.gather(1, entries_b2).unbind(1)
    return torch.where(swaps.gain > 0, pruned_b - regrown_b, 0)


def swap_budget(blocks: int, fraction: float, progress: float) -> int:
    r"""Return how many of B blocks may change: :math:`\lceil B \rho (1 + \cos \pi p) / 2 \rceil`, p from 0 to 1."""
    decay = 1 + math.cos(math.pi * progress)  # from 2 to 0
    budget = blocks * fraction * 0.5 * decay
    # Rounding errors must not add a block: 7.000000000000001 is 7.
    budget = round(budget, 6)
    return math.ceil(budget)


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
    chosen_b = (value > 0) & value.isfinite()
    if budget == 0:
        chosen_b = torch.zeros_like(chosen_b)
    elif int(chosen_b.sum()) > budget:
        damping_b = 1 + oscillation.to(value.dtype)
        damped_b = torch.where(chosen_b, value / damping_b, -torch.inf)
        # A full sort would take more memory.
        top = damped_b.topk(budget, sorted=False)
        threshold = top.values.min()
        chosen_b = damped_b > threshold
        # Which of equal values topk returns is not defined: the first ones fill up the budget.
        is_tie_b = damped_b == threshold
        ties = is_tie_b.nonzero().squeeze(1)
        missing = budget - int(chosen_b.sum())
        chosen_b[ties[:missing]] = True
    return chosen_b.nonzero().squeeze(1)


def count_oscillations(
    oscillation: Tensor, exchanged: Tensor, blocks: Tensor, pruned: Tensor, regrown: Tensor
) -> None:
    """Count the blocks of which an entry was exchanged before, up to 255 times, and note these entries, in place.

    Args:
        oscillation: uint8 ``[B]``, how often each block oscillated.
        exchanged: uint8 ``[entries / 8]``, a bit for each entry: :func:`lightning_nm.functional.pack_mask`.
        blocks: The numbers of the blocks that exchange, int64 ``[K]``, each once.
        pruned: The number of the pruned entry of each in row-major order, int64 ``[K]``.
        regrown: That of the regrown one.
    """
    entries = torch.cat([pruned, regrown])
    bytes_ = entries // 8
    bits = torch.ones_like(entries) << (entries % 8)
    was_exchanged = (exchanged[bytes_].long() & bits).ne(0)
    before_pruned, before_regrown = was_exchanged.chunk(2)
    again = blocks[before_pruned | before_regrown]
    oscillation[again] = oscillation[again].clamp(max=254) + 1
    # No two entries have the same bit, so that a sum sets it.
    new_bits = bits.masked_fill(was_exchanged, 0).to(torch.uint8)
    exchanged.index_put_((bytes_,), new_bits, accumulate=True)


def drop_and_grow(weight: Tensor, grad: Tensor, mask: Tensor, drops: int) -> Tensor:
    r"""Return the mask after RigL's update: drop kept entries of the least magnitude, and grow as many in each block.

    The ``drops`` kept entries of least :math:`|W|` of all blocks are dropped. A block that lost d entries grows the d
    of largest :math:`|G|` among those that it does not keep then. The dropped ones are among these: one that is grown
    again is kept as it was. Of equal entries the first is dropped, or grown.

    Args:
        weight: W in blocks ``[B, M]``.
        grad: The dense gradient G ``[B, M]``.
        mask: The kept entries, bool ``[B, M]``.
        drops: How many entries to drop, at most as many as are kept.

    Returns:
        Bool ``[B, M]``; every block keeps as many entries as in ``mask``.

    Source: RigL (Evci et al., ICML 2020, arXiv 1911.11134), algorithm 1; growth by rows as in SRigL (Lasby et al., ICLR
    2024, arXiv 2305.02299), whose rows are blocks here.

    Example:
        >>> weight = torch.tensor([[3.0, 1.0, 0.0, 0.0], [2.0, 4.0, 0.0, 0.0]])
        >>> grad = torch.tensor([[0.0, 0.1, 0.5, 0.9], [0.0, 0.0, 0.7, 0.2]])
        >>> mask = weight != 0
        >>> drop_and_grow(weight, grad, mask, 1).int().tolist()
        [[1, 0, 0, 1], [1, 1, 0, 0]]
    """
    kept = weight.abs()[mask]  # in the order of the entries
    survives = torch.ones_like(kept, dtype=torch.bool)
    survives[kept.argsort(stable=True)[:drops]] = False
    survives_bm = torch.zeros_like(mask).masked_scatter(mask, survives)
    lost_b = mask.sum(1) - survives_bm.sum(1)
    # The blocks that lost entries, [C, M]: a small part of all, once the fraction of drops has decayed.
    losing_c = lost_b.nonzero().squeeze(1)
    survives_cm = survives_bm[losing_c]
    score_cm = grad[losing_c].abs().masked_fill(survives_cm, -torch.inf)
    order_cm = score_cm.argsort(dim=1, descending=True, stable=True)
    # The rank of each entry in its block: the inverse of that order.
    rank_cm = order_cm.argsort(dim=1)
    grows_cm = rank_cm < lost_b[losing_c].unsqueeze(1)
    grown_bm = survives_bm.clone()
    grown_bm[losing_c] = survives_cm | grows_cm
    return grown_bm
