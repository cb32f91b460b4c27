"""What a method reaches without tuning, the evidence of BAME, and which method leads after how many steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from benchmarks.tables.markdown import RESULTS, Tables, read_csv, table
from benchmarks.tables.methods import PATTERNS, parts
from lightning_nm.commands.study.analysis import Interval

TASKS = {
    "source": ("python-source", "test_bits_per_byte", 1.0, 3),
    "text": ("help-topics", "test_bits_per_byte", 1.0, 3),
    "images": ("fashion-mnist", "test_acc", 100.0, 2),
}
"""By name: of the files, the metric, its factor, and the digits."""
RATE = "model.init_args.lr"
STEPS = (800, 2400, 7200)

BySeed = dict[int, float]


def by_default() -> str:
    """Each variant minus dense training at the learning rate that is best for dense, with the same seeds."""
    header = ["variant"]
    cells: dict[str, list[str]] = defaultdict(list)
    for name, (files, metric, factor, digits) in TASKS.items():
        rows = read_csv(f"study-default-{files}.csv")
        found = _by_seed(rows, lambda row: (row["variant"], row["pattern"]), metric, factor)
        for pattern in ("2:4", "1:16"):
            header.append(f"{name}, {pattern}")
            of = {variant: seeds for (variant, own), seeds in found.items() if own == pattern}
            dense = of.pop("dense")
            sign = 1 if name == "images" else -1
            differences = {variant: difference(seeds, dense) for variant, seeds in of.items()}
            best = max(sign * each.mean for each in differences.values())
            for variant, each in differences.items():
                cells[variant].append(_text(each, digits, sign * each.mean == best))
    return table(header, [[f"`{variant}`", *row] for variant, row in cells.items()])


def evidence() -> str:
    """The mean over the seeds of each way to gather evidence; the best of a row is bold."""
    rows = []
    variants: list[str] = []
    for name, (files, metric, factor, digits) in TASKS.items():
        found = _by_seed(
            read_csv(f"study-evidence-{files}.csv"),
            lambda row: (row["pattern"], row[RATE], row["variant"]),
            metric,
            factor,
        )
        for pattern, rate in dict.fromkeys(key[:2] for key in found):
            means = {
                key[2]: fmean(seeds.values())
                for key, seeds in found.items()
                if key[:2] == (pattern, rate)
            }
            variants = list(means)
            best = (max if name == "images" else min)(means.values())
            texts = [f"{mean:.{digits}f}" for mean in means.values()]
            marked = [
                f"**{text}**" if mean == best else text
                for text, mean in zip(texts, means.values(), strict=True)
            ]
            rows.append([name, pattern, f"{rate:g}", *marked])
    return table(["task", "N:M", "learning rate", *(f"`{name}`" for name in variants)], rows)


def over_steps() -> dict[tuple[str, str], dict[int, Interval]]:
    """By method and pattern, after how many steps: bits per byte minus those of dense training with the same seeds."""
    found: dict[tuple[str, str], dict[int, Interval]] = defaultdict(dict)
    for steps in STEPS:
        name = f"study-length-{steps}-python-source.csv"
        if not (RESULTS / name).exists():
            continue
        of = _by_seed(read_csv(name), lambda row: parts(row["variant"]), "test_bits_per_byte")
        dense = of.pop(("dense", ""))
        for key, seeds in of.items():
            found[key][steps] = difference(seeds, dense)
    return found


def length() -> str:
    """The differences of :func:`over_steps`, one row a method and one column a pattern and a number of steps."""
    found = over_steps()
    columns = [
        (pattern, steps)
        for pattern in PATTERNS
        for steps in STEPS
        if any(key[1] == pattern and steps in of for key, of in found.items())
    ]
    best = {
        (pattern, steps): min(
            of[steps].mean for key, of in found.items() if key[1] == pattern and steps in of
        )
        for pattern, steps in columns
    }
    rows = []
    for method in dict.fromkeys(key[0] for key in found):
        row = [f"`{method}`"]
        for pattern, steps in columns:
            each = found[method, pattern].get(steps)
            is_best = each is not None and each.mean == best[pattern, steps]
            row.append("-" if each is None else _text(each, 3, is_best))
        rows.append(row)
    return table(["method", *(f"{pattern}, {steps}" for pattern, steps in columns)], rows)


def difference(one: BySeed, other: BySeed) -> Interval:
    """The paired difference over the seeds that both have."""
    return Interval.of([value - other[seed] for seed, value in one.items() if seed in other])


def _by_seed(
    rows: Iterable[dict[str, Any]],
    key: Callable[[dict[str, Any]], Any],
    metric: str,
    factor: float = 1.0,
) -> dict[Any, BySeed]:
    found: dict[Any, BySeed] = defaultdict(dict)
    for row in rows:
        if metric in row:
            found[key(row)][row["seed"]] = factor * row[metric]
    return found


def _text(difference: Interval, digits: int, is_best: bool) -> str:
    mean = f"{difference.mean:+.{digits}f}"
    half = f"{difference.high - difference.mean:.{digits}f}"  # Student's t is symmetric
    return f"**{mean}** ± {half}" if is_best else f"{mean} ± {half}"


TABLES: Tables = {"default": by_default, "evidence": evidence, "length": length}
