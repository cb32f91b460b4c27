"""How layers begin to be masked: their schedules, first masks and noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layer import init_masks
from lightning_nm.nn.layer.sharding import is_sharded
from lightning_nm.nn.layer.state import saved_layer, state_difference
from lightning_nm.nn.selection.ranges import grouped, quoted
from lightning_nm.nn.selection.selection import refuse_masked, refuse_nan
from lightning_nm.training.optimizers import trained_layer
from lightning_nm.training.phases import plan_schedules


def choose_masks(
    layers: Sequence[NMLayer],
    saved: Mapping[str, dict[str, Any]],
    planned_steps: int | None,
    clock: int,
    data_rank: int | None,
) -> None:
    """Plan the schedules, and take the saved masks of layers that continue; choose those of the others."""
    plan_schedules(layers, saved, planned_steps, clock)
    for layer in layers:
        state_of_layer = saved.get(layer.name)
        if (
            layer.spec.method.restores_masks
            and state_of_layer
            and not state_difference(layer, state_of_layer)
        ):
            layer.adopt(saved_layer(layer, state_of_layer))  # choosing masks may take a long search
        else:
            with layer.full():
                init_masks(layer)
        layer.noise.follow_data(data_rank)
        layer.draw_noise()


def refuse_to_mask(layers: Iterable[NMLayer], optimizers: Sequence[Optimizer]) -> None:
    """Refuse layers that cannot be masked now by a ``ValueError``; nothing is changed."""
    for layer in layers:
        refuse_nan(layer)
        for holder in layer.spec.holders:
            refuse_masked(layer.name, *holder)
        for optimizer in optimizers:
            if trained_layer(layer, [optimizer]):
                layer.spec.method.check_optimizer(layer, optimizer)


def refuse_late_sharding(layers: Iterable[NMLayer]) -> None:
    """Refuse weights that were sharded after their masks were installed, by a ``RuntimeError``."""
    for layer in layers:
        if is_sharded(layer.param) and not layer.view.is_sharded:
            fault = f"the weight of layer '{layer.name}' was sharded after its masks were installed"
            raise RuntimeError(
                f"{fault}: call fully_shard or parallelize_module first, then attach()"
            )


def told_as_dense(trained_dense: Mapping[str, str]) -> str:
    """What is said of layers whose weight stays dense, by name with the reason; alike ones are written as one."""
    layers = [f"{quoted(name)}: {reason}" for name, reason in grouped(trained_dense.items())]
    shown = "; ".join(layers[:8])
    if len(layers) > 8:
        shown += f"; and {len(layers) - 8} more"
    return (
        f"the trained weights of these layers will be dense, only GEMMs of their backward pass are N:M: {shown}. Give "
        "them another pattern by `rules`, pad their inputs to a multiple of M, or name them in `exclude`"
    )
