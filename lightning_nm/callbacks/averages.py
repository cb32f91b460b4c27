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
from lightning_nm.nn.names import parameter_key, plain_name
from lightning_nm.nn.state import dropped, latent_weight


def check_averaging_order(callback: pl.Callback, trainer: pl.Trainer) -> None:
    """Raise a ``ValueError`` if a WeightAveraging callback follows this one: its weights could not be masked."""
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    for other in callbacks[callbacks.index(callback) + 1 :]:
        if isinstance(other, WeightAveraging):
            fault = f"{type(other).__name__} comes after NMSparsityCallback in the Trainer's callbacks"
            raise ValueError(f"{fault}, so its checkpoints would hold dense weights: put it before NMSparsityCallback")


@torch.no_grad()
def mask_average(
    weights: dict[str, Tensor], model: nn.Module, layers: Mapping[str, NMLayer]
) -> dict[str, dict[str, Any]]:
    """Mask the state dict of an averaged model, by the layers' methods.

    Returns, for each key of a masked weight, the layer's name and its :func:`~lightning_nm.nn.state.dropped` entries.
    """
    by_module = {holder: name for name, layer in layers.items() for holder in layer.spec.holders}
    names = {  # a module that the model holds twice has two keys
        plain_name(parameter_key(prefix, parameter)): by_module[module, parameter]
        for prefix, module in model.named_modules(remove_duplicate=False)
        for parameter in module._parameters
        if (module, parameter) in by_module
    }
    averages: dict[str, dict[str, Any]] = {}
    for key, average in weights.items():
        name = names.get(plain_name(key))
        if name is not None:
            layer = layers[name]
            latent = average.detach().to(layer.param.device)
            masked = layer.method.forward_weight(layer, latent).detach()
            averages[key] = {"layer": name, "dropped": dropped(latent, masked, layer.forward_mask)}
            weights[key] = masked.to(average.device)
    return averages


def restore_average(
    checkpoint: dict[str, Any], state: Mapping[str, Any], trainer: pl.Trainer, pl_module: pl.LightningModule
) -> None:
    """Restore the dropped entries of a checkpoint's averaged weights, and let the averaging callbacks load it again.

    ``state`` is the sparsity callback's state in the checkpoint, with the ``averages`` of :func:`mask_average`.
    """
    averages: Mapping[str, dict[str, Any]] = state.get("averages", {})
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    averaging = [callback for callback in callbacks if isinstance(callback, WeightAveraging)]
    if not averages or not averaging or "current_model_state" not in checkpoint:
        return
    weights = dict(checkpoint["state_dict"])
    for key, average in averages.items():
        packed = state["layers"][average["layer"]]["forward_mask"]
        mask = None if packed is None else unpack_mask(packed.to(weights[key].device), tuple(weights[key].shape))
        weights[key] = latent_weight(weights[key], average["dropped"], mask)
    checkpoint["state_dict"] = weights
    for callback in averaging:
        callback.on_load_checkpoint(trainer, pl_module, checkpoint)
