"""Dense and N:M models of several widths: accuracy next to file size and latency."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import NamedTuple

from benchmarks.fronts import Variant
from benchmarks.tables.markdown import Tables, read_csv, read_json, table
from lightning_nm.commands.study.analysis import Interval


class Front(NamedTuple):
    """One study: where its results are, and how its metric is shown."""

    results: str
    measured: str
    metric: str
    factor: float  # of the metric; negative where less of it is better
    title: str  # of the metric's column
    digits: int
    shapes: dict[str, str]  # what each measured batch is
    suffix: str = ""  # of the fields of the measurement: "_int8" where any precision counts


class Point(NamedTuple):
    """A model of a front."""

    variant: Variant
    by_seed: dict[int, float]  # more is better
    size: int  # bytes of its file
    ms: dict[str, float]

    @property
    def mean(self) -> float:
        """Of all seeds."""
        return mean(self.by_seed.values())


MLP = Front(
    results="study-scale-fronts-fashion-mnist.csv",
    measured="fronts-mlp.json",
    metric="test_acc",
    factor=100.0,
    title="accuracy, %",
    digits=2,
    shapes={"256": "256 images", "1": "one image"},
)
MLP_INT8 = MLP._replace(suffix="_int8")


def points(front: Front) -> list[Point]:
    """The models of a front."""
    by_seed: dict[str, dict[int, float]] = defaultdict(dict)
    for row in read_csv(front.results):
        by_seed[row["variant"]][row["seed"]] = front.factor * row[front.metric]
    measured = read_json(front.measured)["variants"]
    return [
        Point(
            Variant.of(name),
            seeds,
            measured[name][f"bytes{front.suffix}"],
            measured[name][f"ms{front.suffix}"],
        )
        for name, seeds in by_seed.items()
    ]


def means(front: Front) -> str:
    """Every model: its metric, the size of its file and its latencies."""
    rows = []
    sign = math.copysign(1, front.factor)
    for point in points(front):
        interval = Interval.of([sign * value for value in point.by_seed.values()])
        values = (interval.mean, interval.low, interval.high)
        mean_text, low, high = (f"{value:.{front.digits}f}" for value in values)
        rows.append(
            [
                described(point.variant),
                str(point.variant.width),
                f"{mean_text} [{low}, {high}]",
                f"{point.size / 1000:.0f}",
                *(f"{point.ms[shape]:.2f}" for shape in front.shapes),
            ]
        )
    latencies = [f"{what}, ms" for what in front.shapes.values()]
    return table(["model", "width", front.title, "file, kB", *latencies], rows)


def described(variant: Variant) -> str:
    """The pattern of a model, with its method and scale where they are not ``asp`` alone."""
    if not variant.pattern:
        return "dense"
    method, *_ = variant.name.split("-")
    parts = [variant.pattern]
    if method != "asp":
        parts.append(f"`{method}`")
    if variant.name.endswith("-supar"):
        parts.append('`scale="supar"`')
    return ", ".join(parts)


def compared(front: Front) -> str:
    """For each dense model and pattern, the widest N:M model that costs no more, and by how much it is better."""
    found = points(front)
    dense = [point for point in found if not point.variant.pattern]
    patterns = list(dict.fromkeys(p.variant.pattern for p in found if p.variant.pattern))
    costs: dict[str, Callable[[Point], float]] = {"file": lambda point: point.size}
    for shape, what in front.shapes.items():
        costs[what] = partial(_latency, shape=shape)
    rows = []
    for what, cost in costs.items():
        for one in dense:
            cells = [_difference(one, found, pattern, cost) for pattern in patterns]
            rows.append([what, str(one.variant.width), *cells])
    return table(["at most its", "dense, width", *patterns], rows)


def _latency(point: Point, shape: str) -> float:
    return point.ms[shape]


def _difference(
    one: Point, found: list[Point], pattern: str, cost: Callable[[Point], float]
) -> str:
    affordable = [p for p in found if p.variant.pattern == pattern and cost(p) <= cost(one)]
    if not affordable:
        return "none"
    other = max(affordable, key=lambda point: point.variant.width)
    interval = Interval.of([other.by_seed[seed] - one.by_seed[seed] for seed in one.by_seed])
    return (
        f"{interval.mean:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}], "
        f"width {other.variant.width}"
    )


TABLES: Tables = {
    "fronts-mlp-means": partial(means, MLP),
    "fronts-mlp-compared": partial(compared, MLP),
    "fronts-mlp-int8-means": partial(means, MLP_INT8),
    "fronts-mlp-int8-compared": partial(compared, MLP_INT8),
}
