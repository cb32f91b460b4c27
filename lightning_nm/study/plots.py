"""The picture of a report: paired differences to each baseline, for light and for dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_nm.export.safetensors_file import replacing
from lightning_nm.study.analysis import Comparison
from lightning_nm.study.report import Section
from lightning_nm.study.spec import Spec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Page, text, lines of the grid, and the verdicts; the latter differ in lightness, not in hue alone.
THEMES: dict[str, dict[str, str]] = {
    "light": {
        **{"page": "#ffffff", "text": "#1f2328", "grid": "#d0d7de"},
        **{"better": "#1a7f37", "worse": "#bc4c00", "undecided": "#6e7781"},
    },
    "dark": {
        **{"page": "#0d1117", "text": "#e6edf3", "grid": "#30363d"},
        **{"better": "#56d364", "worse": "#ffa657", "undecided": "#8b949e"},
    },
}


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
    variants = len(spec.variants) - 1
    rows, columns = max(1, len(found)), max(1, len(spec.baselines))
    size = (1.5 + 5.2 * columns, 0.8 + rows * (1.2 + 0.42 * variants))
    figure = Figure(figsize=size, layout="constrained", facecolor=colours["page"])
    grid = figure.subplots(rows, columns, squeeze=False)
    for section, line in zip(found, grid, strict=True):
        for baseline, axes in zip(spec.baselines, line, strict=True):
            comparisons = [c for c in section.comparisons if c.baseline == baseline]
            _panel(axes, comparisons, colours)
            axes.set_title(f"{section.title}: difference to {baseline}", fontsize=10, color=colours["text"], loc="left")
    better = "left" if spec.direction == "minimize" else "right"
    caption = f"{spec.metric}, paired by seed; better is to the {better}; bars are 95 % intervals, dots are pairs"
    figure.supxlabel(caption, fontsize=9, color=colours["text"])
    with replacing(path) as new:
        figure.savefig(new, dpi=130, format="png")


def _panel(axes: Axes, comparisons: Sequence[Comparison], colours: dict[str, str]) -> None:
    axes.set_facecolor(colours["page"])
    axes.grid(axis="x", color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.axvline(0.0, color=colours["text"], linewidth=1)
    for height, c in enumerate(comparisons):
        colour = colours[c.verdict]
        axes.plot(
            c.differences, [height + 0.22] * len(c.differences), "o", color=colour, alpha=0.6, markersize=4, mew=0
        )
        if c.difference is None:
            continue
        if not math.isnan(c.difference.low):
            axes.plot([c.difference.low, c.difference.high], [height, height], color=colour, linewidth=3, alpha=0.9)
        axes.plot(c.difference.mean, height, "D", color=colour, markersize=7, mec=colours["page"])
        label: dict[str, Any] = {"fontsize": 8, "color": colour, "ha": "center", "va": "bottom"}
        label["bbox"] = {"facecolor": colours["page"], "edgecolor": "none", "pad": 0.5}
        axes.annotate(c.verdict, (c.difference.mean, height), xytext=(0, 6), textcoords="offset points", **label)
    axes.set_yticks(range(len(comparisons)), [c.variant for c in comparisons])
    axes.set_ylim(len(comparisons) - 0.4, -0.7)
    axes.tick_params(colors=colours["text"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(colours["grid"])
