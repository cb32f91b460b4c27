"""What a study found: paired differences with intervals, their tables, and the picture of them."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from scipy.special import nctdtrinc
from scipy.stats import t

from lightning_nm.commands.study.spec import Spec
from lightning_nm.export.atomic_write import replacing

Row = Mapping[str, Any]
CONFIDENCE = 0.95  # of intervals, on both sides
POWER = 0.8  # the fraction of repetitions in which the smallest detectable difference is seen


@dataclass(frozen=True)
class Interval:
    r"""A mean and its 95 % interval by Student's t, :math:`\bar x \pm t_{0.975, n-1}\, s / \sqrt n`.

    Attributes:
        count: Number n of values.
        mean: Their mean, NaN without values.
        sd: Their sample standard deviation s, NaN for fewer than two values, as are the bounds.
        low: Lower bound of the interval.
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
            >>> f"{found.mean} [{found.low:.3f}, {found.high:.3f}], {found.detectable:.2f}"
            '2.0 [-0.484, 4.484], 3.26'
        """
        count = len(values)
        mean = fmean(values) if count else math.nan
        sd = stdev(values) if count > 1 else math.nan  # stdev() raises for fewer
        # Without values sd is NaN, and so are the bounds, whatever is divided by.
        half_width = _critical(count) * sd / math.sqrt(max(1, count))
        return cls(count, mean, sd, mean - half_width, mean + half_width)

    @property
    def width(self) -> float:
        """The distance of the bounds."""
        return self.high - self.low

    @property
    def detectable(self) -> float:
        r"""The true mean that a two-sided t-test at 5 % tells from zero in 80 % of repetitions.

        It solves :math:`P(T'_{n-1}(\delta \sqrt n / s) > t_{0.975, n-1}) = 0.8` for :math:`\delta`, where T' is the
        noncentral t distribution. The other tail, which would see it on the wrong side of zero, is below 1e-5 there.
        """
        # It inverts P(T' <= t) by the noncentrality: arguments are the degrees of freedom, that probability and t.
        noncentrality = nctdtrinc(self.count - 1, 1 - POWER, _critical(self.count))
        # A numpy number: without pairs NaN is divided by 0, which is NaN again, where Python's would raise.
        return float(noncentrality * self.sd / math.sqrt(self.count))


def _critical(count: int) -> float:
    # The quantile of 0.975, which leaves 2.5 % on each side; NaN without a degree of freedom.
    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1))


NOTES = """
- FLOPs are those of training, relative to dense training, and fit is the mean time of a training, in a study of equal
  seconds, too: perhaps next to other work, which the timing of the steps was not.
- Differences are paired by seed. Intervals are Student's t and hold for each row alone. Smallest detectable is the true
  difference that such a test sees in 80 % of repetitions, by the paired standard deviation. Undecided: the interval
  contains zero, or there is none.
- In a search each variant has the best of its sampled settings, chosen by this metric on these seeds: the means are
  optimistic. Repeat the comparison with these settings and other seeds.
