"""Tables of what masks and estimators of one matrix cost; the benchmarks print the same cells, and the load."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.tables.markdown import Tables, read_json, table

MASKS = [
    "pattern",
    "topk ms",
    "nm_mask ms",
    "magnitude_mask ms",
    "nm_mask / topk",
    "magnitude_mask / topk",
]
TRANSPOSABLE = [
    "pattern",
    "nm_mask s",
    "transposable_mask s",
    "kept / rows alone",
    "kept / optimum, mean (min)",
]
ESTIMATORS = ["pattern", "estimator", "dim", "ms", "copy ms", "times the copy", "random numbers ms"]


def masks(row: dict[str, Any]) -> list[str]:
    """The cells of a pattern: milliseconds, and both masks over `topk`."""
    base, *own = row["seconds"].values()
    ratios = [f"{seconds / base:.2f} ({base / seconds:.1f}x faster)" for seconds in own]
    return [row["pattern"], *(f"{1e3 * seconds:.1f}" for seconds in (base, *own)), *ratios]


def transposable(row: dict[str, Any]) -> list[str]:
    """The cells of a pattern: seconds, and the kept magnitude."""
    seconds = [f"{value:.3f}" for value in row["seconds"].values()]
    mean, least = row["kept / optimum"]
    return [row["pattern"], *seconds, f"{row['kept / rows']:.4f}", f"{mean:.9f} ({least:.9f})"]


def estimators(row: dict[str, Any]) -> list[str]:
    """The cells of an estimator: its time, that of a copy, their ratio, and the time of the random numbers."""
    own, copy, draw = (row["seconds"][name] for name in ("estimator", "copy", "random numbers"))
    times = [f"{1e3 * own:.1f}", f"{1e3 * copy:.1f}", f"{own / copy:.1f}", f"{1e3 * draw:.1f}"]
    return [row["pattern"], row["estimator"], str(row["dim"]), *times]


def _table(name: str, header: list[str], cells: Callable[[dict[str, Any]], list[str]]) -> str:
    return table(header, [cells(row) for row in read_json(f"{name}.json")["rows"]])


TABLES: Tables = {
    **{
        name: partial(_table, name, MASKS, masks)
        for name in ("masks", "masks-columns", "masks-bfloat16")
    },
    "transposable": partial(_table, "transposable", TRANSPOSABLE, transposable),
    "estimators": partial(_table, "estimators", ESTIMATORS, estimators),
}
