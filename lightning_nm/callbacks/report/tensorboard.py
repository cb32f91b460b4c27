"""Histograms, images, text and the layout of custom scalars in TensorBoard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_nm.callbacks.report.heat_map import draw_heat_map
from lightning_nm.callbacks.report.history import MAPS, LayerHistory
from lightning_nm.callbacks.report.pictures import EDGES, Histogram
from lightning_nm.callbacks.report.tables import kernel_rows, layer_rows, summary_rows
from lightning_nm.kernels import Router
from lightning_nm.sparsifier import NMSparsifier

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
            if not isinstance(logger, TensorBoardLogger) or any(logger is failed for failed in self._failed):
                continue
            try:
                draw(logger.experiment)
            except Exception as error:
                self._failed.append(logger)
                rank_zero_warn(
                    f"MaskMonitor: {type(logger).__name__} gets scalars alone from now on, it refused a picture, a "
                    f"histogram or a text ({type(error).__name__}: {error})"
                )


def draw_histogram(writer: Any, tag: str, histogram: Histogram, step: int) -> None:
    """Write a histogram."""
    writer.add_histogram_raw(
        tag,
        min=histogram.low,
        max=histogram.high,
        num=sum(histogram.counts),
        sum=histogram.total,
        sum_squares=histogram.squares,
        bucket_limits=EDGES[1:].tolist(),
        bucket_counts=histogram.counts,
        global_step=step,
    )


def custom_scalars_layout(names: Sequence[str], layers: bool) -> dict[str, dict[str, list[Any]]]:
    """Return a layout for TensorBoard's custom scalars, given the logged statistics and whether layers are logged."""
    chart_of = {name: chart for chart, members in CHARTS.items() for name in members}
    charts: dict[str, list[str]] = {}
    for name in names:
        charts.setdefault(chart_of.get(name, name.replace("_", " ")), []).append(name)
    # Tags are regular expressions that match from the start; a logger's prefix may come first.
    layout = {"N:M masks": {chart: ["Multiline", [f"^(.+-)?nm/{n}$" for n in some]] for chart, some in charts.items()}}
    if layers:
        layout["N:M layers"] = {
            name.replace("_", " "): ["Multiline", [f"^(.+-)?nm/{re.escape(name)}/"]]
            for name in names
            if name not in MODEL_ONLY
        }
    return layout


def write_map_rows(writer: Any, layers: Sequence[str], step: int, suffix: str = "") -> None:
    """Write the names of the layers of :func:`write_map_column` from this step on."""
    writer.add_text(f"nm/map_rows{suffix}", f"```json\n{json.dumps(list(layers), indent=0)}\n```", step)


def write_map_column(writer: Any, column: Tensor, step: int, suffix: str = "") -> None:
    """Write a column of the heat maps as numbers, which TensorBoard's pages do not show."""
    writer.add_tensor(f"nm/maps{suffix}", column.float(), step)


def draw_maps(writer: Any, history: LayerHistory, step: int, suffix: str = "") -> None:
    """Draw the heat map of each statistic."""
    for place, name in enumerate(MAPS):
        title = f"{name.replace('_', ' ')} of layers over steps"
        picture = draw_heat_map(title, history.layers, history.steps, history.values[:, place], name == "flip_rate")
        writer.add_image(f"nm/{name}_map{suffix}", picture, step)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for row in rows:
        lines.append(" | ".join(re.sub(r"([\\|*_])", r"\\\1", " ".join(cell.split())) or " " for cell in row))
    return "\n".join(f"| {line} |" for line in lines)


def layers_markdown(sparsifier: NMSparsifier, router: Router | None) -> str:
    """Return the table of layers in Markdown, with the kernels of a router after its first products."""
    kernels: dict[str, dict[str, str]] = {}
    for used in router.used() if router is not None else ():
        kernels.setdefault(used.product.layer, {})[used.product.key.gemm] = used.kernel
    rows = []
    for row in layer_rows(sparsifier):
        kernel = ", ".join(f"{gemm}: {name}" for gemm, name in kernels.get(row[0], {}).items())
        rows.append((*row, kernel or "dense product"))
    return markdown_table(("layer", "shape", "pattern", "method", "fwd", "dgrad", "wgrad", "why", "kernel"), rows)


def summary_markdown(sparsifier: NMSparsifier, metrics: dict[str, Any]) -> str:
    """Return the statistics of a finished fit in Markdown."""
    return markdown_table(("statistic", "value", "meaning"), summary_rows(sparsifier, metrics))


def kernels_markdown(router: Router) -> str:
    """Return the kernels that ran in Markdown."""
    return markdown_table(*kernel_rows(router))
