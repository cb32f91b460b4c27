"""The page: tables and charts of runs in one HTML file that loads nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_nm.callbacks.report.history import MAPS
from lightning_nm.commands.report.charts import Chart, all_layers, metric_charts, statistic_charts
from lightning_nm.commands.report.events import Series, Table, layer_scalars
from lightning_nm.commands.report.run import Run
from lightning_nm.export.verdicts import Verdict

STATISTICS = (
    "flip rate",
    "margin",
    "kept magnitude",
)  # of a layer at its last log, beside the table of layers


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

    environment = Environment(
        loader=PackageLoader("lightning_nm.commands.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = f"{runs[0].label}: N:M report"
    comparison = None
    if len(runs) > 1:
        title = f"N:M report of {len(runs)} runs"
        comparison = compare(runs)
    return environment.get_template("page.html.j2").render(
        title=title,
        version=version,
        sections=[section(run) for run in runs],
        comparison=comparison,
        plotly=get_plotlyjs(),
    )


def section(run: Run) -> Section:
    """Make the tables and the charts of a run."""
    histories = []
    drawn = set()
    for callback, history in run.log.maps.items():
        for place, statistic in enumerate(MAPS):
            name = f"{statistic}: {callback}" if callback else statistic
            drawn.add(name)
            histories.append((name, history, place))
    constant = []
    for name, history in layer_scalars(run.log).items():
        if name in drawn:
            continue
        values = history.values[:, 0]
        known = values[~values.isnan()]
        # A heat map of one colour shows nothing.
        if known.numel() and known.min() == known.max():
            constant.append(f"{name.replace('_', ' ')} {float(known[0]):.4g}")
        else:
            histories.append((name, history, 0))
    return Section(
        run,
        facts=_facts(run),
        metrics=_metric_table(run),
        layers=_layer_table(run),
        heat_maps=all_layers(histories),
        constant=constant,
        curves=metric_charts({run.label: run.metrics}),
        statistics=statistic_charts({run.label: run.statistics}),
    )


def compare(runs: Sequence[Run]) -> Comparison:
    """Make the tables and the charts of several runs."""
    head = ["", *(run.label for run in runs)]
    metrics = _side_by_side([{tag: _last(series) for tag, series in _named(run)} for run in runs])
    # Metrics come before statistics, whichever run has them.
    metrics.sort(key=lambda row: row[0].startswith("nm/"))
    flops = _side_by_side([run.flops for run in runs])
    settings = [
        row for row in _side_by_side([run.settings for run in runs]) if len(set(row[1:])) > 1
    ]
    return Comparison(
        metrics=[head, *metrics],
        flops=[head, *flops] if flops else [],
        settings=[head, *settings] if settings else [],
        curves=metric_charts({run.label: run.metrics for run in runs}),
        statistics=statistic_charts({run.label: run.statistics for run in runs if run.statistics}),
    )


def _side_by_side(columns: Sequence[Mapping[str, str]]) -> Table:
    """A row for each name of any column; a column without it has a dash."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "-") for column in columns)] for name in names]


def _named(run: Run) -> list[tuple[str, Series]]:
    """The series of a run by tag, metrics first."""
    statistics = [(f"nm/{name}", series) for name, series in run.statistics.items()]
    return [*run.metrics.items(), *statistics]


def _facts(run: Run) -> Table:
    log = run.log
    steps = [series.steps[-1] for series in log.scalars.values() if series.steps]
    epochs = log.scalars.get("epoch")
    rows = [["folder", str(run.path)], ["event files", str(len(log.files))]]
    if steps:
        rows.append(["last logged step", f"{max(steps):,}"])
    if epochs is not None:
        rows.append(["last logged epoch", f"{epochs.values[-1]:g}"])
    layers = log.table("nm/layers")[1:]
    if layers:
        masked = sum(row[2] != "-" for row in layers)
        rows.append(["masked layers", f"{masked} of {len(layers)} with a weight of a known kind"])
    for name, size in run.checkpoints:
        rows.append(["checkpoint", f"{name}, {size / 1e6:,.1f} MB"])
    if run.saved:
        saved = [f"{name} {value}" for name, value in run.saved.items()]
        rows.append(["newest checkpoint", ", ".join(saved)])
    if run.verdicts:
        counts = Counter(verdict.verdict for verdict in run.verdicts)
        shown = [f"{counts[kind]} {kind}" for kind in ("N:M", "dense", "broken") if counts[kind]]
        rows.append(["its masked weights", ", ".join(shown)])
    return rows


def _metric_table(run: Run) -> Table:
    rows = []
    for tag, series in _named(run):
        finite = series.finite
        lowest = _point(min(finite, default=None))
        highest = _point(max(finite, default=None))
        rows.append(
            [
                tag,
                _last(series),
                f"{series.steps[-1]:,}",
                *lowest,
                *highest,
                f"{len(series.steps):,}",
            ]
        )
    if not rows:
        return []
    return [
        ["metric", "last", "at step", "lowest", "at step", "highest", "at step", "points"],
        *rows,
    ]


def _layer_table(run: Run) -> Table:
    """The table of layers, with the last statistics and the verdict of the newest checkpoint."""
    rows = run.log.table("nm/layers")
    if not rows:
        return []
    last: dict[str, list[str]] = {}
    for history in run.log.maps.values():
        for place, name in enumerate(history.layers):
            last[name] = [f"{value:.3g}" for value in history.values[-1, :, place].tolist()]
    # A row is named by its module, or by the parameter where a module has several masked ones.
    verdicts = {}
    for verdict in run.verdicts:
        module, _, _ = verdict.key.rpartition(".")
        verdicts[module] = _shown(verdict)
    for verdict in run.verdicts:
        verdicts[verdict.key] = _shown(verdict)
    head, *layers = rows
    if last:
        unknown = ["-"] * len(STATISTICS)
        head = [*head, *STATISTICS]
        layers = [[*row, *last.get(row[0], unknown)] for row in layers]
    if verdicts:
        head = [*head, "checkpoint"]
        layers = [[*row, verdicts.get(row[0], "-")] for row in layers]
    return [head, *layers]


def _shown(verdict: Verdict) -> str:
    if verdict.verdict != "broken":
        return verdict.verdict
    return f"broken: {verdict.violations:,} of {verdict.blocks:,} blocks"


def _point(point: tuple[float, int] | None) -> tuple[str, str]:
    if point is None:
        return "-", "-"
    value, step = point
    return f"{value:.6g}", f"{step:,}"


def _last(series: Series) -> str:
    """The last value, or the last finite one with a remark."""
    if not series.values:
        return "-"
    value = series.values[-1]
    if series.finite:
        finite, step = series.finite[-1]
        if step != series.steps[-1]:
            return f"{value:g}; last finite {finite:.6g} at {step:,}"
    return f"{value:.6g}"
