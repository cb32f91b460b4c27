"""The table of the cost of one-shot pruning at several depths."""

from __future__ import annotations

from benchmarks.tables.markdown import Tables, read_json, table


def depth() -> str:
    """Forward passes, calls of a block and CPU seconds, block by block and with the whole model for each layer."""
    rows = []
    for run in read_json("prune-depth.json")["runs"]:
        cells = [f"{run[key]:.1f}" for key in ("passes", "calls of a block", "seconds")]
        rows.append([str(run["depth"]), run["way"], *cells])
    return table(["blocks", "way", "forward passes", "calls of a block", "CPU seconds"], rows)


TABLES: Tables = {"prune-depth": depth}
