"""The picture of a study's report: paired differences to each baseline, for light and for dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_nm.callbacks.report.figures import (
    THEMES as THEMES,  # the themes that a study is drawn in
)
from lightning_nm.callbacks.report.figures import style_axes
from lightning_nm.commands.study.analysis import Comparison
from lightning_nm.commands.study.spec import Spec
from lightning_nm.commands.study.tables import Section
from lightning_nm.export.atomic_write import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Sizes in inches.
NAMES_WIDTH = 1.5  # of the names of variants, left of the panels
PANEL_WIDTH = 5.2
CAPTION_HEIGHT = 0.8
PANEL_HEIGHT = 1.2  # without its variants
VARIANT_HEIGHT = 0.42


def draw(path: Path, spec: Spec, found: Sequence[Section], theme: str) -> None:
    """Draw a panel for each grid point and baseline: means with 95 % intervals, and below them the pairs.

    Args:
        path: The PNG to write.
        spec: The study.
        found: The sections of its report.
        theme: A key of :data:`THEMES`.
    """
    from matplotlib.figure import Figure

    colours = THEMES[theme]
    compared_variants = len(spec.variants) - 1
    rows = max(1, len(found))
    columns = max(1, len(spec.baselines))
    width = NAMES_WIDTH + PANEL_WIDTH * columns
    panel_height = PANEL_HEIGHT + VARIANT_HEIGHT * compared_variants
    height = CAPTION_HEIGHT + panel_height * rows
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=colours["page"])
    panels = figure.subplots(rows, columns, squeeze=False)
    for section, panels_of_section in zip(found, panels, strict=True):
        for baseline, axes in zip(spec.baselines, panels_of_section, strict=True):
            comparisons = [one for one in section.comparisons if one.baseline == baseline]
            title = f"{section.title}: difference to {baseline}"
            _draw_panel(axes, title, comparisons, colours)
    better = "left" if spec.direction == "minimize" else "right"
    caption = f"{spec.metric}, paired by seed; better is to the {better}; bars are 95 % intervals, dots are pairs"
    figure.supxlabel(caption, fontsize=9, color=colours["text"])
    with replacing(path) as new:
        figure.savefig(new, dpi=130, format="png")


def _draw_panel(
    axes: Axes,
    title: str,
    comparisons: Sequence[Comparison],
    colours: dict[str, str],
) -> None:
    """Draw a row for each comparison, the first one on top."""
    style_axes(axes, colours, font_size=9)
    axes.set_title(title, fontsize=10, color=colours["text"], loc="left")
    axes.grid(axis="x", color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.axvline(0.0, color=colours["text"], linewidth=1)
    for row, comparison in enumerate(comparisons):
        _draw_comparison(axes, row, comparison, colours)
    variants = [comparison.variant for comparison in comparisons]
    axes.set_yticks(range(len(variants)), variants)
    axes.set_ylim(len(comparisons) - 0.4, -0.7)


def _draw_comparison(
    axes: Axes,
    row: int,
    comparison: Comparison,
    colours: dict[str, str],
) -> None:
    """Draw the pairs of a comparison, and above them its interval, mean and verdict."""
    colour = colours[comparison.verdict]
    heights = [row + 0.22] * len(comparison.differences)
    axes.plot(comparison.differences, heights, "o", color=colour, alpha=0.6, markersize=4, mew=0)
    interval = comparison.difference
    if interval is None:
        return
    # One pair has a mean, but no interval.
    if not math.isnan(interval.low):
        ends = [interval.low, interval.high]
        axes.plot(ends, [row, row], color=colour, linewidth=3, alpha=0.9)
    axes.plot(interval.mean, row, "D", color=colour, markersize=7, mec=colours["page"])
    place = (interval.mean, row)
    axes.annotate(
        comparison.verdict,
        place,
        xytext=(0, 6),
        textcoords="offset points",
        fontsize=8,
        color=colour,
        ha="center",
        va="bottom",
        # A background keeps the verdict readable above dots and lines of the grid.
        bbox={"facecolor": colours["page"], "edgecolor": "none", "pad": 0.5},
    )
