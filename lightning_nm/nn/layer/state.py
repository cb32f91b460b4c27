"""What a layer needs beside its weight in the state dict to go on exactly: plain tensors and primitives."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm.functional import pack_mask, unpack_mask
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.masks import LayerMasks
from lightning_nm.nn.layer.names import plain_name
from lightning_nm.nn.selection.ranges import grouped, quoted


@torch.no_grad()
def layer_state(layer: NMLayer) -> dict[str, Any]:
    """The state of one layer, on the CPU.

    ``latent`` is what :func:`dropped` keeps, or nothing if the method keeps no latent weights and has made a step.
    """
    masks, progress, costs = layer.masks, layer.progress, layer.costs
    forward = masks.forward
    with layer.full():
        weight, forward_weight = layer.weight.detach(), layer.forward_weight()
    return {
        "parameter": layer.parameter,
        "pattern": str(layer.pattern),
        "method": type(layer.method).__name__,
        "settings": _settings(layer.method),
        "layout": layer.spec.layout,
        "shape": list(weight.shape),
        "masked": forward is not None,
        "step": progress.step,
        "updated_at": progress.updated_at,
        "flips": 0 if masks.flips is None else int(masks.flips),
        "total_flips": 0 if masks.total_flips is None else int(masks.total_flips),
        "dense_gradient": progress.dense_gradient,
        "schedule": list(progress.schedule),
        "estimator": type(layer.estimator).__name__,
        "estimator_settings": _estimator_settings(layer),
        "estimator_schedule": list(progress.estimator_schedule),
        "draws": layer.noise.draws,
        "backward_density": masks.backward_density,
        "spent": {kind: list(sums) for kind, sums in costs.spent.items()},
        "counted": costs.counted,
        "forward_mask": None if forward is None else pack_mask(forward).cpu(),
        "backward_mask": None if masks.backward is None else pack_mask(masks.backward).cpu(),
        "permutation": None
        if masks.permutation is None
        else masks.permutation.to("cpu", torch.int32),
        "buffers": {name: tensor.detach().clone().cpu() for name, tensor in layer.buffers.items()},
        "parameters": {
            name: parameter.detach().clone().cpu() for name, parameter in layer.parameters.items()
        },
        "latent": dropped(weight, forward_weight, forward)
        if layer.method.latent or not layer.step
        else None,
        "checksum": _checksum(forward_weight),
    }


SCHEMA = 1


def _checksum(weight: Tensor) -> list[float]:
    """Sum and sum of magnitudes: enough to notice that weights are others."""
    return torch.stack(
        [weight.sum(dtype=torch.float64), weight.abs().sum(dtype=torch.float64)]
    ).tolist()


def dropped(weight: Tensor, forward_weight: Tensor, mask: Tensor | None) -> Tensor | None:
    """What W_F does not tell about W, on the CPU.

    Returns:
        ``None`` if they are equal, the pruned entries in row-major order if W_F is W under the forward mask, else W.
    """
    if _same(forward_weight, weight):
        return None
    if mask is not None and _same(forward_weight, torch.where(mask, weight, 0)):
        return weight[~mask].cpu()
    return weight.clone().cpu()


def latent_weight(forward_weight: Tensor, latent: Tensor | None, mask: Tensor | None) -> Tensor:
    """W from W_F and what :func:`dropped` kept; a new tensor."""
    weight = forward_weight.clone()
    if latent is not None:
        if latent.shape == weight.shape:
            weight.copy_(latent)
        else:
            weight[~mask] = latent.to(weight.device, weight.dtype)  # type: ignore[operator]
    return weight


def _same(a: Tensor, b: Tensor) -> bool:
    """Equality of values in which a NaN equals itself."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


