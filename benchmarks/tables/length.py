"""The differences to dense training after trainings of different lengths."""

from __future__ import annotations

from functools import partial

from benchmarks.tables.markdown import RESULTS, Tables, table
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
    """By method and pattern, then by steps: bits per byte minus those of dense training with the same seeds.

    A length that was not trained is not there.
    """
    found: dict[tuple[str, str], dict[int, Interval]] = {}
    for steps, study in STUDIES[task].items():
        if not (RESULTS / f"study-{study}.csv").exists():
            continue
        variants = {(each.method, each.pattern): each for each in trained(TEXT, study)}
        dense = variants["dense", ""]
        for key, variant in variants.items():
            if key[0] in METHODS:
                found.setdefault(key, {})[steps] = paired_difference(variant, dense)
    return found


def by_length(task: str) -> str:
    """One row a method, one column a pattern and a number of steps; the best of a column is bold."""
    found = over_steps(task)
    columns: list[dict[str, Interval]] = []
    header = ["method"]
    for pattern in PATTERNS:
        for steps in STUDIES[task]:
            cells = {
                method: found[method, pattern][steps]
                for method in METHODS
                if steps in found.get((method, pattern), {})
            }
            if cells:
                header.append(f"{pattern}, {steps}")
                columns.append(cells)
    rows = [[f"`{method}`", *(_cell(method, cells) for cells in columns)] for method in METHODS]
    return table(header, rows)


def _cell(method: str, cells: dict[str, Interval]) -> str:
    if method not in cells:
        return "-"
    best = min(each.mean for each in cells.values())
    return text_of(cells[method], TEXT, cells[method].mean == best)


TABLES: Tables = {
    "length": partial(by_length, "source"),
    "length-text": partial(by_length, "text"),
}
