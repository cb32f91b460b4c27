"""Perplexity of SmolLM2 over its file size and the time of a token: dense by several runtimes, and packed."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, KEPT, LOST, SERIES, Picture, plain
from benchmarks.tables.smollm2 import FILE, rows_by_name

COLOURS = {
    "torch": SERIES[4],
    "onnxruntime": SERIES[1],
    "openvino": SERIES[2],
    "llama.cpp": LOST,
    "packed": KEPT,
}
"""Of the runtimes that are shown, by the first word of a row's name."""

COSTS = {"megabytes of the file": "bytes", "milliseconds for each token": "token"}


def data() -> Any:
    """``{runtime: [[label, perplexity, megabytes, milliseconds], ...]}``."""
    found: dict[str, list[list[Any]]] = {runtime: [] for runtime in COLOURS}
    for name, row in rows_by_name().items():
        runtime, _, label = name.partition(" ")
        if runtime in found and row["perplexity"] and "token" in row["ms"]:
            found[runtime].append(
                [label, row["perplexity"], row["bytes"] / 1e6, row["ms"]["token"]]
            )
    return found


def draw(figure: Figure, found: Any) -> None:
    """A panel for each cost; both axes are logarithmic."""
    panels = figure.subplots(1, len(COSTS), sharey=True)
    for number, (axes, cost) in enumerate(zip(panels, COSTS, strict=True)):
        plain(axes, "")
        for runtime, points in found.items():
            colour = COLOURS[runtime]
            places = [(point[2 + number], point[1]) for point in points]
            marker = "o" if runtime == "packed" else "x"
            axes.scatter(*zip(*places, strict=True), color=colour, marker=marker, label=runtime)
            for (label, *_), place in zip(points, places, strict=True):
                style: Any = {"fontsize": FONT - 3, "color": colour, "rotation": 45}
                axes.annotate(label, place, (2, 4), textcoords="offset points", **style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = axes.get_xlim()
        ticks = [k * 10**e for e in range(4) for k in (1, 2, 5) if low <= k * 10**e <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks([8, 10, 15, 20, 30, 50], ["8", "10", "15", "20", "30", "50"])
        axes.minorticks_off()
        axes.set_xlabel(cost, fontsize=FONT, color=INK)
    panels[0].set_ylabel("perplexity of held-out text", fontsize=FONT, color=INK)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=5,
        fontsize=FONT,
        frameon=False,
    )


PICTURE = Picture(data, draw, (9.0, 4.2), FILE)
