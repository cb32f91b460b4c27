"""N of each layer, chosen once under a budget of the whole model, when the first masks begin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_nm.functional.allocation import retained_magnitudes
from lightning_nm.functional.budget import Candidates, Choice, all_patterns, choose_patterns
from lightning_nm.functional.pattern import AutoPattern, NMPattern
from lightning_nm.functional.stages import DENSE
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layer import set_pattern
from lightning_nm.nn.layer.state import saved_pattern
from lightning_nm.nn.selection.selection import Selection
from lightning_nm.training.macs import example_macs


class PatternChoice:
    r"""Chooses a pattern for each layer by the magnitudes that it keeps.

    .. math:: \min \sum_l \Big(1 - \frac{\sum |W_F|}{\sum |W|}\Big)_l
        \quad\text{so that the whole model keeps at most its budget}

    This happens once: when layers are masked first, or at the step at which the first of them ends its dense start.
    After that the patterns stay. They are saved with the layers' states, which a resumed training takes them from. N is
    from 1 to M - 1: a layer that shall be dense is named in ``exclude``.

    Weights that no optimizer trains when the choice is made are outside of the budget. Once they are trained, they get
    :attr:`AutoPattern.uniform`.

    Args:
        auto: The budget.
        selection: The layers of the model; nothing is changed.
        model: The model, whose ``example_input_array`` is run for a budget of FLOPs.

    Raises:
        ValueError: If FLOPs are to be counted, and there is no example or the model does not take it.
    """

    def __init__(self, auto: AutoPattern, selection: Selection, model: nn.Module) -> None:
        self.auto = auto
        self.choices: dict[str, Choice] = {}
        """By layer, what was chosen in this process and why; empty before that, and in a resumed training."""
        self._selection = selection
        # Of every weight, whether it is masked or not.
        self._all_costs: Mapping[str, int] = selection.sizes
        if auto.counted == "flops":
            self._all_costs = example_macs(model)

    @property
    def moment(self) -> int:
        """The training step at which the patterns are chosen; 0 for the beginning."""
        # Not kept: a loaded state may bring other schedules.
        starts = [_first_masks(layer) for layer in self._budgeted()]
        return min(starts, default=0)

    def is_pending(self, clock: int) -> bool:
        """Whether the patterns are still to be chosen, after so many training steps."""
        return clock < self.moment

    def begin(self, saved: Mapping[str, Mapping[str, Any]], clock: int) -> None:
        """Take the saved patterns, or choose if it is time; the layers' schedules are planned.

        Args:
            saved: By name, the states of layers whose training continues.
            clock: Training steps so far.

        Raises:
            ValueError: If the budget cannot be reached.
        """
        adopt_patterns(self._selection.layers, saved)
        # A training that goes on has its patterns, or chooses them at the same step as it would have.
        if saved or not self._budgeted():
            return
        # A budget that cannot be reached is an error now, whenever the choice is made.
        choices = self._chosen()
        if not self.is_pending(clock):
            self._set(choices)

    def choose_at(self, clock: int) -> None:
        """Choose if the masks begin at this training step; called before they do."""
        # The clock has advanced, so the beginning, 0, is over.
        if clock == self.moment:
            self._set(self._chosen())

    def kept_share(self) -> float:
        """Return the share of the budget's whole that is kept with the layers' patterns as they are."""
        costs = self._costs()
        total = sum(costs.values())
        if not total:
            return 1.0
        densities = {
            layer.name: layer.pattern.density
            for layer in self._selection.layers
            if _masks_forward(layer)
        }
        # Weights without a mask are kept whole.
        kept = sum(cost * densities.get(name, 1.0) for name, cost in costs.items())
        return kept / total

    def _set(self, choices: dict[str, Choice]) -> None:
        self.choices = choices
        for layer in self._budgeted():
            set_pattern(layer, NMPattern.parse(choices[layer.name].pattern))

    def _chosen(self) -> dict[str, Choice]:
        """Return what would be chosen now."""
        costs = self._costs()
        candidates = {}
        for layer in self._budgeted():
            # A layer that the example does not call has no multiply-adds.
            cost = costs.get(layer.name, 0)
            candidates[layer.name] = Candidates(cost, _lost_magnitudes(layer, self.auto.m))
        others = {name: float(cost) for name, cost in costs.items() if name not in candidates}
        for layer in self._selection.layers:
            # Rules may give layers a pattern of their own, which saves a part of their cost.
            has_own_pattern = layer.name in others and not layer.spec.budgeted
            if has_own_pattern and _masks_forward(layer):
                others[layer.name] *= layer.pattern.density
        return choose_patterns(
            candidates,
            self.auto.budget,
            others,
            counted=self.auto.counted,
            name=f"pattern='{self.auto}'",
            allow_dense=False,
            total=float(sum(costs.values())),
        )

    def _costs(self) -> dict[str, int]:
        """The cost of every weight that counts, by name: those that nothing trains now are left out."""
        frozen = {layer.name for layer in self._selection.frozen}
        costs = {}
        for name, cost in self._all_costs.items():
            if cost and name not in frozen:
                costs[name] = cost
        return costs

    def _budgeted(self) -> list[NMLayer]:
        """The layers that a pattern is chosen for: those whose forward weight is masked."""
        layers = self._selection.layers
        return [layer for layer in layers if layer.spec.budgeted and _masks_forward(layer)]


def check_auto(saved: str, here: str) -> None:
    """Refuse a state whose patterns were chosen under another budget, by a ``ValueError``."""
    if saved == here:
        return
    saved_setting = f"pattern='{saved}'" if saved else "patterns that were given"
    own_setting = f"pattern='{here}'" if here else "patterns that are given"
    raise ValueError(
        f"the state was saved with {saved_setting}, and this training has {own_setting}: use the former"
    )


def adopt_patterns(
    layers: Iterable[NMLayer], saved: Mapping[str, Mapping[str, Any]]
) -> dict[NMLayer, NMPattern]:
    """Give layers whose N is chosen that of their saved states; return the patterns that were replaced."""
    replaced = {}
    for layer in layers:
        state = saved.get(layer.name)
        if state is None or not layer.spec.budgeted:
            continue
        pattern = saved_pattern(state)
        # Blocks of another length are another model, which the check of the state explains.
        if pattern != layer.pattern and pattern.m == layer.pattern.m:
            replaced[layer] = layer.pattern
            set_pattern(layer, pattern)
    return replaced


@contextmanager
def adopted_patterns(
    layers: Iterable[NMLayer], saved: Mapping[str, Mapping[str, Any]]
) -> Iterator[None]:
    """Do :func:`adopt_patterns`, and undo it if the block raises an exception."""
    replaced = adopt_patterns(layers, saved)
    try:
        yield
    except BaseException:
        for layer, pattern in replaced.items():
            set_pattern(layer, pattern)
        raise


def _masks_forward(layer: NMLayer) -> bool:
    """Whether the forward weight of a layer is N:M at some time."""
    return layer.spec.method.sparse_forward and not layer.spec.forward_reason


def _first_masks(layer: NMLayer) -> int:
    """The training step at which a layer gets its first masks."""
    for begin, name in layer.progress.stages:
        if name != DENSE:
            return begin
    schedule = layer.progress.schedule
    # Without a dense start, a schedule is one of other phases.
    return schedule[0] if layer.spec.method.dense_start and schedule else 0


@torch.no_grad()
def _lost_magnitudes(layer: NMLayer, m: int) -> dict[str, float]:
    """By pattern, the share of the magnitude that the smallest entries of the blocks hold."""
    with layer.full():
        rows = layer.view.rows(layer.weight.detach())
        shares = retained_magnitudes(rows, m, dim=1).tolist()
    if not math.isfinite(sum(shares)):
        raise ValueError(
            f"the weight of layer '{layer.name}' holds values that are not finite, so no pattern can be chosen: lower "
            "the learning rate, or clip gradients"
        )
    return {str(pattern): 1 - shares[pattern.n - 1] for pattern in all_patterns(m)}
