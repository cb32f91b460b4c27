"""Which pattern each layer gets under a budget: one choice per layer, least loss, as a multiple-choice knapsack.

:func:`retained_magnitudes` measures what every N of a block length M keeps. :func:`allocate` chooses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_STATES = 20_000
"""Partial choices that :func:`allocate` keeps after each layer; beyond, the least promising are dropped."""

_ROUNDING = 1e-9
"""Relative: sums of costs and losses in float64 may differ by this much in another order."""


@torch.no_grad()
def retained_magnitudes(weight: Tensor, m: int, dim: int = -1) -> Tensor:
    r"""Return the share of the magnitude that the n largest entries of every block hold, for n = 1, ..., m.

    .. math:: s_n = \sum_{blocks} \sum_{k \le n} |w|_{(k)} \,/\, \sum |w|

    :math:`|w|_{(k)}` is the k-th largest magnitude of a block, so :math:`s_n` is the ``kept_magnitude`` of a magnitude
    mask of n:m, and :math:`s_m = 1`. The shares are concave in n: each further entry of a block is smaller.

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


@dataclass(frozen=True)
class Allocation:
    """The result of :func:`allocate`.

    Args:
        choices: By layer, the index of the chosen candidate.
        loss: The sum of the chosen losses.
        cost: The sum of the chosen costs.
        bound: No choice within the budget has a smaller loss than this; equal to ``loss`` if it is proved the least.

    Example:
        >>> Allocation(choices=(1, 0), loss=0.25, cost=6.0, bound=0.25).bound
        0.25
    """

    choices: tuple[int, ...]
    loss: float
    cost: float
    bound: float


