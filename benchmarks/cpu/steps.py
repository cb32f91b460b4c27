"""Whole training steps of a GPT in a Trainer: the sparse side next to the dense one, in turn, a process each."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from studies.speed.race import Side, pilot, sides
from studies.speed.side import PRECISIONS, Grant, Precision, Setting


class Case(NamedTuple):
    """A width, a pattern and a method; see METHODS of the speed study for ``bame`` and ``bame-frozen``."""

    width: int
    pattern: str
    method: str


CASES = [
    Case(768, "1:16", "asp"),
    Case(768, "1:8", "asp"),
    Case(1024, "1:16", "asp"),
    Case(1024, "1:8", "asp"),
    Case(768, "1:16", "bame"),  # in the adaptation phase
    Case(768, "1:16", "bame-half"),  # also, with a dense gradient in every other step
    Case(768, "1:16", "bame-frozen"),  # after that phase
    Case(768, "1:16", "sr-ste"),
    Case(768, "1:16", "bi-mask"),
    Case(768, "1:4", "transposable"),
]

_dense: dict[tuple[int, int], dict[Precision, float]] = {}


def measure_step(case: Case, seconds: float, threads: int) -> dict[str, Any]:
    """Median milliseconds of a step of both sides, of steps made in turn for so many seconds.

    The dense side trains in the precision that a few steps of each showed to be the faster; so does the sparse one.
    """
    setting = Setting(
        case.width, pattern=case.pattern, method=case.method, threads=threads, budget_s=120
    )
    size = (case.width, threads)
    if size not in _dense:
        _dense[size] = pilot(setting, lambda what: None)
    precision = next(iter(_dense[size]))
    wanted: list[tuple[str, Precision]] = [("sparse", precision), ("dense", precision)]
    if precision != PRECISIONS[0]:
        wanted.append(("dense", PRECISIONS[0]))
    with sides(setting, *wanted) as racing:
        for side in racing:
            side.grant(Grant(steps=2))
        end = perf_counter() + seconds
        while perf_counter() < end:
            for side in racing:
                side.grant(Grant(steps=1))
        sparse, dense, *others = map(_step_ms, racing)
        kernels = racing[0].curve.kernels
    float32 = others[0] if others else dense
    return {
        **case._asdict(),
        "precision": precision,
        "steps": len(racing[0].curve.seconds),
        "sparse_ms": sparse,
        "dense_ms": dense,
        "dense_float32_ms": float32,
        "gain": dense / sparse,
        "gain_float32": float32 / sparse,
        "kernels": kernels,
    }


def _step_ms(side: Side) -> float:
    """Of the counted steps, two in a row, as some methods do more in every other one.

    The first of them follows the measurement of kernels.
    """
    seconds = side.curve.seconds[1:] or side.curve.seconds
    return (
        1e3 * median((one + two) / 2 for one, two in pairwise(seconds))
        if len(seconds) > 1
        else 1e3 * seconds[0]
    )
