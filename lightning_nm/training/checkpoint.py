"""The state of a sparsifier in a checkpoint: read it, check it, apply it, in this order.

Nothing is changed before all checks have passed: :func:`check_schema` and :func:`check_scale`, then
:func:`check_state`, for which ``differences`` in :mod:`lightning_nm.nn.state` words each refusal. What one layer saves
is in that module. The keys of a state are those of schema 1, plain tensors and primitives:

- ``layers``: the state of each masked layer, by its name.
- ``seed``: the base of all random numbers.
- ``clock``: the training steps so far; ``stepped``: whether an optimizer has stepped since the last end of a batch.
- ``macs``: the multiply-adds of the layers' dense forward GEMMs, by name.
- ``waiting``: the layers that are not masked, because no optimizer trains them.
- ``ends``: the names of the first and the last layer when training began; ``skip_first``, ``skip_last``: whether they
  stayed dense.
- ``preset``: the preset, empty without one.
- ``scale``: the scale of masked weights, empty without one; ``base_density``: what the initial weights suit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import Selection
from lightning_nm.nn.state import (
    State,
    check_fits,
    differences,
    differences_of_layer,
    restore_weights,
    saved_stages,
)
from lightning_nm.schedule import describe
from lightning_nm.spelling import grouped, quoted, some_of
from lightning_nm.training.macs import OTHERS
from lightning_nm.training.phases import plan_stages
from lightning_nm.training.scale import is_rescaled

SCHEMA = 1
"""The number of the form of saved states. A state of another form is refused."""


# ---------------------------------------------------------------------------------------------------------------- read


def check_schema(state: State) -> None:
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
                f"sparsifier state of 0.3 with SLoPe's low-rank adapter next to the weight of layer '{name}', which is "
                "gone: resume or export it with lightning_nm 0.3, or load its N:M weights alone"
            )


def rename_layers(state: State, names: Mapping[str, str]) -> None:
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
    masked_or_waiting = [*state["layers"], *state["waiting"]]
    all_names = [*masked_or_waiting, *state["macs"], *state["ends"]]
    for name in names:
        # "." is the name of no layer: any that begins with this name is changed by it.
        if all(_renamed(layer, {name: "."}) == layer for layer in all_names):
            known = ", ".join(map(repr, masked_or_waiting))
            raise ValueError(f"no layer of the state is '{name}' or a part of it; it has {known}")
    new = [_renamed(name, names) for name in masked_or_waiting]
    # An empty part, as of "a..b" or of a layer without a name.
    bad = [name for name in new if not all(name.split("."))]
    if bad or len(set(new)) < len(new):
        fault = f"'{bad[0]}' is no name" if bad else "two layers would have the same name"
        raise ValueError(f"the names {dict(names)} cannot be given to these layers: {fault}")
    # `averages`, by keys of weights, and `history` are parts of a callback's state, which holds that of its sparsifier.
    for key in ("layers", "macs", "ends", "averages"):
        if key in state:
            state[key] = {_renamed(name, names): value for name, value in state[key].items()}
    for average in state.get("averages", {}).values():
        average["layer"] = _renamed(average["layer"], names)
    for holder, key in ((state, "waiting"), (state.get("history", {}), "layers")):
        if key in holder:
            holder[key] = [_renamed(name, names) for name in holder[key]]


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """A layer's name, or the key of a weight, after the longest of the names that it begins with was replaced."""
    # It stands for no layer, and would get a prefix by {"": "model"}.
    if name == OTHERS:
        return name
    for old in sorted(names, key=len, reverse=True):
        # Whole parts of the name: "body" is no beginning of "body2.0".
        if not old or f"{name}.".startswith(f"{old}."):
            rest = name.removeprefix(old).removeprefix(".")
            return ".".join(filter(None, (names[old], rest)))
    return name


# --------------------------------------------------------------------------------------------------------------- check


def check_scale(
    state: State,
    selection: Selection,
    scale: str | None,
    base_density: float,
    initial_factors: Mapping[str, float],
) -> None:
    """Refuse a state of another scale, and weights that were rescaled although the state belongs to others.

    Args:
        state: The state.
        selection: All layers of the model.
        scale: The scale of this training.
        base_density: Its base density.
        initial_factors: By name of a layer that is not trained yet, what its initial weight was multiplied by.

    Raises:
        ValueError: With both scales, or with the name of a rescaled layer.
    """
    if differences({"scale": scale or "", "base_density": base_density}, state):
        raise ValueError(
            f"the state was saved with scale={state['scale'] or None!r}, base_density={state['base_density']}, and "
            f"this training has scale={scale!r}, base_density={base_density}: use the former"
        )
    for layer in selection.layers if state["clock"] else ():
        # An empty shard tells nothing.
        has_values = initial_factors.get(layer.name, 1.0) != 1.0 and layer.view.local.numel()
        if has_values and is_rescaled(layer):
            raise ValueError(
                f"attach() has rescaled the weight of layer '{layer.name}', which the state does not know: give the "
                "state to attach(state), or load the model's weights after attach()"
            )