- Other versions of torch or numbers of threads may change the last digits of results.
"""


class Comparison(NamedTuple):
    """A variant against a baseline on the seeds that both have.

    Attributes:
        variant: Name of the variant.
        baseline: Name of the baseline.
        differences: Variant minus baseline, by seed.
        difference: Their mean and interval.
        verdict: ``better``, ``worse``, or ``undecided`` unless the interval lies on one side of zero.
    """

    variant: str
    baseline: str
    differences: dict[int, float]
    difference: Interval
    verdict: str


class Section(NamedTuple):
    """One grid point.

    Attributes:
        title: The grid values, or the study's name without a grid.
        rows: The complete rows of this point; in a search those of each variant's best settings.
        comparisons: Every variant against every baseline.
    """

    title: str
    rows: list[Row]
    comparisons: list[Comparison]


def compare(
    rows: Sequence[Row], metric: str, variant: str, baseline: str, direction: str = "minimize"
) -> Comparison:
    """Compare two variants by the complete rows of one grid point.

    Args:
        rows: Rows with the keys ``variant``, ``seed`` and `metric`.
        metric: The column to compare.
        variant: The variant that is judged.
        baseline: The variant it is compared with.
        direction: ``minimize`` if less of the metric is better, else ``maximize``.

    Example:
        >>> rows = [
        ...     {"variant": variant, "seed": seed, "loss": loss + seed}
        ...     for variant, loss in [("dense", 1.0), ("sparse", 1.5)]
        ...     for seed in range(3)
        ... ]
        >>> found = compare(rows, "loss", "sparse", "dense")
        >>> found.differences, found.verdict
        ({0: 0.5, 1: 0.5, 2: 0.5}, 'worse')
    """
    own, other = (
        {row["seed"]: row[metric] for row in rows if row["variant"] == name}
        for name in (variant, baseline)
    )
    differences = {seed: own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())}
    difference = Interval.of(list(differences.values()))
    verdict = "undecided"
    # The bounds of fewer than two pairs are NaN.
    if difference.high < 0 or difference.low > 0:
        # A variant below its baseline is better if less of the metric is.
        verdict = "better" if (difference.high < 0) == (direction == "minimize") else "worse"
    return Comparison(variant, baseline, differences, difference, verdict)


def sections(spec: Spec, rows: Sequence[Row]) -> list[Section]:
    """Return the sections of a report, one for each grid point."""
    found = []
    complete = [row for row in rows if row["state"] == "complete"]
    for values in spec.points():
        # The rows that have all grid values of this point.
        here = [row for row in complete if values.items() <= row.items()]
        if spec.search:
            here = [row for variant in spec.variants for row in _best(spec, here, variant)]
        comparisons = [
            compare(here, spec.metric, variant, baseline, spec.direction)
            for baseline in spec.baselines
            for variant in spec.variants
            if variant != baseline
        ]
        title = ", ".join(f"{key} {value}" for key, value in values.items()) or spec.name
        found.append(Section(title, here, comparisons))
    return found


def _best(spec: Spec, complete: Sequence[Row], variant: str) -> list[Row]:
    """The rows of a variant's settings with the best mean; settings with a missing or failed seed are left out."""
    own = [row for row in complete if row["variant"] == variant]
    trials = [[row for row in own if row["trial"] == number] for number in range(spec.trials or 0)]
    whole = [found for found in trials if len(found) == len(spec.seeds)]
    choose = min if spec.direction == "minimize" else max
    return choose(whole, key=lambda found: fmean(row[spec.metric] for row in found), default=[])


def table(spec: Spec, section: Section) -> list[list[str]]:
    """Return a header, a row for each variant, and one for each comparison; a dash is what a row does not have."""
    # Rows of a variant whose config has no NMSparsityCallback have none of these keys.
    flops = sorted({key for row in section.rows for key in row if key.startswith("flops_")})
    costs = {f"FLOPs, {key.removeprefix('flops_')}": (key, ".3f") for key in flops}
    costs["fit, s"] = ("fit_seconds", ".1f")
    # Then the variants make different numbers of steps.
    if spec.seconds is not None:
        costs["steps"] = ("steps", ".0f")
    head = ["variant", "seeds", "mean", "95 % interval", "smallest detectable", "verdict"]
    cells = [[*head, *costs, *spec.search]]
    rows_of = {
        name: [row for row in section.rows if row["variant"] == name] for name in spec.variants
    }
    means = {
        name: Interval.of([row[spec.metric] for row in rows]) for name, rows in rows_of.items()
    }
    # A single seed has no interval: then the size of the mean decides.
    # A fifth of a mean, to two digits, shows two or three digits of the mean.
    widths = [width for each in means.values() for width in (each.width, abs(each.mean) / 5)]
    digits = _decimals(widths)
    for variant, rows in rows_of.items():
        # Only comparisons have a smallest detectable difference and a verdict.
        line = [variant, *_texts(means[variant], f".{digits}f"), "-", "-"]
        for key, form in costs.values():
            found = [row[key] for row in rows if key in row]
            line.append(_text(fmean(found or [math.nan]), form))
        # In a search the rows of a variant are those of one trial, so their settings are the same.
        cells.append(line + [str(rows[0][key]) if rows else "-" for key in spec.search])
    # Half of an interval is what is written behind a ±: it gets two digits.
    digits = _decimals([each.difference.width / 2 for each in section.comparisons])
    for variant, baseline, _, interval, verdict in section.comparisons:
        line = [f"{variant} - {baseline}", *_texts(interval, f"+.{digits}f")]
        line += [_text(interval.detectable, f".{digits}f"), verdict]
        cells.append(line + ["-"] * len([*costs, *spec.search]))
    return cells


