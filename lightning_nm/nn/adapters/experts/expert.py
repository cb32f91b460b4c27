"""One expert of a layer of experts, as a layer that products run through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layout import of_one_expert, row_sizes


class ExpertLayer(NMLayer):
    """The matrix of one expert: views of the layer's masks, its method and estimator, and random numbers of its own.

    It has a handle of its own, so kernels keep packed operands for each expert. Counters and observations are the
    layer's. Made by :func:`expert_of`.
    """

    layer: NMLayer  # of all experts
    expert: int
    stamp: tuple[Any, ...]  # see _stamp
    routes_gradients = False  # those of all experts are routed together

    def follow(self, layer: NMLayer, expert: int, method: Any = None) -> ExpertLayer:
        """Become this expert of a layer as the layer is now, perhaps with another method; returns itself."""
        # Every part of the layer is shared, as in a shallow copy; only the handle is another one.
        self.__setstate__(vars(layer))
        self.layer = layer
        self.expert = expert
        self.stamp = _stamp(layer)
        self.spec = replace(
            layer.spec,
            layout=of_one_expert(layer.spec.layout),
            groups=1,
            method=method or layer.spec.method,
        )
        all_rows, _ = row_sizes(layer.param.shape, layer.spec.layout)
        out = all_rows // layer.spec.groups
        self.masks = layer.masks.of_group(expert, out)
        # It tells the expert's random numbers from those of others.
        self.first_row = expert * out
        # Their gradients are made once for all experts, with the weight's.
        self.parameters = {}
        return self

    @property
    def param(self) -> Any:
        """The expert's part of the parameter, detached, for its shape and whether it is trained."""
        parameter = self.layer.param
        return parameter.detach()[self.expert].requires_grad_(parameter.requires_grad)


def expert_of(layer: NMLayer, expert: int) -> ExpertLayer:
    """Return the layer of one expert, its masks as they are now."""
    found = layer.experts.get(expert)
    if isinstance(found, ExpertLayer):
        # By identity, not by ==, which for tensors compares values.
        if all(new is old for new, old in zip(_stamp(layer), found.stamp, strict=True)):
            return found
        made = found
    else:
        # Without __init__, which would make parts of its own: follow() takes those of the layer.
        made = ExpertLayer.__new__(ExpertLayer)
        layer.experts[expert] = made
    return made.follow(layer, expert)


def _stamp(layer: NMLayer) -> tuple[Any, ...]:
    """Return what the parts of an expert's layer are made of, to be compared by identity."""
    return layer.masks, layer.masks.generation, layer.buffers, layer.pending, layer.handle_tensor


class WholeValues:
    """W_F and W_B of all experts, made at once, for a method that makes them of more than one expert's entries.

    It stands in for the method of an expert's layer within one forward pass and its backward pass.
    """

    selects_entries = False

    def __init__(self, layer: NMLayer, weight: Tensor) -> None:
        self._layer = layer
        self._weight = weight
        # All experts' W_F and W_B, made when the first expert asks.
        self._forward: Tensor | None = None
        self._backward: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        # Everything else is the method's.
        return getattr(self._layer.spec.method, name)

    @torch.no_grad()
    def forward_weight(self, layer: ExpertLayer, weight: Tensor) -> Tensor:
        """Return W_F of the expert."""
        if self._forward is None:
            self._forward = self._layer.view.forward_of(self._weight)
        return self._forward[layer.expert]

    # Both are made as the whole layer's products make them.
    training_weight = forward_weight

    @torch.no_grad()
    def backward_weight(self, layer: ExpertLayer, weight: Tensor) -> Tensor:
        """Return W_B of the expert."""
        if self._backward is None:
            self._backward = self._layer.view.backward_of(self._weight)
        return self._backward[layer.expert]

    def release(self) -> None:
        """Free the memory of both."""
        self._forward = self._backward = None
