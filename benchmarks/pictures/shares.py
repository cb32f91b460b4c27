"""Where the time of a training step goes: dense and N:M next to each other at several widths."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, KEPT, LOST, QUIET, SERIES, Picture, plain
from benchmarks.step_shares import (
    ATTENTION,
    DENSE,
    GROUPS,
    LAYOUTS,
    MASKS,
    OPTIMIZER,
    REST,
    SPARSE,
)
from benchmarks.tables.markdown import read_json

RESULTS = "step-shares.json"
COLOURS = {
    ATTENTION: SERIES[3],
    DENSE: SERIES[0],
    SPARSE: KEPT,
    LAYOUTS: SERIES[1],
    MASKS: SERIES[2],
    OPTIMIZER: LOST,
    REST: SERIES[4],
}


def data() -> Any:
    """``{width: [[method, {group: milliseconds}], ...]}``."""
    found: dict[int, list[Any]] = {}
    for row in read_json(RESULTS)["steps"]:
        found.setdefault(row["width"], []).append([row["method"], row["groups"]])
    return found


def draw(figure: Figure, found: Any) -> None:
    """A panel for each width, a bar for each training, as long as its step takes."""
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, (width, rows) in zip(panels, found.items(), strict=True):
        plain(axes, f"width {width}")
        left = [0.0] * len(rows)
        for group in GROUPS:
            lengths = [groups[group] for _, groups in rows]
            axes.barh(range(len(rows)), lengths, left=left, color=COLOURS[group], label=group)
            left = [start + length for start, length in zip(left, lengths, strict=True)]
        dense = left[0]
        for place, end in enumerate(left):
            axes.text(
                end,
                place,
                f"  {end:.0f} ms, {dense / end:.2f}x",
                va="center",
                fontsize=FONT - 1,
                color=QUIET,
            )
        axes.set_yticks(range(len(rows)), [method for method, _ in rows], color=INK)
        axes.set_xlim(0, 1.18 * max(left))
        axes.invert_yaxis()
    panels[-1].set_xlabel("milliseconds of a step, one thread", fontsize=FONT, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=4, fontsize=FONT, frameon=False
    )


PICTURE = Picture(data, draw, (9, 7.5), RESULTS)
