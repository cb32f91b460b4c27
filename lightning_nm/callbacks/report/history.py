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

COLUMNS = 128  # at most; even


@torch.no_grad()
def layer_column(layers: Sequence[NMLayer]) -> Tensor:
    """Compute :data:`MAPS` of layers with one device synchronization; the margin is the mean over blocks.

    With sharded weights all processes must call it.

    Returns:
        float64 ``[3, layers]`` on the CPU. A layer without a forward mask has no flip rate and no margin: they are NaN.
    """
    parts, sizes = [], []
    for layer in layers:
        with layer.full():
            weight, used = layer.weight.detach(), layer.forward_weight()
            sums = [magnitude_sum(used), magnitude_sum(weight)]
            if layer.forward_mask is not None and layer.masks.flips is not None:
                margins = mask_margin(layer.rows(weight), layer.rows(layer.forward_mask), layer.pattern, 1)
                sums += [margins.nanmean(), layer.masks.flips]
        sizes.append(weight.numel())
        parts += [value.double() for value in (*sums, *[weight.new_tensor(torch.nan)] * (4 - len(sums)))]
    if not parts:
        return torch.empty(len(MAPS), 0, dtype=torch.float64)
    used, whole, margin, flips = torch.stack([part.to(parts[0].device) for part in parts]).cpu().view(-1, 4).unbind(1)
    entries = torch.tensor(sizes, dtype=torch.float64)
    return torch.stack([FLIP_RATE.exact(flips, entries), margin, KEPT_MAGNITUDE.exact(used, whole)])


class LayerHistory:
    """The columns of a run: at most :data:`COLUMNS`, each the mean of equally many logs, which double as need be.

    Each value takes two bytes, in the last column six: at most 780 bytes for a layer.

    Attributes:
        layers: Names of the layers, in the order of the rows.
        steps: The step of the last log of each column.
        values: float16 ``[columns, 3, layers]``; NaN where a layer was not masked.
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.steps: list[int] = []
        self.values = torch.empty(0, len(MAPS), 0, dtype=torch.float16)
        self._stride = 1  # logs of a column
        self._filled = 0  # logs of the last column so far
        self._mean = torch.empty(len(MAPS), 0)  # of these, in float32

    def add(self, step: int, layers: Sequence[str], column: Tensor) -> None:
        """Add the values of a log, ``[3, layers]``; columns that reach that step or later ones are dropped.

        ``layers`` may have other names than before.
        """
        self._set_rows(layers)
        if self.steps and self.steps[-1] >= step:
            known = sum(at < step for at in self.steps)
            self.steps, self.values, self._filled = self.steps[:known], self.values[:known], self._stride
        if self._filled == self._stride and len(self.steps) == COLUMNS:
            self.values = self.values.float().unflatten(0, (-1, 2)).nanmean(1).to(torch.float16)
            self.steps, self._stride, self._filled = self.steps[1::2], 2 * self._stride, 2 * self._stride
        column = column.float()
        if self.steps and self._filled < self._stride:
            self._filled += 1
            mean = self._mean + (column - self._mean) / self._filled
            mean = torch.where(self._mean.isnan(), column, torch.where(column.isnan(), self._mean, mean))
            self.steps, self.values = self.steps[:-1], self.values[:-1]
        else:
            self._filled, mean = 1, column
        self.steps, self._mean = [*self.steps, step], mean
        self.values = torch.cat([self.values, mean.to(torch.float16).unsqueeze(0)])

    def _set_rows(self, layers: Sequence[str]) -> None:
        if self.layers == list(layers):
            return
        places = {name: place for place, name in enumerate(self.layers)}
        values = torch.full((len(self.steps), len(MAPS), len(layers)), torch.nan, dtype=torch.float16)
        mean = torch.full((len(MAPS), len(layers)), torch.nan)
        for place, name in enumerate(layers):
            if name in places:
                values[:, :, place] = self.values[:, :, places[name]]
                mean[:, place] = self._mean[:, places[name]]
        self.layers, self.values, self._mean = list(layers), values, mean

    def state_dict(self) -> dict[str, Any]:
        """Return the columns as plain tensors and names."""
        return {
            "layers": list(self.layers),
            "steps": list(self.steps),
            "values": self.values.clone(),
            "stride": self._stride,
            "filled": self._filled,
            "mean": self._mean.clone(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LayerHistory:
        """Return the history of a :meth:`state_dict`."""
        history = cls()
        history.layers, history.steps = list(state["layers"]), list(state["steps"])
        history.values, history._mean = state["values"].cpu(), state["mean"].cpu()
        history._stride, history._filled = state["stride"], state["filled"]
        return history
