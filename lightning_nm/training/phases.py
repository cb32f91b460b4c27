"""What the layers do in the window before the next optimizer step: planned once, settled before its first forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.state import same_estimator
from lightning_nm.schedule import within

_OBSERVED = 4
"""Layers whose gradient estimates are observed at a time."""


def plan_schedules(
    layers: Sequence[NMLayer], saved: Mapping[str, Mapping[str, Any]], planned_steps: int | None
) -> None:
    """Turn shares of the training into steps, once: what was planned when a training began stays.

    Args:
        layers: The layers, whose schedules are set.
        saved: By name, the states of layers whose training is to go on.
        planned_steps: Training steps of the whole training, if known.

    Raises:
        ValueError: If the schedule of a method or an estimator does not go with the plan.
    """
    new = set()
    for layer in layers:
        state = saved.get(layer.name, {})
        if state.get("method") == type(layer.method).__name__:
            layer.schedule = tuple(state["schedule"])
        else:
            new.add(layer.method)
            layer.schedule = tuple(layer.method.schedule(planned_steps))
        if same_estimator(layer, state):
            layer.estimator_schedule = tuple(state["estimator_schedule"])
        elif layer.estimator is not None:
            layer.estimator_schedule = tuple(layer.estimator.schedule(planned_steps))
    for method in new:
        method.check(planned_steps)


def changed_schedules(
    layers: Sequence[NMLayer], saved: Mapping[str, Mapping[str, Any]], planned_steps: int | None
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Each saved schedule that would be another if training began now: whose it is, then and now."""
    changes = set()
    for layer in layers:
        state = saved[layer.name]
        owners: list[tuple[Any, str]] = [(layer.method, "schedule")]
        if same_estimator(layer, state):
            owners.append((layer.estimator, "estimator_schedule"))
        for owner, key in owners:
            try:
                here = tuple(owner.schedule(planned_steps))
            except ValueError:  # no plan now, and none is needed any more
                continue
            then = tuple(state[key])
            if here != then:
                changes.add((type(owner).__name__, then, here))
    return sorted(changes)


def settle_window(layers: Sequence[NMLayer], clock: int, observe_every: int) -> None:
    """Settle whether estimators work and which are observed: every micro-batch of a window does the same.

    Args:
        layers: The layers.
        clock: Training steps so far.
        observe_every: Training steps between two observations; 0 for none.
    """
    able = []
    for layer in layers:
        layer.clock = clock
        layer.estimating = layer.estimator is not None and within(layer.estimator_schedule, clock)
        layer.observing = False
        if not layer.estimating:
            layer.observed = None
        elif layer.param.requires_grad:
            able.append(layer)
    if observe_every and clock % observe_every == 0:
        first = clock // observe_every * _OBSERVED
        for k in range(min(_OBSERVED, len(able))):
            able[(first + k) % len(able)].observing = True


def finished_windows(layers: Sequence[NMLayer]) -> list[str]:
    """What masks and estimates no more, because the dense phase at the end of its training has begun."""
    found = []
    for layer in layers:
        for owner, window in ((layer.method, layer.schedule), (layer.estimator, layer.estimator_schedule)):
            if owner is not None and owner.dense_end and len(window) > 1 and layer.clock >= window[1]:
                found.append(f"{type(owner).__name__} is in the dense phase that began at training step {window[1]}")
    return list(dict.fromkeys(found))
