"""The report of a study: a tidy CSV, and tables as markdown and on the console."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from lightning_nm.commands.study.analysis import (
    Comparison,
    Interval,
    best_settings,
    by_seed,
    compare,
)
from lightning_nm.commands.study.spec import Spec
from lightning_nm.commands.study.store import Row
from lightning_nm.export.atomic_write import replacing

_FACTS = ("torch", "lightning_nm", "threads", "device")


@dataclass(frozen=True)
class Section:
    """One grid point: its rows, and the comparisons with each baseline.

    Attributes:
        title: The grid values, or the study's name without a grid.
        rows: Rows of this point; in a search those of each variant's best settings.
        comparisons: Every variant against every baseline.
    """

    title: str
    rows: list[Row]
    comparisons: list[Comparison]


@dataclass(frozen=True)
class Table:
    """A table for markdown and for the console."""

    title: str
    header: list[str]
    cells: list[list[str]]


def sections(spec: Spec, rows: Sequence[Row]) -> list[Section]:
    """Return the sections of a report, one for each grid point."""
    minimize = spec.direction == "minimize"
    points = list({str(cell.values): cell.values for cell in spec.cells()}.values())
    found = []
    for values in points:
        rows_here = [row for row in rows if all(row[key] == value for key, value in values.items())]
        if spec.search:
            rows_here = best_settings(rows_here, spec.metric, list(spec.search), minimize=minimize)
        comparisons = []
        for baseline in spec.baselines:
            for variant in spec.variants:
                if variant != baseline:
                    comparisons.append(
                        compare(rows_here, spec.metric, variant, baseline, minimize=minimize)
                    )
        title = ", ".join(f"{key} {value}" for key, value in values.items()) or spec.name
        found.append(Section(title, rows_here, comparisons))
    return found


def tables(spec: Spec, section: Section) -> Iterator[Table]:
    """Yield the tables of a section: means, and differences to the baselines."""
    yield _means(spec, section)
    if section.comparisons:
        yield _differences(section)


def _means(spec: Spec, section: Section) -> Table:
    """One row for each variant: its mean, its costs, and in a search its settings."""
    flops_keys = sorted({key for row in section.rows for key in row if key.startswith("flops_")})
    header = ["variant", "seeds", "missing", "mean", "95 % interval"]
    header += [f"FLOPs, {key.removeprefix('flops_')}" for key in flops_keys]
    header.append("fit, s")
    if spec.seconds is not None:
        header += ["steps", "step, ms"]
    header += spec.search

    intervals: dict[str, Interval | None] = {}
    widths = []
    for variant in spec.variants:
        values = list(by_seed(section.rows, spec.metric, variant).values())
        interval = Interval.of(values) if values else None
        intervals[variant] = interval
        if interval is not None:
            widths += [interval.high - interval.low, abs(interval.mean) / 5]
    digits = decimals(widths)

    cells = []
    for variant, interval in intervals.items():
        rows = [row for row in section.rows if row["variant"] == variant]
        complete = [row for row in rows if row["state"] == "complete"]
        line = [variant, str(len(complete)), str(len(rows) - len(complete))]
        line.append("-" if interval is None else f"{interval.mean:.{digits}f}")
        line.append(bounds(interval, digits, sign=""))
        line += [_mean(complete, key, 3) for key in flops_keys]
        line.append(_mean(complete, "fit_seconds", 1))
        if spec.seconds is not None:
            line += [_mean(complete, "steps", 0), _mean(complete, "step_ms", 1)]
        line += [_setting(complete, key) for key in spec.search]
        cells.append(line)
    less = "less" if spec.direction == "minimize" else "more"
    return Table(f"{section.title}: {spec.metric}, {less} is better", header, cells)


def _differences(section: Section) -> Table:
    """One row for each comparison."""
    header = [
        "variant - baseline",
        "pairs",
        "mean",
        "95 % interval",
        "smallest detectable",
        "verdict",
    ]
    intervals = [comparison.difference for comparison in section.comparisons]
    digits = decimals(
        [(interval.high - interval.low) / 2 for interval in intervals if interval is not None]
    )
    cells = []
    for comparison in section.comparisons:
        interval = comparison.difference
        detectable = comparison.detectable
        cells.append(
            [
                f"{comparison.variant} - {comparison.baseline}",
                str(len(comparison.seeds)),
                "-" if interval is None else f"{interval.mean:+.{digits}f}",
                bounds(interval, digits, sign="+"),
                "-" if math.isnan(detectable) else f"{detectable:.{digits}f}",
                comparison.verdict,
            ]
        )
    return Table(f"{section.title}: paired differences", header, cells)


def notes(spec: Spec, rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the tables must know: what is missing or failed, mixed versions, how to read columns."""
    complete = [row for row in rows if row["state"] == "complete"]
    failed = [row for row in rows if row["state"] == "failed"]
    said = []
    missing = len(rows) - len(complete) - len(failed)
    if missing:
        said.append(
            f"Not finished: {missing} of {len(rows)} trainings. Run the command again to go on."
        )
    for row in failed:
        where = ", ".join(
            f"{key} {row[key]}" for key in ("variant", *spec.grid, *spec.search, "seed")
        )
        said.append(f"Failed: {where}: {row['error']}")
    for fact in _FACTS:
        values = sorted({str(row[fact]) for row in complete})
        if len(values) > 1:
            said.append(
                f"Mixed: trials ran with {fact} {', '.join(values)}; their results may differ for that reason."
            )
    if complete:
        said.append(
            "FLOPs are those of training, relative to dense training, and fit is the mean time of a training."
        )
        if spec.seconds is not None:
            said.append(
                f"Every training has as many steps as take {spec.seconds:g} s, by the time of a step that was measured "
                "before the first training; fit is what trainings took then, perhaps beside other work."
            )
        said.append("Ran with " + ", ".join(f"{fact} {complete[0][fact]}" for fact in _FACTS) + ".")
    if spec.search:
        said.append(
            "Each variant has the best of its sampled settings, chosen by this metric on these seeds: the means are "
            "optimistic. Repeat the comparison with these settings and other seeds."
        )
    if spec.baselines:
        said.append(
            "Differences are paired by seed. Intervals are Student's t and hold for each row alone. "
            "Smallest detectable is the true difference that such a test sees in 80 % of repetitions, by the "
            "paired standard deviation. Undecided: the interval contains zero, or there is none."
        )
    return said


