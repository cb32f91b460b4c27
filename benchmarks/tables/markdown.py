"""Tables in Markdown, and the files that they are made from."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Tables = dict[str, Callable[[], str]]
"""What makes the text of a region, by its name."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    Example:
        >>> print(table(["N:M", "ms"], [["2:4", "1.5"]]))
        | N:M | ms |
        |---|---|
        | 2:4 | 1.5 |
    """
    lines = [line(header), "|" + "---|" * len(header)]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"a row has {len(row)} cells and the header {len(header)}: {list(row)}"
            )
        lines.append(line(row))
    return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def read_json(name: str) -> Any:
    """A file of the results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def read_csv(name: str) -> list[dict[str, Any]]:
    """The trainings of a study: numbers as numbers; an empty cell is left out, as it was when the study wrote it."""
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return [
            {key: _value(key, text) for key, text in row.items() if text != ""}
            for row in csv.DictReader(file)
        ]


def _value(key: str, text: str) -> Any:
    if key in ("variant", "pattern", "state", "torch", "lightning_nm", "device", "host", "error"):
        return text
    return int(text) if key == "seed" else float(text)


def time_text(ms: float) -> str:
    """Milliseconds with two digits below ten, and whole ones from there.

    Example:
        >>> time_text(7.04), time_text(48.6)
        ('7.0', '49')
    """
    return f"{ms:.1f}" if ms < 9.95 else f"{ms:.0f}"
