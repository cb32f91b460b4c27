"""The gain of GEMMs over the pattern, on the CPUs that were measured, with the line 0.58 M/N."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, LOST, QUIET, SERIES, Picture, plain
from benchmarks.tables.cpu import PRODUCTS, fastest
from benchmarks.tables.markdown import read_json

GEMMS = ("forward", "dgrad", "wgrad")
BOUND = 0.58
"""An estimate from the rates of the EPYC's instructions: this times M/N."""


def data() -> Any:
    """``{product: {CPU and precision: [[M/N, gain], ...]}}``."""
    found: dict[str, dict[str, list[list[float]]]] = {
        gemm: {title: [] for title in PRODUCTS} for gemm in GEMMS
    }
    for title, (file, part, dtype) in PRODUCTS.items():
        for row in read_json(file)[part]["products"]:
            if row["dtype"] == dtype:
                n, m = map(int, row["pattern"].split(":"))
                dense, sparse = fastest(row["ms"])
                found[row["product"]][title].append([m / n, dense / sparse])
    return found


def draw(figure: Figure, found: Any) -> None:
    """A panel for each GEMM, both axes logarithmic."""
    panels = figure.subplots(1, 3, sharey=True)
    for axes, gemm in zip(panels, GEMMS, strict=True):
        plain(axes, gemm)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ends = [2.0, 16.0]
        axes.plot(
            ends,
            [BOUND * end for end in ends],
            color=LOST,
            linewidth=1.5,
            label="0.58 M/N, an estimate",
        )
        axes.axhline(1, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)))
        for number, (title, points) in enumerate(found[gemm].items()):
            x, y = zip(*points, strict=True)
            shifted = [value * 2 ** (0.12 * (number - 1)) for value in x]
            axes.scatter(
                shifted, y, s=30, color=SERIES[number], marker="osD"[number], label=title, zorder=3
            )
        axes.set_xticks([2, 4, 8, 16], ["2:4", "1:4", "1:8", "1:16"])
        axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5x", "1x", "2x", "4x", "8x"])
        axes.minorticks_off()
        axes.set_xlabel("pattern", fontsize=FONT, color=INK)
    panels[0].set_ylabel("dense time / sparse time", fontsize=FONT, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=4, fontsize=FONT, frameon=False
    )


PICTURE = Picture(data, draw, (9, 4))
