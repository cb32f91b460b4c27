"""Statistics of every masked layer over the steps of a run: the columns of the heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional import mask_margin
from lightning_nm.functional.statistics import FLIP_RATE, KEPT_MAGNITUDE, magnitude_sum
from lightning_nm.nn.layer import NMLayer

MAPS = ("flip_rate", "margin", "kept_magnitude")
"""The statistics of a column, in this order."""

COLUMNS = 128  # a longer history has wider columns


@torch.no_grad()
def layer_column(layers: Sequence[NMLayer]) -> Tensor:
    """Compute :data:`MAPS` of layers with one device synchronization; the margin is the mean over blocks.

    With sharded weights all processes must call it.

    Returns:
        float64 ``[3, layers]`` on the CPU. A layer without a forward mask has no flip rate and no margin: they are NaN.
    """
    parts = []
    for layer in layers:
        with layer.full():
            weight, used = layer.weight.detach(), layer.forward_weight()
            sums = [magnitude_sum(used), magnitude_sum(weight)]
            if layer.forward_mask is not None and layer.masks.flips is not None:
                margins = mask_margin(layer.rows(weight), layer.rows(layer.forward_mask), layer.pattern, 1)
                sums += [margins.nanmean(), layer.masks.flips]
        parts += [value.double() for value in (*sums, *[weight.new_tensor(torch.nan)] * (4 - len(sums)))]
    if not parts:
        return torch.empty(len(MAPS), 0, dtype=torch.float64)
    used, whole, margin, flips = torch.stack([part.to(parts[0].device) for part in parts]).cpu().view(-1, 4).unbind(1)
    sizes = torch.tensor([layer.param.numel() for layer in layers], dtype=torch.float64)
    return torch.stack([FLIP_RATE.exact(flips, sizes), margin, KEPT_MAGNITUDE.exact(used, whole)])


class LayerHistory:
    """The columns of a run, at most :data:`COLUMNS` of them: a longer run has the means of neighbours.

    Each value takes two bytes: at most 768 bytes for a layer.

    Attributes:
        layers: Names of the layers, in the order of the rows.
        steps: The step of each column, which stands for the steps since the column before it.
        values: float16 ``[columns, 3, layers]``; NaN where a layer was not masked.
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.steps: list[int] = []
        self.values = torch.empty(0, len(MAPS), 0, dtype=torch.float16)

    def add(self, step: int, layers: Sequence[str], column: Tensor) -> None:
        """Add the values of a step, ``[3, layers]``; columns of that step and of later ones are dropped.

        ``layers`` may have more names than before, in any order.
        """
        self._set_rows(layers)
        known = sum(at < step for at in self.steps)
        self.steps = [*self.steps[:known], step]
        self.values = torch.cat([self.values[:known], column.to(torch.float16).unsqueeze(0)])
        if len(self.steps) > COLUMNS:
            self._halve()

    def _set_rows(self, layers: Sequence[str]) -> None:
        if self.layers == list(layers):
            return
        values = torch.full((len(self.steps), len(MAPS), len(layers)), torch.nan, dtype=torch.float16)
        for place, name in enumerate(layers):
            if name in self.layers:
                values[:, :, place] = self.values[:, :, self.layers.index(name)]
        self.layers, self.values = list(layers), values

    def _halve(self) -> None:
        whole = len(self.steps) // 2 * 2
        pairs = self.values[:whole].float().unflatten(0, (-1, 2)).nanmean(1).to(torch.float16)
        self.values = torch.cat([pairs, self.values[whole:]])
        self.steps = self.steps[1:whole:2] + self.steps[whole:]

    def state_dict(self) -> dict[str, Any]:
        """Return the columns as plain tensors and names."""
        return {"layers": list(self.layers), "steps": list(self.steps), "values": self.values.clone()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LayerHistory:
        """Return the history of a :meth:`state_dict`."""
        history = cls()
        history.layers, history.steps = list(state["layers"]), list(state["steps"])
        history.values = state["values"].to(torch.float16).cpu()
        return history
