"""Methods from outside the package, as a user would write them; they pass the contract that the built-in ones pass."""

import torch
from torch import nn

from lightning_nm import NMPattern
from lightning_nm.functional import magnitude_mask, nm_mask
from lightning_nm.methods import MaskMethod, Method


class SoftThreshold(Method):
    """Changes values: shrinks every block by its largest pruned magnitude, so W_F is continuous in W."""

    sparse_forward = True

    def forward_weight(self, layer, weight):
        rows = layer.view.rows(weight)
        if layer.spec.forward_reason:
            return weight
        moved = rows.movedim(1, -1)
        blocks = moved.unflatten(-1, (-1, layer.pattern.m))
        threshold = (
            blocks.abs()
            .sort(dim=-1, descending=True)
            .values[..., layer.pattern.n : layer.pattern.n + 1]
        )
        shrunk = torch.where(blocks.abs() > threshold, blocks - blocks.sign() * threshold, 0)
        return layer.view.unrows(shrunk.flatten(-2).movedim(-1, 1))


class ScaledMask(MaskMethod):
    """Owns a parameter: W_F = scale * W under the mask, with a penalty that pulls the scale towards 1."""

    selects_entries = False

    def __init__(self, strength=0.1):
        self.strength = strength

    def follow(self, schedule):
        schedule.refuse(self, dense_start="its scale is trained from the first step")
        return super().follow(schedule)

    def init_masks(self, layer):
        if "scale" not in layer.parameters:
            layer.parameters["scale"] = nn.Parameter(torch.full((), 1.5, dtype=layer.weight.dtype))
        self.update(layer)

    @torch.no_grad()
    def update(self, layer):
        layer.set_masks(
            None
            if layer.spec.forward_reason
            else layer.view.unrows(
                nm_mask(layer.view.rows(layer.weight.detach()).abs(), layer.pattern, dim=1)
            )
        )

    def forward_weight(self, layer, weight):
        return super().forward_weight(layer, weight) * layer.parameters["scale"]

    def weight_gradient(self, layer, weight, grad):
        masked = super().forward_weight(layer, weight)
        return grad * layer.parameters["scale"], (grad * masked).sum()

    def penalty(self, layer):
        return self.strength * (layer.parameters["scale"] - 1).square()


class DecayingN(MaskMethod):
    """3:4 for the first two steps, then the layer's pattern."""

    def current_pattern(self, layer):
        return NMPattern(3, 4) if layer.step < 2 else layer.pattern

    def init_masks(self, layer):
        pattern = self.current_pattern(layer)
        layer.set_masks(layer.view.by_rows(lambda rows: magnitude_mask(rows, pattern, dim=1)))

    def update(self, layer):
        self.init_masks(layer)
