"""Accuracy over the estimated cycles of an Ethos-U85: dense and 2:4 models of several widths."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from benchmarks.ethos_u85 import NAME, STUDIES
from benchmarks.pictures.style import FONT, INK, KEPT, LOST, SERIES, Picture, plain
from benchmarks.tables.cycles import points
from lightning_nm.commands.study.analysis import Interval

STYLES = {
    "dense": ("dense", SERIES[4], "s"),
    "sr-ste": ("2:4, sr-ste", SERIES[0], "o"),
    "bi-mask": ("2:4, bi-mask", LOST, "o"),
}
KILOCYCLES = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Marks of the axis."""
TITLES = {"residual": "residual CNN", "mobile": "depthwise and pointwise convolutions"}


def data(kind: str) -> Any:
    """``{method: [[kilocycles, int8 accuracy in percent, its interval's half], ...]}`` of one kind of model."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for point in points(kind):
        values = list(point.int8_by_seed.values())
        half = 0.0
        if len(values) > 1:
            interval = Interval.of(values)
            half = (interval.high - interval.low) / 2
        found[point.variant.method].append([point.cycles / 1000, mean(values), half])
    return {method: sorted(rows) for method, rows in found.items()}


def draw(figure: Figure, found: Any, kind: str) -> None:
    """One line for each method."""
    axes = figure.subplots()
    plain(axes, TITLES[kind])
    for method, rows in found.items():
        label, colour, marker = STYLES.get(method, (method, KEPT, "o"))
        cycles, accuracies, halves = zip(*rows, strict=True)
        axes.errorbar(
            cycles,
            accuracies,
            halves,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.8,
            elinewidth=1,
            label=label,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(KILOCYCLES))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(
        "kilocycles of an inference on an Ethos-U85, estimated by Vela", fontsize=FONT, color=INK
    )
    axes.set_ylabel("int8 accuracy on Fashion-MNIST, %", fontsize=FONT, color=INK)
    axes.legend(fontsize=FONT - 1, frameon=False, loc="lower right")


def picture(kind: str) -> Picture:
    """The picture of one kind of model."""
    return Picture(partial(data, kind), partial(draw, kind=kind), (6.2, 3.8), f"{NAME}-{kind}.json")


def pictures() -> dict[str, Picture]:
    """Those whose results are there: the pages show every picture."""
    found = {f"cycles-{kind}": picture(kind) for kind in STUDIES}
    return {name: each for name, each in found.items() if each.can_be_drawn()}
