"""Which method leads after how many steps: the differences to dense training over the length of the training."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, KEPT, LOST, QUIET, SERIES, Picture, plain
from benchmarks.tables.length import METHODS, STUDIES, over_steps
from benchmarks.tables.methods import PATTERNS

COLOURS = dict(zip(METHODS, (KEPT, LOST, SERIES[0], SERIES[1], SERIES[3], SERIES[4]), strict=True))
TITLES = {"source": "source, read once", "text": "text, 2 to 6 epochs"}


def data() -> Any:
    """By task, pattern and method: the steps, the mean, and the ends of the 95 % interval."""
    shown: dict[str, Any] = {}
    for task in STUDIES:
        found = over_steps(task)
        shown[task] = {
            pattern: {
                method: [
                    [steps, each.mean, each.low, each.high]
                    for steps, each in found[method, pattern].items()
                ]
                for method in METHODS
            }
            for pattern in PATTERNS
        }
    return shown


def draw(figure: Figure, shown: Any) -> None:
    """One row a task, one panel a pattern."""
    grid = figure.subplots(len(shown), len(PATTERNS), squeeze=False, sharex=True)
    for row, (task, patterns) in zip(grid, shown.items(), strict=True):
        for axes, (pattern, methods) in zip(row, patterns.items(), strict=True):
            plain(axes, f"{pattern}, {TITLES[task]}")
            _curves(axes, methods)
        row[0].set_ylabel("bits per byte, minus dense", fontsize=FONT, color=INK)
    for axes in grid[-1]:
        axes.set_xlabel("steps", fontsize=FONT, color=INK)
    grid[0][0].legend(fontsize=FONT - 2, frameon=False)


def _curves(axes: Axes, methods: dict[str, Any]) -> None:
    axes.axhline(0, color=QUIET, linewidth=1)
    for place, (method, points) in enumerate(methods.items()):
        steps, means, lows, highs = zip(*points, strict=True)
        # Side by side, so that intervals at the same number of steps do not hide each other.
        shifted = [1.03 ** (place - (len(methods) - 1) / 2) * step for step in steps]
        colour = COLOURS[method]
        axes.plot(shifted, means, "o-", color=colour, markersize=4, linewidth=1.6, label=method)
        axes.vlines(shifted, lows, highs, color=colour, linewidth=1.2, alpha=0.7)
    axes.set_xscale("log")
    ticks = sorted({steps for studies in STUDIES.values() for steps in studies})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


PICTURE = Picture(data, draw, (9.4, 6.4), "study-length-2400-python-source.csv")
