"""The phases of methods and estimators: planned once for the whole training, then begun in all layers.

Read from top to bottom: the plan of a training, and the first masks; what happens when a stage of the user's schedule
begins; the costs of a training that is only planned.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional.select import mask_
from lightning_nm.nn.layer import NMLayer, end_masks, init_masks
from lightning_nm.nn.selection import refuse_masked, refuse_nan
from lightning_nm.nn.state import (
    State,
    differences_of_layer,
    saved_layer,
    saved_stages,
)
from lightning_nm.nn.weight import is_sharded, local_shard, local_values
from lightning_nm.schedule import DENSE, Stages
from lightning_nm.spelling import grouped, quoted, some_of
from lightning_nm.training.optimizers import trained_layer

# -------------------------------------------------------------------------------------------- plan


def plan_stages(layer: NMLayer, planned_steps: int | None) -> Stages:
    """The stages of a layer whose method's schedule is planned.

    Raises:
        ValueError: If they do not fit the planned steps.
    """
    schedule = layer.spec.schedule
    if schedule is None:
        return ()
    return schedule.stages(planned_steps, layer.spec.method.phases(layer).sparse)


def plan_schedules(
    layers: Sequence[NMLayer],
    saved: Mapping[str, State],
    planned_steps: int | None,
    clock: int,
) -> None:
    """Set the layers' schedules: fractions of the training become steps once; a training that continues keeps its own.

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
        progress = layer.progress
        method = layer.spec.method
        estimator = layer.spec.estimator
        # enter_stage() below goes by it.
        progress.clock = clock
        state = saved.get(layer.name, {})
        # Of another method the saved moments mean something else; that such a state is refused comes later.
        if state.get("method") == type(method).__name__:
            progress.schedule = tuple(state["schedule"])
            progress.stages = saved_stages(state)
        else:
            new.add(method)
            progress.schedule = tuple(method.layer_schedule(layer, planned_steps))
            # After the schedule of the method, from which its phases are read.
            progress.stages = plan_stages(layer, planned_steps)
            _check_moving_masks(layer)
        progress.enter_stage()
        if estimator is not None:
            is_same = state.get("estimator") == type(estimator).__name__
            schedule = state["estimator_schedule"] if is_same else estimator.schedule(planned_steps)
            progress.estimator_schedule = tuple(schedule)
    # Once for all layers of a method. Where all of them go on by a saved plan, this plan does not concern it.
    for method in new:
        method.check(planned_steps)


def _check_moving_masks(layer: NMLayer) -> None:
    """Compare a user's schedule with the moment until which the masks of a method move.

    Raise a ``ValueError`` if the first masks come no earlier; warn if those of the layer's own pattern do not.
    """
    stop = layer.spec.method.phases(layer).moves_until
    if stop is None:
        return
    method = type(layer.spec.method).__name__
    begins = [begin for begin, name in layer.progress.stages if name != DENSE] or [0]
    # At 0 masks come without a schedule, too.
    if begins[0] and begins[0] >= stop:
        raise ValueError(
            f"the masks of {method} would never move: they come at step {begins[0]} by the schedule's dense_start, and "
            f"move until `stop`, step {stop}, alone (layer '{layer.name}'): use an earlier dense_start, or a later "
            "`stop`"
        )
    if begins[-1] and begins[-1] >= stop:
        warnings.warn(
            f"the {layer.spec.pattern} masks of {method} stand still: the schedule's ramp ends at step {begins[-1]}, "
            f"and masks move until `stop`, step {stop}, alone; use an earlier end of the ramp, or a later `stop`",
            stacklevel=2,
        )


def choose_masks(
    layers: Sequence[NMLayer],
    saved: Mapping[str, State],
    planned_steps: int | None,
    clock: int,
    data_rank: int | None,
) -> None:
    """Plan the schedules, and take the saved masks of layers that continue; choose those of the others."""
    plan_schedules(layers, saved, planned_steps, clock)
    for layer in layers:
        state = saved.get(layer.name)
        # A saved state replaces all that the package's own methods do there, such as a long search. What a method from
        # outside prepares is not known.
        is_own = str(type(layer.spec.method).init_masks.__module__).startswith("lightning_nm.")
        if is_own and state and not differences_of_layer(layer, state)[0]:
            layer.adopt(saved_layer(layer, state))
        else:
            with layer.full():
                init_masks(layer)
        layer.noise.follow_data(data_rank)
        # The first words: a backward pass may come before any end of a batch.
        layer.draw_noise()


# ----------------------------------------------------------------------------------- begin and end


def begin_stage(layer: NMLayer, optimizers: Iterable[Optimizer] = ()) -> None:
    """Begin the stage of this training step: choose masks of its pattern, or end the masks for a dense phase.

    Args:
        layer: The layer, within ``layer.full()``.
        optimizers: All that may own its weight. Where pruned entries have no values they have no state either: it is
            zeroed.
    """
    method = layer.spec.method
    # Read first: in a dense stage no mask is left to tell which entries were pruned.
    kept = layer.masks.forward
    layer.progress.enter_stage()
    if not layer.progress.is_dense:
        method.init_masks(layer)
        kept = layer.masks.forward
    else:
        end_masks(layer)
    # A weight that never made a step keeps its entries until its first one: a fit that fails before has cost nothing.
    if layer.step and not method.latent:
        layer.zero_pruned()
        zero_pruned_state(layer, kept, optimizers)


