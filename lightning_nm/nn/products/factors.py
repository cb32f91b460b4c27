"""The dense gradient of a packed weight whose mask moves, kept as factors where its products are made."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.nn.layer import NMLayer


def needs_factors(layer: NMLayer) -> bool:
    """Whether the method needs a dense gradient in this window that the packed parameter cannot hold."""
    return layer.storage is not None and layer.progress.dense_gradient


def begin_factors(layer: NMLayer) -> None:
    """Forget the factors of a gradient that was dropped, as by ``zero_grad()``; called in a forward pass."""
    if layer.storage is None or not layer.storage.factors or layer.param.grad is not None:
        return
    # A checkpointed forward pass runs again within the backward pass, where a gradient is about to come.
    in_backward = torch._C._current_graph_task_id() != -1
    if not in_backward:
        layer.storage.factors.clear()


def keep_factors(layer: NMLayer, dy_to: Tensor, x_ti: Tensor, first_row: int = 0) -> None:
    """Keep dY and X of a product, if the dense gradient is needed.

    Args:
        layer: The layer.
        dy_to: ``dY [tokens, rows]``.
        x_ti: ``X [tokens, in]``.
        first_row: The first row of the weight that belongs to dY.
    """
    if needs_factors(layer):
        assert layer.storage is not None
        layer.storage.factors.add(dy_to, x_ti, layer.param.dtype, first_row)
