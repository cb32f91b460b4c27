"""The table of the memory of trainings with and without packed storage."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.markdown import Tables, read_json, table

_FILES = [f"memory-{width}-{pattern}.json" for width in (1024, 2048) for pattern in ("1-16", "2-4")]
_NAMES = {
    "dense": "dense",
    "asp": "`asp`",
    "asp-packed": '`asp`, `storage="packed"`',
    "bame": "`bame`",
    "bame-packed": '`bame`, `storage="packed"`',
}


def memory() -> str:
    """What weights, gradients and optimizer state take, and the resident memory, each also over the dense training."""
    rows = []
    for file in _FILES:
        data: dict[str, Any] = read_json(file)
        by_mode = {found["mode"]: found for found in data["found"]}
        setting = data["setting"]
        for mode, found in by_mode.items():
            cells = []
            for key in ("counted", "resident"):
                share = found[key] / by_mode["dense"][key]
                cells += [f"{found[key] / 2**20:,.0f}", f"{share:.3f}"]
            cells.append(f"{found['peak'] / 2**20:,.0f}")
            pattern = "-" if mode == "dense" else setting["pattern"]
            rows.append([str(setting["width"]), pattern, _NAMES[mode], *cells])
    header = ["width", "N:M", "training", "held, MiB", "of dense", "resident, MiB", "of dense"]
    header.append("largest, MiB")
    # The dense training is the same beside every pattern.
    different = {row[0] + row[1] + row[2]: row for row in rows}
    return table(header, different.values())


TABLES: Tables = {"memory": memory}
