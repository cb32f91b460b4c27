"""Histograms, heat maps, text and the layout of custom scalars in TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_nm.callbacks.report.heat_maps import block_margins
from lightning_nm.callbacks.report.tables import layer_rows
from lightning_nm.kernels import Router
from lightning_nm.nn.layer import NMLayer
from lightning_nm.sparsifier import NMSparsifier

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


class TensorBoardWriter:
    """Writes to the TensorBoard loggers of a Trainer; other loggers get scalars only.

    After its first failure a logger is not used again, with one warning; training continues.
    """

    def __init__(self) -> None:
        self._failed: list[Logger] = []

    @staticmethod
    def has_logger(trainer: pl.Trainer) -> bool:
        """Whether the Trainer has a TensorBoard logger: the same in all processes, and after failures on rank 0."""
        return any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)

    def write(self, trainer: pl.Trainer, draw: Callable[[Any], None]) -> None:
        """Call ``draw`` with each ``SummaryWriter`` on rank 0."""
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            # By identity: loggers may define what equal means.
            has_failed = any(logger is failed for failed in self._failed)
            if has_failed or not isinstance(logger, TensorBoardLogger):
                continue
            try:
                draw(logger.experiment)
            # A full disk, a missing package or a strange version: no log is worth a training.
            except Exception as error:
                self._failed.append(logger)
                rank_zero_warn(
                    f"MaskMonitor: {type(logger).__name__} gets scalars alone from now on, it refused a picture, a "
                    f"histogram or a text ({type(error).__name__}: {error})"
                )


@torch.no_grad()
def margin_histogram(layer: NMLayer) -> Tensor:
    """Count the margins of all blocks of a layer with a forward mask, with one device synchronization.

    With sharded weights all processes must call it.

    Returns:
        float64 ``[44]`` on the CPU: the least and the largest margin, their sum, the sum of their squares, and the
        counts between :data:`EDGES`, where an edge belongs to the bin above it, and 1 to the last bin.

    Example:
        >>> from torch import nn
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
    together = torch.stack(list(histograms))
    counts = together[:, 4:].sum(0)
    if not counts.any():
        return
    writer.add_histogram_raw(
        tag,
        min=together[:, 0].min().item(),
        max=together[:, 1].max().item(),
        num=int(counts.sum()),
        sum=together[:, 2].sum().item(),
        sum_squares=together[:, 3].sum().item(),
        bucket_limits=EDGES[1:].tolist(),
        bucket_counts=counts.int().tolist(),
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
    model_charts: dict[str, list[Any]] = {}
    # One chart for each statistic of layers, with a line for each layer.
    layer_charts: dict[str, list[Any]] = {}
    for name in names:
        title = name.replace("_", " ")
        chart = model_charts.setdefault(shared.get(name, title), ["Multiline", []])
        chart[1].append(f"^(.+-)?nm/{name}$")
        if name not in MODEL_ONLY:
            layer_charts[title] = ["Multiline", [f"^(.+-)?nm/{re.escape(name)}/"]]
    return {"N:M masks": model_charts, **({"N:M layers": layer_charts} if layers else {})}


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Return a table in Markdown.

    Example:
        >>> print(markdown_table(["layer", "shape"], [["net_1", "8 x 8"]]))
        | layer | shape |
        | --- | --- |
        | net\_1 | 8 x 8 |
    """
    lines = []
    for cells in (head, ["---" for _ in head], *rows):
        # In one line, with Markdown's special characters escaped; an empty cell needs a space.
        texts = [re.sub(r"([\\|*_])", r"\\\1", " ".join(cell.split())) or " " for cell in cells]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def layers_markdown(sparsifier: NMSparsifier, router: Router | None) -> str:
    """Return the table of layers in Markdown, with the kernels of a router after its first products."""
    kernels_of_layer: dict[str, dict[str, str]] = {}  # by layer and GEMM
    used_kernels = [] if router is None else router.used()
    for used in used_kernels:
        product = used.product
        kernels = kernels_of_layer.setdefault(product.layer, {})
        kernels[product.key.gemm] = used.kernel  # the last one, if it changed
    rows = []
    for row in layer_rows(sparsifier):
        name = row[0]
        kernels = kernels_of_layer.get(name, {})
        text = ", ".join(f"{gemm}: {kernel}" for gemm, kernel in kernels.items())
        # Products that no router has seen ran as torch computes them.
        rows.append((*row, text or "dense product"))
    head = ("layer", "shape", "pattern", "method", "fwd", "dgrad", "wgrad", "why", "kernel")
    return markdown_table(head, rows)
