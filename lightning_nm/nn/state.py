"""The state of one layer in a checkpoint, besides its weight: plain tensors and primitives for an exact resume.

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
from lightning_nm.nn.layer import LayerMasks, NMLayer, init_masks
from lightning_nm.schedule import DENSE, FINAL, Stages

State = dict[str, Any]
"""What a checkpoint holds of something, by name: tensors, primitives, and lists and states of them."""

_CHECKSUM_TOLERANCE = 1e-4
"""Of sums, relative: another device or precision may sum a little differently."""


@torch.no_grad()
def layer_state(layer: NMLayer) -> State:
    """The state of one layer, on the CPU; the keys are those of schema 1.

    ``latent`` is what :func:`dropped` keeps, or nothing if the method keeps no latent weights and has made a step.
    """
    spec = layer.spec
    masks = layer.masks
    progress = layer.progress
    # One gathering for both: forward_weight() enters full() again, which does nothing.
    with layer.full():
        weight = layer.weight.detach()
        forward_weight = layer.forward_weight()
    forward_mask = masks.forward
    backward_mask = masks.backward
    # int32 takes half of the space in a file; masks that are loaded have int64 again.
    permutation = None if masks.permutation is None else masks.permutation.to("cpu", torch.int32)
    latent = None
    # Before its first step a method may not have zeroed the pruned entries yet.
    if spec.method.latent or progress.step == 0:
        latent = dropped(weight, forward_weight, forward_mask)
    return {
        **_decisions(layer),
        "parameter": spec.parameter,
        "masked": forward_mask is not None,
        "step": progress.step,
        "updated_at": progress.updated_at,
        "flips": 0 if masks.flips is None else int(masks.flips),
        "total_flips": 0 if masks.total_flips is None else int(masks.total_flips),
        "dense_gradient": progress.dense_gradient,
        "schedule": list(progress.schedule),
        "stages": [list(stage) for stage in progress.stages],
        "stage": progress.stage,
        "estimator_schedule": list(progress.estimator_schedule),
        "draws": layer.noise.draws,
        "backward_density": masks.backward_density,
        "spent": {kind: list(sums) for kind, sums in layer.costs.spent.items()},
        "low_rank_spent": 0.0,  # 0.3 reads it
        "counted": layer.costs.counted,
        "forward_mask": None if forward_mask is None else pack_mask(forward_mask).cpu(),
        "backward_mask": None if backward_mask is None else pack_mask(backward_mask).cpu(),
        "permutation": permutation,
        "buffers": {name: _copied(tensor) for name, tensor in layer.buffers.items()},
        "parameters": {name: _copied(parameter) for name, parameter in layer.parameters.items()},
        "latent": latent,
        "checksum": _checksum(forward_weight),
    }


def _decisions(layer: NMLayer) -> State:
    """What was decided on a layer, by which another training is told apart."""
    spec = layer.spec
    estimator_settings = {}
    if spec.estimator is not None:
        # The pattern that it has at this layer: its own may be None, which takes the layer's.
        pattern = str(spec.estimator.pattern_of(layer))
        estimator_settings = {**_settings(spec.estimator), "pattern": pattern}
    return {
        "shape": list(layer.view.shape),
        "pattern": str(spec.pattern),
        "method": type(spec.method).__name__,
        "settings": _settings(spec.method),
        "layout": str(spec.layout),
        "estimator": type(spec.estimator).__name__,
        "estimator_settings": estimator_settings,
        "dgrad": type(spec.dgrad).__name__,
    }


def _settings(part: Any) -> dict[str, Any]:
    """The primitives, and mappings of them, among the arguments that a part keeps under their names."""
    names = inspect.signature(type(part).__init__).parameters
    return {
        name: value
        for name, value in vars(part).items()
        if name in names and (value is None or isinstance(value, (bool, int, float, str, dict)))
    }


def _copied(tensor: Tensor) -> Tensor:
    """A copy that no training step changes, also of a tensor that is on the CPU already."""
    return tensor.detach().clone().cpu()


def _checksum(weight: Tensor) -> list[float]:
    """Sum and sum of magnitudes: enough to notice that weights are others."""
    total = weight.sum(dtype=torch.float64)
    magnitude = weight.abs().sum(dtype=torch.float64)
    return torch.stack([total, magnitude]).tolist()


def dropped(weight: Tensor, forward_weight: Tensor, mask: Tensor | None) -> Tensor | None:
    """The values of W that W_F lacks, on the CPU: those of pruned entries, or all.

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
    # W_F has other values at kept entries, too, such as scaled ones: only all of W brings it back.
    return weight.clone().cpu()


def latent_weight(forward_weight: Tensor, latent: Tensor | None, mask: Tensor | None) -> Tensor:
    """W from W_F and what :func:`dropped` kept; a new tensor."""
    weight = forward_weight.clone()
    if latent is None:
        return weight
    # A vector of pruned entries never has the shape of a weight, which has two dimensions or more.
    if latent.shape == weight.shape:
        return weight.copy_(latent)
    assert mask is not None
    weight[~mask] = latent.to(weight.device, weight.dtype)
    return weight


def _same(a: Tensor, b: Tensor, tolerance: float = 0.0) -> bool:
    """Equality to a relative tolerance: a NaN equals itself, and where one is 0, the other is, too."""
    return torch.allclose(a.to(b.dtype), b, rtol=tolerance, atol=0.0, equal_nan=True)


# Weights that are swapped in under installed masks
#
# The model's state dict holds W_F and no latent values. Callbacks swap weights all the same: averages for a validation,
# or those of before a search for a learning rate. The first load, or step of a search, keeps the layer's state as
# `replaced_state`, until its masks move. When a later load brings the same W_F back, the module gets the latent values
# back at once. A checkpoint that is loaded then finds a module with latent values, and not W_F as otherwise: it is the
# layer's W_F that must fit.


