"""Perplexity of SmolLM2 on held-out text over the tokens of a fine-tuning, dense and pruned to 2:4."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, KEPT, SERIES, Picture, plain
from benchmarks.tables.markdown import read_csv

FILE = "smollm2-training.csv"
COLOURS = {"dense": SERIES[4], "2:4": KEPT}


def data() -> Any:
    """``{variant: {planned steps: [[tokens, perplexity], ...]}}``."""
    found: dict[str, dict[int, list[list[float]]]] = {variant: {} for variant in COLOURS}
    for row in read_csv(FILE):
        if row["seed"] == 0:
            points = found[row["variant"]].setdefault(int(row["planned_steps"]), [])
            points.append([row["tokens"], row["perplexity"]])
    return found


def draw(figure: Figure, found: Any) -> None:
    """A curve for the long trainings, a point for the ends of the short ones; the learning rate falls to zero there."""
    axes = figure.subplots()
    plain(axes)
    for variant, trainings in found.items():
        for steps, points in trainings.items():
            tokens, perplexity = zip(*points, strict=True)
            thousands = [count / 1000 for count in tokens]
            axes.plot(thousands, perplexity, "o-", markersize=4, color=COLOURS[variant])
            # Of shorter trainings the end alone is known: its name stands on the side away from the curve.
            single = len(points) == 1
            below = single and variant == "dense"
            axes.annotate(
                f"{variant}, {steps} steps",
                (thousands[-1], perplexity[-1]),
                (0, -14 if below else 6),
                textcoords="offset points",
                ha="left" if single else "right",
                fontsize=FONT,
                color=COLOURS[variant],
            )
    axes.set_yscale("log")
    axes.set_yticks([8, 10, 12, 15, 20, 30], ["8", "10", "12", "15", "20", "30"])
    axes.minorticks_off()
    axes.set_xlabel("thousands of tokens of training", fontsize=FONT, color=INK)
    axes.set_ylabel("perplexity of held-out text", fontsize=FONT, color=INK)


PICTURE = Picture(data, draw, (8.0, 3.6), FILE)
