"""Histograms, heat maps and the layout of custom scalars in TensorBoard."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.functional import mask_margin
from lightning_nm.functional.mask_statistics import FLIP_RATE, KEPT_MAGNITUDE, magnitude_sum
from lightning_nm.nn.layer import NMLayer

if TYPE_CHECKING:  # for the types only
    from matplotlib.figure import Figure


MAPS = ("flip_rate", "margin", "kept_magnitude")
"""The statistics of a column, in this order."""

COLUMNS = 128
"""The most columns of a history; even, because pairs of columns are joined."""

MOST_LETTERS = 32
"""Of a layer's name in a heat map."""
FONT_SIZE = 8
"""Of a heat map."""


def block_margins(layer: NMLayer) -> Tensor:
    """Return the margin of each block; NaN where it has none. The layer has a forward mask, and its weight is whole."""
    mask = layer.forward_mask
    assert mask is not None
    # Blocks lie along the input channels, axis 1.
    return mask_margin(layer.view.rows(layer.weight), layer.view.rows(mask), layer.pattern, 1)


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
    sums = []
    for layer in layers:
        # Gathers a sharded weight, one layer after another, so that one whole weight is in memory at a time.
        with layer.full():
            weight = layer.weight.detach()
            margin = flips = weight.new_tensor(torch.nan)
            if layer.masks.has_forward and layer.masks.flips is not None:
                margin = block_margins(layer).nanmean()  # blocks without a margin are NaN
                flips = layer.masks.flips
            used, whole = magnitude_sum(layer.forward_weight()), magnitude_sum(weight)
            # float64 holds every number of flips exactly, and one dtype lets them share a tensor.
            sums.append(torch.stack([part.double() for part in (used, whole, margin, flips)]))
    # One copy for all layers waits for the device once. Layers may be on several devices.
    of_layers = torch.stack([values.to(sums[0].device) for values in sums]).cpu()  # [layers, 4]
    used, whole, margin, flips = of_layers.unbind(1)
    entries = torch.tensor([layer.view.shape.numel() for layer in layers], dtype=torch.float64)
    return torch.stack([FLIP_RATE.exact(flips, entries), margin, KEPT_MAGNITUDE.exact(used, whole)])


