"""What the pictures share: size, colours, and a stamp of the data that they were drawn from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.tables.markdown import RESULTS

# On white, which pages in both colour schemes show as a card; the colours differ in lightness, not in hue alone.
INK, QUIET, LINE = "#1f2328", "#57606a", "#d0d7de"
KEPT, LOST, PRUNED = "#1a7f37", "#bc4c00", "#f0f2f4"
SERIES = ("#0b3d91", "#2b8a9e", "#e07b00", "#8a2be2", "#6e7781")
FONT = 10.0


class Picture(NamedTuple):
    """A picture of the documentation.

    Attributes:
        data: What it shows, as numbers and text.
        draw: Draws that into a figure of this size.
        size: Width and height in inches; text of 10 points is readable at a width of 800 pixels up to 9 inches.
        results: The file of ``benchmarks/results`` that the data are from; without it there is nothing to draw.
    """

    data: Callable[[], Any]
    draw: Callable[[Figure, Any], None]
    size: tuple[float, float]
    results: str = ""

    def can_be_drawn(self) -> bool:
        """Whether the results are there."""
        return not self.results or (RESULTS / self.results).exists()

    def stamp(self) -> str:
        """A hash of the data."""
        return hashlib.sha256(
            json.dumps(_rounded(self.data()), sort_keys=True).encode()
        ).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Draw it into a PNG that names the hash of its data."""
        figure = Figure(figsize=self.size, layout="constrained", facecolor="white")
        self.draw(figure, self.data())
        figure.savefig(path, dpi=150, metadata={"Software": None, "Data": self.stamp()})


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
