"""When methods and estimators begin and end something: planned once for the whole training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.state import changed_settings, same_estimator


def plan_schedules(
    layers: Sequence[NMLayer],
    saved: Mapping[str, Mapping[str, Any]],
    planned_steps: int | None,
    clock: int,
) -> None:
    """Set the layers' schedules: shares of the training become steps once, and a training that continues keeps its own.

    Args:
        layers: The layers.
        saved: By name, the states of layers whose training continues.
        planned_steps: Training steps of the whole training, if known.
        clock: Training steps so far.

    Raises:
        ValueError: If the schedule of a method or an estimator does not fit the planned steps.
    """
    new = set()
    for layer in layers:
        layer.progress.clock = clock
        state = saved.get(layer.name, {})
        if state.get("method") == type(layer.method).__name__:
            layer.progress.schedule = tuple(state["schedule"])
        else:
            new.add(layer.method)
            layer.progress.schedule = tuple(layer.method.schedule(planned_steps))
        if same_estimator(layer, state):
            layer.progress.estimator_schedule = tuple(state["estimator_schedule"])
        elif layer.estimator is not None:
            layer.progress.estimator_schedule = tuple(layer.estimator.schedule(planned_steps))
    for method in new:
        method.check(planned_steps)


def changed_schedules(
    layers: Sequence[NMLayer], saved: Mapping[str, Mapping[str, Any]], planned_steps: int | None
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Each saved schedule that would differ if training began now: its owner, the saved and the new one."""
    changes = set()
    for layer in layers:
        state = saved[layer.name]
        owners: list[tuple[Any, str]] = [(layer.method, "schedule")]
        if same_estimator(layer, state):
            owners.append((layer.estimator, "estimator_schedule"))
        for owner, key in owners:
            try:
                new = tuple(owner.schedule(planned_steps))
            except ValueError:  # no plan now, and none is needed any more
                continue
            then = tuple(state[key])
            if new != then:
                changes.add((type(owner).__name__, then, new))
    return sorted(changes)


def warn_of_changes(
    layers: Mapping[str, NMLayer],
    saved: Mapping[str, Mapping[str, Any]],
    planned_steps: int | None,
    masked_first_last: Sequence[str] = (),
) -> None:
    """Warn if a training goes on with other settings or another plan than it began with.

    ``masked_first_last``: "first" and "last", if that layer is masked although it would be dense if training began now.
    """
    for which in masked_first_last:
        warnings.warn(
            f"this training began with its {which} layer masked, which stays", stacklevel=3
        )
    for name, then, now in changed_schedules(list(layers.values()), saved, planned_steps):
        plan = f"{name} scheduled at steps {then}, which stays; settings and plan would now make that {now}"
        warnings.warn(f"this training began with {plan}", stacklevel=3)
    changes = {
        change for name, layer in layers.items() for change in changed_settings(layer, saved[name])
    }
    if changes:
        warnings.warn(
            f"this training goes on with other settings: {'; '.join(sorted(changes))}", stacklevel=3
        )


def finished_phases(layers: Sequence[NMLayer]) -> list[str]:
    """Methods and estimators whose dense phase at the end of training has begun, as sentences."""
    found = []
    for layer in layers:
        progress = layer.progress
        for owner, window in (
            (layer.method, progress.schedule),
            (layer.estimator, progress.estimator_schedule),
        ):
            if (
                owner is not None
                and owner.dense_end
                and len(window) > 1
                and progress.clock >= window[1]
            ):
                found.append(
                    f"{type(owner).__name__} is in the dense phase that began at training step {window[1]}"
                )
    return list(dict.fromkeys(found))
