"""The stages of a user's schedule: planned once for each layer, and begun in all layers at the same training step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional.schedule import Stages
from lightning_nm.functional.select import mask_
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.sharding import local_shard, local_values


def plan_stages(layer: NMLayer, planned_steps: int | None) -> Stages:
    """The stages of a layer whose method's schedule is planned.

    Raises:
        ValueError: If they do not fit the planned steps.
    """
    schedule = layer.spec.schedule
    if schedule is None:
        return ()
    method = layer.spec.method
    masks_between = method.sparse_window(layer) if method.plans_dense_phases else None
    return schedule.stages(planned_steps, masks_between)


@torch.no_grad()
def begin_stage(layer: NMLayer, optimizers: Iterable[Optimizer] = ()) -> None:
    """Begin the stage of this training step: choose masks of its pattern, or end the masks for a dense phase.

    Args:
        layer: The layer, within ``layer.full()``.
        optimizers: All that may own its weight. Where pruned entries have no values they have no state either: it is
            zeroed.
    """
    method = layer.spec.method
    kept = layer.masks.forward
    layer.progress.enter_stage()
    if layer.progress.is_dense:
        method.end_masks(layer)
    else:
        method.init_masks(layer)
        kept = layer.masks.forward
    # A weight that never made a step keeps its entries until its first one: a fit that fails before has cost nothing.
    if method.latent or kept is None or not layer.step:
        return
    if layer.masks.has_forward:
        layer.view.zero_pruned(layer.view.local)
    zero_pruned_state(layer, kept, optimizers)


@torch.no_grad()
def zero_pruned_state(layer: NMLayer, kept: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Zero the state that optimizers have for pruned entries: they have no values, and get no gradient.

    Weight decay that is coupled to the gradient, as SGD's and Adam's, and steps before the masks have left momentum.

    Args:
        layer: The layer.
        kept: The forward mask.
        optimizers: All that may own its weight.
    """
    parameter = layer.optimizer_param
    for optimizer in optimizers:
        for state in optimizer.state.get(parameter, {}).values():
            has_entries = isinstance(state, Tensor) and state.shape == parameter.shape
            if has_entries and state.is_floating_point():
                mask_(local_values(state), local_shard(kept, state))
