"""The state of a sparsifier in a checkpoint: read it, check it, apply it, in this order.

:meth:`SparsifierState.from_dict` reads, :func:`check_state` checks, and :meth:`CheckedState.apply` applies. Nothing is
changed before all checks have passed. What one layer saves is in :mod:`lightning_nm.nn.state`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import Selection
from lightning_nm.nn.state import (
    changed_settings,
    fits,
    restore_weights,
    same_estimator,
    same_noise,
    saved_stages,
    state_difference,
)
from lightning_nm.schedule import describe
from lightning_nm.spelling import grouped, quoted
from lightning_nm.training.macs import OTHERS
from lightning_nm.training.phases import plan_stages
from lightning_nm.training.scale import is_rescaled

SCHEMA = 1
"""The number of the form of saved states. A state of another form is refused."""

_SHOWN_DIFFERENCES = 8


# ---------------------------------------------------------------------------------------------------------------- read


def check_schema(state: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` for a state of another schema, of a version before 0.3, or with SLoPe's adapters."""
    if state.get("schema") != SCHEMA:
        raise ValueError(
            f"sparsifier state of schema {state.get('schema')!r}, but this version reads schema {SCHEMA}: "
            "use the version of lightning_nm that wrote it"
        )
    if "scale" not in state:
        raise ValueError(
            "sparsifier state of a version before 0.3: resume with lightning_nm 0.3, and save it there once"
        )
    for name, layer in state["layers"].items():
        if "adapter_left" in layer["parameters"]:
            raise ValueError(
                f"sparsifier state of 0.3 with SLoPe's low-rank adapter beside the weight of layer '{name}', which is "
                "gone: resume or export it with lightning_nm 0.3, or load its N:M weights alone"
            )


@dataclass(frozen=True)
class SparsifierState:
    """What a sparsifier saves beside the model's weights: plain tensors and primitives.

    Args:
        layers: The state of each masked layer, by its name, as
            :func:`~lightning_nm.nn.state.layer_state` makes it.
        seed: The base of all random numbers.
        preset: The preset; empty without one.
        clock: The training steps so far.
        stepped: Whether an optimizer has stepped since the last end of a batch.
        macs: The multiply-adds of the layers' dense forward products, by name.
        frozen_layers: The layers that are not masked, because no optimizer trains them.
        first_last: The names of the first and the last layer when training began.
        skip_first: Whether the first layer stayed dense.
        skip_last: Whether the last one did.
        scale: The scale of masked weights; empty without one.
        base_density: The density that the initial weights and learning rates suit.
    """

    layers: Mapping[str, dict[str, Any]]
    seed: int
    clock: int
    stepped: bool
    preset: str = ""
    macs: Mapping[str, int] = field(default_factory=dict)
    frozen_layers: Sequence[str] = ()
    first_last: Mapping[str, str] | None = None
    skip_first: bool = True
    skip_last: bool = True
    scale: str = ""
    base_density: float = 1.0

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SparsifierState:
        """Read what :meth:`to_dict` wrote, by this version or by 0.3.

        Raises:
            ValueError: If the state is of another schema, or of a version before 0.3.
        """
        check_schema(state)
        return cls(
            layers=state["layers"],
            macs=state["macs"],
            seed=state["seed"],
            clock=state["clock"],
            stepped=state["stepped"],
            preset=state["preset"],
            frozen_layers=tuple(state["waiting"]),
            first_last=state["ends"],
            skip_first=state["skip_first"],
            skip_last=state["skip_last"],
            scale=state["scale"],
            base_density=state["base_density"],
        )

    def to_dict(self) -> dict[str, Any]:
        """The state as checkpoints hold it. The keys are those of schema 1."""
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "preset": self.preset,
            "clock": self.clock,
            "stepped": self.stepped,
            "layers": dict(self.layers),
            "macs": dict(self.macs),
            "waiting": list(self.frozen_layers),
            "ends": dict(self.first_last or {}),
            "skip_first": self.skip_first,
            "skip_last": self.skip_last,
            "scale": self.scale,
            "base_density": self.base_density,
            "auto": "",  # 0.3 reads it: no training chooses patterns
        }


