"""The coordinate check of SuPar: sizes of activations over ten steps, at all densities."""

from __future__ import annotations

from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, Picture, plain
from benchmarks.tables.markdown import read_json

RESULTS = "coordinate-check.json"
WIDTH = 256
TITLES = {None: "without scale", "supar": 'scale="supar"'}


def data() -> Any:
    """The curves of one width: by scale, then by pattern."""
    curves: dict[str, dict[str, list[float]]] = {}
    for run in read_json(RESULTS)["runs"]:
        if run["width"] == WIDTH:
            curves.setdefault(TITLES[run["scale"]], {})[run["pattern"]] = run["sizes"]
    return curves


def draw(figure: Figure, found: Any) -> None:
    """One panel without the scale, one with it."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, curves) in zip(panels, found.items(), strict=True):
        plain(axes, title)
        shades = colormaps["viridis"]
        for number, (pattern, sizes) in enumerate(curves.items()):
            colour = shades(0.9 * number / max(len(curves) - 1, 1))
            axes.plot(sizes, color=colour, linewidth=2, label=pattern)
        axes.set_xlabel("training steps", fontsize=FONT, color=INK)
    panels[0].set_ylabel("root mean square of the activations", fontsize=FONT, color=INK)
    panels[0].legend(fontsize=FONT - 1, frameon=False, title="weights")


PICTURE = Picture(data, draw, (9, 3.8), RESULTS)
