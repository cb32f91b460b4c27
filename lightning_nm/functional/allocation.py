"""Which pattern each layer gets under a budget: one choice per layer, least loss, as a multiple-choice knapsack.

:func:`retained_magnitudes` measures what every N of a block length M keeps. :func:`allocate` chooses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MOST_STATES = 20_000
"""Partial choices that :func:`allocate` keeps after each layer; beyond, the least promising are dropped."""

_ROUNDING = 1e-9
"""Relative: sums of costs and losses in float64 may differ by this much in another order."""


@torch.no_grad()
def retained_magnitudes(weight: Tensor, m: int, dim: int = -1) -> Tensor:
    r"""Return the fraction of the magnitude that the n largest entries of every block hold, for n = 1, ..., m.

    .. math:: s_n = \sum_{blocks} \sum_{k \le n} |w|_{(k)} \,/\, \sum |w|

    :math:`|w|_{(k)}` is the k-th largest magnitude of a block, so :math:`s_n` is the ``kept_magnitude`` of a magnitude
    mask of n:m, and :math:`s_m = 1`. The fractions are concave in n: each further entry of a block is smaller.

    Args:
        weight: Any shape and floating dtype; its size along ``dim`` is a multiple of ``m``.
        m: Length of a block.
        dim: The axis of the blocks.

    Returns:
        float64 ``[m]`` on the weight's device; ones for a weight that is all zero.

    Raises:
        ValueError: If the blocks do not fit.

    Example:
        >>> retained_magnitudes(torch.tensor([[4.0, 1.0, -3.0, 2.0]]), 4)
        tensor([0.4000, 0.7000, 0.9000, 1.0000], dtype=torch.float64)
    """
    size = weight.shape[dim]
    if m < 1 or size % m:
        raise ValueError(f"blocks of {m} do not fit along dim {dim} of {tuple(weight.shape)}")
    blocks_bm = weight.movedim(dim, -1).reshape(-1, m)
    # Sums need float64, sorting does not: a copy of a large weight in float64 would double its memory.
    largest_first_bm = blocks_bm.abs().sort(dim=1, descending=True).values
    of_each_place = largest_first_bm.sum(0, dtype=torch.float64)
    kept = of_each_place.cumsum(0)
    total = kept[-1]
    # A weight without magnitude loses none. A NaN stays one.
    return torch.where(total == 0, torch.ones_like(kept), kept / total)


def allocate(
    losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float
) -> tuple[int, ...]:
    r"""Choose one candidate for each layer, so that the sum of losses is least and the sum of costs within a budget.

    This is the multiple-choice knapsack problem. Two steps solve it:

    1. *Greedy on the convex hulls.* Of each layer only the candidates on the lower convex hull of (cost, loss) count.
       All layers begin with the cheapest one; then the steps along the hulls are taken in the order of their gain,
       :math:`-\Delta loss / \Delta cost`, as long as they fit. The gain :math:`\lambda` of the first step that does not
       fit is the Lagrange multiplier of the relaxed problem, so that with every multiplier

       .. math:: L(\lambda) = \sum_l \min_j (loss_{lj} + \lambda\, cost_{lj}) - \lambda\, budget

       is a lower bound of every choice's loss (Sinha and Zoltners, Operations Research 27(3), 1979).
    2. *Search for the rest.* Layer by layer, the partial choices that no other one beats in both cost and loss are
       extended by every candidate. One whose bound by :math:`L(\lambda)` is not below the best known loss is dropped.
       The result is optimal unless more than 20,000 partial choices are left at some layer; then the least promising
       are dropped.

    Args:
        losses: By layer, the loss of each candidate. They need not fall as costs grow.
        costs: By layer, the cost of each candidate, 0 or more.
        budget: The largest sum of costs.

    Returns:
        By layer, the index of the chosen candidate.

    Raises:
        ValueError: If a layer has not one loss and one cost for each candidate, one is not finite, or the cheapest
            candidates exceed the budget.

    Example:
        >>> losses = [[0.5, 0.2, 0.0], [0.5, 0.1, 0.0]]
        >>> costs = [[1, 2, 4], [10, 20, 40]]
        >>> allocate(losses, costs, budget=24)
        (2, 1)
    """
    layers = [
        list(zip(layer_losses, layer_costs, strict=True))
        for layer_losses, layer_costs in zip(losses, costs, strict=True)
    ]
    for number, layer in enumerate(layers):
        if not layer or not all(map(math.isfinite, itertools.chain(*layer))):
            raise ValueError(
                f"layer {number} has no candidate, or a loss or a cost that is not finite"
            )
    # Sums of costs that are equal on paper may exceed the budget by a rounding error.
    limit = budget + _ROUNDING * max(abs(budget), 1.0)
    least = sum(map(min, costs))
    if least > limit:
        raise ValueError(
            f"budget={budget:g} cannot be reached: the cheapest candidates cost {least:g}"
        )
    greedy, multiplier = _greedy(layers, limit)
    found = _search(layers, limit, multiplier, _sums(layers, greedy)[0])
    # Of equal losses the smaller cost.
    return min([greedy, *found], key=lambda choice: _sums(layers, choice))


_Layer = Sequence[tuple[float, float]]
"""The loss and the cost of each candidate."""


def _sums(layers: Sequence[_Layer], choice: Sequence[int]) -> tuple[float, float]:
    """The loss and the cost of a choice, independent of the order of the layers."""
    chosen = [layer[j] for layer, j in zip(layers, choice, strict=True)]
    return math.fsum(loss for loss, _ in chosen), math.fsum(cost for _, cost in chosen)


def _gain(layer: _Layer, cheaper: int, dearer: int) -> float:
    """The loss that a step from one candidate to another saves for each unit of cost."""
    return (layer[cheaper][0] - layer[dearer][0]) / (layer[dearer][1] - layer[cheaper][1])


def _hull(layer: _Layer) -> list[int]:
    """The indices of the candidates on the lower convex hull of (cost, loss), from the cheapest one on.

    Costs grow strictly along it, losses fall strictly, and each step gains less per cost than the one before.
    """
    hull: list[int] = []
    # Of candidates with the same cost the best one comes first, and the others are skipped.
    for j in sorted(range(len(layer)), key=lambda j: (layer[j][1], layer[j][0])):
        if hull and layer[j][0] >= layer[hull[-1]][0]:
            continue  # a cheaper candidate loses no more
        # A candidate on or above the line between its neighbours goes.
        while len(hull) > 1 and _gain(layer, hull[-1], j) >= _gain(layer, hull[-2], hull[-1]):
            hull.pop()
        hull.append(j)
    return hull


def _greedy(layers: Sequence[_Layer], limit: float) -> tuple[tuple[int, ...], float]:
    """A choice within the limit, and the gain of the first step that does not fit; 0 if all fit."""
    hulls = [_hull(layer) for layer in layers]
    choice = [hull[0] for hull in hulls]
    spent = sum(layer[j][1] for layer, j in zip(layers, choice, strict=True))
    # The layer and the candidates make the order, and so the choice, the same everywhere where gains are equal.
    steps = [
        (-_gain(layers[number], cheaper, dearer), number, cheaper, dearer)
        for number, hull in enumerate(hulls)
        for cheaper, dearer in itertools.pairwise(hull)
    ]
    multiplier = 0.0
    # Within a layer the gains fall, so its steps come in their order.
    for negative_gain, number, cheaper, dearer in sorted(steps):
        extra = layers[number][dearer][1] - layers[number][cheaper][1]
        follows = choice[number] == cheaper  # not if an earlier step of this layer did not fit
        if follows and spent + extra <= limit:
            choice[number] = dearer
            spent += extra
        elif not multiplier:
            multiplier = -negative_gain
    return tuple(choice), multiplier


def _search(
    layers: Sequence[_Layer], limit: float, multiplier: float, best_loss: float
) -> list[tuple[int, ...]]:
    """The best choice that beats or equals a known loss, if there is one.

    A state is a choice for the first layers, of which only the sums of cost and loss matter for the others.
    """
    # The least of loss + multiplier * cost of each layer: what the layers that are still to come add to the bound.
    reduced = [min(loss + multiplier * cost for loss, cost in layer) for layer in layers]
    cheapest = [min(cost for _, cost in layer) for layer in layers]
    # States that are as good as the known choice by all but a rounding error stay.
    most = best_loss + multiplier * limit
    most += _ROUNDING * (sum(map(abs, reduced)) + multiplier * limit)
    states: list[tuple[float, float, Any]] = [(0.0, 0.0, None)]
    for number, layer in enumerate(layers):
        rest = sum(reduced[number + 1 :])
        most_cost = limit - sum(cheapest[number + 1 :])
        extended = []
        for cost, loss, chosen in states:
            for j, (own_loss, own_cost) in enumerate(layer):
                state = (cost + own_cost, loss + own_loss, (j, chosen))
                bound = state[1] + multiplier * state[0] + rest
                if state[0] <= most_cost and bound <= most:
                    extended.append(state)
        states = []
        for state in sorted(extended, key=lambda state: state[:2]):
            # Whatever comes before costs no more: this one must lose less.
            if not states or state[1] < states[-1][1]:
                states.append(state)
        if len(states) > _MOST_STATES:
            by_bound = sorted(states, key=lambda state: state[1] + multiplier * state[0])
            states = sorted(by_bound[:_MOST_STATES], key=lambda state: state[:2])
    choices = []
    # Losses fall as costs grow.
    for _, _, chosen in states[-1:]:
        choice = []
        while chosen is not None:
            j, chosen = chosen
            choice.append(j)
        choices.append(tuple(reversed(choice)))
    return choices
