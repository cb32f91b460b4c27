"""What the pictures share: size, colours, and a stamp of the data that they were drawn from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure

from benchmarks.tables.markdown import RESULTS

# On white, which pages in both colour schemes show as a card; the colours differ in lightness, not in hue alone.
PAPER = "#ffffff"
INK, QUIET, LINE = "#1f2328", "#57606a", "#d0d7de"
KEPT, LOST, PRUNED = "#1a7f37", "#bc4c00", "#f0f2f4"
SERIES = ("#0b3d91", "#2b8a9e", "#e07b00", "#8a2be2", "#6e7781")
FONT = 10.0

DARK = {
    PAPER: "#0d1117",
    INK: "#e6edf3",
    "#000000": "#e6edf3",  # matplotlib's own, such as of legends
    QUIET: "#9198a1",
    LINE: "#30363d",
    KEPT: "#3fb950",
    LOST: "#f0883e",
    PRUNED: "#21262d",
    SERIES[0]: "#79a7ff",
    SERIES[1]: "#56c2d6",
    SERIES[2]: "#ffa94d",
    SERIES[3]: "#c89bff",
    SERIES[4]: "#a2abb5",
}
"""What each colour becomes in a picture for dark pages."""


class Picture(NamedTuple):
    """A picture of the documentation.

    Attributes:
        data: What it shows, as numbers and text.
        draw: Draws that into a figure of this size.
        size: Width and height in inches; text of 10 points is readable at a width of 800 pixels up to 9 inches.
        results: The file of ``benchmarks/results`` that the data are from; without it there is nothing to draw.
        has_dark: Whether there is another one for dark pages, ``NAME-dark.png``: the README shows either.
    """

    data: Callable[[], Any]
    draw: Callable[[Figure, Any], None]
    size: tuple[float, float]
    results: str = ""
    has_dark: bool = False

    def can_be_drawn(self) -> bool:
        """Whether the results are there."""
        return not self.results or (RESULTS / self.results).exists()

    def stamp(self) -> str:
        """A hash of the data."""
        return hashlib.sha256(
            json.dumps(_rounded(self.data()), sort_keys=True).encode()
        ).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Draw it into a PNG that names the hash of its data, and into the one for dark pages."""
        figure = Figure(figsize=self.size, layout="constrained", facecolor=PAPER)
        self.draw(figure, self.data())
        metadata = {"Software": None, "Data": self.stamp()}
        figure.savefig(path, dpi=150, metadata=metadata)
        if self.has_dark:
            darken(figure)
            figure.savefig(path.with_stem(f"{path.stem}-dark"), dpi=150, metadata=metadata)


def darken(figure: Figure) -> None:
    """Give every artist of a figure that was drawn the dark twins of its colours."""
    for artist in figure.findobj():
        for name in ("color", "facecolor", "edgecolor"):
            get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            if get is None or put is None:
                continue
            colour = get()
            # Collections have an array of colours.
            several = not isinstance(colour, str) and np.ndim(colour) == 2
            dark = [_dark(each) for each in colour] if several else _dark(colour)
            put(dark)


def _dark(colour: Any) -> Any:
    """The dark twin of a colour, with its transparency; other colours stay."""
    twin = DARK.get(to_hex(colour))
    return colour if twin is None else (twin, to_rgba(colour)[3])


def _rounded(data: Any) -> Any:
    """The data with four significant digits, which no CPU's arithmetic changes."""
    if isinstance(data, float):
        return float(f"{data:.4g}")
    if isinstance(data, dict):
        return {str(key): _rounded(value) for key, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, (list, tuple)) else data


def stamp_of(path: Path) -> str | None:
    """The hash in a PNG, or ``None``."""
    content = path.read_bytes()
    mark = b"tEXtData\x00"
    start = content.find(mark)
    return None if start < 0 else content[start + len(mark) :][:16].decode("latin-1")


def plain(axes: Axes, title: str = "") -> None:
    """Axes with a light grid and no box."""
    axes.set_title(title, fontsize=FONT + 1, color=INK, loc="left")
    axes.grid(color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=FONT - 1, colors=QUIET, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def blank(axes: Axes) -> None:
    """Axes for a diagram: no ticks, equal units, rows from the top."""
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.invert_yaxis()