def zero_pruned_state(layer: NMLayer, kept: Tensor | None, optimizers: Iterable[Optimizer]) -> None:
    """Zero the state that optimizers have for pruned entries, where these have no values and get no gradient.

    Weight decay that is coupled to the gradient, as SGD's and Adam's, and steps before the masks have left momentum.

    Args:
        layer: The layer.
        kept: The forward mask.
        optimizers: All that may own its weight.
    """
    if kept is None or layer.spec.method.latent:
        return
    parameter = layer.view.optimizer_param
    for optimizer in optimizers:
        for state in optimizer.state.get(parameter, {}).values():
            # A counter or a factored moment belongs to no entry.
            has_entries = isinstance(state, Tensor) and state.shape == parameter.shape
            # Integers are codes of quantised state, of which 0 need not stand for 0.
            if has_entries and state.is_floating_point():
                mask_(local_values(state), local_shard(kept, state))


def finished_phases(layers: Sequence[NMLayer]) -> list[str]:
    """Methods and estimators whose dense phase at the end of training has begun, as sentences."""
    found = []
    for layer in layers:
        progress = layer.progress
        method = layer.spec.method
        windows = (
            (method, method.phases(layer).sparse),
            (layer.spec.estimator, progress.estimator_schedule),
        )
        for owner, window in windows:
            # A window of two steps ends where the dense phase begins.
            if getattr(owner, "dense_end", 0) and len(window) == 2 and progress.clock >= window[1]:
                found.append(
                    f"{type(owner).__name__} is in the dense phase that began at training step {window[1]}"
                )
        if progress.is_dense and not progress.has_more_stages:
            found.append(
                f"the schedule's dense end began at training step {progress.stages[-1][0]}"
            )
    return list(dict.fromkeys(found))  # several layers share them


# ----------------------------------------------------------------------------------- planned costs


# COUNTED and _UNPLANNED are multiples of 1 to 10, 12, 15, 16 and 20: whole periods of so many steps fit in.
COUNTED = 1_008_000
"""Steps of a phase that are asked one by one whether their gradient is dense; more are taken to be like them."""
_UNPLANNED = 5040  # the number of steps where it does not matter
_LOOKS = 64  # at the masks of a method whose pattern changes between the moments of its schedule
# Steps by which layers are told apart that take dense gradients at different times.
_TOLD_APART = 64


@torch.no_grad()
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
        updates = {*progress.schedule}
        if "current_pattern" in layer.spec.method.defined_hooks():
            updates |= {steps * k // _LOOKS for k in range(1, _LOOKS)}
        begins = {begin for begin, _ in progress.stages}
        moments = {*progress.estimator_schedule} | begins | updates
        within = {moment for moment in moments if 0 < moment < steps}
        # Between two neighbouring moments only the need of dense gradients is taken to change.
        for start, stop in pairwise(sorted({0, steps} | within)):
            progress.go_to(start)
            with layer.full():
                # The masks of step 0 are those of attach().
                if start and progress.begins_stage:
                    begin_stage(layer)
                elif start and start in updates and not progress.is_dense:
                    layer.spec.method.update(layer)
            dense = _dense_gradients(layer, start, stop, turns)
            progress.go_to(start)  # _dense_gradients() has moved the counters
            layer.costs.charge(layer.gemms(), stop - start - dense)
            progress.dense_gradient = True
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

    # Layers of one method that answer alike at first are taken to do so all along: a long phase is asked once for all.
    first_answers = tuple(asks(step) for step in range(start, min(stop, start + _TOLD_APART)))
    key = (id(method), layer.progress.schedule, start, stop, first_answers)
    if key not in turns:
        asked = range(start, min(stop, start + COUNTED))
        dense = sum(asks(step) for step in asked)
        # Of a phase longer than COUNTED the rest has the same fraction.
        turns[key] = round(dense * (stop - start) / len(asked))
    return turns[key]


# ------------------------------------------------------------------------------ refusals and texts


def refuse_to_mask(layers: Iterable[NMLayer], optimizers: Sequence[Optimizer]) -> None:
    """Refuse layers that cannot be masked now by a ``ValueError``; nothing is changed."""
    for layer in layers:
        refuse_nan(layer)
        # Another sparsifier may have masked it meanwhile, through any module that holds it.
        for holder in layer.spec.holders:
            refuse_masked(layer.name, *holder)
        for optimizer in optimizers:
            if trained_layer(layer, [optimizer]):
                layer.spec.method.check_optimizer(layer, optimizer)


def refuse_late_sharding(layers: Iterable[NMLayer]) -> None:
    """Refuse weights that were sharded after their masks were installed, by a ``RuntimeError``."""
    for layer in layers:
        if is_sharded(layer.param) and not layer.view.is_sharded:
            raise RuntimeError(
                f"the weight of layer '{layer.name}' was sharded after its masks were installed: call fully_shard or "
                "parallelize_module first, then attach()"
            )


def told_as_dense(layers: Iterable[NMLayer]) -> str:
    """What is said of layers whose weight is trained dense, alike ones as one; empty if there are none."""
    rows = [
        (layer.name, layer.spec.forward_reason)
        for layer in layers
        if layer.spec.forward_reason and layer.spec.method.sparse_forward
    ]
    told = [f"{quoted(name)}: {reason}" for name, reason in grouped(rows)]
    text = (
        "the trained weights of these layers will be dense, only GEMMs of their backward pass are N:M: "
        f"{some_of(told)}. Give them another pattern by `rules`, pad their inputs to a multiple of M, or name them in "
        "`exclude`"
    )
    return text if told else ""
