"""Every table as a CSV file of ``benchmarks/results/tables``, with the cells of the pages."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.tables.markdown import RESULTS

FOLDER = RESULTS / "tables"
LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
BAR = re.compile(r"(?<!\\)\|")


def contents(tables: Mapping[str, str]) -> dict[Path, str]:
    """The text of each CSV file, by its path.

    Args:
        tables: Tables in Markdown, by name.
    """
    return {FOLDER / f"{name}.csv": as_csv(text) for name, text in tables.items()}


def as_csv(text: str) -> str:
    r"""A table in Markdown as CSV: the same cells, without the marks of code, of emphasis and of links.

    Example:
        >>> as_csv("| method | gain |\n|---|---|\n| `asp` | **2.4x**, [why](a.md) |")
        'method,gain\nasp,"2.4x, why"\n'
    """
    header, _, *rows = text.strip().splitlines()
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in (header, *rows):
        writer.writerow(plain(cell) for cell in BAR.split(row)[1:-1])
    return file.getvalue()


def plain(cell: str) -> str:
    """A cell without the marks of Markdown."""
    text = LINK.sub(r"\1", cell.strip())
    return text.replace("**", "").replace("`", "").replace("\\|", "|")
