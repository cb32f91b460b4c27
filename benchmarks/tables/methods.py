"""Tables that compare all methods: accuracy by pattern, learning rates, memory and the overhead of a step."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, get_args

from benchmarks.tables.markdown import RESULTS, ROOT, Tables, read_csv, read_json, table
from lightning_nm.commands.study.analysis import Interval
from lightning_nm.commands.study.spec import read
from lightning_nm.methods import Method
from lightning_nm.short_names import MethodName, resolve_method


class Task(NamedTuple):
    """A task that every method was trained on."""

    name: str
    metric: str
    factor: float  # of the metric
    digits: int
    more_is_better: bool


TEXT = Task("help-topics", "test_bits_per_byte", 1.0, 3, more_is_better=False)
IMAGES = Task("fashion-mnist", "test_acc", 100.0, 2, more_is_better=True)
PATTERNS = ("2:4", "1:4", "1:16")
_RATE = "model.init_args.lr"
SEARCHES = tuple(
    f"learning-rate{part}" for part in ("", "-edges", "-last", "-decays", "-relative", "-bame")
)
"""The studies of learning rates: their names begin with it."""


class Trained(NamedTuple):
    """A variant of the comparison, ``METHOD-PATTERN`` or ``dense``."""

    method: str
    pattern: str
    by_seed: dict[int, float]
    flops: float  # of training, over dense training, as the papers count


def trained(task: Task, study: str = "") -> list[Trained]:
    """The variants of a study, by default those of the comparison of all methods."""
    by_seed: dict[str, dict[int, float]] = defaultdict(dict)
    flops: dict[str, float] = {}
    for row in read_csv(f"study-{study or f'methods-{task.name}'}.csv"):
        name = row["variant"]
        if task.metric in row:
            by_seed[name][row["seed"]] = task.factor * row[task.metric]
            flops[name] = row.get("flops_paper", 1.0)
    found = []
    for name, seeds in by_seed.items():
        method, pattern = parts(name)
        found.append(Trained(method, pattern, seeds, flops[name]))
    return found


def parts(variant: str) -> tuple[str, str]:
    """The method and the pattern of a variant.

    Example::

        >>> parts("bi-mask-1:16"), parts("dense")
        (('bi-mask', '1:16'), ('dense', ''))
    """
    method, _, pattern = variant.rpartition("-")
    return (method, pattern) if ":" in pattern else (variant, "")


FORMER = ("-2e-4", "-0.015")
"""How the names of variants end that have the defaults of version 0.3."""


def accuracy(task: Task) -> str:
    """Each method's difference to dense training with the same seeds, by pattern; the best first."""
    found = [each for each in trained(task) if not each.method.endswith(FORMER)]
    dense = next(each for each in found if each.method == "dense")
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    means: dict[str, list[float]] = defaultdict(list)
    best = {
        pattern: _best([each for each in found if each.pattern == pattern], task)
        for pattern in PATTERNS
    }
    for each in found:
        if each is dense:
            continue
        difference = paired_difference(each, dense)
        cells[each.method][each.pattern] = text_of(difference, task, each is best[each.pattern])
        means[each.method].append(difference.mean)
    ranked = sorted(means, key=lambda name: fmean(means[name]), reverse=task.more_is_better)
    rows = [
        [f"`{name}`", *(cells[name].get(pattern, "-") for pattern in PATTERNS)] for name in ranked
    ]
    return table(["method", *PATTERNS], rows)


def learning_rates(task: Task) -> str:
    """What the search found for each method and pattern: the metric at each learning rate, the best one bold."""
    by_rate: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
    for kind in SEARCHES:
        name = f"methods/{kind}-{task.name}"
        path = ROOT / "studies" / f"{name}.yaml"
        if not path.exists():  # a task need not have all
            continue
        spec = read(path)
        for row in read_csv(f"study-{name.replace('/', '-')}.csv"):
            method, pattern = parts(row["variant"])
            if method != "dense":
                pattern = row.get("pattern", pattern)
            # In the grid, or in the variant.
            rate = row.get(_RATE) or spec.variants[row["variant"]][_RATE]
            value = row.get(task.metric)
            if value is not None:
                by_rate[method, pattern][rate] = task.factor * value
    rates = sorted({rate for found in by_rate.values() for rate in found})
    rows = []
    for (method, pattern), found in by_rate.items():
        best = max(found.values()) if task.more_is_better else min(found.values())
        cells = []
        for rate in rates:
            value = found.get(rate)
            text = "-" if value is None else f"{value:.{task.digits}f}"
            cells.append(f"**{text}**" if value == best else text)
        rows.append([f"`{method}`", pattern, *cells])
    return table(["method", "N:M", *(f"lr {rate:g}" for rate in rates)], rows)