@torch.no_grad()
def fits(layer: NMLayer, state: dict[str, Any], weight: Tensor | None = None) -> bool:
    """Whether W_F made of the saved state equals what the module holds, or `weight`; the layer is not changed."""
    if weight is None:
        with layer.full():
            weight = layer.weight.detach()
    mask, latent = _unpacked(layer, state["forward_mask"]), state["latent"]
    (saved_total, saved_magnitude), (total, magnitude) = state["checksum"], _checksum(weight)
    tolerance = 1e-4 * max(
        saved_magnitude, magnitude
    )  # another device or precision may sum a little differently
    if not (
        abs(saved_total - total) <= tolerance and abs(saved_magnitude - magnitude) <= tolerance
    ):
        return math.isnan(saved_magnitude) and math.isnan(magnitude)
    if latent is None or latent.shape != weight.shape:
        return mask is None or not bool(weight[~mask].any())
    saved = saved_layer(layer, state)
    return _same(layer.method.forward_weight(saved, latent.to(weight.device, weight.dtype)), weight)


def latent_loaded(
    layers: Mapping[str, NMLayer], saved: Mapping[str, dict[str, Any]]
) -> dict[str, Tensor]:
    """W_F of the layers whose latent values were loaded with the weights, by name.

    Raises:
        ValueError: If a layer's saved masks do not belong to its weight.
    """
    found = {}
    for name, layer in layers.items():
        if fits(layer, saved[name]):
            continue
        found[name] = layer.forward_weight()
        if layer.replaced_state is None or not fits(layer, saved[name], found[name]):
            fault = f"the masks in the checkpoint do not belong to the weights of layer '{name}'"
            advice = "load its weights into the model first; if they are averages, resume with their callback, too"
            raise ValueError(f"{fault}: {advice}")
    return found


@torch.no_grad()
def restore_weights(layer: NMLayer, state: dict[str, Any]) -> None:
    """Give a layer whose module holds W_F the latent values and masks of a saved state that :func:`fits`."""
    with layer.full():
        weight = layer.weight
        weight.copy_(
            latent_weight(weight, state["latent"], _unpacked(layer, state["forward_mask"]))
        )
    layer.adopt(saved_layer(layer, state))


def load_layer_state(layer: NMLayer, state: dict[str, Any]) -> None:
    """Set a layer whose module holds W_F to a saved state that :func:`fits`: its weights, clocks and counts."""
    restore_weights(layer, state)
    layer.progress.load(
        state["step"], state["updated_at"], state["dense_gradient"], tuple(state["schedule"])
    )
    if same_estimator(layer, state):
        layer.progress.load_estimator(tuple(state["estimator_schedule"]))
        layer.draw_noise(state["draws"])
    layer.costs.load(state["spent"], state.get("counted", state["step"]))


def saved_layer(layer: NMLayer, state: dict[str, Any]) -> NMLayer:
    """The layer with the masks, buffers and parameters of a saved state, in tensors of their own."""
    device = layer.param.device
    masks = LayerMasks()
    masks.set(
        _unpacked(layer, state["forward_mask"]),
        _unpacked(layer, state["backward_mask"]),
        None if layer.sharded else layer.param,
    )
    permutation = state["permutation"]
    masks.set_permutation(None if permutation is None else permutation.to(device, torch.int64))
    masks.load(state["flips"], state["total_flips"], state["backward_density"], device)
    buffers = {name: value.to(device) for name, value in state["buffers"].items()}
    parameters = {
        name: nn.Parameter(value.to(device)) for name, value in state["parameters"].items()
    }
    return layer.with_state(masks, buffers, parameters)


def _unpacked(layer: NMLayer, packed: Tensor | None) -> Tensor | None:
    return (
        None
        if packed is None
        else unpack_mask(packed.to(layer.param.device), tuple(layer.param.shape))
    )


def same_estimator(layer: NMLayer, state: Mapping[str, Any]) -> bool:
    """Whether a layer has an estimator, of the class that the saved state was made with."""
    return layer.estimator is not None and state.get("estimator") == type(layer.estimator).__name__


