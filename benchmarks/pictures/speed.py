"""Training loss over seconds and over steps, sparse and dense, of a run of ``python -m studies.speed``."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, SERIES, Picture, plain
from benchmarks.tables.markdown import read_json
from studies.speed.curves import Curve, means

FILE = "speed.json"
COLOURS = {"sparse": SERIES[2], "dense": SERIES[0]}


def data() -> Any:
    """Each side's seconds, losses and their means, and what the picture says of the run."""
    found = read_json(FILE)
    setting, machine = found["setting"], found["machine"]
    curves = [
        Curve(**{key: side[key] for key in Curve.__dataclass_fields__})
        for side in found["sides"].values()
    ]
    over_seconds, over_steps = means(curves)
    names = {"sparse": f"sparse, {setting['pattern']} {setting['method']}", "dense": "dense"}
    return {
        "sides": {
            curve.name: {
                "label": f"{names[curve.name]}: {curve.tokens_per_s:,.0f} tokens/s",
                "ends": curve.ends,
                "losses": curve.losses,
                "over seconds": timed,
                "over steps": counted,
                "validation": curve.val_loss,
            }
            for curve, timed, counted in zip(curves, over_seconds, over_steps, strict=True)
        },
        "title": f"GPT of width {setting['width']}, {setting['layers']} layers, {curves[0].precision}; "
        f"{machine['cpu']}, {machine['threads']} threads",
    }


def draw(figure: Figure, found: Any) -> None:
    """Every step pale, means strong, and the loss on held-out text as a cross at the end."""
    left, right = figure.subplots(1, 2, sharey=True)
    plain(left, "over seconds")
    plain(right, "over steps")
    for name, side in found["sides"].items():
        steps = list(range(1, len(side["losses"]) + 1))
        for axes, x, smooth in ((left, side["ends"], "over seconds"), (right, steps, "over steps")):
            axes.plot(x, side["losses"], color=COLOURS[name], alpha=0.25, linewidth=1)
            axes.plot(x, side[smooth], color=COLOURS[name], linewidth=2, label=side["label"])
            if side["validation"] is not None:
                axes.plot(
                    x[-1:],
                    [side["validation"]],
                    "x",
                    color=COLOURS[name],
                    markersize=8,
                    markeredgewidth=2,
                )
    left.set_xlabel("seconds of training", fontsize=FONT, color=INK)
    right.set_xlabel("steps; crosses: loss on held-out text at the end", fontsize=FONT, color=INK)
    left.set_ylabel("training loss, nats per byte", fontsize=FONT, color=INK)
    figure.suptitle(found["title"], fontsize=FONT + 1, color=INK)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=2, fontsize=FONT, frameon=False
    )


PICTURE = Picture(data, draw, (9, 4.4), FILE)
