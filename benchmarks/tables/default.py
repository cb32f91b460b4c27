"""What a method reaches without tuning, and by which evidence BAME exchanges entries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

from benchmarks.tables.markdown import Tables, read_csv, table
from benchmarks.tables.methods import IMAGES, TEXT, Task, text_of
from lightning_nm.commands.study.analysis import Interval

TASKS = {"source": TEXT._replace(name="python-source"), "text": TEXT, "images": IMAGES}
RATE = "model.init_args.lr"

BySeed = dict[int, float]


def by_default() -> str:
    """Each variant minus dense training at the learning rate that is best for dense, with the same seeds."""
    header = ["variant"]
    cells: dict[str, list[str]] = defaultdict(list)
    for name, task in TASKS.items():
        found = _by_seed("default", task, lambda row: (row["pattern"], row["variant"]))
        for pattern in ("2:4", "1:16"):
            header.append(f"{name}, {pattern}")
            dense = found[pattern, "dense"]
            differences = {
                variant: Interval.of([value - dense[seed] for seed, value in seeds.items()])
                for (own, variant), seeds in found.items()
                if own == pattern and variant != "dense"
            }
            best = _best(task)(each.mean for each in differences.values())
            for variant, each in differences.items():
                cells[variant].append(text_of(each, task, each.mean == best))
    return table(header, [[f"`{variant}`", *row] for variant, row in cells.items()])


def evidence() -> str:
    """The mean over the seeds of each way to gather evidence; the best of a row is bold."""
    rows = []
    variants: list[str] = []
    for name, task in TASKS.items():
        found = _by_seed("evidence", task, lambda row: (row["pattern"], row[RATE], row["variant"]))
        for pattern, rate in dict.fromkeys(key[:2] for key in found):
            means = {
                variant: fmean(seeds.values())
                for (*point, variant), seeds in found.items()
                if point == [pattern, rate]
            }
            variants = list(means)
            best = _best(task)(means.values())
            cells = []
            for mean in means.values():
                text = f"{mean:.{task.digits}f}"
                cells.append(f"**{text}**" if mean == best else text)
            rows.append([name, pattern, f"{rate:g}", *cells])
    return table(["task", "N:M", "learning rate", *(f"`{name}`" for name in variants)], rows)


def _best(task: Task) -> Callable[..., float]:
    return max if task.more_is_better else min


def _by_seed(
    study: str, task: Task, key: Callable[[dict[str, Any]], tuple[Any, ...]]
) -> dict[tuple[Any, ...], BySeed]:
    found: dict[tuple[Any, ...], BySeed] = defaultdict(dict)
    for row in read_csv(f"study-{study}-{task.name}.csv"):
        if task.metric in row:
            found[key(row)][row["seed"]] = task.factor * row[task.metric]
    return found


TABLES: Tables = {"default": by_default, "evidence": evidence}
