"""Tables of the recipes: cost compared with dense training, settings, and the search that found them."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tables.markdown import RESULTS, ROOT, Tables, read_csv, table
from lightning_nm.commands.from_config import read_yaml
from lightning_nm.commands.study.analysis import Interval, compare

TASKS = {
    "help-topics": ("test_bits_per_byte", 1.0, 3, "bits"),
    "fashion-mnist": ("test_acc", 100.0, 2, "points"),
}
"""For each task: its metric, the factor and the digits of its figures, the unit of a difference."""
AIMS = {"bi-mask": (0.02, 0.3), "transposable": (0.05, 0.5), "three-gemms": (0.08, 1.0)}
"""The loss to dense training that was aimed at: bits, points."""
METHODS = ("dense", "sr-ste", "bi-mask", "transposable", "three-gemms", "bame")
ROUNDS = ("search-lr", "search-high-lr")
LR, DECAY = "model.init_args.lr", "method.init_args.decay"


def _rows(task: str) -> list[dict[str, Any]]:
    return read_csv(f"study-recipes-{task}.csv")


def _mean(task: str, variant: str) -> float:
    metric, scale, _, _ = TASKS[task]
    return statistics.fmean(scale * row[metric] for row in _rows(task) if row["variant"] == variant)


def best_dense(task: str) -> str:
    """The dense variant with the best mean over the seeds of the comparison: nothing is compared with a weaker one."""
    names = {row["variant"] for row in _rows(task) if row["variant"].startswith("dense")}
    return (min if task == "help-topics" else max)(sorted(names), key=partial(_mean, task))


def gain(task: str, variant: str) -> Interval:
    """The paired difference to the best dense training."""
    metric, scale, _, _ = TASKS[task]
    rows = [row | {metric: scale * row[metric]} for row in _rows(task)]
    return compare(rows, metric, variant, best_dense(task)).difference


def gain_text(task: str, variant: str) -> str:
    """That difference, with its interval."""
    difference, (_, _, digits, _) = gain(task, variant), TASKS[task]
    if not difference.count:
        return "not measured"
    text = f"{difference.mean:+.{digits}f}"
    if difference.count > 1:
        text += f" [{difference.low:+.{digits}f}, {difference.high:+.{digits}f}]"
    return text


def verdict(task: str, variant: str) -> str:
    """Whether the loss to dense training is within the aim: by its mean, and by its whole interval."""
    base, difference = variant.removesuffix("-ends-dense"), gain(task, variant)
    if base not in AIMS or not difference.count:
        return ""
    text = task == "help-topics"
    aim = AIMS[base][0 if text else 1]
    loss, worst = (
        (difference.mean, difference.high) if text else (-difference.mean, -difference.low)
    )
    return f"{aim:g}: " + (
        "missed" if loss > aim else "met" if worst <= aim else "met by the mean alone"
    )


def compared(task: str) -> str:
    """Every variant of the comparison."""
    metric, scale, digits, _ = TASKS[task]
    variants = read_yaml(ROOT / "studies" / f"recipes-{task}.yaml")["variants"]
    dense, lines = best_dense(task), []
    for name, settings in variants.items():
        rows = [row for row in _rows(task) if row["variant"] == name]
        if rows:
            values = Interval.of([scale * row[metric] for row in rows])
            difference = "" if name == dense else gain_text(task, name)
            flops = f"{rows[0]['flops_arithmetic']:.3f}"
            cells = [
                f"`{name}`",
                f"{settings[LR]:g}",
                str(values.count),
                f"{values.mean:.{digits}f}",
            ]
            lines.append([*cells, difference, verdict(task, name), flops])
    what = "bits per byte" if task == "help-topics" else "accuracy, %"
    return table(
        ["variant", "learning rate", "seeds", what, f"minus `{dense}`", "aim", "FLOPs"], lines
    )


def settings(task: str) -> str:
    """The recipes of a task: what to set, what it costs, what it saves."""
    unit, lines = TASKS[task][3], []
    variants = read_yaml(ROOT / "studies" / f"recipes-{task}.yaml")["variants"]
    for name in variants:
        path = ROOT / "configs" / "recipes" / f"{task}-{name}.yaml"
        if path.exists():
            config = read_yaml(path)
            method = config["trainer"]["callbacks"][0]["init_args"]["method"]
            chosen = {"lr": config["model"]["init_args"]["lr"], **(method.get("init_args") or {})}
            flops = next(
                (f"{row['flops_arithmetic']:.2f}" for row in _rows(task) if row["variant"] == name),
                "",
            )
            written = ", ".join(f"`{key}={value:g}`" for key, value in chosen.items())
            ends = "dense" if name.endswith("-ends-dense") else "2:4"
            lines.append(
                [f"`{path.stem}`", ends, written, f"{gain_text(task, name)} {unit}", flops]
            )
    model = "transformer, AdamW" if task == "help-topics" else "CNN, SGD"
    return table([model, "ends", "settings", "minus dense", "FLOPs"], lines)


def search(task: str) -> str:
    """For each method the number of settings that were tried, the best and the two next ones."""
    metric, scale, digits, _ = TASKS[task]
    lines = []
    for method in METHODS:
        files = [Path(f"study-{name}-{task}-{method}.csv") for name in ROUNDS]
        rows = [row for file in files if (RESULTS / file).exists() for row in read_csv(str(file))]
        rows.sort(key=lambda row: row[metric], reverse=task != "help-topics")
        found = [
            f"{scale * row[metric]:.{digits}f} at "
            + ", ".join(f"{row[key]:.3g}" for key in (LR, DECAY) if key in row)
            for row in rows[:3]
        ]
        worst = f"{scale * rows[-1][metric]:.{digits}f}"
        lines.append([f"`{method}`", str(len(rows)), *found, worst])
    return table(
        ["method", "trials", "best, at learning rate, decay", "second", "third", "worst"], lines
    )


TABLES: Tables = {
    f"recipes-{task}-{name}": partial(make, task)
    for task in TASKS
    for name, make in (("compared", compared), ("settings", settings), ("search", search))
}
