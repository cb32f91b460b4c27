"""Which method leads after how many steps: the differences to dense training over the length of the training."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, KEPT, LOST, QUIET, SERIES, Picture, plain
from benchmarks.tables.default import over_steps
from benchmarks.tables.methods import PATTERNS

COLOURS = {
    "bame": KEPT,
    "asp": LOST,
    "sr-ste": SERIES[0],
    "bi-mask": SERIES[1],
    "transposable": SERIES[3],
    "rigl": SERIES[4],
}


def data() -> Any:
    """By pattern and method: the steps, the mean, and the ends of the 95 % interval."""
    found = over_steps()
    return {
        pattern: {
            method: [
                [steps, each.mean, each.low, each.high]
                for steps, each in sorted(found[method, pattern].items())
            ]
            for method in COLOURS
        }
        for pattern in PATTERNS
    }


def draw(figure: Figure, found: Any) -> None:
    """One panel a pattern."""
    for axes, (pattern, methods) in zip(figure.subplots(1, 3), found.items(), strict=True):
        plain(axes, f"{pattern}, minus dense")
        axes.axhline(0, color=QUIET, linewidth=1)
        for place, (method, points) in enumerate(methods.items()):
            if not points:
                continue
            steps, means, lows, highs = zip(*points, strict=True)
            # Side by side, so that intervals at the same number of steps do not hide each other.
            shifted = [1.03 ** (place - 2.5) * step for step in steps]
            colour = COLOURS[method]
            axes.plot(shifted, means, "o-", color=colour, markersize=4, linewidth=1.6, label=method)
            axes.vlines(shifted, lows, highs, color=colour, linewidth=1.2, alpha=0.7)
        axes.set_xscale("log")
        ticks = sorted({int(point[0]) for points in methods.values() for point in points})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("steps", fontsize=FONT, color=INK)
    first = figure.axes[0]
    first.set_ylabel("bits per byte", fontsize=FONT, color=INK)
    first.legend(fontsize=FONT - 2, frameon=False)


PICTURE = Picture(data, draw, (9.4, 3.8), "study-length-2400-python-source.csv")
