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

from lightning_nm.export.safetensors_file import replacing
from lightning_nm.study.analysis import Comparison, Interval, best_settings, by_seed, compare
from lightning_nm.study.spec import Spec
from lightning_nm.study.store import Row

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
    """The sections of a report, one for each grid point."""
    minimize = spec.direction == "minimize"
    points = list({str(cell.values): cell.values for cell in spec.cells()}.values())
    found = []
    for values in points:
        here = [row for row in rows if all(row[key] == value for key, value in values.items())]
        if spec.search:
            here = best_settings(here, spec.metric, list(spec.search), minimize=minimize)
        pairs = [(variant, baseline) for baseline in spec.baselines for variant in spec.variants if variant != baseline]
        comparisons = [compare(here, spec.metric, *pair, minimize=minimize) for pair in pairs]
        title = ", ".join(f"{key} {value}" for key, value in values.items()) or spec.name
        found.append(Section(title, here, comparisons))
    return found


def tables(spec: Spec, section: Section) -> Iterator[Table]:
    """The tables of a section: means, and differences to the baselines."""
    yield _means(spec, section)
    if section.comparisons:
        yield _differences(section)


def _means(spec: Spec, section: Section) -> Table:
    kinds = sorted({key for row in section.rows for key in row if key.startswith("flops_")})
    less = "less" if spec.direction == "minimize" else "more"
    header = ["variant", "seeds", "missing", "mean", "95 % interval"]
    header += [f"FLOPs, {kind.removeprefix('flops_')}" for kind in kinds] + ["fit, s"]
    header += ["steps", "step, ms"] * (spec.seconds is not None) + list(spec.search)
    found = {variant: list(by_seed(section.rows, spec.metric, variant).values()) for variant in spec.variants}
    intervals = {variant: Interval.of(values) if values else None for variant, values in found.items()}
    digits = decimals(
        [i.high - i.low for i in intervals.values() if i] + [abs(i.mean) / 5 for i in intervals.values() if i]
    )
    cells = []
    for variant, interval in intervals.items():
        own = [row for row in section.rows if row["variant"] == variant]
        complete = [row for row in own if row["state"] == "complete"]
        cells.append(
            [
                variant,
                str(len(complete)),
                str(len(own) - len(complete)),
                f"{interval.mean:.{digits}f}" if interval else "-",
                bounds(interval, digits, sign=""),
                *(_mean(complete, kind, 3) for kind in kinds),
                _mean(complete, "fit_seconds", 1),
                *([_mean(complete, "steps", 0), _mean(complete, "step_ms", 1)] if spec.seconds is not None else []),
                *(
                    f"{complete[0][key]:.4g}" if _is_float(complete, key) else _first(complete, key)
                    for key in spec.search
                ),
            ]
        )
    return Table(f"{section.title}: {spec.metric}, {less} is better", header, cells)


def _differences(section: Section) -> Table:
    header = ["variant - baseline", "pairs", "mean", "95 % interval", "smallest detectable", "verdict"]
    found = [c.difference for c in section.comparisons if c.difference]
    digits = decimals([(interval.high - interval.low) / 2 for interval in found])
    cells = []
    for c in section.comparisons:
        mean = f"{c.difference.mean:+.{digits}f}" if c.difference else "-"
        seen = "-" if math.isnan(c.detectable) else f"{c.detectable:.{digits}f}"
        name = f"{c.variant} - {c.baseline}"
        cells.append([name, str(len(c.seeds)), mean, bounds(c.difference, digits, "+"), seen, c.verdict])
    return Table(f"{section.title}: paired differences", header, cells)


def notes(spec: Spec, rows: Sequence[Row]) -> list[str]:
    """What a reader of the tables must know: what is missing, failures, mixed versions, how to read the columns."""
    said = []
    states = [row["state"] for row in rows]
    if missing := len(states) - states.count("complete") - states.count("failed"):
        said.append(f"Not finished: {missing} of {len(rows)} trainings. Run the command again to go on.")
    for row in rows:
        if row["state"] == "failed":
            where = ", ".join(f"{key} {row[key]}" for key in ("variant", *spec.grid, *spec.search, "seed"))
            said.append(f"Failed: {where}: {row['error']}")
    complete = [row for row in rows if row["state"] == "complete"]
    for fact in _FACTS:
        values = sorted({str(row[fact]) for row in complete})
        if len(values) > 1:
            said.append(f"Mixed: trials ran with {fact} {', '.join(values)}; their results may differ for that reason.")
    if complete:
        said.append("FLOPs are those of training, relative to dense training, and fit is the mean time of a training.")
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
    first = ["variant", *spec.grid, *(["trial", *spec.search] if spec.search else []), "seed", "state"]
    names = dict.fromkeys([*first, *(key for row in rows for key in row if key != "error"), "error"])
    with replacing(path) as new, new.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(rows)


def markdown(spec: Spec, rows: Sequence[Row], found: Sequence[Section]) -> str:
    """The report as markdown."""
    lines = [f"# {spec.name}", ""]
    for section in found:
        for table in tables(spec, section):
            lines += [f"## {table.title}", "", _line(table.header), _line(["---"] * len(table.header))]
            lines += [*map(_line, table.cells), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(spec, rows))]) + "\n"


def show(spec: Spec, rows: Sequence[Row], found: Sequence[Section], console: Console) -> None:
    """Print the report."""
    for section in found:
        for table in tables(spec, section):
            shown = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
            for number, name in enumerate(table.header):
                width = max((len(cells[number]) for cells in table.cells), default=0)
                shown.add_column(name, justify="right" if number else "left", min_width=width)
            for cells in table.cells:
                shown.add_row(*cells)
            console.print(shown)
    for note in notes(spec, rows):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def bounds(interval: Interval | None, digits: int, sign: str) -> str:
    """An interval as text, or ``-`` if it has no bounds."""
    if interval is None or math.isnan(interval.low):
        return "-"
    return f"[{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]"


def decimals(widths: Sequence[float]) -> int:
    """Decimals that show the narrowest of some widths to two digits; between 0 and 6.

    Example:
        >>> decimals([0.42, 0.037]), decimals([12.0]), decimals([])
        (3, 0, 3)
    """
    real = [width for width in widths if width > 0 and math.isfinite(width)]
    return min(6, max(0, 1 - math.floor(math.log10(min(real))))) if real else 3


def _mean(rows: Sequence[Row], key: str, digits: int) -> str:
    values = [row[key] for row in rows if key in row]
    return f"{sum(values) / len(values):.{digits}f}" if values else "-"


def _is_float(rows: Sequence[Row], key: str) -> bool:
    return bool(rows) and isinstance(rows[0][key], float)


def _first(rows: Sequence[Row], key: str) -> str:
    return str(rows[0][key]) if rows else "-"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
