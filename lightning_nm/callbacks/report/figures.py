"""Heat maps of layers over steps as matplotlib figures, and the colours and scales that all pictures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from torch import Tensor

THEMES: dict[str, dict[str, str]] = {
    "light": {
        "page": "#ffffff",
        "text": "#1f2328",
        "grid": "#d0d7de",
        "better": "#1a7f37",
        "worse": "#bc4c00",
        "undecided": "#6e7781",
    },
    "dark": {
        "page": "#0d1117",
        "text": "#e6edf3",
        "grid": "#30363d",
        "better": "#56d364",
        "worse": "#ffa657",
        "undecided": "#8b949e",
    },
}
"""Colours of the page, its text, the grid and the verdicts; verdicts differ in lightness, not in hue alone."""

COLOUR_MAP = "viridis"  # from dark to light at equal steps of lightness
UNKNOWN = "#d0d0d0"  # the colour of NaN

# Sizes of a figure in pixels. TensorBoard shrinks an image to its card, of about 400 pixels: the names of a wider
# figure could be read after a click alone.
DPI = 100
PLOT_WIDTH = 224
PLOT_HEIGHT = 560  # few rows make a plot lower, more rows than this higher
ROW = 18  # height of a row, at most
LEAST_HEIGHT = 120  # of the plot, for the numbers beside the colour bar
NAME_DISTANCE = 15  # from one name of a layer to the next, at least
MARGIN = 8
TICK = 12  # the line between a name and its row, and the space beside it
TITLE_HEIGHT = 32
STEPS_HEIGHT = 48  # numbers and title of the horizontal axis
BAR_WIDTH = 10
BAR_GAP = 10
BAR_NUMBERS = 56

MOST_ROWS = 1000  # more layers than this share rows
MOST_LETTERS = 26  # of a name
FONT_SIZE = 8.0  # in points
LETTER_WIDTH = 7  # in pixels: all letters of DejaVu Sans Mono at 8 points


def can_draw() -> bool:
    """Whether matplotlib is installed.

    Example:
        >>> can_draw()
        True
    """
    return find_spec("matplotlib") is not None


def first_edge(steps: Sequence[int]) -> int:
    """Return where the first column begins; the other columns begin at the step of the column before them.

    The first column is as wide as the second one.

    Example:
        >>> first_edge([4, 9, 19]), first_edge([7])
        (-1, 6)
    """
    if len(steps) == 1:
        return steps[0] - 1
    return 2 * steps[0] - steps[1]


@dataclass(frozen=True)
class Scale:
    """The values that the ends of a colour map stand for.

    Attributes:
        low: The value of the first colour.
        high: The value of the last colour.
        root: Whether colours go by the square root of a value, so that small values differ.
    """

    low: float
    high: float
    root: bool

    @classmethod
    def of(cls, values: Tensor, root: bool) -> Scale:
        """Return the scale of all finite values; it starts at 0 if colours go by the square root.

        Example:
            >>> Scale.of(torch.tensor([0.25, 1.0, torch.nan]), root=True)
            Scale(low=0.0, high=1.0, root=True)
        """
        finite = values[values.isfinite()]
        if finite.numel() == 0:
            return cls(0.0, 1.0, root)
        low = 0.0 if root else float(finite.min())
        return cls(low, float(finite.max()), root)

    @property
    def is_constant(self) -> bool:
        """Whether there is one value alone."""
        # Also if all values are 0 and colours go by the square root.
        return self.high <= self.low

    def shares(self, values: Tensor) -> Tensor:
        """Return the places of values in the colour map, in [0, 1]; a constant has the colour in the middle.

        Example:
            >>> Scale(0.0, 1.0, root=True).shares(torch.tensor([0.25, 1.0, torch.nan]))
            tensor([0.5000, 1.0000,    nan])
        """
        if self.is_constant:
            return torch.where(values.isnan(), torch.nan, 0.5)
        shares = (values - self.low) / (self.high - self.low)
        return shares.clamp(min=0).sqrt() if self.root else shares

    def marks(self) -> dict[float, float]:
        """Return the values to write beside the colour bar, by their places in it.

        Example:
            >>> Scale(0.0, 1.0, root=True).marks()
            {0.0: 0.0, 0.25: 0.0625, 0.5: 0.25, 0.75: 0.5625, 1.0: 1.0}
        """
        if self.is_constant:
            return {0.5: self.low}
        marks = {}
        for place in (0.0, 0.25, 0.5, 0.75, 1.0):
            share = place**2 if self.root else place
            marks[place] = self.low + (self.high - self.low) * share
        return marks


class HeatMapFigure:
    """A figure that shows one statistic of layers over steps after another.

    The maps of one log share what takes the most time to prepare: names, ticks and the colour bar. The figure does
    without pyplot, which would keep every figure in memory until it is closed.

    Attributes:
        figure: The figure, as :meth:`show` has last drawn it. Its background is white on light and on dark pages.

    Args:
        layers: The names of the rows, from the top. Where there is no room for all names, some are left out, and
            the axis of the steps says so; more than 1000 layers share rows.
        steps: The steps at which the columns end, rising.

    Raises:
        ImportError: Without matplotlib.

    Example:
        >>> maps = HeatMapFigure(["encoder", "head"], [9, 19, 29])
        >>> figure = maps.show("flip rate", torch.rand(3, 2), root=True)
        >>> figure.axes[0].get_title(loc="left")
        'flip rate'
    """

    figure: Figure

    def __init__(self, layers: Sequence[str], steps: Sequence[int]) -> None:
        # matplotlib is an extra, so it is imported only where something is drawn.
        from matplotlib.figure import Figure

        self._layers_per_row = math.ceil(len(layers) / MOST_ROWS)
        self._rows = math.ceil(len(layers) / self._layers_per_row)
        self._edges = [first_edge(steps), *steps]  # of the columns
        self._row_edges = range(self._rows + 1)

        row_height = PLOT_HEIGHT // self._rows
        row_height = max(1, min(ROW, row_height))
        self._rows_per_name = math.ceil(NAME_DISTANCE / row_height)
        layers_per_name = self._layers_per_row * self._rows_per_name
        names = shortened(layers)[::layers_per_name]

        # From the left: names, plot, colour bar with its numbers. From the top: title, plot, steps.
        longest = max(len(name) for name in names)
        left = MARGIN + LETTER_WIDTH * longest + TICK
        bar_left = left + PLOT_WIDTH + BAR_GAP
        width = bar_left + BAR_WIDTH + BAR_NUMBERS
        plot_height = row_height * self._rows
        bar_height = max(plot_height, LEAST_HEIGHT)
        height = TITLE_HEIGHT + bar_height + STEPS_HEIGHT

        page = THEMES["light"]["page"]
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=page)
        # Places are given in pixels: matplotlib's own layouts draw all texts twice.
        self._axes = self._add_axes(left, PLOT_WIDTH, plot_height)
        self._bar = self._add_axes(bar_left, BAR_WIDTH, bar_height)
        self._prepare_plot(names)
        self._prepare_bar()

    def _add_axes(self, left: float, width: float, height: float) -> Axes:
        """Add axes of a size in pixels, below the title."""
        figure_width, figure_height = self.figure.bbox.size
        bottom = figure_height - TITLE_HEIGHT - height
        # matplotlib takes shares of the figure, from the lower left corner.
        place = (
            left / figure_width,
            bottom / figure_height,
            width / figure_width,
            height / figure_height,
        )
        axes = self.figure.add_axes(place)
        style_axes(axes, THEMES["light"], FONT_SIZE)
        return axes

    def _prepare_plot(self, names: Sequence[str]) -> None:
        """Draw what all maps have in common: names, steps, and an image whose values :meth:`show` sets."""
        from matplotlib.colors import Normalize
        from matplotlib.image import PcolorImage
        from matplotlib.ticker import MaxNLocator, StrMethodFormatter

        axes = self._axes
        middles = [row + 0.5 for row in range(0, self._rows, self._rows_per_name)]
        # A name is no formula, even with two dollar signs.
        axes.set_yticks(middles, names, family="DejaVu Sans Mono", parse_math=False)
        label = "; ".join(["step", *self._remarks()])
        axes.set_xlabel(label, fontsize=FONT_SIZE, color=THEMES["light"]["text"])
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.set_xlim(self._edges[0], self._edges[-1])
        axes.set_ylim(self._rows, 0)  # the first row is at the top

        # Columns differ in width, for which imshow has no means. [rows, columns]
        columns = len(self._edges) - 1
        nothing_rc = torch.full((self._rows, columns), torch.nan, dtype=torch.float32).numpy()
        norm = Normalize(0, 1)
        self._image = PcolorImage(
            axes, self._edges, self._row_edges, nothing_rc, cmap=_colours(), norm=norm
        )
        axes.add_image(self._image)

    def _prepare_bar(self) -> None:
        """Draw the colours of the bar, which are the same for all scales."""
        colours = torch.linspace(1, 0, 256, dtype=torch.float32).unsqueeze(1).numpy()
        self._bar.imshow(colours, cmap=_colours(), aspect="auto", extent=(0, 1, 0, 1))
        self._bar.set_xticks([])
        self._bar.yaxis.tick_right()

    def show(self, title: str, values: Tensor, root: bool) -> Figure:
        """Draw a statistic in place of the one before.

        Args:
            title: The heading.
            values: ``[columns, layers]``; NaN is grey.
            root: Colour by the square root, from 0 on, so that small values differ; else from the least to the largest.

        Returns:
            The figure, which is the same one in every call.
        """
        rows_rc = self._mean_of_shared_rows(values.double()).T
        scale = Scale.of(rows_rc, root)
        self._image.set_data(self._edges, self._row_edges, scale.shares(rows_rc).numpy())
        marks = scale.marks()
        self._bar.set_yticks(list(marks), [f"{value:.3g}" for value in marks.values()])
        self._axes.set_title(
            title, fontsize=FONT_SIZE + 1, color=THEMES["light"]["text"], loc="left"
        )
        return self.figure

    def _mean_of_shared_rows(self, values_cl: Tensor) -> Tensor:
        """Return ``[columns, rows]``, the means of the layers of each row without NaN."""
        # The last row may have fewer layers than the others.
        missing = self._rows * self._layers_per_row - values_cl.shape[1]
        padded = F.pad(values_cl, (0, missing), value=torch.nan)
        rows_crl = padded.unflatten(1, (self._rows, self._layers_per_row))
        return rows_crl.nanmean(2)

    def _remarks(self) -> list[str]:
        remarks = []
        layers_per_name = self._rows_per_name * self._layers_per_row
        if layers_per_name > 1:
            remarks.append(f"one name for {layers_per_name} layers")
        if self._layers_per_row > 1:
            remarks.append(f"mean of {self._layers_per_row} layers in a row")
        return remarks


def _colours() -> Colormap:
    import matplotlib as mpl

    return mpl.colormaps[COLOUR_MAP].with_extremes(bad=UNKNOWN)


def style_axes(axes: Axes, theme: dict[str, str], font_size: float) -> None:
    """Give axes the colours of a theme.

    Example:
        >>> from matplotlib.figure import Figure
        >>> style_axes(Figure().subplots(), THEMES["dark"], font_size=9)
    """
    axes.set_facecolor(theme["page"])
    axes.tick_params(colors=theme["text"], labelsize=font_size)
    for spine in axes.spines.values():
        spine.set_color(theme["grid"])


def shortened(names: Sequence[str]) -> list[str]:
    """Return names of at most 26 letters, all of which matplotlib's own font has.

    Of every module's name the same number of first letters stays, but for the last one, by which layers differ.

    Example:
        >>> shortened(["model.encoder.layers.0.attention.query", "model.head"])
        ['mod.enc.lay.0.att.query', 'mod.head']
    """
    ascii_names = [name.encode("ascii", "replace").decode() for name in names]
    short = ascii_names
    for letters in range(MOST_LETTERS, 0, -1):
        short = [_with_letters(name, letters) for name in ascii_names]
        if max(map(len, short), default=0) <= MOST_LETTERS:
            break
    return [
        f"...{name[3 - MOST_LETTERS :]}" if len(name) > MOST_LETTERS else name for name in short
    ]


def _with_letters(name: str, letters: int) -> str:
    *parents, last = name.split(".")
    return ".".join([*(parent[:letters] for parent in parents), last])