def check_state(
    state: State,
    selection: Selection,
    skips: dict[str, bool],
    planned_steps: int | None,
    short_names: Mapping[str, str],
) -> dict[str, Tensor]:
    """Check that a state fits a model's layers and weights; nothing is changed.

    It warns if the training goes on with other settings or another plan than it began with.

    Args:
        state: The state.
        selection: All layers of the model.
        skips: ``skip_first`` and ``skip_last`` of this training.
        planned_steps: Training steps of the whole training, if known.
        short_names: What users call the classes of methods and estimators.

    Returns:
        W_F of the layers whose modules got latent weights with the model's, by name.

    Raises:
        ValueError: If the state is of other layers, patterns, methods, estimators or shapes, or of other weights.
    """
    saved = state["layers"]
    # A layer that was frozen when the state was saved, and is masked here, has no state of its own.
    waiting = {*state["waiting"]} - saved.keys()
    layers = {layer.name: layer for layer in selection.layers if layer.name not in waiting}
    layers |= {layer.name: layer for layer in selection.frozen if layer.name in saved}

    rows = [(name, " is masked only in the checkpoint") for name in saved if name not in layers]
    changes = set()
    for name, layer in layers.items():
        if name not in saved:
            rows.append((name, " is masked only here"))
            continue
        refused, changed = differences_of_layer(layer, saved[name], short_names)
        changes.update(changed)
        if refused:
            rows.append((name, f": {', '.join(refused)}"))
    if rows:
        # Layers that differ in the same way are one line of the message.
        found = [f"layer {quoted(name)}{difference}" for name, difference in grouped(rows)]
        advice = "Configure the sparsifier as it was, or load only the weights to start again"
        # Some are missing and others are new: a sign of other names.
        if layers.keys() - saved.keys() and saved.keys() - layers.keys():
            advice += "; if modules were renamed, rename them in the state, too, by lightning_nm.rename_layers()"
        raise ValueError(f"the checkpoint is of another sparse model: {some_of(found)}. {advice}")

    # Only now: weights can be compared where shape, pattern and method are the same.
    loaded = {name: check_fits(layer, saved[name]) for name, layer in layers.items()}

    warned = [
        f"this training began with its {key.removeprefix('skip_')} layer masked, which stays"
        for key, (_, is_skipped) in differences(skips, state).items()
        if is_skipped
    ]
    plans = {
        plan
        for name, layer in layers.items()
        for plan in _changed_plans(layer, saved[name], planned_steps)
    }
    warned += [
        f"this training began with {then}, which stays; settings and plan would now make that {now}"
        for then, now in sorted(plans)
    ]
    if changes:
        warned.append(f"this training goes on with other settings: {'; '.join(sorted(changes))}")
    for text in warned:
        warnings.warn(text, stacklevel=3)
    return {name: weight for name, weight in loaded.items() if weight is not None}


def _changed_plans(
    layer: NMLayer, state: State, planned_steps: int | None
) -> Iterator[tuple[str, str]]:
    """Each saved schedule of a layer that would differ if training began now, and the new one, as texts."""
    method, estimator, pattern = layer.spec.method, layer.spec.estimator, layer.spec.pattern
    # The new plans are functions, because each may raise an error by itself.
    plans: list[tuple[str, Any, Callable[[], Any]]] = [
        (
            f"{type(method).__name__} scheduled at steps",
            tuple(state["schedule"]),
            lambda: tuple(method.layer_schedule(layer, planned_steps)),
        ),
        (
            "the schedule",
            describe(saved_stages(state), pattern),
            lambda: describe(plan_stages(layer, planned_steps), pattern),
        ),
        (
            f"{type(estimator).__name__} scheduled at steps",
            tuple(state["estimator_schedule"]),
            lambda: tuple(estimator.schedule(planned_steps)) if estimator else (),
        ),
    ]
    for owner, then, plan in plans:
        try:
            now = plan()
        except ValueError:
            continue  # there is no plan now, and the training that goes on needs none
        if now != then:
            yield f"{owner} {then}", str(now)


# --------------------------------------------------------------------------------------------------------------- apply


@torch.no_grad()
def apply_state(state: State, selection: Selection, loaded_latent: Mapping[str, Tensor]) -> None:
    """Set all layers to a state that fits them: weights, masks, counters, random numbers and costs.

    Args:
        state: The state, whose layers are all masked.
        selection: All layers of the model.
        loaded_latent: What :func:`check_state` returned.
    """
    for layer in (*selection.layers, *selection.frozen):
        layer.noise.reseed(state["seed"])
        saved = state["layers"].get(layer.name)
        if saved is None:
            # The layer was frozen when the state was saved: its training begins now.
            layer.progress.go_to(0)
            layer.costs.charge_dense(state["clock"])
            continue
        if layer.name in loaded_latent:
            # These modules hold latent values, while restore_weights() adds those of the state to W_F.
            layer.view.local.copy_(layer.view.shard_of(loaded_latent[layer.name]))
        restore_weights(layer, saved)
        layer.progress.load(saved, saved_stages(saved))
        # The last draw once more, by its number: the next backward pass has the noise that it would have had.
        layer.draw_noise(saved["draws"])
        layer.costs.load(saved["spent"], saved["counted"])
        # It was kept for weights that this state has replaced.
        layer.replaced_state = None
