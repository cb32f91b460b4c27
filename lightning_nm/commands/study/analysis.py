"""Paired differences between variants, with intervals. Pure functions of rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["better", "worse", "undecided"]
CONFIDENCE = 0.95  # of intervals, on both sides
POWER = 0.8  # the share of repetitions in which the smallest detectable difference is seen


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval by Student's t; the bounds are NaN for a single value.

    Attributes:
        count: Number of values.
        mean: Their mean.
        sd: Their sample standard deviation, NaN for a single value.
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
        r"""The interval :math:`\bar x \pm t_{0.975, n-1}\, s / \sqrt n`.

        Example:
            >>> found = Interval.of([1.0, 2.0, 3.0])
            >>> f"{found.mean} [{found.low:.3f}, {found.high:.3f}]"
            '2.0 [-0.484, 4.484]'
        """
        from scipy.stats import t

        count = len(values)
        mean = statistics.fmean(values)
        if count < 2:
            return cls(count, mean, math.nan, math.nan, math.nan)
        sd = statistics.stdev(values)
        critical = float(t.ppf((1 + CONFIDENCE) / 2, count - 1))
        half_width = critical * sd / math.sqrt(count)
        return cls(count, mean, sd, mean - half_width, mean + half_width)


@dataclass(frozen=True)
class Comparison:
    """A variant against a baseline on the seeds that both have.

    Attributes:
        variant: Name of the variant.
        baseline: Name of the baseline.
        seeds: The seeds that both finished.
        differences: Variant minus baseline, for each of them.
        difference: Their mean and interval; ``None`` without pairs.
        detectable: The smallest true difference that would have been seen, see :func:`smallest_detectable`.
        verdict: ``undecided`` unless the interval lies on one side of zero.
    """

    variant: str
    baseline: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    difference: Interval | None
    detectable: float
    verdict: Verdict


def compare(
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    variant: str,
    baseline: str,
    *,
    minimize: bool = True,
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
        ((0.5, 0.5, 0.5), 'worse')
    """
    of_variant = by_seed(rows, metric, variant)
    of_baseline = by_seed(rows, metric, baseline)
    seeds = tuple(sorted(of_variant.keys() & of_baseline.keys()))
    differences = tuple(of_variant[seed] - of_baseline[seed] for seed in seeds)
    interval = None
    detectable = math.nan
    if differences:
        interval = Interval.of(differences)
        detectable = smallest_detectable(interval.sd, interval.count)
    return Comparison(
        variant, baseline, seeds, differences, interval, detectable, verdict(interval, minimize)
    )


def by_seed(rows: Sequence[Mapping[str, Any]], metric: str, variant: str) -> dict[int, float]:
    """Return the metric of a variant's complete rows, by seed.

    Example:
        >>> by_seed([{"variant": "dense", "seed": 3, "state": "complete", "loss": 0.5}], "loss", "dense")
        {3: 0.5}
    """
    found = {}
    for row in rows:
        if row["variant"] == variant and row["state"] == "complete":
            found[row["seed"]] = row[metric]
    return found


def verdict(difference: Interval | None, minimize: bool) -> Verdict:
    """Judge a difference: ``undecided`` if the interval has zero in it, or there is none.

    Example:
        >>> verdict(Interval(6, mean=-1.0, sd=0.5, low=-1.5, high=-0.5), minimize=True)
        'better'
    """
    if difference is None:
        return "undecided"
    is_lower = difference.high < 0
    is_higher = difference.low > 0
    # The bounds of a single pair are NaN.
    if not is_lower and not is_higher:
        return "undecided"
    return "better" if is_lower == minimize else "worse"


def smallest_detectable(sd: float, count: int) -> float:
    r"""The true mean difference that a two-sided paired t-test at 5 % sees in 80 % of repetitions.

    It solves :math:`P(T'_{n-1}(\delta \sqrt n / s) > t_{0.975, n-1}) = 0.8` for :math:`\delta`, where T' is the
    noncentral t distribution and s the paired standard deviation. The other tail, which would see the difference on the
    wrong side of zero, is below 1e-5 there. NaN if there is no standard deviation.

    Args:
        sd: Sample standard deviation s of the paired differences.
        count: Number n of pairs.

    Example:
        >>> f"{smallest_detectable(1.0, 6):.3f}"
        '1.435'
    """
    from scipy.special import nctdtrinc
    from scipy.stats import t

    if math.isnan(sd) or count < 2:
        return math.nan
    critical = t.ppf((1 + CONFIDENCE) / 2, count - 1)
    noncentrality = float(nctdtrinc(count - 1, 1 - POWER, critical))
    return noncentrality * sd / math.sqrt(count)


def best_settings(
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    searched: Sequence[str],
    *,
    minimize: bool = True,
) -> list[dict[str, Any]]:
    """Return those rows of a search, at one grid point, that have their variant's best mean over all seeds.

    Settings of which a training is missing or failed are left out.

    Example:
        >>> rows = [
        ...     {"variant": "sr-ste", "seed": 0, "state": "complete", "decay": decay, "loss": loss}
        ...     for decay, loss in [(1e-4, 2.0), (2e-4, 1.0)]
        ... ]
        >>> [row["decay"] for row in best_settings(rows, "loss", ["decay"])]
        [0.0002]
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        settings = [row.get(key) for key in searched]
        groups.setdefault((row["variant"], row.get("trial"), *settings), []).append(dict(row))

    best: dict[str, tuple[float, list[dict[str, Any]]]] = {}
    for (variant, *_), group in groups.items():
        if any(row["state"] != "complete" for row in group):
            continue
        mean = statistics.fmean(row[metric] for row in group)
        cost = mean if minimize else -mean
        if variant not in best or cost < best[variant][0]:
            best[variant] = (cost, group)
    return [row for _, group in best.values() for row in group]
