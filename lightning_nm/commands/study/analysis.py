"""What a study found: paired differences with intervals, their tables, and the picture of them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from lightning_nm.commands.study.spec import Spec
from lightning_nm.export.atomic_write import replacing

Row = Mapping[str, Any]
Verdict = Literal["better", "worse", "undecided"]
CONFIDENCE = 0.95  # of intervals, on both sides
POWER = 0.8  # the fraction of repetitions in which the smallest detectable difference is seen
FACTS = ("torch", "lightning_nm", "threads", "device")
COLOURS = {"better": "#1a7f37", "worse": "#cf222e", "undecided": "#6e7781"}


class Interval(NamedTuple):
    r"""A mean and its 95 % interval by Student's t, :math:`\bar x \pm t_{0.975, n-1}\, s / \sqrt n`.

    Attributes:
        count: Number n of values.
        mean: Their mean.
        sd: Their sample standard deviation s, NaN for a single value.
        low: Lower bound of the interval, NaN for a single value.
        high: Upper bound.
    """

    count: int
    mean: float
    sd: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of some values.

        Example:
            >>> found = Interval.of([1.0, 2.0, 3.0])
            >>> f"{found.mean} [{found.low:.3f}, {found.high:.3f}], {found.detectable:.3f}"
            '2.0 [-0.484, 4.484], 3.265'
        """
        count, mean = len(values), fmean(values)
        sd = stdev(values) if count > 1 else math.nan
        half_width = _critical(count) * sd / math.sqrt(count)
        return cls(count, mean, sd, mean - half_width, mean + half_width)

    @property
    def detectable(self) -> float:
        r"""The true mean that a two-sided t-test at 5 % tells from zero in 80 % of repetitions.

        It solves :math:`P(T'_{n-1}(\delta \sqrt n / s) > t_{0.975, n-1}) = 0.8` for :math:`\delta`, where T' is the
        noncentral t distribution. The other tail, which would see it on the wrong side of zero, is below 1e-5 there.
        """
        from scipy.special import nctdtrinc

        noncentrality = nctdtrinc(self.count - 1, 1 - POWER, _critical(self.count))
        return float(noncentrality * self.sd / math.sqrt(self.count))


def _critical(count: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1))


class Comparison(NamedTuple):
    """A variant against a baseline on the seeds that both have.

    Attributes:
        variant: Name of the variant.
        baseline: Name of the baseline.
        differences: Variant minus baseline, by seed.
        difference: Their mean and interval; ``None`` without pairs.
        verdict: ``undecided`` unless the interval lies on one side of zero.
    """

    variant: str
    baseline: str
    differences: dict[int, float]
    difference: Interval | None
    verdict: Verdict


class Table(NamedTuple):
    """A table of texts."""

    title: str
    header: list[str]
    cells: list[list[str]]


class Section(NamedTuple):
    """One grid point.

    Attributes:
        title: The grid values, or the study's name without a grid.
        rows: Rows of this point; in a search those of each variant's best settings.
        comparisons: Every variant against every baseline.
    """

    title: str
    rows: list[Row]
    comparisons: list[Comparison]


def compare(
    rows: Sequence[Row], metric: str, variant: str, baseline: str, *, minimize: bool = True
) -> Comparison:
    """Compare two variants by the complete rows of one grid point.

    Args:
        rows: Rows with the keys ``variant``, ``seed``, ``state`` and `metric`.
        metric: The column to compare.
        variant: The variant that is judged.
        baseline: The variant it is compared with.
        minimize: Whether less of the metric is better.

    Example:
        >>> rows = [
        ...     {"variant": variant, "seed": seed, "state": "complete", "loss": loss + seed}
        ...     for variant, loss in [("dense", 1.0), ("sparse", 1.5)]
        ...     for seed in range(3)
        ... ]
        >>> found = compare(rows, "loss", "sparse", "dense")
        >>> found.differences, found.verdict
        ({0: 0.5, 1: 0.5, 2: 0.5}, 'worse')
    """
    own, other = (by_seed(rows, metric, name) for name in (variant, baseline))
    differences = {seed: own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())}
    difference = Interval.of(list(differences.values())) if differences else None
    verdict: Verdict = "undecided"
    # The bounds of a single pair are NaN.
    if difference and (difference.high < 0 or difference.low > 0):
        verdict = "better" if (difference.high < 0) == minimize else "worse"
    return Comparison(variant, baseline, differences, difference, verdict)


def by_seed(rows: Sequence[Row], metric: str, variant: str) -> dict[int, float]:
    """Return the metric of a variant's complete rows, by seed."""
    complete = [row for row in rows if row["variant"] == variant and row["state"] == "complete"]
    return {row["seed"]: row[metric] for row in complete}