def state_difference(
    layer: NMLayer, state: Mapping[str, Any], short_names: Mapping[str, str] | None = None
) -> str:
    """What keeps a saved state from fitting a layer, with classes by their short names; empty when it fits."""
    own = {
        "shape": list(layer.param.shape),
        "pattern": str(layer.pattern),
        "method": type(layer.method).__name__,
        "layout": layer.spec.layout,
        "estimator": type(layer.estimator).__name__,
    }
    differences = _differences(own, state, {"NoneType": "none", **(short_names or {})})
    if state["method"] == own["method"]:
        fixed = {
            key: value
            for key, value in _settings(layer.method).items()
            if key in layer.method.fixed
        }
        differences += _differences(fixed, state.get("settings", {}))
    if state["estimator"] == own["estimator"] and layer.estimator is not None:
        pattern = {"pattern": _estimator_settings(layer)["pattern"]}
        differences += [
            f"estimator {change}"
            for change in _differences(pattern, state.get("estimator_settings", {}))
        ]
    return ", ".join(differences)


def refuse_others(
    layers: Mapping[str, NMLayer],
    saved: Mapping[str, Mapping[str, Any]],
    short_names: Mapping[str, str],
) -> None:
    """Refuse saved states that are not of these layers by a ``ValueError`` that names them and what differs.

    ``short_names`` are what users call the classes of methods and estimators.
    """
    rows = [(name, " is masked only in the checkpoint") for name in saved if name not in layers]
    rows += [(name, " is masked only here") for name in layers if name not in saved]
    rows += [
        (name, f": {difference}")
        for name in layers
        if name in saved
        and (difference := state_difference(layers[name], saved[name], short_names))
    ]
    differences = [f"layer {quoted(name)}{difference}" for name, difference in grouped(rows)]
    if differences:
        shown = "; ".join(differences[:8]) + (
            f"; and {len(differences) - 8} more" if len(differences) > 8 else ""
        )
        raise ValueError(
            f"the checkpoint is of another sparse model: {shown}. Configure the sparsifier as it was, or load only "
            "the weights to start anew"
        )


def changed_settings(layer: NMLayer, state: Mapping[str, Any]) -> list[str]:
    """Settings of method and estimator that are others now, and may be; those that are planned moments left out."""
    planned = {"dense_start", "dense_end"} | (
        {"start", "stop"} if layer.schedule or layer.method.dense_start else set()
    )
    changes = []
    for part, here, key in (
        (layer.method, _settings(layer.method), "settings"),
        (layer.estimator, _estimator_settings(layer), "estimator_settings"),
    ):
        free = {name: value for name, value in here.items() if name not in planned}
        changes += [
            f"{type(part).__name__}'s {change}" for change in _differences(free, state.get(key, {}))
        ]
    return changes


def _differences(
    here: Mapping[str, Any], saved: Mapping[str, Any], shown: Mapping[str, str] | None = None
) -> list[str]:
    """What both have and is not equal, each as it is shown: a checkpoint of another version may lack entries."""
    known = shown or {}
    return [
        f"{key} {known.get(str(saved[key]), saved[key])} in the checkpoint, {known.get(str(value), value)} here"
        for key, value in here.items()
        if key in saved and saved[key] != value
    ]


def _settings(part: Any) -> dict[str, Any]:
    """The primitives among the constructor's arguments that a method or an estimator keeps under their names."""
    names = inspect.signature(type(part).__init__).parameters
    kept = {name: value for name, value in vars(part).items() if name in names}
    return {
        name: value for name, value in kept.items() if isinstance(value, (bool, int, float, str))
    }


def _estimator_settings(layer: NMLayer) -> dict[str, Any]:
    """Those of the layer's estimator, and its pattern in this layer."""
    if layer.estimator is None:
        return {}
    return {**_settings(layer.estimator), "pattern": str(layer.estimator.pattern_of(layer))}


def by_plain_name(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the wrappers in layer names, which version 0.1.0 saved."""
    return {plain_name(name): value for name, value in saved.items()}


def check_schema(state: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` for a state of another schema."""
    if state.get("schema") != SCHEMA:
        fault = f"sparsifier state of schema {state.get('schema')!r}, but this version reads schema {SCHEMA}"
        raise ValueError(f"{fault}: use the version of lightning_nm that wrote it")