def write_csv(path: Path, spec: Spec, rows: Sequence[Row]) -> None:
    """Write one line for each training; a cell is empty where a training has no such value."""
    names = ["variant", *spec.grid]
    if spec.search:
        names += ["trial", *spec.search]
    names += ["seed", "state"]
    for row in rows:
        names += [key for key in row if key != "error"]
    names.append("error")  # a long text: the last column
    with replacing(path) as new, new.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(names)))
        writer.writeheader()
        writer.writerows(rows)


def markdown(spec: Spec, rows: Sequence[Row], found: Sequence[Section]) -> str:
    """Return the report as Markdown."""
    lines = [f"# {spec.name}", ""]
    for section in found:
        for table in tables(spec, section):
            rule = ["---"] * len(table.header)
            lines += [f"## {table.title}", ""]
            lines += [_line(cells) for cells in (table.header, rule, *table.cells)]
            lines.append("")
    lines += [f"- {note}" for note in notes(spec, rows)]
    return "\n".join(lines) + "\n"


def show(spec: Spec, rows: Sequence[Row], found: Sequence[Section], console: Console) -> None:
    """Print the report."""
    for section in found:
        for table in tables(spec, section):
            console.print(_rich_table(table))
    for note in notes(spec, rows):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _rich_table(table: Table) -> RichTable:
    shown = RichTable(
        title=table.title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold"
    )
    for number, name in enumerate(table.header):
        # A narrow console shortens headings, not numbers.
        width = max((len(cells[number]) for cells in table.cells), default=0)
        shown.add_column(name, justify="right" if number else "left", min_width=width)
    for cells in table.cells:
        shown.add_row(*cells)
    return shown


def bounds(interval: Interval | None, digits: int, sign: str) -> str:
    """Return an interval as text, or ``-`` if it has no bounds.

    Example:
        >>> bounds(Interval(6, mean=0.1, sd=0.2, low=-0.123, high=0.323), digits=2, sign="+")
        '[-0.12, +0.32]'
    """
    if interval is None or math.isnan(interval.low):
        return "-"
    return f"[{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]"


def decimals(widths: Sequence[float]) -> int:
    """Return the decimals that show the narrowest of some widths to two digits; between 0 and 6.

    Example:
        >>> decimals([0.42, 0.037]), decimals([12.0]), decimals([])
        (3, 0, 3)
    """
    real = [width for width in widths if width > 0 and math.isfinite(width)]
    if not real:
        return 3
    place_of_first_digit = math.floor(math.log10(min(real)))
    return min(6, max(0, 1 - place_of_first_digit))


def _mean(rows: Sequence[Row], key: str, digits: int) -> str:
    values = [row[key] for row in rows if key in row]
    if not values:
        return "-"
    return f"{sum(values) / len(values):.{digits}f}"


def _setting(rows: Sequence[Row], key: str) -> str:
    """A setting of a variant, which all of its rows have."""
    if not rows:
        return "-"
    value = rows[0][key]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
