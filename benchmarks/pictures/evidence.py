"""BAME's evidence: how it accumulates in one block, and what that gains over a fixed mask and SR-STE."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, KEPT, LOST, QUIET, SERIES, Picture, plain
from benchmarks.tables.markdown import read_csv
from lightning_nm.commands.study.analysis import Interval
from lightning_nm.methods.bame.exchange import Evidence

STEPS, RATE, KEPT_WEIGHT = 60, 0.015, 0.25
STUDIES = {
    "images, 1:16": ("bame-fashion-mnist", "1:16", "test_acc", 100.0),
    "text, 1:16": ("bame-help-topics", "1:16", "test_bits_per_byte", -100.0),
    "text, 1:8": ("bame-help-topics-denser", "1:8", "test_bits_per_byte", -100.0),
    "text, 2:4": ("bame-help-topics-denser", "2:4", "test_bits_per_byte", -100.0),
}


def data() -> Any:
    """The evidence of one block of 1:4 after every gradient, and the paired gains of the studies."""
    gains = {}
    for title, (name, pattern, metric, scale) in STUDIES.items():
        rows = [
            row
            for row in read_csv(f"study-{name}.csv")
            if row["pattern"] == pattern and metric in row
        ]
        of = {(row["variant"], row["seed"]): scale * row[metric] for row in rows}
        pairs = [of["bame", seed] - of["sr-ste", seed] for variant, seed in of if variant == "bame"]
        interval = Interval.of(pairs)
        gains[title] = {
            "pairs": pairs,
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
        }
    return {"block": _block(), "gains": gains}


def _block() -> list[list[float]]:
    """|U| of the pruned entries after every gradient; the gradient of the third has a mean, the others are noise."""
    noise = torch.randn(STEPS, 4, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[True, False, False, False]])
    weight = torch.tensor([[KEPT_WEIGHT, 0.0, 0.0, 0.0]])
    evidence = Evidence.none(weight)
    found = [[0.0, 0.0, 0.0]]
    for step in range(STEPS):
        grad = noise[step : step + 1] - torch.tensor([[0.0, 0.0, 0.75, 0.0]])
        evidence.add(grad, mask, torch.tensor(RATE))
        found.append(evidence.value.abs()[0, 1:].tolist())
    return found


def draw(figure: Figure, found: Any) -> None:
    """The block on the left, the studies on the right."""
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    plain(left, "one block of 1:4 (an example)")
    curves = list(zip(*found["block"], strict=True))
    for number, curve in enumerate(curves):
        steady = number == 1
        colour = SERIES[0] if steady else SERIES[4]
        left.plot(curve, color=colour, linewidth=2.2 if steady else 1.3)
    crossing = next(step for step, value in enumerate(curves[1]) if value > KEPT_WEIGHT)
    left.axhline(KEPT_WEIGHT, color=KEPT, linewidth=2)
    left.text(
        STEPS, KEPT_WEIGHT - 0.022, "|W| of the kept entry", fontsize=FONT, color=KEPT, ha="right"
    )
    left.text(2, 0.41, "|U|: gradients with a mean", fontsize=FONT, color=SERIES[0])
    left.text(STEPS, 0.165, "|U|: gradients that cancel", fontsize=FONT, color=QUIET, ha="right")
    left.plot([crossing], [curves[1][crossing]], "o", color=LOST, markersize=8)
    left.annotate(
        "from here an adaptation\nexchanges the two",
        (crossing, curves[1][crossing]),
        (2, 0.31),
        fontsize=FONT,
        color=LOST,
        arrowprops={"arrowstyle": "-", "color": LOST},
    )
    left.set_xlabel("gradients", fontsize=FONT, color=INK)
    left.set_ylabel("size", fontsize=FONT, color=INK)
    plain(right, "bame against sr-ste (measured)")
    for row, (_, gain) in enumerate(found["gains"].items()):
        right.scatter(
            gain["pairs"], [row + 0.18] * len(gain["pairs"]), s=14, color=SERIES[4], alpha=0.7
        )
        right.plot([gain["low"], gain["high"]], [row, row], color=SERIES[0], linewidth=3)
        right.plot([gain["mean"]], [row], "o", color=SERIES[0], markersize=7)
    right.axvline(0, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)))
    right.set_yticks(range(len(STUDIES)), list(found["gains"]))
    right.invert_yaxis()
    right.set_xlabel(
        "points, or 1/100 bit per byte, that bame is better\nbars: 95 % intervals of the mean; dots: seeds",
        fontsize=FONT,
        color=INK,
    )


PICTURE = Picture(data, draw, (9, 4.2))
