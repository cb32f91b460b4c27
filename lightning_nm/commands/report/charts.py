"""Curves and heat maps as plotly's figures."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_nm.callbacks.report.figures import COLOUR_MAP, UNKNOWN, Scale, first_edge
from lightning_nm.callbacks.report.history import LayerHistory
from lightning_nm.callbacks.report.tensorboard import charts_of
from lightning_nm.commands.report.events import Series

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

POINTS = 1000  # of a curve; a longer one is thinned
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c8c00")
DASHES = ("solid", "dash", "dot", "dashdot")
FONT = {
    "family": "system-ui, -apple-system, 'Segoe UI', sans-serif",
    "size": 12,
    "color": "#1f2328",
}
GRID = {
    "gridcolor": "#e4e8ec",
    "zerolinecolor": "#d0d7de",
    "linecolor": "#8c959f",
    "ticks": "outside",
}

# What Lightning and users write before and after a metric's name: `train_loss_epoch` is about `loss`.
_AFFIXES = re.compile(r"^(train|training|val|valid|validation|test)[_/]|(_step|_epoch)$")

Runs = Mapping[str, Mapping[str, Series]]
"""The scalars of each run, by the run's label and the scalar's tag."""


class Chart(NamedTuple):
    """A figure of a page.

    Example:
        >>> chart = Chart("loss", figure='{"data":[],"layout":{}}', height=260)
        >>> chart.title
        'loss'
    """

    title: str  # what is above it
    figure: str  # plotly's JSON, safe within a script element
    height: int  # in pixels


def metric_charts(runs: Runs) -> list[Chart]:
    """Draw a chart for each metric over all runs; its training, validation and test are in one.

    Example:
        >>> runs = {"a": {"train_loss": Series([0, 1], [2.0, 1.0]), "val_loss": Series([1], [1.5])}}
        >>> [chart.title for chart in metric_charts(runs)]
        ['loss']
    """
    groups: dict[str, list[str]] = {}
    for tag in _all_tags(runs):
        name = _AFFIXES.sub("", tag)
        groups.setdefault(name, []).append(tag)
    return [_curves(name, members, runs) for name, members in groups.items()]


def statistic_charts(runs: Runs) -> list[Chart]:
    """Draw the statistics of masks, grouped as in TensorBoard's custom scalars.

    Example:
        >>> runs = {"a": {"density": Series([0], [0.5]), "overlap": Series([0], [1.0])}}
        >>> [chart.title for chart in statistic_charts(runs)]
        ['kept']
    """
    groups = charts_of(_all_tags(runs))
    return [_curves(title, members, runs) for title, members in groups.items()]


def _all_tags(runs: Runs) -> list[str]:
    """The tags of all runs, each once, in the order in which the runs have them."""
    tags = chain.from_iterable(runs.values())
    return list(dict.fromkeys(tags))


def _curves(title: str, tags: Sequence[str], runs: Runs) -> Chart:
    """Draw the scalars of a chart: a colour for each run, or for each tag of a single run."""
    from plotly.graph_objects import Figure

    figure = Figure()
    several_runs = len(runs) > 1
    for run_number, (label, series_of_run) in enumerate(runs.items()):
        for tag_number, tag in enumerate(tags):
            if tag not in series_of_run:
                continue
            series = series_of_run[tag]
            if not several_runs:
                curve = _curve(series, name=tag, colour=tag_number, dash=0)
            else:
                name = f"{label}: {tag}" if len(tags) > 1 else label
                curve = _curve(series, name=name, colour=run_number, dash=tag_number)
            figure.add_trace(curve)

    has_legend = len(figure.data) > 1
    height = 260
    if several_runs and has_legend:
        # Names with labels of runs are long: the legend may need a line for each.
        height += 18 * len(figure.data)
    figure.update_layout(
        showlegend=has_legend,
        # Below the chart, where long names do not take its width.
        legend={"orientation": "h", "yanchor": "top", "y": -0.22, "x": 0},
        margin={"l": 58, "r": 14, "t": 8, "b": 44},
        hovermode="x unified",
    )
    figure.update_xaxes(title_text="step", title_standoff=6, **GRID)
    # Around a constant plotly would choose a narrow range, in which its digits look like a change.
    shown: set[float] = set()
    for curve in figure.data:
        shown.update(value for value in curve.y if value is not None)
    is_constant = len(shown) == 1
    figure.update_yaxes(rangemode="tozero" if is_constant else "normal", **GRID)
    return Chart(title if len(tags) > 1 else tags[0], _to_json(figure), height)


def _curve(series: Series, name: str, colour: int, dash: int) -> Any:
    """One scalar of one run; with few points these are marked."""
    from plotly.graph_objects import Scatter

    steps, values = thinned(series)
    line = {
        "color": COLOURS[colour % len(COLOURS)],
        "dash": DASHES[dash % len(DASHES)],
        "width": 2,
    }
    return Scatter(
        x=steps,
        # None leaves a gap in the curve; JSON has no NaN.
        y=[value if math.isfinite(value) else None for value in values],
        # plotly shows some HTML in names.
        name=html.escape(name),
        mode="lines+markers" if len(steps) < 30 else "lines",
        line=line,
        marker={"size": 5},
    )


def thinned(series: Series) -> tuple[list[int], list[float]]:
    """Return at most :data:`POINTS` points at equal distances, the last one among them, in six digits.

    Example:
        >>> steps, values = thinned(Series(list(range(2000)), [0.5] * 2000))
        >>> len(steps), steps[:3], steps[-1]
        (1000, [1, 3, 5], 1999)
    """
    count = len(series.steps)
    if count == 0:
        return [], []
    every = math.ceil(count / POINTS)
    # Counted from the end, because the last point must be among them.
    first = (count - 1) % every
    steps = series.steps[first::every]
    # Fewer digits make the page smaller, and the eye cannot tell.
    values = [float(f"{value:.6g}") for value in series.values[first::every]]
    return steps, values


def heat_map(title: str, history: LayerHistory, place: int, root: bool) -> Chart:
    """Draw a statistic of layers over steps, the first layer on top.

    Args:
        title: The heading.
        history: The columns.
        place: Which of a column's statistics.
        root: Colour by the square root, so that small values differ.

    Example:
        >>> history = LayerHistory()
        >>> history.add(9, ["encoder", "head"], torch.rand(3, 2))
        >>> heat_map("flip rate", history, place=0, root=True).title
        'flip rate'
    """
    from plotly.graph_objects import Figure, Heatmap

    values_lc = history.values[:, place].double().T  # [layers, columns]
    scale = Scale.of(values_lc, root)
    marks = scale.marks()
    cells = Heatmap(
        # Colours show shares of the scale, from 0 to 1; the text below the pointer has the values.
        z=_numbers(scale.shares(values_lc)),
        zmin=0,
        zmax=1,
        customdata=_numbers(values_lc),
        # The edges of the columns, one more than there are columns.
        x=[first_edge(history.steps), *history.steps],
        y=[html.escape(name) for name in history.layers],
        colorscale=COLOUR_MAP,
        colorbar={
            "thickness": 14,
            "outlinewidth": 0,
            "tickvals": list(marks),
            "ticktext": [f"{value:.3g}" for value in marks.values()],
        },
        hovertemplate="%{y}<br>step %{x}: %{customdata:.4g}<extra></extra>",
        hoverongaps=False,
    )
    figure = Figure(cells)
    figure.update_layout(margin={"l": 10, "r": 10, "t": 8, "b": 44}, plot_bgcolor=UNKNOWN)
    figure.update_xaxes(title_text="step", title_standoff=6, showgrid=False, ticks="outside")
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False, type="category")
    rows_height = 16 * len(history.layers)
    plot_height = max(150, min(rows_height, 640))
    return Chart(title, _to_json(figure), plot_height + 60)


def _numbers(rows: torch.Tensor) -> list[list[float | None]]:
    """Numbers in four digits; JSON has no others than finite ones."""
    cells = []
    for row in rows.tolist():
        cells.append([_number(value) for value in row])
    return cells


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _to_json(figure: Figure) -> str:
    """Return data and layout; ``<`` is escaped, so that no name ends the script element around them."""
    figure.update_layout(template="none", font=FONT, paper_bgcolor="rgba(0,0,0,0)", autosize=True)
    content = json.loads(figure.to_json())
    content["layout"].pop("template", None)  # "none", written out as a dictionary
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def all_layers(histories: Iterable[tuple[str, LayerHistory, int]]) -> list[Chart]:
    """Draw the heat map of each statistic, given its name, columns and place; flip rates by their square roots.

    Example:
        >>> history = LayerHistory()
        >>> history.add(9, ["encoder", "head"], torch.rand(3, 2))
        >>> [chart.title for chart in all_layers([("flip_rate", history, 0), ("margin: b", history, 1)])]
        ['flip rate', 'margin: b']
    """
    charts = []
    for name, history, place in histories:
        if not history.steps:
            continue
        statistic, _, _ = name.partition(":")  # the name of a callback may follow
        title = name.replace("_", " ")
        charts.append(heat_map(title, history, place, root=statistic == "flip_rate"))
    return charts
