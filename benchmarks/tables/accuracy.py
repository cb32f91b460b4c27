"""Tables of the accuracy runs that precede studies: ``benchmarks/results/accuracy-*.json``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.tables.markdown import Tables, read_json, table
from lightning_nm.commands.study.analysis import Interval

COUNTS = ("arithmetic", "paper", "eligible")
GRADIENTS = {
    "Fashion-MNIST, batch 64": "accuracy-gradients-fashion-mnist-64.json",
    "Fashion-MNIST, batch 256": "accuracy-gradients-fashion-mnist-256.json",
    "HelpTopics, batch 16": "accuracy-gradients-help-topics-16.json",
    "HelpTopics, batch 64": "accuracy-gradients-help-topics-64.json",
}


def runs(file: str) -> tuple[dict[str, list[float]], int]:
    """The metric of every seed by variant, in per cent or bits per byte, and its decimals."""
    data: dict[str, Any] = read_json(file)
    if "accuracy" in data:
        return {
            name: [100 * value for value in values] for name, values in data["accuracy"].items()
        }, 2
    return data["figures"], 2 if "fashion" in file else 3


def seeds(file: str) -> str:
    """The metric of every seed, and the mean."""
    found, digits = runs(file)
    rows = [
        [str(seed), *map(f"{{:.{digits}f}}".format, values)]
        for seed, values in enumerate(zip(*found.values(), strict=True))
    ]
    means = [f"{sum(values) / len(values):.{digits}f}" for values in found.values()]
    return table(["seed", *found], [*rows, ["mean", *means]])


def difference(found: dict[str, list[float]], variant: str, baseline: str, digits: int) -> str:
    """The mean paired difference and its 95 % interval."""
    pairs = zip(found[variant], found[baseline], strict=True)
    interval = Interval.of([own - other for own, other in pairs])
    return f"{interval.mean:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def differences(file: str, *baselines: str) -> str:
    """Every variant against some baselines."""
    found, digits = runs(file)
    pairs = [
        (variant, baseline) for baseline in baselines for variant in found if variant != baseline
    ]
    rows = [
        [f"{variant} - {baseline}", difference(found, variant, baseline, digits)]
        for variant, baseline in pairs
    ]
    return table(["variant - baseline", "mean difference [95 % interval]"], rows)


def flops(file: str, to: str) -> str:
    """Training FLOPs relative to dense training, and to a variant."""
    counted = read_json(file)["flops"]
    header = [
        "training FLOPs",
        *(title for kind in COUNTS for title in (f"{kind}, to dense", f"to {to}")),
    ]
    rows = []
    for name, own in counted.items():
        rows.append(
            [
                name,
                *(
                    f"{value:.3f}"
                    for kind in COUNTS
                    for value in (own[kind], own[kind] / counted[to][kind])
                ),
            ]
        )
    return table(header, rows)


def gradients() -> str:
    """The cost of gradient estimators: the mean, and the difference to dense."""
    columns = [runs(file) for file in GRADIENTS.values()]
    names = list(dict.fromkeys(name for found, _ in columns for name in found))
    return table(
        ["", *GRADIENTS],
        [[name, *(_cell(found, name, digits) for found, digits in columns)] for name in names],
    )


def _cell(found: dict[str, list[float]], name: str, digits: int) -> str:
    if name not in found:
        return ""
    values: Sequence[float] = found[name]
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if name == "dense" else f"{mean}: {difference(found, name, 'dense', digits)}"


_IMAGES, _TEXT = "accuracy-fashion-mnist-1-16.json", "accuracy-help-topics-1-16.json"
TABLES: Tables = {
    "accuracy-fashion-mnist-seeds": partial(seeds, "accuracy-fashion-mnist.json"),
    "accuracy-fashion-mnist-differences": partial(
        differences, "accuracy-fashion-mnist.json", "dense"
    ),
    "accuracy-fashion-mnist-1-16-seeds": partial(seeds, _IMAGES),
    "accuracy-fashion-mnist-1-16-differences": partial(differences, _IMAGES, "sr-ste", "fixed"),
    "accuracy-fashion-mnist-1-16-flops": partial(flops, _IMAGES, "sr-ste"),
    "accuracy-help-topics-1-16-seeds": partial(seeds, _TEXT),
    "accuracy-help-topics-1-16-differences": partial(differences, _TEXT, "sr-ste", "fixed"),
    "accuracy-help-topics-1-16-flops": partial(flops, _TEXT, "sr-ste"),
    "accuracy-gradients": gradients,
}