def _decimals(widths: Sequence[float]) -> int:
    """Return the decimals that show the narrowest of some widths to two digits; between 0 and 6.

    Example:
        >>> _decimals([0.42, 0.037]), _decimals([12.0]), _decimals([])
        (3, 0, 3)
    """
    real = [width for width in widths if width > 0 and math.isfinite(width)]
    if not real:
        return 3
    # -2 for 0.037, whose first digit is in the second decimal; one more decimal shows the second digit.
    place_of_first_digit = math.floor(math.log10(min(real)))
    return min(6, max(0, 1 - place_of_first_digit))


def _texts(interval: Interval, form: str) -> list[str]:
    """The number of values, their mean and its bounds."""
    mean, low, high = (_text(each, form) for each in (interval.mean, interval.low, interval.high))
    return [str(interval.count), mean, f"[{low}, {high}]"]


def _text(number: float, form: str) -> str:
    return "-" if math.isnan(number) else format(number, form)


def report(spec: Spec, rows: Sequence[Row], found: Sequence[Section]) -> str:
    """Return the report as Markdown, whose tables can be read as they are."""
    text = f"# {spec.name}: {spec.metric}, {spec.direction}\n"
    for section in found:
        text += f"\n## {section.title}\n"
        cells = table(spec, section)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["-" * width for width in widths])
        for line in cells:
            # Markdown needs no padding, but the report is also printed.
            padded = [each.ljust(width) for each, width in zip(line, widths, strict=True)]
            text += f"\n| {' | '.join(padded)} |"
        text += "\n"
    if missing := sum(row["state"] == "missing" for row in rows):
        text += f"\n- Not finished: {missing} of {len(rows)} trainings; the same command goes on."
    for row in rows:
        if row["state"] == "failed":
            text += f"\n- Failed: {', '.join(f'{key} {value}' for key, value in row.items())}"
    # More than one value of a fact says that rows are of different machines or versions.
    for fact in ("torch", "lightning_nm", "threads", "device"):
        values = sorted({str(row[fact]) for row in rows if fact in row})
        text += f"\n- Ran with {fact} {' and '.join(values) or 'unknown'}."
    return text + NOTES


def write(folder: Path, spec: Spec, rows: Sequence[Row]) -> str:
    """Write ``results.csv``, ``report.md`` and, with baselines, ``report.png``; return the report."""
    found = sections(spec, rows)
    text = report(spec, rows, found)
    # A failed training has other columns than a complete one. A dict keeps the order in which they are met.
    header = dict.fromkeys(key for row in rows for key in row)
    # csv writes the ends of lines itself.
    with replacing(folder / "results.csv") as new, new.open("w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(rows)
    with replacing(folder / "report.md") as new:
        new.write_text(text)
    if spec.baselines:
        with replacing(folder / "report.png") as new:
            _draw(spec, found).savefig(new, dpi=130, format="png")
    return text


def _draw(spec: Spec, found: Sequence[Section]) -> Figure:
    """Draw every comparison: its mean and interval, and below them the pairs."""
    names = []
    shown = [(section.title, each) for section in found for each in section.comparisons]
    # Without pyplot, which chooses a backend and keeps figures. In inches: half of one for each comparison.
    figure = Figure((9, 1 + 0.5 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, c="black")
    for place, (title, (variant, baseline, pairs, interval, verdict)) in enumerate(shown):
        names.append(f"{title}\n{variant} - {baseline}: {verdict}")
        half_width = interval.high - interval.mean  # NaN is not drawn
        axes.errorbar(interval.mean, place, xerr=half_width, fmt="D")
        # The y axis is inverted: 0.2 more is below the interval.
        axes.plot(list(pairs.values()), [place + 0.2] * len(pairs), ".", c="grey")
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"{spec.metric}, {spec.direction}; bars: 95 %, dots: pairs by seed")
    return figure
