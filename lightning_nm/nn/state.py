"""What one layer saves beside its weight in the state dict, to go on exactly: plain tensors and primitives.

The model's state dict holds W_F, the weight that the model uses. A layer's state holds the rest: masks, the values of
pruned entries where a method keeps them, counters, and the settings by which another training is told apart.
:mod:`lightning_nm.training.checkpoint` has the state of a whole sparsifier.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm.functional import pack_mask, unpack_mask
from lightning_nm.nn.layer import LayerMasks, NMLayer
from lightning_nm.schedule import DENSE, FINAL, Stages

_CHECKSUM_TOLERANCE = 1e-4
"""Of sums, relative: another device or precision may sum a little differently."""


@torch.no_grad()
def layer_state(layer: NMLayer) -> dict[str, Any]:
    """The state of one layer, on the CPU; the keys are those of schema 1.

    ``latent`` is what :func:`dropped` keeps, or nothing if the method keeps no latent weights and has made a step.
    """
    spec = layer.spec
    masks = layer.masks
    progress = layer.progress
    with layer.full():
        weight = layer.weight.detach()
        forward_weight = layer.forward_weight()
    forward_mask = masks.forward
    latent = None
    # Before its first step a method may not have zeroed the pruned entries yet.
    if spec.method.latent or progress.step == 0:
        latent = dropped(weight, forward_weight, forward_mask)
    return {
        "parameter": spec.parameter,
        "pattern": str(spec.pattern),
        "method": type(spec.method).__name__,
        "settings": _settings(spec.method),
        "layout": str(spec.layout),
        "shape": list(weight.shape),
        "masked": forward_mask is not None,
        "step": progress.step,
        "updated_at": progress.updated_at,
        "flips": _as_int(masks.flips),
        "total_flips": _as_int(masks.total_flips),
        "dense_gradient": progress.dense_gradient,
        "schedule": list(progress.schedule),
        "stages": [list(stage) for stage in progress.stages],
        "stage": progress.stage,
        "estimator": type(spec.estimator).__name__,
        "estimator_settings": _estimator_settings(layer),
        "estimator_schedule": list(progress.estimator_schedule),
        "dgrad": type(spec.dgrad).__name__,
        "draws": layer.noise.draws,
        "backward_density": masks.backward_density,
        "spent": {kind: list(sums) for kind, sums in layer.costs.spent.items()},
        "low_rank_spent": 0.0,  # 0.3 reads it
        "counted": layer.costs.counted,
        "forward_mask": _packed(forward_mask),
        "backward_mask": _packed(masks.backward),
        "permutation": _to_cpu(masks.permutation, torch.int32),
        "buffers": {name: _copied(tensor) for name, tensor in layer.buffers.items()},
        "parameters": {name: _copied(parameter) for name, parameter in layer.parameters.items()},
        "latent": latent,
        "checksum": _checksum(forward_weight),
    }


def _as_int(count: Tensor | None) -> int:
    return 0 if count is None else int(count)


def _packed(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else pack_mask(mask).cpu()


def _to_cpu(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to("cpu", dtype)


def _copied(tensor: Tensor) -> Tensor:
    """A copy that no training step changes, also of a tensor that is on the CPU already."""
    return tensor.detach().clone().cpu()


def _checksum(weight: Tensor) -> list[float]:
    """Sum and sum of magnitudes: enough to notice that weights are others."""
    total = weight.sum(dtype=torch.float64)
    magnitude = weight.abs().sum(dtype=torch.float64)
    return torch.stack([total, magnitude]).tolist()


def dropped(weight: Tensor, forward_weight: Tensor, mask: Tensor | None) -> Tensor | None:
    """What W_F does not tell about W, on the CPU.

    Args:
        weight: W.
        forward_weight: W_F.
        mask: The forward mask, if there is one.

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
    if latent is None:
        return weight
    if latent.shape == weight.shape:
        return weight.copy_(latent)
    assert mask is not None
    weight[~mask] = latent.to(weight.device, weight.dtype)
    return weight