def keep_replaced(layer: NMLayer) -> None:
    """Keep the state that belongs to the weights of a layer, which are about to be replaced."""
    if layer.replaced_state is None:
        layer.replaced_state = layer_state(layer)


def take_loaded(layer: NMLayer) -> None:
    """Restore the state that belongs to weights which a layer's module has just loaded; see :func:`keep_replaced`."""
    before = layer.replaced_state
    assert before is not None
    with layer.full():
        if fits(layer, before):
            restore_weights(layer, before)  # its counters went on, and stay
        else:
            init_masks(layer)


def check_fits(layer: NMLayer, state: State) -> Tensor | None:
    """Check that a saved state belongs to a layer's weight; nothing is changed.

    Returns:
        W_F, if the module holds latent values that a load brought back; ``None`` if it holds W_F.

    Raises:
        ValueError: If the state is of other weights.
    """
    if fits(layer, state):
        return None
    forward_weight = layer.forward_weight()
    if layer.replaced_state is None or not fits(layer, state, forward_weight):
        raise ValueError(
            f"the masks in the checkpoint do not belong to the weights of layer '{layer.name}': load its weights into "
            "the model first; if they are averages, resume with their callback, too"
        )
    return forward_weight


@torch.no_grad()
def fits(layer: NMLayer, state: State, weight: Tensor | None = None) -> bool:
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
        # Equal sums could be of weights with zeros elsewhere: W_F is 0 at each entry that the saved mask prunes.
        return mask is None or not bool(weight[~mask].any())
    # W was saved whole, because its method makes W_F in another way than by a mask: it is made again.
    saved = saved_layer(layer, state)
    latent = latent.to(weight.device, weight.dtype)
    return _same(layer.spec.method.forward_weight(saved, latent), weight, _CHECKSUM_TOLERANCE)


@torch.no_grad()
def restore_weights(layer: NMLayer, state: State) -> None:
    """Give a layer whose module holds W_F the latent values and masks of a saved state that :func:`fits`."""
    saved = saved_layer(layer, state)
    with layer.full():
        layer.weight.copy_(latent_weight(layer.weight, state["latent"], saved.forward_mask))
    layer.adopt(saved)


def saved_layer(layer: NMLayer, state: State) -> NMLayer:
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
    masks.load(state, device)
    # Copies, also on the same device: training writes to these tensors, and the state may be loaded again.
    buffers = {name: value.to(device, copy=True) for name, value in state["buffers"].items()}
    parameters = {
        name: nn.Parameter(value.to(device, copy=True))
        for name, value in state["parameters"].items()
    }
    # What a method makes of the weight may depend on the pattern of that time.
    # A copy: the layer's own stage stays.
    progress = replace(layer.progress)
    progress.set_stage(state["stage"])
    return layer.with_parts(masks=masks, buffers=buffers, parameters=parameters, progress=progress)


def _unpacked(layer: NMLayer, packed: Tensor | None) -> Tensor | None:
    if packed is None:
        return None
    return unpack_mask(packed.to(layer.param.device), tuple(layer.view.shape))


def saved_stages(state: State) -> Stages:
    """The stages of the schedule that a layer's training began with."""
    return tuple((int(begin), str(name)) for begin, name in state["stages"])


def differences(here: State, saved: State) -> dict[str, tuple[Any, Any]]:
    """The entries that differ between two flat states, by key, as ``(saved, present)``.

    Keys of one state alone do not count: a checkpoint of another version may lack entries.
    """
    return {
        key: (saved[key], value)
        for key, value in here.items()
        if key in saved and saved[key] != value
    }


def differences_of_layer(
    layer: NMLayer, state: State, short_names: Mapping[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """How a layer differs from its saved state: what keeps the state from fitting, and settings that may be others.

    Classes are called by their short names. Settings that are planned moments are left out, and the values of weights,
    see :func:`fits`.
    """
    method, schedule = layer.spec.method, layer.spec.schedule
    shown = {"NoneType": "none", **(short_names or {})}
    ramp = () if schedule is None else schedule.ramp
    saved_ramp = [name for _, name in saved_stages(state) if name not in (DENSE, FINAL)]
    own = _decisions(layer)
    # Of the ramp the patterns are compared, and not the moments, which were planned in steps.
    here = {**own, "ramp": ", ".join(map(str, ramp)) or "none"}
    saved = {**state, "ramp": ", ".join(saved_ramp) or "none"}
    refused = []
    changed = []
    # The moments became training steps when training began: what is compared is the schedule.
    planned = {"dense_start", "dense_end"}
    if layer.progress.schedule or hasattr(method, "start"):
        planned |= {"start", "stop", "latest"}
    for key, (then, now) in differences(here, saved).items():
        if not key.endswith("settings"):
            then, now = (shown.get(str(value), value) for value in (then, now))
            refused.append(f"{key} {then} in the checkpoint, {now} here")
    for part, kind, settings, fixed, prefix in (
        (method, "method", "settings", method.fixed, ""),
        (layer.spec.estimator, "estimator", "estimator_settings", ("pattern",), "estimator "),
    ):
        if state[kind] != own[kind]:
            continue  # the settings of another class are others
        for key, (then, now) in differences(own[settings], state[settings]).items():
            change = f"{key} {then} in the checkpoint, {now} here"
            if key in fixed:
                refused.append(prefix + change)
            elif key not in planned:
                changed.append(f"{type(part).__name__}'s {change}")
    return refused, changed
