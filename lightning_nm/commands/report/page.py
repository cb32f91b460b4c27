"""The page: tables and charts of runs in one HTML file that loads nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_nm.callbacks.report.history import MAPS, LayerHistory
from lightning_nm.commands.report.charts import Chart, all_layers, metric_charts, statistic_charts
from lightning_nm.commands.report.events import Series, Table, layer_scalars
from lightning_nm.commands.report.run import Run
from lightning_nm.export.verdicts import Verdict

# Of a layer at its last log, beside the table of layers; in the order of MAPS.
STATISTICS = ("flip rate", "margin", "kept magnitude")


@dataclass
class Section:
    """One run of a page, as :func:`section` returns it.

    Example:
        >>> from pathlib import Path
        >>> from lightning_nm.commands.report.events import Log
        >>> part = section(Run(Path("runs/a"), "a", Log(["events.out.tfevents.1"])))
        >>> part.facts
        [['folder', 'runs/a'], ['event files', '1']]
    """

    run: Run
    facts: Table  # without a head: a name and a value in each row
    metrics: Table
    layers: Table
    heat_maps: list[Chart]
    constant: list[str]  # statistics that no heat map shows, because they have one value
    curves: list[Chart]
    statistics: list[Chart]


@dataclass
class Comparison:
    """Several runs side by side, as :func:`compare` returns them; a table without rows is empty.

    Example:
        >>> from pathlib import Path
        >>> from lightning_nm.commands.report.events import Log
        >>> runs = [Run(Path(name), name, Log([]), settings={"lr": lr}) for name, lr in (("a", "1"), ("b", "2"))]
        >>> compare(runs).settings
        [['', 'a', 'b'], ['lr', '1', '2']]
    """

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

    # Names of layers, runs and settings are escaped; a name that the template misspells is an error.
    environment = Environment(
        loader=PackageLoader("lightning_nm.commands.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = f"{runs[0].label}: N:M report"
    comparison = None  # nothing to compare a single run with
    if len(runs) > 1:
        title = f"N:M report of {len(runs)} runs"
        comparison = compare(runs)
    return environment.get_template("page.html.j2").render(
        title=title,
        version=version,
        sections=[section(run) for run in runs],
        comparison=comparison,
        plotly=get_plotlyjs(),  # megabytes, within the page, so that it opens without a network
    )


def section(run: Run) -> Section:
    """Make the tables and the charts of a run."""
    histories, constant = _heat_maps(run)
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


def _heat_maps(run: Run) -> tuple[list[tuple[str, LayerHistory, int]], list[str]]:
    """What :func:`all_layers` draws, and the statistics with one value, which it need not draw."""
    histories = []
    drawn = set()
    for callback, history in run.log.maps.items():
        for place, statistic in enumerate(MAPS):
            name = f"{statistic}: {callback}" if callback else statistic
            drawn.add(name)
            histories.append((name, history, place))

    # Scalars of layers (`log_layers`) may repeat what the heat maps hold.
    constant = []
    for name, history in layer_scalars(run.log).items():
        if name in drawn:
            continue
        values = history.values[:, 0]  # [columns, layers]
        known = values[~values.isnan()]
        is_constant = known.numel() > 0 and bool(known.min() == known.max())
        # A heat map of one colour shows nothing.
        if is_constant:
            title = name.replace("_", " ")
            constant.append(f"{title} {float(known[0]):.4g}")
        else:
            histories.append((name, history, 0))
    return histories, constant


def compare(runs: Sequence[Run]) -> Comparison:
    """Make the tables and the charts of several runs."""
    head = ["", *(run.label for run in runs)]
    metrics = _side_by_side([_last_values(run) for run in runs])
    # Metrics come before statistics, whichever run has them; the sort is stable.
    metrics.sort(key=lambda row: row[0].startswith("nm/"))
    flops = _side_by_side([run.flops for run in runs])
    settings = []
    for name, *values in _side_by_side([run.settings for run in runs]):
        if len(set(values)) > 1:
            settings.append([name, *values])
    curves = {run.label: run.metrics for run in runs}
    statistics = {run.label: run.statistics for run in runs if run.statistics}
    return Comparison(
        metrics=[head, *metrics],
        flops=[head, *flops] if flops else [],
        settings=[head, *settings] if settings else [],
        curves=metric_charts(curves),
        statistics=statistic_charts(statistics),
    )


def _side_by_side(columns: Sequence[Mapping[str, str]]) -> Table:
    """A row for each name of any column; a column without it has a dash."""
    names = dict.fromkeys(chain.from_iterable(columns))
    rows = []
    for name in names:
        values = [column.get(name, "-") for column in columns]
        rows.append([name, *values])
    return rows


def _last_values(run: Run) -> dict[str, str]:
    return {tag: _last(series) for tag, series in _named(run)}


def _named(run: Run) -> list[tuple[str, Series]]:
    """The series of a run by tag, metrics first."""
    # Under the prefix that they have in TensorBoard, which tells them from a metric of the same name.
    statistics = [(f"nm/{name}", series) for name, series in run.statistics.items()]
    return [*run.metrics.items(), *statistics]


def _facts(run: Run) -> Table:
    """What is known of the run: folder, length, layers and checkpoints."""
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
        masked = sum(row[2] != "-" for row in layers)  # the column of patterns
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
    """A row for each scalar of the whole model, with its extremes; empty without any."""
    rows = []
    for tag, series in _named(run):
        # Pairs of value and step: of equal values `min` finds the first step, `max` the last.
        finite = series.finite
        last_step = f"{series.steps[-1]:,}"
        lowest = _point(min(finite, default=None))
        highest = _point(max(finite, default=None))
        points = f"{len(series.steps):,}"
        rows.append([tag, _last(series), last_step, *lowest, *highest, points])
    if not rows:
        return []
    head = ["metric", "last", "at step", "lowest", "at step", "highest", "at step", "points"]
    return [head, *rows]


def _layer_table(run: Run) -> Table:
    """The table of layers, with the last statistics and the verdict of the newest checkpoint."""
    rows = run.log.table("nm/layers")
    if not rows:
        return []
    head, *layers = rows
    statistics = _last_statistics(run)
    if statistics:
        unknown = ["-"] * len(STATISTICS)
        head = [*head, *STATISTICS]
        layers = [[*row, *statistics.get(row[0], unknown)] for row in layers]
    verdicts = _verdicts(run)
    if verdicts:
        head = [*head, "checkpoint"]
        layers = [[*row, verdicts.get(row[0], "-")] for row in layers]
    return [head, *layers]


def _last_statistics(run: Run) -> dict[str, list[str]]:
    """The last column of the heat maps, by layer."""
    found = {}
    for history in run.log.maps.values():
        if not history.steps:
            continue
        last_column = history.values[-1]  # [statistics, layers]
        for place, name in enumerate(history.layers):
            found[name] = [f"{value:.3g}" for value in last_column[:, place].tolist()]
    return found


def _verdicts(run: Run) -> dict[str, str]:
    """What a checkpoint's check found, by the names that rows of the table of layers have."""
    # A row is named by its module, or by the parameter where a module has several masked ones.
    by_module = {}
    by_parameter = {}
    for verdict in run.verdicts:
        module, _, _ = verdict.key.rpartition(".")
        by_module[module] = _shown(verdict)
        by_parameter[verdict.key] = _shown(verdict)
    return {**by_module, **by_parameter}


def _shown(verdict: Verdict) -> str:
    if verdict.verdict != "broken":
        return verdict.verdict
    return f"broken: {verdict.violations:,} of {verdict.blocks:,} blocks"


def _point(point: tuple[float, int] | None) -> tuple[str, str]:
    """A value and its step as two cells."""
    if point is None:
        return "-", "-"
    value, step = point
    return f"{value:.6g}", f"{step:,}"


def _last(series: Series) -> str:
    """The last value, or the last finite one with a remark."""
    if not series.values:
        return "-"
    value = series.values[-1]
    finite = series.finite
    if finite:
        finite_value, step = finite[-1]
        if step != series.steps[-1]:  # then the last value is NaN or infinite
            return f"{value:g}; last finite {finite_value:.6g} at {step:,}"
    return f"{value:.6g}"
