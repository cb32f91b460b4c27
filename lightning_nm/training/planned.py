"""What the GEMMs of layers cost over a whole training, by its plan: nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_nm.nn.layer import NMLayer
from lightning_nm.training.stages import begin_stage

COUNTED = 1_008_000
"""Steps of a phase that are asked one by one whether their gradient is dense; more are taken to be like them."""
_UNPLANNED = 5040  # the number of steps where it does not matter
_LOOKS = 64  # at the masks of a method whose pattern changes between the moments of its schedule
# Steps by which layers are told apart that take dense gradients at different times.
_TOLD_APART = 64


def charge_plan(layers: Sequence[NMLayer], planned_steps: int | None) -> None:
    """Charge the costs of new layers as if the training that they are planned for had run.

    ``layer.mean_densities()`` is then the average over that training. The methods' and estimators' own hooks are asked:
    at each step of a schedule the masks are updated, and each step between counts as its GEMMs are then, with a dense
    gradient where ``needs_dense_gradient`` asks for one. Where the pattern of the masks changes, they are also updated
    at 64 moments of the training. Other changes of cost that no schedule tells are not known.

    Counters, masks and, where a method prunes for good, weights are changed, so the layers cannot be trained after it.

    Args:
        layers: Layers of an attached sparsifier, before their first step.
        planned_steps: The steps of the training. ``None`` is for methods and estimators without a schedule.
    """
    turns: dict[tuple[object, ...], int] = {}
    for layer in layers:
        progress = layer.progress
        steps = planned_steps or _UNPLANNED
        moments = {0, steps}
        begins = [begin for begin, _ in progress.stages]
        for moment in (*progress.schedule, *progress.estimator_schedule, *begins):
            if 0 < moment < steps:
                moments.add(moment)
        looks = set()
        if layer.spec.method.changes_pattern:
            looks = {steps * k // _LOOKS for k in range(1, _LOOKS)}
        for start, stop in pairwise(sorted(moments | looks)):
            progress.go_to(start)
            updates = start in progress.schedule or start in looks
            with layer.full():
                if start and progress.begins_stage:
                    begin_stage(layer)
                elif start and updates and not progress.is_dense:
                    layer.spec.method.update(layer)
            dense = _dense_gradients(layer, start, stop, turns)
            progress.go_to(start)
            layer.costs.charge(layer.gemms(), stop - start - dense)
            progress.need_dense_gradient()
            layer.costs.charge(layer.gemms(), dense)


def _dense_gradients(
    layer: NMLayer, start: int, stop: int, turns: dict[tuple[object, ...], int]
) -> int:
    """How many of the steps of a phase have a dense gradient; ``turns`` keeps the answers for other layers."""
    method = layer.spec.method
    if layer.progress.is_dense or "needs_dense_gradient" not in method.defined_hooks():
        return 0

    def asks(step: int) -> bool:
        layer.progress.go_to(step)
        return method.needs_dense_gradient(layer)

    first_answers = tuple(asks(step) for step in range(start, min(stop, start + _TOLD_APART)))
    key = (id(method), layer.progress.schedule, start, stop, first_answers)
    if key not in turns:
        asked = range(start, min(stop, start + COUNTED))
        dense = sum(asks(step) for step in asked)
        turns[key] = round(dense * (stop - start) / len(asked))
    return turns[key]
