"""Dense and 2:4 models of several widths: accuracy next to the estimated cycles of an Ethos-U85."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import NamedTuple

from benchmarks.ethos_u85 import NAME, STUDIES, Variant
from benchmarks.tables.markdown import RESULTS, Tables, read_csv, read_json, table
from lightning_nm.commands.study.analysis import Interval


class Point(NamedTuple):
    """A model of a study.

    Attributes:
        variant: Its name, method and width.
        cycles: Vela's estimate.
        mixed_by_seed: Accuracy in bf16-mixed, as in training, in percent.
        int8_by_seed: Accuracy of the int8 program, in percent.
    """

    variant: Variant
    cycles: int
    mixed_by_seed: dict[int, float]
    int8_by_seed: dict[int, float]


def points(kind: str) -> list[Point]:
    """The models of a study, in its order."""
    by_metric: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_csv(f"study-{NAME}-{kind}.csv"):
        if row["state"] == "complete":
            for metric in ("test_acc", "test_acc_int8"):
                by_metric[row["variant"]][metric][row["seed"]] = 100 * row[metric]
    estimated = read_json(f"{NAME}-{kind}.json")["variants"]
    return [
        Point(
            Variant.of(name),
            estimated[name]["cycles"],
            metrics["test_acc"],
            metrics["test_acc_int8"],
        )
        for name, metrics in by_metric.items()
    ]


def between(dense: list[Point], cycles: int, seed: int) -> float | None:
    """The int8 accuracy of a dense model of that many cycles: on a line between its neighbours, over log cycles.

    ``None`` outside of the dense models that were trained.
    """
    known = sorted((point.cycles, point.int8_by_seed[seed]) for point in dense)
    for (fewer, below), (more, above) in pairwise(known):
        if fewer <= cycles <= more:
            share = math.log(cycles / fewer) / math.log(more / fewer)
            return below + share * (above - below)
    return None


def accuracy(kind: str) -> str:
    """Each model's cycles and accuracy, and its difference to a dense one of the same cycles."""
    found = points(kind)
    dense = [point for point in found if not point.variant.pattern]
    rows = []
    for point in found:
        variant = point.variant
        model = f"{variant.pattern}, `{variant.method}`" if variant.pattern else "dense"
        cells = [
            f"{mean(values.values()):.2f}" for values in (point.mixed_by_seed, point.int8_by_seed)
        ]
        rows.append(
            [
                model,
                str(variant.width),
                f"{point.cycles / 1000:.0f}",
                *cells,
                _difference(point, dense) if variant.pattern else "",
            ]
        )
    header = ["weights", "width", "kilocycles", "accuracy, bf16-mixed, %", "int8, %"]
    return table([*header, "int8, minus dense at equal cycles, points"], rows)


def _difference(point: Point, dense: list[Point]) -> str:
    differences = []
    for seed, value in point.int8_by_seed.items():
        other = between(dense, point.cycles, seed)
        if other is None:
            return "no dense model of that cost"
        differences.append(value - other)
    found = Interval.of(differences)
    return f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


TABLES: Tables = {
    f"cycles-{kind}": partial(accuracy, kind)
    for kind in STUDIES
    # A study is left out until its trainings and estimates are there.
    if (RESULTS / f"{NAME}-{kind}.json").exists()
}