def sections(spec: Spec, rows: Sequence[Row]) -> list[Section]:
    """Return the sections of a report, one for each grid point."""
    minimize = spec.direction == "minimize"
    found = []
    for values in {str(cell.values): cell.values for cell in spec.cells()}.values():
        here = [row for row in rows if values.items() <= row.items()]
        if spec.search:
            here = [row for name in spec.variants for row in _best(spec, here, name)]
        comparisons = [
            compare(here, spec.metric, variant, baseline, minimize=minimize)
            for baseline in spec.baselines
            for variant in spec.variants
            if variant != baseline
        ]
        title = ", ".join(f"{key} {value}" for key, value in values.items()) or spec.name
        found.append(Section(title, here, comparisons))
    return found


def _best(spec: Spec, rows: Sequence[Row], variant: str) -> list[Row]:
    """The rows of the settings of a variant that have the best mean; settings with a missing seed are left out."""
    trials: dict[Any, list[Row]] = {}
    for row in rows:
        if row["variant"] == variant and row["state"] == "complete":
            trials.setdefault(row["trial"], []).append(row)
    whole = [found for found in trials.values() if len(found) == len(spec.seeds)]
    best = min if spec.direction == "minimize" else max
    return best(whole, key=lambda found: fmean(row[spec.metric] for row in found), default=[])


def tables(spec: Spec, section: Section) -> Iterator[Table]:
    """Yield the tables of a section: means, and differences to the baselines if there are some."""
    yield _means(spec, section)
    if section.comparisons:
        yield _differences(section)


def _means(spec: Spec, section: Section) -> Table:
    """One row for each variant: its mean, its costs, and in a search its settings."""
    columns = {
        f"FLOPs, {key.removeprefix('flops_')}": (key, 3)
        for key in sorted({key for row in section.rows for key in row})
        if key.startswith("flops_")
    }
    columns["fit, s"] = ("fit_seconds", 1)
    if spec.seconds is not None:
        columns |= {"steps": ("steps", 0), "step, ms": ("step_ms", 1)}
    values = {name: by_seed(section.rows, spec.metric, name).values() for name in spec.variants}
    intervals = {name: Interval.of(list(each)) for name, each in values.items() if each}
    digits = decimals(
        [
            width
            for each in intervals.values()
            for width in (each.high - each.low, abs(each.mean) / 5)
        ]
    )
    cells = []
    for variant in spec.variants:
        rows = [row for row in section.rows if row["variant"] == variant]
        complete = [row for row in rows if row["state"] == "complete"]
        line = [variant, str(len(complete)), str(len(rows) - len(complete))]
        line += _texts(intervals.get(variant), digits, "")
        for key, places in columns.values():
            found = [row[key] for row in complete if key in row]
            line.append(f"{fmean(found):.{places}f}" if found else "-")
        for key in spec.search:
            setting = complete[0][key] if complete else "-"
            line.append(f"{setting:.4g}" if isinstance(setting, float) else str(setting))
        cells.append(line)
    less = "less" if spec.direction == "minimize" else "more"
    header = ["variant", "seeds", "missing", "mean", "95 % interval", *columns, *spec.search]
    return Table(f"{section.title}: {spec.metric}, {less} is better", header, cells)


def _differences(section: Section) -> Table:
    """One row for each comparison: the mean of its pairs, its interval and what that says."""
    header = [
        *("variant - baseline", "pairs", "mean", "95 % interval"),
        *("smallest detectable", "verdict"),
    ]
    found = [each.difference for each in section.comparisons if each.difference]
    digits = decimals([(each.high - each.low) / 2 for each in found])
    cells = []
    for variant, baseline, differences, interval, verdict in section.comparisons:
        detectable = interval.detectable if interval else math.nan
        text = "-" if math.isnan(detectable) else f"{detectable:.{digits}f}"
        names = [f"{variant} - {baseline}", str(len(differences))]
        cells.append([*names, *_texts(interval, digits, "+"), text, verdict])
    return Table(f"{section.title}: paired differences", header, cells)


def _texts(interval: Interval | None, digits: int, sign: str) -> tuple[str, str]:
    """The mean and the interval, or ``-`` where there is none."""
    if interval is None:
        return "-", "-"
    mean, low, high = (
        f"{x:{sign}.{digits}f}" for x in (interval.mean, interval.low, interval.high)
    )
    return mean, "-" if math.isnan(interval.low) else f"[{low}, {high}]"


