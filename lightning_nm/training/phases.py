"""When methods and estimators begin and end something: planned once for the whole training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.state import same_estimator, saved_stages
from lightning_nm.training.stages import plan_stages


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
        if state.get("method") == type(layer.spec.method).__name__:
            layer.progress.schedule = tuple(state["schedule"])
            layer.progress.stages = saved_stages(state)
        else:
            new.add(layer.spec.method)
            schedule = layer.spec.method.layer_schedule(layer, planned_steps)
            layer.progress.schedule = tuple(schedule)
            layer.progress.stages = plan_stages(layer, planned_steps)
            layer.spec.method.check_stages(layer)
        layer.progress.enter_stage()
        if same_estimator(layer, state):
            layer.progress.estimator_schedule = tuple(state["estimator_schedule"])
        elif layer.spec.estimator is not None:
            layer.progress.estimator_schedule = tuple(layer.spec.estimator.schedule(planned_steps))
    for method in new:
        method.check(planned_steps)


def finished_phases(layers: Sequence[NMLayer]) -> list[str]:
    """Methods and estimators whose dense phase at the end of training has begun, as sentences."""
    # A dict keeps the order and drops what several layers share.
    found: dict[str, None] = {}
    for layer in layers:
        progress = layer.progress
        method = layer.spec.method
        for owner, window in (
            (method, method.sparse_window(layer)),
            (layer.spec.estimator, progress.estimator_schedule),
        ):
            # A window of two steps ends where the dense phase begins.
            if owner is None or not owner.dense_end or len(window) < 2:
                continue
            end = window[1]
            if progress.clock >= end:
                found[
                    f"{type(owner).__name__} is in the dense phase that began at training step {end}"
                ] = None
        stages = progress.stages
        if progress.is_dense and not progress.has_more_stages:
            found[f"the schedule's dense end began at training step {stages[-1][0]}"] = None
    return list(found)
