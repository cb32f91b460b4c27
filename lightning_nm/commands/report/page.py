"""The page: tables and charts of runs in one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_nm.callbacks.report.history import MAPS
from lightning_nm.commands.report.charts import Chart, all_layers, metric_charts, statistic_charts
from lightning_nm.commands.report.events import Series, Table, layer_scalars
from lightning_nm.commands.report.run import Run

STATISTICS = ("flip rate", "margin", "kept magnitude")  # of a layer at its last log, beside the table of layers


@dataclass
class Section:
    """One run of a page."""

    run: Run
    facts: Table
    metrics: Table
    layers: Table
    heat_maps: list[Chart]
    constant: list[str]  # statistics that no heat map shows, because they have one value
    curves: list[Chart]
    statistics: list[Chart]


@dataclass
class Comparison:
    """Several runs side by side."""

    metrics: Table
    flops: Table
    settings: Table
    curves: list[Chart]
    statistics: list[Chart]


def render(runs: Sequence[Run], version: str) -> str:
    """Return the page of one or several runs.

    Raises:
        ImportError: Without Jinja2 or plotly.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    places = PackageLoader("lightning_nm.commands.report", "templates")
    environment = Environment(
        loader=places, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    values: dict[str, Any] = {
        "title": f"{runs[0].label}: N:M report" if len(runs) == 1 else f"N:M report of {len(runs)} runs",
        "version": version,
        "sections": [section(run) for run in runs],
        "comparison": compare(runs) if len(runs) > 1 else None,
        "plotly": get_plotlyjs(),
    }
    return environment.get_template("page.html.j2").render(values)


def section(run: Run) -> Section:
    """Make the tables and the charts of a run."""
    log = run.log
    histories = [
        (name if not callback else f"{name}: {callback}", history, place)
        for callback, history in log.maps.items()
        for place, name in enumerate(MAPS)
    ]
    drawn = {name for name, *_ in histories}
    constant = []
    for name, history in layer_scalars(log).items():
        values = history.values[:, 0]
        known = values[~values.isnan()]
        if name not in drawn and known.numel() and known.min() == known.max():
            constant.append(f"{name.replace('_', ' ')} {float(known[0]):.4g}")
        elif name not in drawn:
            histories.append((name, history, 0))
    return Section(
        run,
        _facts(run),
        _metric_table(run),
        _layer_table(run),
        all_layers(histories),
        constant,
        metric_charts({run.label: run.metrics}),
        statistic_charts({run.label: run.statistics}),
    )


def compare(runs: Sequence[Run]) -> Comparison:
    """Make the tables and the charts of several runs."""
    names = [run.label for run in runs]
    tags = dict.fromkeys(tag for run in runs for tag in run.metrics)
    metrics = [[tag, *(_last(run.metrics.get(tag)) for run in runs)] for tag in tags]
    statistics = dict.fromkeys(name for run in runs for name in run.statistics)
    metrics += [[f"nm/{name}", *(_last(run.statistics.get(name)) for run in runs)] for name in statistics]
    flops = [
        [kind, *(run.flops.get(kind, "-") for run in runs)]
        for kind in dict.fromkeys(kind for run in runs for kind in run.flops)
    ]
    settings = [
        [key, *(run.settings.get(key, "-") for run in runs)]
        for key in dict.fromkeys(key for run in runs for key in run.settings)
        if len({run.settings.get(key) for run in runs}) > 1
    ]
    head = ["", *names]
    return Comparison(
        [head, *metrics],
        [head, *flops] if flops else [],
        [head, *settings] if settings else [],
        metric_charts({run.label: run.metrics for run in runs}),
        statistic_charts({run.label: run.statistics for run in runs if run.statistics}),
    )


def _facts(run: Run) -> Table:
    log = run.log
    steps = [series.steps[-1] for series in log.scalars.values() if series.steps]
    epochs = log.scalars.get("epoch")
    rows = [["folder", str(run.path)], ["event files", str(len(log.files))]]
    if steps:
        rows.append(["last logged step", f"{max(steps):,}"])
    if epochs is not None:
        rows.append(["last logged epoch", f"{epochs.values[-1]:g}"])
    if layers := log.table("nm/layers")[1:]:
        masked = sum(row[2] != "-" for row in layers)
        rows.append(["masked layers", f"{masked} of {len(layers)} with a weight of a known kind"])
    for name, size in run.checkpoints:
        rows.append(["checkpoint", f"{name}, {size / 1e6:,.1f} MB"])
    if run.saved:
        rows.append(["newest checkpoint", ", ".join(f"{name} {value}" for name, value in run.saved.items())])
    if run.verdicts:
        counts = {kind: sum(v.verdict == kind for v in run.verdicts) for kind in ("N:M", "dense", "broken")}
        rows.append(["its masked weights", ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)])
    return rows


def _metric_table(run: Run) -> Table:
    rows = [["metric", "last", "at step", "lowest", "at step", "highest", "at step", "points"]]
    named = [*run.metrics.items(), *((f"nm/{name}", series) for name, series in run.statistics.items())]
    for tag, series in named:
        finite = series.finite
        extremes = [cell for end in (min, max) for cell in _point(end(finite) if finite else None)]
        rows.append([tag, _last(series), f"{series.steps[-1]:,}", *extremes, f"{len(series.steps):,}"])
    return rows if named else []


def _layer_table(run: Run) -> Table:
    """The table of layers, with the last statistics and the verdict of the newest checkpoint."""
    rows = run.log.table("nm/layers")
    if not rows:
        return []
    last: dict[str, list[str]] = {}
    for history in run.log.maps.values():
        for place, name in enumerate(history.layers):
            last[name] = [f"{value:.3g}" for value in history.values[-1, :, place].tolist()]
    verdicts = {v.key.rpartition(".")[0]: v for v in run.verdicts} | {v.key: v for v in run.verdicts}
    head = [*rows[0], *(STATISTICS if last else ()), *(["checkpoint"] if verdicts else ())]
    found = [head]
    for row in rows[1:]:
        verdict = verdicts.get(row[0])
        checked = "-" if verdict is None else verdict.verdict
        if verdict is not None and verdict.verdict == "broken":
            checked += f": {verdict.violations:,} of {verdict.blocks:,} blocks"
        extra = [*(last.get(row[0], ["-"] * len(STATISTICS)) if last else ()), *([checked] if verdicts else ())]
        found.append([*row, *extra])
    return found


def _point(point: tuple[float, int] | None) -> tuple[str, str]:
    return ("-", "-") if point is None else (f"{point[0]:.6g}", f"{point[1]:,}")


def _last(series: Series | None) -> str:
    """The last value, or the last finite one with a remark."""
    if series is None or not series.values:
        return "-"
    value, finite = series.values[-1], series.finite
    if finite and finite[-1][1] != series.steps[-1]:
        return f"{value:g}; last finite {finite[-1][0]:.6g} at {finite[-1][1]:,}"
    return f"{value:.6g}"
