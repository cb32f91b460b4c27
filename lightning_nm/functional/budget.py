"""A pattern for each layer, chosen so that the whole model keeps a share of its parameters or of its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_nm.functional.allocation import allocate
from lightning_nm.functional.pattern import NMPattern

DENSE = "dense"
"""What is written in place of a pattern for a layer that keeps all of its entries."""

Counted = Literal["parameters", "flops"]
"""What a budget is a share of: the entries of all weights, or the multiply-adds of their dense forward products."""

WHOLE: dict[Counted, str] = {
    "parameters": "entries of all weights",
    "flops": "multiply-adds of all weights",
}
"""What a budget is a share of, in messages."""


@dataclass(frozen=True)
class Candidates:
    """What one layer can choose among, beside staying dense.

    Args:
        cost: What the dense layer costs; a pattern N:M costs N/M of it.
        values: By pattern, what choosing it takes from the layer; nothing if it stays dense.

    Example:
        >>> Candidates(cost=64, values={"2:4": 0.3, "1:4": 0.6}).patterns
        [NMPattern(n=1, m=4), NMPattern(n=2, m=4)]
    """

    cost: int
    values: Mapping[str, float]

    @property
    def patterns(self) -> list[NMPattern]:
        """The patterns, the sparsest one first."""
        parsed = [NMPattern.parse(pattern) for pattern in self.values]
        return sorted(parsed, key=lambda pattern: (pattern.density, pattern.m))


@dataclass(frozen=True)
class Choice:
    """The pattern of one layer, and why it was chosen.

    Args:
        pattern: The pattern as text, or ``"dense"``.
        value: What was measured for it; 0 for a dense layer.
        why: The values of the next sparser and the next denser candidate.

    Example:
        >>> Choice("4:16", 0.02, "3:16 has 0.0310, 5:16 has 0.0131").density
        0.25
    """

    pattern: str
    value: float
    why: str = ""

    @property
    def density(self) -> float:
        """The share of the layer's entries that is kept."""
        return 1.0 if self.pattern == DENSE else NMPattern.parse(self.pattern).density


def all_patterns(m: int) -> list[NMPattern]:
    """Return 1:m, 2:m, ..., (m-1):m.

    Raises:
        ValueError: If a block of ``m`` entries has no pattern.

    Example:
        >>> [str(pattern) for pattern in all_patterns(4)]
        ['1:4', '2:4', '3:4']
    """
    if isinstance(m, bool) or not isinstance(m, int) or m < 2:
        raise ValueError(f"m={m!r} must be the length of a block, 2 or more, for example 16")
    return [NMPattern(n, m) for n in range(1, m)]


def check_budget(budget: float) -> None:
    """Refuse what is no share of a model, by a ``ValueError``."""
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not is_number or not 0 < budget <= 1:
        raise ValueError(
            f"budget={budget!r} must be the share of the model's weights that is kept: more than 0 and at most 1, for "
            "example 0.5"
        )


def check_counted(counted: str) -> None:
    """Refuse an unknown way of counting, by a ``ValueError``."""
    if counted not in get_args(Counted):
        raise ValueError(f"counted={counted!r} is unknown: use 'parameters' or 'flops'")


def choose_patterns(
    layers: Mapping[str, Candidates],
    budget: float,
    dense: Mapping[str, float],
    *,
    power: int = 1,
    counted: Counted = "parameters",
) -> dict[str, Choice]:
    r"""Choose a pattern, or none, for each layer: the least sum of losses within a budget of the whole model.

    .. math:: \min \sum_l v_l^p \quad\text{so that}\quad \sum_l c_l N_l / M_l + \sum_{dense} c \le budget \sum c

    :math:`v` are the candidates' values, such as output errors with p = 2: the squares of errors that do not depend on
    each other add up.

    Args:
        layers: By name.
        budget: The share of the costs of all weights that may be left.
        dense: By name, the costs of the weights that stay dense.
        power: The exponent p.
        counted: What the costs are, for errors.

    Raises:
        ValueError: If the budget is no share, or too small for the weights that stay dense. The message has the least
            one.

    Example:
        >>> layers = {"a": Candidates(64, {"1:4": 0.5, "2:4": 0.1}), "b": Candidates(64, {"1:4": 0.1, "2:4": 0.05})}
        >>> {name: choice.pattern for name, choice in choose_patterns(layers, 0.375, {}).items()}
        {'a': '2:4', 'b': '1:4'}
    """
    check_budget(budget)
    names = list(layers)
    labels: list[list[str]] = []
    losses: list[list[float]] = []
    costs: list[list[float]] = []
    for candidates in layers.values():
        # The sparsest one first, dense last: the neighbours in this order explain a choice.
        patterns = candidates.patterns
        options = [str(pattern) for pattern in patterns]
        options_losses = [candidates.values[option] ** power for option in options]
        # In whole entries: m divides the layer's size.
        options_costs: list[float] = [
            candidates.cost * pattern.n / pattern.m for pattern in patterns
        ]
        options.append(DENSE)
        options_losses.append(0.0)
        options_costs.append(float(candidates.cost))
        labels.append(options)
        losses.append(options_losses)
        costs.append(options_costs)

    dense_cost = sum(dense.values())
    total = dense_cost + sum(candidates.cost for candidates in layers.values())
    least = dense_cost + sum(min(layer_costs) for layer_costs in costs)
    # Sums of floats: what is equal on paper is within the budget.
    if total and least > budget * total * (1 + 1e-9):
        raise ValueError(_unreachable(budget, least / total, dense, total, WHOLE[counted]))
    # What is left for the layers; not less than nothing by a rounding error.
    left = max(budget * total - dense_cost, 0.0)
    found = allocate(losses, costs, left)
    choices = {}
    for layer_name, options, index in zip(names, labels, found.choices, strict=True):
        values_of_layer = {**layers[layer_name].values, DENSE: 0.0}
        choices[layer_name] = Choice(
            options[index],
            values_of_layer[options[index]],
            neighbours(options, values_of_layer, index),
        )
    return choices


def neighbours(options: Sequence[str], values: Mapping[str, float], index: int) -> str:
    """Return the values of the candidates before and after the chosen one, as a reason for it."""
    parts = []
    # A layer that stays dense loses nothing, which needs no mention.
    for place in (index - 1, index + 1):
        if 0 <= place < len(options) and options[place] != DENSE:
            parts.append(f"{options[place]} has {values[options[place]]:.4f}")
    return ", ".join(parts)


def _unreachable(
    budget: float, least: float, dense: Mapping[str, float], total: float, whole: str
) -> str:
    """Return the message for a budget that is too small: what can be reached, and what stands in the way."""
    # Rounded up, so that the number in the message can be given as it stands.
    reachable = math.ceil(least * 10_000) / 10_000
    message = (
        f"budget={budget:g} cannot be reached: with the sparsest candidate in every layer {reachable:.4f} of the "
        f"{whole} are left"
    )
    if dense:
        share = sum(dense.values()) / total
        largest = sorted(dense, key=lambda each: -dense[each])[:3]
        shown = ", ".join(repr(each) for each in largest)
        message += f", of which {share:.4f} belong to other weights, such as {shown}"
    # What the user can do, the simplest first.
    return (
        f"{message}. Give {reachable:.4f} or more, sparser candidates (a larger M), or mask more layers "
        "(`include`, `exclude`, `skip_first_last`)"
    )