def decimals(widths: Sequence[float]) -> int:
    """Return the decimals that show the narrowest of some widths to two digits; between 0 and 6.

    Example:
        >>> decimals([0.42, 0.037]), decimals([12.0]), decimals([])
        (3, 0, 3)
    """
    real = [width for width in widths if 0 < width < math.inf]
    place_of_first_digit = math.floor(math.log10(min(real, default=0.01)))
    return min(6, max(0, 1 - place_of_first_digit))


def report(spec: Spec, rows: Sequence[Row], found: Sequence[Section]) -> str:
    """Return the report as Markdown, whose tables can be read as they are."""
    lines = [f"# {spec.name}"]
    for section in found:
        for title, header, cells in tables(spec, section):
            texts = [[text.replace("|", "\\|") for text in line] for line in (header, *cells)]
            widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
            texts.insert(1, ["-" * width for width in widths])
            lines += ["", f"## {title}", ""]
            for line in texts:
                padded = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
                lines.append(f"| {' | '.join(padded)} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in _notes(spec, rows)), ""])


def _notes(spec: Spec, rows: Sequence[Row]) -> Iterator[str]:
    """What a reader of the tables must know."""
    complete = [row for row in rows if row["state"] == "complete"]
    failed = [row for row in rows if row["state"] == "failed"]
    if missing := len(rows) - len(complete) - len(failed):
        yield f"Not finished: {missing} of {len(rows)} trainings. Run the command again to go on."
    for row in failed:
        keys = ("variant", *spec.grid, *spec.search, "seed")
        yield f"Failed: {', '.join(f'{key} {row.get(key)}' for key in keys)}: {row['error']}"
    if complete:
        facts = {fact: sorted({str(row[fact]) for row in complete}) for fact in FACTS}
        mixed = any(len(values) > 1 for values in facts.values())
        what = ", ".join(f"{fact} {' and '.join(values)}" for fact, values in facts.items())
        yield f"Ran with {what}{'; mixed, so results may differ for that reason' if mixed else ''}."
        yield "FLOPs are those of training, relative to dense training, and fit is the mean time of a training."
    if spec.seconds is not None:
        yield (
            f"Every training has as many steps as take {spec.seconds:g} s, by the time of a step that was measured "
            "before the first training; fit is what trainings took then, perhaps beside other work."
        )
    if spec.search:
        yield (
            "Each variant has the best of its sampled settings, chosen by this metric on these seeds: the means are "
            "optimistic. Repeat the comparison with these settings and other seeds."
        )
    if spec.baselines:
        yield (
            "Differences are paired by seed. Intervals are Student's t and hold for each row alone. "
            "Smallest detectable is the true difference that such a test sees in 80 % of repetitions, by the "
            "paired standard deviation. Undecided: the interval contains zero, or there is none."
        )


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write one line for each training; a cell is empty where a training has no such value."""
    names = dict.fromkeys(key for row in rows for key in row)
    # Errors are long texts: the last column.
    header = sorted(names, key="error".__eq__)
    with replacing(path) as new, new.open("w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(rows)


def draw(path: Path, spec: Spec, found: Sequence[Section]) -> None:
    """Draw a panel for each grid point and baseline: means with 95 % intervals, and below them the pairs."""
    from matplotlib.figure import Figure

    size = (1.5 + 5.2 * len(spec.baselines), 0.8 + len(found) * (1.2 + 0.42 * len(spec.variants)))
    figure = Figure(size, layout="constrained")
    panels = figure.subplots(len(found), len(spec.baselines), squeeze=False)
    for section, of_section in zip(found, panels, strict=True):
        for baseline, axes in zip(spec.baselines, of_section, strict=True):
            shown = [each for each in section.comparisons if each.baseline == baseline]
            axes.set_title(f"{section.title}: difference to {baseline}", loc="left", fontsize=10)
            axes.axvline(0, color="black", linewidth=1)
            axes.set_yticks(range(len(shown)), [each.variant for each in shown])
            axes.set_ylim(len(shown) - 0.4, -0.7)
            for row, (_, _, differences, interval, verdict) in enumerate(shown):
                colour = COLOURS[verdict]
                axes.plot(list(differences.values()), [row + 0.2] * len(differences), ".", c=colour)
                if interval:
                    half_width = (
                        interval.high - interval.mean
                    )  # NaN, which is not drawn, for one pair
                    axes.errorbar(interval.mean, row, xerr=half_width, fmt="D", c=colour)
                    axes.annotate(verdict, (interval.mean, row - 0.15), ha="center", color=colour)
    better = "left" if spec.direction == "minimize" else "right"
    caption = f"{spec.metric}, paired by seed; better is to the {better}; bars are 95 % intervals, dots are pairs"
    figure.supxlabel(caption, fontsize=9)
    with replacing(path) as new:
        figure.savefig(new, dpi=130, format="png")