def _same(a: Tensor, b: Tensor) -> bool:
    """Equality of values in which a NaN equals itself."""
    both_nan = (a != a) & (b != b)
    return bool(((a == b) | both_nan).all())


def _alike(a: Tensor, b: Tensor) -> bool:
    """Equality to the tolerance of another machine's arithmetic; where one is 0, the other is, too."""
    close = (a - b).abs() <= _CHECKSUM_TOLERANCE * b.abs()
    both_nan = (a != a) & (b != b)
    return bool((close | both_nan | (a == b)).all())


@torch.no_grad()
def fits(layer: NMLayer, state: dict[str, Any], weight: Tensor | None = None) -> bool:
    """Whether a saved state belongs to W_F as the layer's module holds it; the layer is not changed.

    Args:
        layer: The layer.
        state: The state.
        weight: W_F, if it is not what the module holds.
    """
    if weight is None:
        with layer.full():
            weight = layer.weight.detach()
    saved_total, saved_magnitude = state["checksum"]
    total, magnitude = _checksum(weight)
    tolerance = _CHECKSUM_TOLERANCE * max(saved_magnitude, magnitude)
    is_close = (
        abs(saved_total - total) <= tolerance and abs(saved_magnitude - magnitude) <= tolerance
    )
    if not is_close:
        # NaN is close to nothing: a training that diverged resumes as it was.
        return math.isnan(saved_magnitude) and math.isnan(magnitude)
    mask = _unpacked(layer, state["forward_mask"])
    latent = state["latent"]
    if latent is None or latent.shape != weight.shape:
        return mask is None or not bool(weight[~mask].any())
    # W was saved whole, because its method makes W_F in another way than by a mask: it is made again.
    saved = saved_layer(layer, state)
    latent = latent.to(weight.device, weight.dtype)
    return _alike(layer.spec.method.forward_weight(saved, latent), weight)


@torch.no_grad()
def restore_weights(layer: NMLayer, state: dict[str, Any]) -> None:
    """Give a layer whose module holds W_F the latent values and masks of a saved state that :func:`fits`."""
    mask = _unpacked(layer, state["forward_mask"])
    with layer.full():
        weight = layer.weight
        weight.copy_(latent_weight(weight, state["latent"], mask))
    layer.adopt(saved_layer(layer, state))


def saved_layer(layer: NMLayer, state: dict[str, Any]) -> NMLayer:
    """The layer with the masks, buffers and parameters of a saved state, in tensors of their own."""
    device = layer.param.device
    masks = LayerMasks()
    masks.set(
        forward=_unpacked(layer, state["forward_mask"]),
        backward=_unpacked(layer, state["backward_mask"]),
        like=layer.view.memory_order,
    )
    permutation = state["permutation"]
    if permutation is not None:
        masks.set_permutation(permutation.to(device, torch.int64, copy=True))
    masks.load(state["flips"], state["total_flips"], state["backward_density"], device)
    # Copies, also on the same device: training writes to these tensors, and the state may be loaded again.
    buffers = {name: value.to(device, copy=True) for name, value in state["buffers"].items()}
    parameters = {
        name: nn.Parameter(value.to(device, copy=True))
        for name, value in state["parameters"].items()
    }
    # What a method makes of the weight may depend on the pattern of that time.
    progress = replace(layer.progress)
    progress.set_stage(state["stage"])
    return layer.with_parts(masks=masks, buffers=buffers, parameters=parameters, progress=progress)


def _unpacked(layer: NMLayer, packed: Tensor | None) -> Tensor | None:
    if packed is None:
        return None
    return unpack_mask(packed.to(layer.param.device), tuple(layer.view.shape))


def saved_stages(state: Mapping[str, Any]) -> Stages:
    """The stages of the schedule that a layer's training began with."""
    return tuple((int(begin), str(name)) for begin, name in state["stages"])


def same_estimator(layer: NMLayer, state: Mapping[str, Any]) -> bool:
    """Whether a layer has an estimator, of the class that the saved state was made with."""
    estimator = layer.spec.estimator
    return estimator is not None and state.get("estimator") == type(estimator).__name__


