"""The differences to dense training after trainings of different lengths."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from benchmarks.tables.markdown import Tables, table
from benchmarks.tables.methods import PATTERNS, TEXT, paired_difference, text_of, trained
from lightning_nm.commands.study.analysis import Interval

STUDIES = {
    "source": {
        800: "length-800-python-source",
        2400: "length-2400-python-source",
        7200: "length-7200-python-source",
    },
    "text": {800: "methods-help-topics", 2400: "length-2400-help-topics"},
}
"""By task, after how many steps: the study."""
METHODS = ("bame", "asp", "sr-ste", "bi-mask", "transposable", "rigl")


def over_steps(task: str) -> dict[tuple[str, str], dict[int, Interval]]:
    """By method and pattern, then by steps: bits per byte minus those of dense training with the same seeds."""
    found: dict[tuple[str, str], dict[int, Interval]] = defaultdict(dict)
    for steps, study in STUDIES[task].items():
        variants = {(each.method, each.pattern): each for each in trained(TEXT, study)}
        dense = variants["dense", ""]
        for key, variant in variants.items():
            if key[0] in METHODS:
                found[key][steps] = paired_difference(variant, dense)
    return found


def by_length(task: str) -> str:
    """One row a method, one column a pattern and a number of steps that the default was trained for."""
    found = over_steps(task)
    columns = [(pattern, steps) for pattern in PATTERNS for steps in found["bame", pattern]]
    rows = []
    for method in METHODS:
        cells = [found[method, pattern].get(steps) for pattern, steps in columns]
        texts = ["-" if cell is None else text_of(cell, TEXT, is_best=False) for cell in cells]
        rows.append([f"`{method}`", *texts])
    return table(["method", *(f"{pattern}, {steps}" for pattern, steps in columns)], rows)


TABLES: Tables = {
    "length": partial(by_length, "source"),
    "length-text": partial(by_length, "text"),
}