def allocate(
    losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float
) -> Allocation:
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
       The result is optimal unless more than 20,000 partial choices are left at some layer; then the
       least promising are dropped, and ``bound`` tells how far the result can be from the optimum.

    Args:
        losses: By layer, the loss of each candidate. They need not fall as costs grow.
        costs: By layer, the cost of each candidate, 0 or more.
        budget: The largest sum of costs.

    Raises:
        ValueError: If the numbers do not fit together, one is not finite, or the cheapest candidates exceed the budget.

    Example:
        >>> losses = [[0.5, 0.2, 0.0], [0.5, 0.1, 0.0]]
        >>> costs = [[1, 2, 4], [10, 20, 40]]
        >>> allocate(losses, costs, budget=24).choices
        (2, 1)
    """
    _check(losses, costs, budget)
    # Sums of costs that are equal on paper may exceed the budget by a rounding error.
    limit = budget + _ROUNDING * max(abs(budget), 1.0)
    hulls = [_hull(*layer) for layer in zip(losses, costs, strict=True)]
    greedy, multiplier = _greedy(hulls, losses, costs, limit)
    # The least of loss + lambda * cost of each layer: what the layers that are still to come add to the bound.
    reduced = []
    for layer_losses, layer_costs in zip(losses, costs, strict=True):
        priced = zip(layer_losses, layer_costs, strict=True)
        reduced.append(min(loss + multiplier * cost for loss, cost in priced))
    lower_bound = sum(reduced) - multiplier * limit

    choices = greedy
    loss, cost = _sums(greedy, losses, costs)
    found, least_dropped = _search(losses, costs, limit, reduced, multiplier, loss)
    if found is not None:
        found_loss, found_cost = _sums(found, losses, costs)
        # Of equal losses the smaller cost.
        if (found_loss, found_cost) < (loss, cost):
            choices = found
            loss = found_loss
            cost = found_cost
    # What was not searched has no smaller loss than its bound; everything else has no smaller loss than the result.
    bound = max(lower_bound, min(loss, least_dropped))
    return Allocation(tuple(choices), loss, cost, min(bound, loss))


def _check(
    losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float
) -> None:
    """Refuse what is no problem, or one without a solution, by a ``ValueError``."""
    if len(losses) != len(costs):
        raise ValueError(f"losses of {len(losses)} layers, but costs of {len(costs)}")
    for layer, (layer_losses, layer_costs) in enumerate(zip(losses, costs, strict=True)):
        if not layer_losses or len(layer_losses) != len(layer_costs):
            raise ValueError(
                f"layer {layer} has {len(layer_losses)} losses and {len(layer_costs)} costs: give one of each for "
                "every candidate, at least one"
            )
        for value in (*layer_losses, *layer_costs):
            if not math.isfinite(value):
                raise ValueError(f"layer {layer} has a loss or a cost that is {value}")
        if min(layer_costs) < 0:
            raise ValueError(f"layer {layer} has the negative cost {min(layer_costs)}")
    if not math.isfinite(budget):
        raise ValueError(f"budget={budget} is not finite")
    least = sum(min(layer_costs) for layer_costs in costs)
    if least > budget + _ROUNDING * max(abs(budget), 1.0):
        raise ValueError(
            f"budget={budget:g} cannot be reached: the cheapest candidates cost {least:g}"
        )


def _hull(layer_losses: Sequence[float], layer_costs: Sequence[float]) -> list[int]:
    """The indices of the candidates on the lower convex hull of (cost, loss), from the cheapest one on.

    Costs grow strictly along it, losses fall strictly, and each step gains less per cost than the one before.
    """
    # Of candidates with the same cost the best one comes first, and the others are skipped.
    order = sorted(range(len(layer_costs)), key=lambda j: (layer_costs[j], layer_losses[j]))
    hull: list[int] = []
    for j in order:
        if hull and layer_losses[j] >= layer_losses[hull[-1]]:
            continue  # a cheaper candidate loses no more
        while len(hull) > 1:
            gain_before = _gain(layer_losses, layer_costs, hull[-2], hull[-1])
            gain_now = _gain(layer_losses, layer_costs, hull[-1], j)
            if gain_now < gain_before:
                break
            hull.pop()  # it lies on or above the line between its neighbours
        hull.append(j)
    return hull


def _gain(
    layer_losses: Sequence[float], layer_costs: Sequence[float], cheaper: int, dearer: int
) -> float:
    """The loss that a step from one candidate to another saves for each unit of cost."""
    saved = layer_losses[cheaper] - layer_losses[dearer]
    extra = layer_costs[dearer] - layer_costs[cheaper]
    return saved / extra


def _greedy(
    hulls: Sequence[Sequence[int]],
    losses: Sequence[Sequence[float]],
    costs: Sequence[Sequence[float]],
    limit: float,
) -> tuple[list[int], float]:
    """A choice within the limit, and the gain of the first step that does not fit; 0 if all fit."""
    # The first candidate of a hull is the cheapest one of its layer.
    choice = [hull[0] for hull in hulls]
    spent = sum(layer_costs[j] for layer_costs, j in zip(costs, choice, strict=True))
    steps = []
    for layer, hull in enumerate(hulls):
        for cheaper, dearer in itertools.pairwise(hull):
            gain = _gain(losses[layer], costs[layer], cheaper, dearer)
            # The layer and the candidates make the order, and so the choice, the same everywhere where gains are equal.
            steps.append((-gain, layer, cheaper, dearer))
    multiplier = 0.0
    # Within a layer the gains fall, so its steps come in their order.
    for negative_gain, layer, cheaper, dearer in sorted(steps):
        extra = costs[layer][dearer] - costs[layer][cheaper]
        follows = choice[layer] == cheaper  # not if an earlier step of this layer did not fit
        if follows and spent + extra <= limit:
            choice[layer] = dearer
            spent += extra
        elif not multiplier:
            multiplier = -negative_gain
    return choice, multiplier


def _sums(
    choice: Sequence[int], losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """The loss and the cost of a choice, in float64 and independent of the order of the layers."""
    loss = math.fsum(losses[layer][j] for layer, j in enumerate(choice))
    cost = math.fsum(costs[layer][j] for layer, j in enumerate(choice))
    return loss, cost


def _search(
    losses: Sequence[Sequence[float]],
    costs: Sequence[Sequence[float]],
    limit: float,
    reduced: Sequence[float],
    multiplier: float,
    best_loss: float,
) -> tuple[list[int] | None, float]:
    """Return the best choice that beats or equals a known loss, and the least bound of what was left out.

    A state is a choice for the first layers, of which only the sums of loss and cost matter for the others.
    """
    wide = torch.float64
    # The one state before the first layer.
    state_loss = torch.zeros(1, dtype=wide)
    state_cost = torch.zeros(1, dtype=wide)
    # By layer: which candidate made each state, and of which state of the layer before.
    trace: list[tuple[Tensor, Tensor]] = []
    least_dropped = math.inf
    # What the layers that are still to come add at least, to the bound and to the cost.
    rest = sum(reduced)
    cheapest_rest = sum(min(layer_costs) for layer_costs in costs)
    # States that are as good as the known choice by all but a rounding error stay.
    size_of_terms = sum(map(abs, reduced)) + multiplier * limit
    slack = _ROUNDING * size_of_terms
    for layer_losses, layer_costs, own in zip(losses, costs, reduced, strict=True):
        rest -= own
        cheapest_rest -= min(layer_costs)
        number = len(layer_losses)
        # Every state with every candidate: [states, candidates], flat.
        own_loss = torch.tensor(layer_losses, dtype=wide)
        own_cost = torch.tensor(layer_costs, dtype=wide)
        new_loss = (state_loss[:, None] + own_loss).flatten()
        new_cost = (state_cost[:, None] + own_cost).flatten()
        bound = new_loss + rest + multiplier * (new_cost - limit)
        can_end_within = new_cost + cheapest_rest <= limit
        can_be_better = bound <= best_loss + slack
        kept = (can_end_within & can_be_better).nonzero()[:, 0]
        kept = kept[_not_dominated(new_loss[kept], new_cost[kept])]
        if len(kept) > _MOST_STATES:
            by_bound = kept[bound[kept].argsort(stable=True)]
            least_dropped = min(least_dropped, float(bound[by_bound[_MOST_STATES]]))
            kept = by_bound[:_MOST_STATES].sort().values
        # Nothing beats the known choice.
        if not len(kept):
            return None, least_dropped
        state_loss = new_loss[kept]
        state_cost = new_cost[kept]
        candidate = kept % number
        parent = kept // number
        trace.append((candidate, parent))
    if not trace:
        return [], least_dropped  # there is no layer
    # Of equal losses the cheapest: states that are dominated are gone.
    place = int(state_loss.argmin())
    choice = []
    for candidates, parents in reversed(trace):
        choice.append(int(candidates[place]))
        place = int(parents[place])
    return choice[::-1], least_dropped


def _not_dominated(loss: Tensor, cost: Tensor) -> Tensor:
    """The places of the states that no other one equals or beats in both, in the order of cost."""
    if not len(loss):
        return torch.empty(0, dtype=torch.int64)
    # Sorted by cost, and by loss where costs are equal.
    by_loss = loss.argsort(stable=True)
    order = by_loss[cost[by_loss].argsort(stable=True)]
    # Whatever comes before costs no more: it must have lost more.
    ordered = loss[order]
    least_before = ordered.cummin(0).values.roll(1)
    least_before[0] = math.inf
    return order[ordered < least_before]