def same_noise(layer: NMLayer, state: Mapping[str, Any]) -> bool:
    """Whether a saved state's count of draws is that of this layer's random numbers."""
    dgrad = layer.spec.dgrad
    same_dgrad = dgrad is not None and state.get("dgrad") == type(dgrad).__name__
    return same_dgrad or same_estimator(layer, state)


def state_difference(
    layer: NMLayer, state: Mapping[str, Any], short_names: Mapping[str, str] | None = None
) -> str:
    """What keeps a saved state from fitting a layer, with classes by their short names; empty when it fits.

    The values of weights are not compared, see :func:`fits`.
    """
    spec = layer.spec
    own = {
        "shape": list(layer.view.shape),
        "pattern": str(spec.pattern),
        "method": type(spec.method).__name__,
        "layout": str(spec.layout),
        "estimator": type(spec.estimator).__name__,
        "dgrad": type(spec.dgrad).__name__,
    }
    shown = {"NoneType": "none", **(short_names or {})}
    differences = _differences(own, state, shown)
    ramp = {"ramp": _ramp_of(layer)}
    saved_ramp = [name for _, name in saved_stages(state) if name not in (DENSE, FINAL)]
    differences += _differences(ramp, {"ramp": ", ".join(saved_ramp) or "none"})
    if state["method"] == own["method"]:
        settings = _settings(spec.method)
        fixed = {name: value for name, value in settings.items() if name in spec.method.fixed}
        differences += _differences(fixed, state["settings"])
    if same_estimator(layer, state):
        pattern = {"pattern": _estimator_settings(layer)["pattern"]}
        changes = _differences(pattern, state["estimator_settings"])
        differences += [f"estimator {change}" for change in changes]
    return ", ".join(differences)


def _ramp_of(layer: NMLayer) -> str:
    """The patterns of the schedule before the layer's own."""
    schedule = layer.spec.schedule
    ramp = () if schedule is None else schedule.ramp
    return ", ".join(map(str, ramp)) or "none"


def changed_settings(layer: NMLayer, state: Mapping[str, Any]) -> list[str]:
    """Settings of method and estimator that are others now, and may be; those that are planned moments left out."""
    method = layer.spec.method
    # These became training steps when training began: what is compared is the schedule.
    planned = {"dense_start", "dense_end"}
    if layer.progress.schedule or method.dense_start:
        planned |= {"start", "stop", "latest"}
    changes = []
    for part, settings, key in (
        (method, _settings(method), "settings"),
        (layer.spec.estimator, _estimator_settings(layer), "estimator_settings"),
    ):
        compared = {name: value for name, value in settings.items() if name not in planned}
        for change in _differences(compared, state[key]):
            changes.append(f"{type(part).__name__}'s {change}")
    return changes


def _differences(
    here: Mapping[str, Any], saved: Mapping[str, Any], shown: Mapping[str, str] | None = None
) -> list[str]:
    """What both have and is not equal: a checkpoint of another version may lack entries.

    Args:
        here: The values of this training.
        saved: Those of the checkpoint.
        shown: What values are called in the text, where that is not their own text.
    """
    names = shown or {}
    found = []
    for key, value in here.items():
        if key in saved and saved[key] != value:
            then = names.get(str(saved[key]), saved[key])
            now = names.get(str(value), value)
            found.append(f"{key} {then} in the checkpoint, {now} here")
    return found


def _settings(part: Any) -> dict[str, Any]:
    """The primitives, and mappings of them, among the arguments that a part keeps under their names."""
    names = inspect.signature(type(part).__init__).parameters
    found = {}
    for name, value in vars(part).items():
        if name in names and isinstance(value, (bool, int, float, str, dict)):
            found[name] = value
    return found


def _estimator_settings(layer: NMLayer) -> dict[str, Any]:
    """The settings of the layer's estimator, and its pattern in this layer; empty without one."""
    estimator = layer.spec.estimator
    if estimator is None:
        return {}
    return {**_settings(estimator), "pattern": str(estimator.pattern_of(layer))}