@dataclass
class LayerHistory:
    """The columns of a run: at most :data:`COLUMNS`, each the mean of equally many logs.

    When all columns are full, each two neighbours are joined, so that a column holds twice as many logs from then on.
    A run of any length thus fits, from its first step on, in 1536 bytes for a layer.

    Checkpoints hold all attributes.

    Attributes:
        layers: Names of the layers, in the order of the rows.
        steps: The step of the last log of each column.
        values: float32 ``[columns, 3, layers]``; NaN where a layer was not masked.
        stride: Logs of a column.
        filled: Logs of the last column so far.

    Example:
        >>> history = LayerHistory()
        >>> for step in range(130):
        ...     history.add(step, ["encoder", "head"], torch.rand(3, 2))
        >>> history.steps[:3], history.steps[-1], history.values.shape
        ([1, 3, 5], 129, torch.Size([65, 3, 2]))
    """

    layers: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: Tensor = field(
        default_factory=lambda: torch.empty(0, len(MAPS), 0, dtype=torch.float32)
    )
    stride: int = 1
    filled: int = 1

    def add(self, step: int, layers: Sequence[str], column: Tensor) -> None:
        """Add the values of a log, ``[3, layers]``; columns that reach that step or later ones are dropped.

        ``layers`` may have other names than before.
        """
        if self.layers != list(layers):
            # A new layer takes a row of NaN, which is put behind the last one, at -1.
            rows = {name: row for row, name in enumerate(self.layers)}
            with_nan = F.pad(self.values, (0, 1), value=torch.nan)
            self.values = with_nan[..., [rows.get(name, -1) for name in layers]]
            self.layers = list(layers)
        # A run that resumes from an earlier checkpoint comes by steps that it has seen.
        kept = sum(earlier < step for earlier in self.steps)
        if kept < len(self.steps):
            self.filled = self.stride  # all columns before them are full
        steps, values = self.steps[:kept], self.values[:kept]
        if self.filled == self.stride and kept == COLUMNS:
            steps = steps[1::2]  # a column has the step of its last log
            values = values.unflatten(0, (-1, 2)).nanmean(1)
            self.stride *= 2
            self.filled *= 2
        column = column.float()
        if steps and self.filled < self.stride:
            # The last column is written again: its running mean has one log more. A NaN does not count.
            self.filled += 1
            mean = values[-1]
            column = torch.where(column.isnan(), mean, column)
            column = torch.where(mean.isnan(), column, mean + (column - mean) / self.filled)
            steps, values = steps[:-1], values[:-1]
        else:
            self.filled = 1
        self.steps = [*steps, step]
        self.values = torch.cat([values, column.unsqueeze(0)])

    def state_dict(self) -> dict[str, Any]:
        """Return the columns as plain tensors and names."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LayerHistory:
        """Return the history of a :meth:`state_dict`, in 0.3 of float16 values."""
        values = state["values"].to("cpu", torch.float32)
        return cls(state["layers"], state["steps"], values, state["stride"], state["filled"])


def heat_map(
    title: str, layers: Sequence[str], steps: Sequence[int], values: Tensor, *, root: bool
) -> Figure:
    """Draw one statistic of layers over steps, without pyplot, which would keep every figure in memory.

    Args:
        title: The heading.
        layers: The names of the rows, from the top. Where there is no room for all, the axis of the steps says so.
        steps: The steps at which the columns end, rising.
        values: ``[columns, layers]``; NaN is grey.
        root: Colour by the square root, from 0 on, so that small values differ; else from the least to the largest.

    Raises:
        ImportError: Without matplotlib.

    Example:
        >>> figure = heat_map("flip rate", ["encoder", "head"], [9, 19, 29], torch.rand(3, 2), root=True)
        >>> figure.axes[0].get_title(loc="left")
        'flip rate'
    """
    # matplotlib is an extra, so it is imported only where something is drawn.
    from matplotlib import colormaps
    from matplotlib.colors import Normalize, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    known = values[values.isfinite()].tolist() or [0.0, 1.0]
    low, high = min(known), max(known)
    norm = PowerNorm(0.5, 0, high or 1) if root else Normalize(low, high)
    # 540 pixels wide: TensorBoard shrinks an image to its card, of about 400, and the names of a wider figure could be
    # read after a click alone. The title, the numbers and the title of the horizontal axis are 80 pixels high.
    height = min(max(18 * len(layers), 120), 560)  # of the rows
    figure = Figure((5.4, (height + 80) / 100), dpi=100, layout="constrained")
    axes = figure.subplots()
    # A column begins at the step of the one before it. The first one is as wide as the second.
    first_width = steps[1] - steps[0] if len(steps) > 1 else 1
    edges = [steps[0] - first_width, *steps]
    colours = colormaps["viridis"].with_extremes(bad="#d0d0d0")
    mesh = axes.pcolormesh(
        edges, range(len(layers) + 1), values.double().T, cmap=colours, norm=norm
    )
    figure.colorbar(mesh, format="%.3g").ax.tick_params(labelsize=FONT_SIZE)

    # From one name of a layer to the next there are at least 15 pixels.
    every = math.ceil(len(layers) * 15 / height)
    names = [
        name if len(name) <= MOST_LETTERS else f"...{name[3 - MOST_LETTERS :]}"
        # A name is no formula, even with two dollar signs, and matplotlib's own font has no letters but these.
        for name in (layer.encode("ascii", "replace").decode() for layer in layers[::every])
    ]
    middles = [row + 0.5 for row in range(0, len(layers), every)]
    axes.set_yticks(middles, names, family="DejaVu Sans Mono", parse_math=False)
    axes.set_ylim(len(layers), 0)  # the first row is at the top
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_xlabel("step" if every == 1 else f"step; one name for {every} layers", size=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE)
    axes.set_title(title, loc="left", fontsize=FONT_SIZE + 1)
    return figure


# Between the bins of margins, which lie in [-1, 1]. One edge is exactly 0, the margin of equal weights.
EDGES = torch.arange(-20, 21, dtype=torch.float64) / 20

# Statistics that share a chart. Each other statistic has a chart of its own.
CHARTS = {
    "kept": ("density", "kept_magnitude", "overlap"),
    "gradients": ("grad_density", "grad_bytes_ratio"),
    "adaptation": ("adapted_blocks", "frozen_blocks"),
}

# Statistics of the whole model, which single layers do not have.
MODEL_ONLY = ("train_flops_ratio", "grad_bytes_ratio")


def margin_histogram(layer: NMLayer) -> Tensor:
    """Count the margins of all blocks of a layer with a forward mask, with one device synchronization.

    With sharded weights all processes must call it.

    Returns:
        float64 ``[44]`` on the CPU: the least and the largest margin, their sum, the sum of their squares, and the
        counts between :data:`EDGES`, where an edge belongs to the bin above it, and 1 to the last bin.

    Example:
        >>> from torch import nn
        >>> from lightning_nm import NMSparsifier
        >>> sparsifier = NMSparsifier(nn.Linear(8, 8), "2:4", "sr-ste", skip_first_last=False).attach()
        >>> (layer,) = sparsifier.layers.values()
        >>> margin_histogram(layer)[4:].sum()
        tensor(16., dtype=torch.float64)
    """
    with layer.full():
        margins = block_margins(layer).double().flatten()
    known = ~margins.isnan()
    margins = torch.where(known, margins, 0)
    # Blocks without a margin have a bin of their own, so that shapes do not depend on values.
    bins = torch.bucketize(margins, EDGES[1:-1].to(margins.device), right=True)
    counts = torch.bincount(bins.where(known, len(EDGES) - 1), minlength=len(EDGES))[:-1]
    least = torch.where(known, margins, torch.inf).amin()
    largest = torch.where(known, margins, -torch.inf).amax()
    moments = torch.stack([least, largest, margins.sum(), margins.square().sum()])
    return torch.cat([moments, counts.double()]).cpu()


def draw_histogram(writer: Any, tag: str, histograms: Sequence[Tensor], step: int) -> None:
    """Write the sum of results of :func:`margin_histogram`; nothing without a margin."""
    least, largest, sums, squares, *counts = torch.stack(list(histograms)).unbind(1)
    numbers = [int(count.sum()) for count in counts]
    if any(numbers):
        writer.add_histogram_raw(
            tag,
            min=least.min().item(),
            max=largest.max().item(),
            num=sum(numbers),
            sum=sums.sum().item(),
            sum_squares=squares.sum().item(),
            bucket_limits=EDGES[1:].tolist(),
            bucket_counts=numbers,
            global_step=step,
        )


Layout = dict[str, dict[str, list[Any]]]
"""A layout of custom scalars: by category and chart, the kind of the chart and its tags."""


def custom_scalars_layout(names: Sequence[str], layers: bool) -> Layout:
    """Return a layout for TensorBoard's custom scalars.

    Args:
        names: The statistics that are logged.
        layers: Whether they are also logged for each layer.

    Example:
        >>> custom_scalars_layout(["flip_rate"], layers=False)
        {'N:M masks': {'flip rate': ['Multiline', ['^(.+-)?nm/flip_rate$']]}}
    """
    # Tags are regular expressions that match from the start; a logger's prefix may come first.
    shared = {name: chart for chart, members in CHARTS.items() for name in members}
    layout: Layout = {"N:M masks": {}}
    if layers:  # one chart for each statistic, with a line for each layer
        layout["N:M layers"] = {
            name.replace("_", " "): ["Multiline", [f"^(.+-)?nm/{re.escape(name)}/"]]
            for name in names
            if name not in MODEL_ONLY
        }
    for name in names:
        title = shared.get(name, name.replace("_", " "))
        chart = layout["N:M masks"].setdefault(title, ["Multiline", []])
        chart[1].append(f"^(.+-)?nm/{name}$")
    return layout
