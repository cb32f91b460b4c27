"""Curves and heat maps as plotly's figures."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_nm.callbacks.report.history import LayerHistory
from lightning_nm.callbacks.report.tensorboard import CHARTS
from lightning_nm.report.events import Series

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

POINTS = 1000  # of a curve; a longer one is thinned
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c8c00")
DASHES = ("solid", "dash", "dot", "dashdot")
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 12, "color": "#1f2328"}
GRID = {"gridcolor": "#e4e8ec", "zerolinecolor": "#d0d7de", "linecolor": "#8c959f", "ticks": "outside"}


class Chart(NamedTuple):
    """A figure of a page: what is above it, plotly's JSON, safe within a script element, and its height in pixels."""

    title: str
    figure: str
    height: int


def metric_charts(runs: Mapping[str, Mapping[str, Series]]) -> list[Chart]:
    """Draw a chart for each metric, with its training, validation and test in one, over all runs by label."""
    tags = dict.fromkeys(tag for series in runs.values() for tag in series)
    groups: dict[str, list[str]] = {}
    for tag in tags:
        name = re.sub(r"^(train|training|val|valid|validation|test)[_/]|(_step|_epoch)$", "", tag)
        groups.setdefault(name, []).append(tag)
    return [_curves(name, members, runs) for name, members in groups.items()]


def statistic_charts(runs: Mapping[str, Mapping[str, Series]]) -> list[Chart]:
    """Draw the statistics of masks, grouped as in TensorBoard's custom scalars."""
    chart_of = {name: chart for chart, members in CHARTS.items() for name in members}
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for series in runs.values() for name in series):
        groups.setdefault(chart_of.get(name, name.replace("_", " ")), []).append(name)
    return [_curves(title, members, runs) for title, members in groups.items()]


def _curves(title: str, tags: Sequence[str], runs: Mapping[str, Mapping[str, Series]]) -> Chart:
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    several = len(runs) > 1
    for number, (label, series) in enumerate(runs.items()):
        for place, tag in enumerate(tags):
            if tag not in series:
                continue
            name = (f"{label}: {tag}" if len(tags) > 1 else label) if several else tag
            colour, dash = (number, place) if several else (place, 0)
            steps, values = thinned(series[tag])
            figure.add_trace(
                Scatter(
                    x=steps,
                    y=[value if math.isfinite(value) else None for value in values],
                    name=html.escape(name),
                    mode="lines+markers" if len(steps) < 30 else "lines",
                    line={"color": COLOURS[colour % len(COLOURS)], "dash": DASHES[dash % len(DASHES)], "width": 2},
                    marker={"size": 5},
                )
            )
    legend = len(figure.data) > 1
    height = 260 + (18 * len(figure.data) if several and legend else 0)
    figure.update_layout(
        showlegend=legend,
        legend={"orientation": "h", "yanchor": "top", "y": -0.22, "x": 0},
        margin={"l": 58, "r": 14, "t": 8, "b": 44},
        hovermode="x unified",
    )
    figure.update_xaxes(title_text="step", title_standoff=6, **GRID)
    shown = {value for trace in figure.data for value in trace.y if value is not None}
    figure.update_yaxes(rangemode="tozero" if len(shown) == 1 else "normal", **GRID)
    return Chart(title if len(tags) > 1 else tags[0], _to_json(figure), height)


def thinned(series: Series) -> tuple[list[int], list[float]]:
    """Return at most :data:`POINTS` points at equal distances, the last one among them, in six digits."""
    every = math.ceil(len(series.steps) / POINTS)
    chosen = range((len(series.steps) - 1) % every, len(series.steps), every) if series.steps else range(0)
    return [series.steps[k] for k in chosen], [float(f"{series.values[k]:.6g}") for k in chosen]


def heat_map(title: str, history: LayerHistory, place: int, root: bool) -> Chart:
    """Draw a statistic of layers over steps, the first layer on top.

    Args:
        title: The heading.
        history: The columns.
        place: Which of a column's statistics.
        root: Colour by the square root, so that small values differ.
    """
    from plotly.graph_objects import Figure, Heatmap

    values = history.values[:, place].double().T
    shown = values.clamp(min=0).sqrt() if root else values
    start = history.steps[0] - (history.steps[1] - history.steps[0] if len(history.steps) > 1 else 1)
    known = values[values.isfinite()]
    bar: dict[str, Any] = {"thickness": 14, "outlinewidth": 0}
    if root and known.numel() and float(known.max()) > 0:
        marks = [float(known.max()) * share**2 for share in (0, 0.25, 0.5, 0.75, 1)]
        bar |= {"tickvals": [math.sqrt(mark) for mark in marks], "ticktext": [f"{mark:.3g}" for mark in marks]}
    figure = Figure(
        Heatmap(
            z=_numbers(shown),
            customdata=_numbers(values),
            x=[start, *history.steps],
            y=[html.escape(name) for name in history.layers],
            colorscale="Viridis",
            zmin=0 if root else None,
            colorbar=bar,
            hovertemplate="%{y}<br>step %{x}: %{customdata:.4g}<extra></extra>",
            hoverongaps=False,
        )
    )
    height = max(150, min(16 * len(history.layers), 640)) + 60
    figure.update_layout(margin={"l": 10, "r": 10, "t": 8, "b": 44}, plot_bgcolor="#d0d0d0")
    figure.update_xaxes(title_text="step", title_standoff=6, showgrid=False, ticks="outside")
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False, type="category")
    return Chart(title, _to_json(figure), height)


def _numbers(rows: torch.Tensor) -> list[list[float | None]]:
    return [[float(f"{value:.4g}") if math.isfinite(value) else None for value in row] for row in rows.tolist()]


def _to_json(figure: Figure) -> str:
    """Return data and layout; ``<`` is escaped, so that no name ends the script element around them."""
    figure.update_layout(template="none", font=FONT, paper_bgcolor="rgba(0,0,0,0)", autosize=True)
    content = json.loads(figure.to_json())
    content["layout"].pop("template", None)
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def all_layers(histories: Iterable[tuple[str, LayerHistory, int]]) -> list[Chart]:
    """Draw the heat map of each statistic: name, columns and place; flip rates by their square roots."""
    return [
        heat_map(name.replace("_", " "), history, place, name.partition(":")[0] == "flip_rate")
        for name, history, place in histories
        if history.steps
    ]
