"""SuPar: where the best learning rate lies with and without it, and what models of as many nonzeros reach."""

from __future__ import annotations

from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, KEPT, LOST, QUIET, SERIES, Picture, plain
from benchmarks.tables.markdown import read_csv
from benchmarks.tables.scale import METRIC, losses_by_rate
from lightning_nm.commands.study.analysis import Interval

RESULTS = "study-scale-equal-nonzeros-python-source.csv"
CURVES = {
    "dense-128": ("dense, width 128", SERIES[4], "-"),
    "asp-1:4-128": ("1:4, width 128", LOST, (0, (4, 3))),
    "asp-1:4-128-supar": ("1:4, width 128, SuPar", LOST, "-"),
    "asp-1:16-256": ("1:16, width 256", SERIES[0], (0, (4, 3))),
    "asp-1:16-256-supar": ("1:16, width 256, SuPar", SERIES[0], "-"),
}
MODELS = {
    "dense-64": "dense, width 64\n98 thousand weights",
    "dense-96": "dense, width 96\n221 thousand weights",
    "dense-128": "dense, width 128\n393 thousand weights",
    "asp-1:4-128-supar": "1:4, width 128\n98 thousand nonzeros",
    "asp-1:16-256-supar": "1:16, width 256\n98 thousand nonzeros",
    "bame-1:16-256-supar": "1:16, width 256, BAME\n98 thousand nonzeros",
}
WORST_SHOWN = 2.8  # bits; curves that diverge leave the picture


def data() -> Any:
    """The curves of the search, and every seed of the comparison."""
    losses = losses_by_rate()
    curves = {variant: sorted(losses[variant].items()) for variant in CURVES}
    seeds: dict[str, list[float]] = {variant: [] for variant in MODELS}
    for row in read_csv(RESULTS):
        if row["variant"] in seeds and METRIC in row:
            seeds[row["variant"]].append(row[METRIC])
    return {"curves": curves, "seeds": seeds}


def draw(figure: Figure, found: Any) -> None:
    """The learning rates on the left, the models on the right."""
    left, right = figure.subplots(1, 2, width_ratios=[1.05, 1])
    plain(left, "learning rate of the blocks (one seed)")
    for variant, (label, colour, style) in CURVES.items():
        rates, losses = zip(*found["curves"][variant], strict=True)
        left.plot(rates, losses, "o", color=colour, markersize=3.5)
        left.plot(rates, losses, color=colour, linestyle=style, linewidth=1.8, label=label)
    left.set_xscale("log", base=2)
    left.set_xticks(rates, [f"{rate:g}" for rate in rates])
    left.set_ylim(1.45, WORST_SHOWN)
    left.set_xlabel("relative to the other parameters' rate", fontsize=FONT, color=INK)
    left.set_ylabel("bits per byte", fontsize=FONT, color=INK)
    left.legend(fontsize=FONT - 2, frameon=False)

    plain(right, "each at its best rate (held-out files)")
    for row, variant in enumerate(MODELS):
        losses = found["seeds"][variant]
        colour = SERIES[4] if variant.startswith("dense") else KEPT
        interval = Interval.of(losses)
        right.scatter(losses, [row + 0.22] * len(losses), s=12, color=colour, alpha=0.6)
        right.plot([interval.low, interval.high], [row, row], color=colour, linewidth=3)
        right.plot([mean(losses)], [row], "o", color=colour, markersize=7)
    right.set_yticks(range(len(MODELS)), list(MODELS.values()), color=QUIET)
    right.invert_yaxis()
    right.set_xlabel(
        "bits per byte\nbars: 95 % intervals of the mean; dots: seeds", fontsize=FONT, color=INK
    )


PICTURE = Picture(data, draw, (9.4, 4.4), RESULTS)
