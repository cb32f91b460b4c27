"""Mask the weights that WeightAveraging saves, and restore their pruned entries when a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from lightning_nm.functional import unpack_mask
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.names import parameter_key, plain_name
from lightning_nm.nn.layer.state import dropped, latent_weight


def check_averaging_order(callback: pl.Callback, trainer: pl.Trainer) -> None:
    """Raise a ``ValueError`` if a WeightAveraging callback follows this one: its weights could not be masked."""
    # Lightning calls on_save_checkpoint in the callbacks' order: the average must be in the checkpoint already.
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    own_place = callbacks.index(callback)
    for other in callbacks[own_place + 1 :]:
        if isinstance(other, WeightAveraging):
            fault = (
                f"{type(other).__name__} comes after NMSparsityCallback in the Trainer's callbacks"
            )
            raise ValueError(
                f"{fault}, so its checkpoints would hold dense weights: put it before NMSparsityCallback"
            )


@torch.no_grad()
def mask_average(
    weights: dict[str, Tensor], model: nn.Module, layers: Mapping[str, NMLayer]
) -> dict[str, dict[str, Any]]:
    """Mask the state dict of an averaged model, by the layers' methods.

    Returns, for each key of a masked weight, the layer's name and its
    :func:`~lightning_nm.nn.layer.state.dropped` entries.
    """
    names = _layer_names(model, layers)
    averages: dict[str, dict[str, Any]] = {}
    for key, average in weights.items():
        name = names.get(plain_name(key))
        if name is None:
            continue
        layer = layers[name]
        # The average is kept with its pruned entries, as latent values of its own: averaging goes on with them.
        latent = average.detach().to(layer.param.device)
        masked = layer.spec.method.forward_weight(layer, latent).detach()
        averages[key] = {"layer": name, "dropped": dropped(latent, masked, layer.forward_mask)}
        weights[key] = masked.to(average.device)
    return averages


def _layer_names(model: nn.Module, layers: Mapping[str, NMLayer]) -> dict[str, str]:
    """The layer's name of each key of a masked weight; a module that the model holds twice has two keys."""
    # A holder is a module and the name of one of its parameters. Tied weights have several.
    layer_of_holder = {
        holder: name for name, layer in layers.items() for holder in layer.spec.holders
    }
    return {
        # Without the prefixes of wrappers such as torch.compile's.
        plain_name(parameter_key(prefix, parameter)): layer_of_holder[module, parameter]
        for prefix, module in model.named_modules(remove_duplicate=False)
        for parameter in module._parameters
        if (module, parameter) in layer_of_holder
    }


def restore_average(
    checkpoint: dict[str, Any],
    state: Mapping[str, Any],
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
) -> None:
    """Restore the dropped entries of a checkpoint's averaged weights, and let the averaging callbacks load it again.

    ``state`` is the sparsity callback's state in the checkpoint, with the ``averages`` of :func:`mask_average`.
    """
    averages: Mapping[str, dict[str, Any]] = state.get("averages", {})
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    averaging = [callback for callback in callbacks if isinstance(callback, WeightAveraging)]
    if not averages or not averaging or "current_model_state" not in checkpoint:
        return
    # A new dictionary, since others may hold the checkpoint's.
    weights = dict(checkpoint["state_dict"])
    for key, average in averages.items():
        if key not in weights:
            continue  # it was renamed, and the state was not: which layers these are is said where states are checked
        masked = weights[key]
        mask = None  # the method had none at that time, as before its first step
        packed_mask = state["layers"][average["layer"]]["forward_mask"]
        if packed_mask is not None:
            mask = unpack_mask(packed_mask.to(masked.device), tuple(masked.shape))
        weights[key] = latent_weight(masked, average["dropped"], mask)
    checkpoint["state_dict"] = weights
    # These callbacks come first, so they have read the masked averages already.
    for callback in averaging:
        callback.on_load_checkpoint(trainer, pl_module, checkpoint)
