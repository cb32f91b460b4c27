"""Accuracy of dense and N:M models over the size of their files in int8, and over their latency in any precision."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, KEPT, LOST, SERIES, Picture, plain
from benchmarks.tables.fronts import MLP_INT8, points
from lightning_nm.commands.study.analysis import Interval

STYLES = {
    "": ("dense", SERIES[4], "s"),
    "1:4": ("1:4", LOST, "o"),
    "1:8": ("1:8", KEPT, "o"),
    "1:16": ("1:16", SERIES[0], "o"),
}
TICKS = [digit * 10**power for power in range(-2, 5) for digit in (1, 2, 5)]


def data() -> Any:
    """``{pattern: [[accuracy, its interval's half, kilobytes, milliseconds of each batch], ...]}``."""
    found: dict[str, list[list[float]]] = {pattern: [] for pattern in STYLES}
    for point in points(MLP_INT8):
        interval = Interval.of(list(point.by_seed.values()))
        latencies = [point.ms[shape] for shape in MLP_INT8.shapes]
        found[point.variant.pattern].append(
            [point.mean, (interval.high - interval.low) / 2, point.size / 1000, *latencies]
        )
    return found


def draw(figure: Figure, found: Any) -> None:
    """A panel for each cost."""
    costs = ["kilobytes of the file, int8"]
    costs += [f"milliseconds for {what}" for what in MLP_INT8.shapes.values()]
    panels = figure.subplots(1, len(costs), sharey=True)
    for number, (axes, cost) in enumerate(zip(panels, costs, strict=True)):
        plain(axes, "")
        for pattern, rows in found.items():
            label, colour, marker = STYLES[pattern]
            rows = sorted(rows, key=lambda row: row[2])
            axes.errorbar(
                [row[2 + number] for row in rows],
                [row[0] for row in rows],
                [row[1] for row in rows],
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1.8 if pattern else 2.4,
                elinewidth=1,
                label=label,
            )
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(cost, fontsize=FONT, color=INK)
    panels[0].set_ylabel("accuracy on Fashion-MNIST, %", fontsize=FONT, color=INK)
    panels[0].legend(fontsize=FONT - 1, frameon=False, loc="lower right")


PICTURE = Picture(data, draw, (9.4, 3.6), MLP_INT8.results, has_dark=True)