NOTES = {
    "asp": "NVIDIA's recipe, [2104.08378](https://arxiv.org/abs/2104.08378)",
    "slope": "without its adapters",
    "bame": "a reconstruction",
    "rigl": "in blocks, as [2305.02299](https://arxiv.org/abs/2305.02299) in rows",
    "cast": "its code is not public",
}
"""What the table of methods says of a source next to its number."""


def by_method() -> str:
    """Every built-in method: its source, and what is N:M under it, from the classes."""
    rows = []
    for name in get_args(MethodName):
        method = resolve_method(name)
        source = ", ".join([*_sources(method), *([NOTES[name]] if name in NOTES else [])])
        latent = "yes" if method.latent else "no"
        if name == "dense":
            latent = "the weight itself"
        rows.append([f"`{name}`", source, *products(method), latent])
    header = ["method", "source", "forward", "input gradient", "weight gradient"]
    return table([*header, "dense weight behind the mask"], rows)


def products(method: Method) -> tuple[str, str, str]:
    """What is sparse in the forward GEMM, the input gradient's and the weight gradient's."""
    if not method.uses_masks:
        return "dense", "dense", "dense"
    if method.has_training_weight:
        return "N:M", "dense", "dense"  # training has other weights than the model
    has_sparse_dgrad = method.sparse_dgrad or method.transposable
    needs_all = type(method).gradient_at_pruned is Method.gradient_at_pruned
    return (
        "N:M",
        "N:M" if has_sparse_dgrad else "masked",
        "dense" if needs_all else "kept entries",
    )


def _sources(method: Method) -> list[str]:
    """Links to the papers that the first paragraph of a method's docstring names."""
    paragraph = (method.__doc__ or "").partition("\n\n")[0]
    links = [
        f"[{number}](https://arxiv.org/abs/{number})"
        for number in re.findall(r"arXiv (\d{4}\.\d{5})", paragraph)
    ]
    links += [
        f"[{key}](https://openreview.net/forum?id={key})"
        for key in re.findall(r"OpenReview (\w+)", paragraph)
    ]
    return links


def costs() -> str:
    """The overhead of a step without kernels, linear and convolution, and the memory, by method."""
    linear = read_json("step-overhead.json")["over the plain step"]
    convolution = read_json("convolution-overhead.json")["over the plain step"]
    memory = read_json("state-memory.json")["bytes per weight"]
    widths = list(convolution)
    rows = []
    for name, by_pattern in memory.items():
        over = [linear.get(name), *(convolution[width].get(name) for width in widths)]
        held = [f"{by_pattern[pattern]:.1f}" for pattern in ("2:4", "1:16")]
        rows.append([f"`{name}`", *map(_share, over), *held])
    header = ["method", "linear, 1:16", *(f"convolutions of {width}, 2:4" for width in widths)]
    return table([*header, "bytes a weight, 2:4", "1:16"], rows)


def _share(over: float | None) -> str:
    return "-" if over is None else f"{100 * over:+.0f} %"


def _best(found: list[Trained], task: Task) -> Trained | None:
    if not found:
        return None
    means = [fmean(each.by_seed.values()) for each in found]
    return found[means.index(max(means) if task.more_is_better else min(means))]


def paired_difference(one: Trained, other: Trained) -> Interval:
    """One minus the other, paired by the seeds of the first."""
    return Interval.of([one.by_seed[seed] - other.by_seed[seed] for seed in one.by_seed])


def text_of(difference: Interval, task: Task, is_best: bool) -> str:
    """A difference as a cell: the mean, and half of the interval."""
    mean = f"{difference.mean:+.{task.digits}f}"
    half = f"{difference.high - difference.mean:.{task.digits}f}"  # Student's t is symmetric
    return f"**{mean}** ± {half}" if is_best else f"{mean} ± {half}"


def _tables(task: Task) -> dict[str, Any]:
    # A task is left out until its trainings are there.
    if not (RESULTS / f"study-methods-{task.name}.csv").exists():
        return {}
    return {
        f"methods-{task.name}": partial(accuracy, task),
        f"methods-learning-rate-{task.name}": partial(learning_rates, task),
    }


TABLES: Tables = {
    **_tables(TEXT),
    **_tables(IMAGES),
    "method-costs": costs,
    "methods": by_method,
}
