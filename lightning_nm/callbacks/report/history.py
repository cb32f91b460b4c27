"""Statistics of every masked layer over the steps of a run: the columns of the heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.callbacks.report.pictures import block_margins
from lightning_nm.functional.statistics import FLIP_RATE, KEPT_MAGNITUDE, magnitude_sum
from lightning_nm.nn.layer import NMLayer

MAPS = ("flip_rate", "margin", "kept_magnitude")
"""The statistics of a column, in this order."""

COLUMNS = 128
"""The most columns of a history; even, because pairs of columns are joined."""


@torch.no_grad()
def layer_column(layers: Sequence[NMLayer]) -> Tensor:
    """Compute :data:`MAPS` of layers with one device synchronization; the margin is the mean over blocks.

    With sharded weights all processes must call it.

    Returns:
        float64 ``[3, layers]`` on the CPU. A layer without a forward mask has no flip rate and no margin: they are NaN.

    Example:
        >>> from torch import nn
        >>> from lightning_nm import NMSparsifier
        >>> sparsifier = NMSparsifier(nn.Linear(8, 8), "2:4", "dense", skip_first_last=False).attach()
        >>> layer_column(list(sparsifier.layers.values())).tolist()
        [[nan], [nan], [1.0]]
    """
    if not layers:
        return torch.empty(len(MAPS), 0, dtype=torch.float64)
    sums = []
    sizes = []
    for layer in layers:
        # Gathers a sharded weight, one layer after another, so that one whole weight is in memory at a time.
        with layer.full():
            sums.append(_layer_sums(layer))
            sizes.append(layer.weight.numel())
    # One copy for all layers waits for the device once. Layers may be on several devices.
    device = sums[0].device
    sums_of_layers = torch.stack([values.to(device) for values in sums])  # [layers, 4]
    used, whole, margin, flips = sums_of_layers.cpu().unbind(1)
    entries = torch.tensor(sizes, dtype=torch.float64)
    flip_rate = FLIP_RATE.exact(flips, entries)
    kept_magnitude = KEPT_MAGNITUDE.exact(used, whole)
    return torch.stack([flip_rate, margin, kept_magnitude])


def _layer_sums(layer: NMLayer) -> Tensor:
    """The magnitudes that are used and of the whole weight, the mean margin, and the number of flips, in float64."""
    weight = layer.weight.detach()
    used = magnitude_sum(layer.forward_weight())
    whole = magnitude_sum(weight)
    if layer.forward_mask is None or layer.masks.flips is None:
        margin = weight.new_tensor(torch.nan)
        flips = margin
    else:
        # Blocks without a margin are NaN.
        margin = block_margins(layer).nanmean()
        flips = layer.masks.flips
    # float64 holds every number of flips exactly, and one dtype lets them share a tensor.
    return torch.stack([used.double(), whole.double(), margin.double(), flips.double()])


def _with_nan(values: Tensor) -> Tensor:
    """Values ``[..., layers]`` with one more layer behind the last one, all NaN."""
    return F.pad(values, (0, 1), value=torch.nan)


class LayerHistory:
    """The columns of a run: at most :data:`COLUMNS`, each the mean of equally many logs.

    When all columns are full, each two neighbours are joined, so that a column holds twice as many logs from then on.
    A run of any length thus fits, from its first step on. Each value takes two bytes, in the last column six: at most
    780 bytes for a layer.

    Attributes:
        layers: Names of the layers, in the order of the rows.
        steps: The step of the last log of each column.
        values: float16 ``[columns, 3, layers]``; NaN where a layer was not masked.

    Example:
        >>> history = LayerHistory()
        >>> for step in range(130):
        ...     history.add(step, ["encoder", "head"], torch.rand(3, 2))
        >>> history.steps[:3], history.steps[-1], history.values.shape
        ([1, 3, 5], 129, torch.Size([65, 3, 2]))
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.steps: list[int] = []
        self.values = torch.empty(0, len(MAPS), 0, dtype=torch.float16)
        self._stride = 1  # logs of a column
        self._filled = 0  # logs of the last column so far
        # The mean of these in float32: many small steps of a mean would be lost in float16.
        self._mean = torch.empty(len(MAPS), 0, dtype=torch.float32)

    def add(self, step: int, layers: Sequence[str], column: Tensor) -> None:
        """Add the values of a log, ``[3, layers]``; columns that reach that step or later ones are dropped.

        ``layers`` may have other names than before.
        """
        self._set_rows(layers)
        # A run that resumes from an earlier checkpoint comes by steps that it has seen.
        if self.steps and self.steps[-1] >= step:
            self._drop_from(step)
        if self._filled == self._stride and len(self.steps) == COLUMNS:
            self._halve()

        column = column.float()
        is_last_open = bool(self.steps) and self._filled < self._stride
        if is_last_open:
            # The last column is written again, with this log in its mean.
            self._filled += 1
            self._mean = self._mean_with(column)
            self.steps.pop()
            self.values = self.values[:-1]
        else:
            self._filled = 1
            self._mean = column
        self.steps.append(step)
        last_column = self._mean.to(torch.float16).unsqueeze(0)
        self.values = torch.cat([self.values, last_column])

    def _drop_from(self, step: int) -> None:
        """Drop the columns that reach a step; all columns before them are full."""
        self.steps = [earlier for earlier in self.steps if earlier < step]
        self.values = self.values[: len(self.steps)]
        self._filled = self._stride

    def _halve(self) -> None:
        """Join each two neighbouring columns, so that there is room for as many again."""
        # p pairs of columns, s statistics and l layers; in float32, so that only the means are rounded.
        values_csl = self.values.float()
        pairs_p2sl = values_csl.unflatten(0, (-1, 2))
        means_psl = pairs_p2sl.nanmean(1)
        self.values = means_psl.to(torch.float16)
        self.steps = self.steps[1::2]  # a column has the step of its last log
        self._stride *= 2
        self._filled *= 2

    def _mean_with(self, column: Tensor) -> Tensor:
        """The mean of the last column's logs and one more; a NaN on either side does not count."""
        # The update of a running mean: `_filled` counts the new log already.
        change = column - self._mean
        mean = self._mean + change / self._filled
        mean = torch.where(column.isnan(), self._mean, mean)
        return torch.where(self._mean.isnan(), column, mean)

    def _set_rows(self, layers: Sequence[str]) -> None:
        """Put rows in the order of ``layers``; new ones are NaN so far."""
        if self.layers == list(layers):
            return
        # A new layer takes the row of NaN, which is put behind the last one.
        old_rows = {name: row for row, name in enumerate(self.layers)}
        nan_row = len(self.layers)
        rows = [old_rows.get(name, nan_row) for name in layers]
        self.values = _with_nan(self.values)[..., rows]
        self._mean = _with_nan(self._mean)[..., rows]
        self.layers = list(layers)

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
        history.layers = list(state["layers"])
        history.steps = list(state["steps"])
        history.values = state["values"].to("cpu", copy=True)
        history._stride = state["stride"]
        history._filled = state["filled"]
        history._mean = state["mean"].to("cpu", copy=True)
        return history
