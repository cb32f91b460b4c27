"""Tables of what methods, the monitor and the search for permutations cost."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks.tables.markdown import Tables, read_json, table

PERMUTATION = {
    "case": "{}",
    **dict.fromkeys(["random mean", "best of 100", "swap", "swap, long", "ceiling"], "{:.4f}"),
    **{"gain ratio": "**{:.1f}**", "time": "{:.2f}"},
    **{"best of 100, ms": "{:.1f}", "swap, ms": "{:.1f}", "long, ms": "{:.0f}"},
}


def permutation(part: str) -> str:
    """The search for permutations, by case; of trained weights also the median."""
    found: list[dict[str, Any]] = read_json("permutation.json")[part]
    if part == "trained":
        middle = {
            name: statistics.median(row[name] for row in found)
            for name in PERMUTATION
            if name != "case"
        }
        found = [*found, {"case": f"median of {len(found)}", **middle}]
    return table(
        list(PERMUTATION),
        [[form.format(row[name]) for name, form in PERMUTATION.items()] for row in found],
    )


def steps() -> str:
    """A training step under every method, over the step without masks."""
    data = read_json("step-overhead.json")
    over = data["over the plain step"]
    medians = {
        name: f"{1e3 * statistics.median(seconds):.0f}"
        for name, seconds in data["step seconds"].items()
    }
    rows = [[name, ms, f"{100 * over[name]:+.1f} %"] for name, ms in medians.items()]
    return table(["method", "step, ms", "over the plain step"], rows)


def convolutions() -> str:
    """The same for a residual CNN, by width."""
    data = read_json("convolution-overhead.json")
    over: dict[str, dict[str, float]] = data["over the plain step"]
    rows = []
    for name in next(iter(over.values())):
        row = [name]
        for width, seconds in data["step seconds"].items():
            row += [
                f"{1e3 * statistics.median(seconds[name]):.1f}",
                f"{100 * over[width][name]:+.1f} %",
            ]
        rows.append(row)
    header = ["method"]
    for width in over:
        header += [f"width {width}: step, ms", "over the plain step"]
    return table(header, rows)


def adaptations() -> str:
    """What an adaptation of BAME costs."""
    data = read_json("step-overhead.json")
    costs = data["adaptation seconds"].items()
    rows = [
        [*name.split(), f"{seconds:.2f}", f"{without:.2f}"] for name, (seconds, without) in costs
    ]
    size = data["settings"]["size"]
    return table(
        [f"an adaptation, {size} x {size}", "optimizer", "evidence", "seconds", "without"], rows
    )


def monitor() -> str:
    """What MaskMonitor costs."""
    header = [
        "method",
        "step, ms",
        "batch without a log, ms",
        "log, ms",
        "histogram and pictures, ms",
        "share",
    ]
    rows = []
    for name, part in read_json("monitor-overhead.json")["seconds"].items():
        ms = {kind: 1e3 * part[kind] for kind in ("step", "quiet", "log", "draw")}
        times = [f"{ms['step']:.0f}", f"{ms['quiet']:.2f}", f"{ms['log']:.0f}", f"{ms['draw']:.0f}"]
        rows.append([name, *times, f"{100 * part['share']:.2f} %"])
    return table(header, rows)


TABLES: Tables = {
    "permutation-gaussian": partial(permutation, "gaussian"),
    "permutation-trained": partial(permutation, "trained"),
    "step-overhead": steps,
    "convolution-overhead": convolutions,
    "step-overhead-adaptations": adaptations,
    "monitor-overhead": monitor,
}