def rename_layers(state: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename modules in a saved state, for a model whose modules have other names by now.

    Random numbers follow from the names of layers: a renamed layer with a gradient estimator, and one of
    ``mask-logits``, goes on with other draws than an uninterrupted run.

    Args:
        state: What ``NMSparsifier.state_dict()`` or ``NMSparsityCallback.state_dict()`` returned, in a checkpoint of
            Lightning ``checkpoint["callbacks"]["NMSparsityCallback"]``; it is changed in place.
        names: Names of modules in the state, and what they are called now. The parts of a module are renamed with it;
            of several names that fit, the longest counts. ``{"model": ""}`` drops a prefix, ``{"": "model"}`` adds one.

    Raises:
        ValueError: If the state is of another schema, a name is in no layer of the state, or two layers would have the
            same name, or none. Nothing is changed then.

    Example::

        def on_load_checkpoint(self, checkpoint):
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {k.replace("body.", "encoder.", 1): v for k, v in weights.items()}
            rename_layers(checkpoint["callbacks"]["NMSparsityCallback"], {"body": "encoder"})
    """
    check_schema(state)
    waiting = state["waiting"]
    all_names = [*state["layers"], *state["macs"], *state["ends"], *waiting]
    for name in names:
        if all(_renamed(layer, {name: "."}) == layer for layer in all_names):
            known = ", ".join(map(repr, [*state["layers"], *waiting]))
            raise ValueError(f"no layer of the state is '{name}' or a part of it; it has {known}")
    masked_or_waiting = [_renamed(name, names) for name in [*state["layers"], *waiting]]
    bad = [name for name in masked_or_waiting if not all(name.split("."))]
    if bad or len(set(masked_or_waiting)) < len(masked_or_waiting):
        fault = f"'{bad[0]}' is no name" if bad else "two layers would have the same name"
        raise ValueError(f"the names {dict(names)} cannot be given to these layers: {fault}")
    for key in ("layers", "macs", "ends", "averages"):
        if key in state:
            state[key] = {_renamed(name, names): value for name, value in state[key].items()}
    for average in state.get("averages", {}).values():
        average["layer"] = _renamed(average["layer"], names)
    state["waiting"] = [_renamed(name, names) for name in waiting]
    history = state.get("history")
    if history:
        history["layers"] = [_renamed(name, names) for name in history["layers"]]


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """A layer's name, or the key of a weight, after the longest of the names that it begins with was replaced."""
    if name == OTHERS:
        return name
    for old in sorted(names, key=len, reverse=True):
        if name == old:
            return names[old]
        prefix = f"{old}." if old else ""
        if name.startswith(prefix):
            new = f"{names[old]}." if names[old] else ""
            return new + name.removeprefix(prefix)
    return name


# --------------------------------------------------------------------------------------------------------------- check


@dataclass(frozen=True)
class CheckedState:
    """A saved state that fits the layers of a model, ready to be applied.

    Args:
        state: The state.
        selection: All layers of the model.
        layers: The layers that the state is of, by name.
        frozen: Those of them that are not masked here, because no optimizer trains them now.
        loaded_latent: W_F of layers whose modules got latent weights with the model's, by name.
    """

    state: SparsifierState
    selection: Selection
    layers: Mapping[str, NMLayer]
    frozen: list[NMLayer]
    loaded_latent: Mapping[str, Tensor]

    @torch.no_grad()
    def apply(self) -> None:
        """Set all layers to the state: weights, masks, counters, random numbers and costs."""
        for layer in (*self.selection.layers, *self.selection.frozen):
            layer.noise.reseed(self.state.seed)
            if layer.name not in self.state.layers:
                # The layer was frozen when the state was saved: its training begins now.
                layer.progress.load(0, 0, False, layer.progress.schedule)
                layer.costs.charge_dense(self.state.clock)
        for name, layer in self.layers.items():
            if name in self.loaded_latent:
                layer.view.local.copy_(layer.view.shard_of(self.loaded_latent[name]))
            _apply_to_layer(layer, self.state.layers[name])
            layer.replaced_state = None


def check_state(
    state: SparsifierState, selection: Selection, short_names: Mapping[str, str]
) -> CheckedState:
    """Check that a state fits a model's layers and weights; nothing is changed.

    Args:
        state: The state.
        selection: All layers of the model.
        short_names: What users call the classes of methods and estimators, for errors.

    Raises:
        ValueError: If the state is of other layers, patterns, methods, estimators or shapes, or of other weights.
    """
    saved = state.layers
    # A layer that was frozen when the state was saved, and is masked here, has no state of its own.
    expected = [
        layer
        for layer in selection.layers
        if layer.name in saved or layer.name not in state.frozen_layers
    ]
    frozen = [layer for layer in selection.frozen if layer.name in saved]
    layers = {layer.name: layer for layer in (*expected, *frozen)}
    _refuse_other_layers(layers, saved, short_names)
    loaded_latent = _loaded_latent(layers, saved)
    return CheckedState(state, selection, layers, frozen, loaded_latent)


def check_scale(
    state: SparsifierState,
    selection: Selection,
    *,
    scale: str | None,
    base_density: float,
    clock: int,
    initial_factors: Mapping[str, float],
) -> None:
    """Refuse a state of another scale, and weights that were rescaled although the state belongs to others.

    Args:
        state: The state.
        selection: All layers of the model.
        scale: The scale of this training.
        base_density: Its base density.
        clock: Its training steps so far.
        initial_factors: By layer name, what its initial weight was multiplied by.

    Raises:
        ValueError: With both scales, or with the name of a rescaled layer.
    """
    if (state.scale, state.base_density) != (scale or "", base_density):
        saved_scale = f"scale={state.scale or None!r}, base_density={state.base_density}"
        own_scale = f"scale={scale!r}, base_density={base_density}"
        raise ValueError(
            f"the state was saved with {saved_scale}, and this training has {own_scale}: use the former"
        )
    if clock or not state.clock:
        return
    for layer in selection.layers:
        was_rescaled = initial_factors.get(layer.name, 1.0) != 1.0
        if was_rescaled and is_rescaled(layer):
            raise ValueError(
                f"attach() has rescaled the weight of layer '{layer.name}', which the state does not know: give the "
                "state to attach(state), or load the model's weights after attach()"
            )


def _refuse_other_layers(
    layers: Mapping[str, NMLayer],
    saved: Mapping[str, Mapping[str, Any]],
    short_names: Mapping[str, str],
) -> None:
    rows = []
    for name in saved:
        if name not in layers:
            rows.append((name, " is masked only in the checkpoint"))
    for name, layer in layers.items():
        if name not in saved:
            rows.append((name, " is masked only here"))
            continue
        difference = state_difference(layer, saved[name], short_names)
        if difference:
            rows.append((name, f": {difference}"))
    if not rows:
        return
    # Layers that differ in the same way are one line of the message.
    differences = [f"layer {quoted(name)}{difference}" for name, difference in grouped(rows)]
    shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
    more = len(differences) - _SHOWN_DIFFERENCES
    if more > 0:
        shown += f"; and {more} more"
    advice = "Configure the sparsifier as it was, or load only the weights to start anew"
    if not layers.keys() <= saved.keys() and not saved.keys() <= layers.keys():
        advice += "; if modules were renamed, rename them in the state, too, by lightning_nm.rename_layers()"
    raise ValueError(f"the checkpoint is of another sparse model: {shown}. {advice}")


def _loaded_latent(
    layers: Mapping[str, NMLayer], saved: Mapping[str, dict[str, Any]]
) -> dict[str, Tensor]:
    """W_F of the layers whose latent values were loaded with the model's weights, by name.

    Checkpoints hold W_F in the place of W. Where the masks were installed when such weights were loaded, the module may
    have got its latent values back at once, and then it is the layer's W_F that must fit the state.
    """
    found = {}
    for name, layer in layers.items():
        if fits(layer, saved[name]):
            continue
        forward_weight = layer.forward_weight()
        if layer.replaced_state is None or not fits(layer, saved[name], forward_weight):
            raise ValueError(
                f"the masks in the checkpoint do not belong to the weights of layer '{name}': load its weights into "
                "the model first; if they are averages, resume with their callback, too"
            )
        found[name] = forward_weight
    return found


def warn_of_changes(
    layers: Mapping[str, NMLayer],
    saved: Mapping[str, Mapping[str, Any]],
    planned_steps: int | None,
    masked_first_last: Sequence[str] = (),
) -> None:
    """Warn if a training goes on with other settings or another plan than it began with.

    Args:
        layers: The layers that the state is of, by name.
        saved: Their saved states.
        planned_steps: Training steps of the whole training, if known.
        masked_first_last: "first" and "last", if that layer is masked although it would be dense if training began now.
    """
    for which in masked_first_last:
        warnings.warn(
            f"this training began with its {which} layer masked, which stays", stacklevel=3
        )
    for then, now in _changed_schedules(list(layers.values()), saved, planned_steps):
        warnings.warn(
            f"this training began with {then}, which stays; settings and plan would now make that {now}",
            stacklevel=3,
        )
    changes = set()
    for name, layer in layers.items():
        changes.update(changed_settings(layer, saved[name]))
    if changes:
        warnings.warn(
            f"this training goes on with other settings: {'; '.join(sorted(changes))}", stacklevel=3
        )


def _changed_schedules(
    layers: Sequence[NMLayer], saved: Mapping[str, Mapping[str, Any]], planned_steps: int | None
) -> list[tuple[str, str]]:
    """Each saved schedule that would differ if training began now, and the new one, as texts."""
    changes = set()
    for layer in layers:
        state = saved[layer.name]
        method = layer.spec.method
        plans: list[tuple[Any, str, Callable[[int | None], Sequence[int]]]] = [
            (method, "schedule", partial(method.layer_schedule, layer))
        ]
        estimator = layer.spec.estimator
        if estimator is not None and same_estimator(layer, state):
            plans.append((estimator, "estimator_schedule", estimator.schedule))
        for owner, key, schedule in plans:
            try:
                now = tuple(schedule(planned_steps))
            except ValueError:
                # There is no plan now, and the training that goes on needs none.
                continue
            then = tuple(state[key])
            if now != then:
                changes.add((f"{type(owner).__name__} scheduled at steps {then}", str(now)))
        try:
            stages_now = plan_stages(layer, planned_steps)
        except ValueError:
            continue
        stages_then = saved_stages(state)
        if stages_now != stages_then:
            pattern = layer.spec.pattern
            changes.add(
                (f"the schedule {describe(stages_then, pattern)}", describe(stages_now, pattern))
            )
    return sorted(changes)


# --------------------------------------------------------------------------------------------------------------- apply


def _apply_to_layer(layer: NMLayer, state: dict[str, Any]) -> None:
    """Set a layer whose module holds W_F to a saved state that fits it."""
    restore_weights(layer, state)
    layer.progress.load(
        step=state["step"],
        updated_at=state["updated_at"],
        dense_gradient=state["dense_gradient"],
        schedule=tuple(state["schedule"]),
    )
    layer.progress.load_stages(saved_stages(state), state["stage"])
    if same_estimator(layer, state):
        layer.progress.load_estimator(tuple(state["estimator_schedule"]))
    if same_noise(layer, state):
        layer.draw_noise(state["draws"])
    layer.costs.load(state["spent"], state["counted"])
