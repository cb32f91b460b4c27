"""Regions of a Markdown page that hold generated text: found, and replaced.

A region lies between ``<!-- table: name -->`` and ``<!-- /table -->``, each in a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from benchmarks.tables.markdown import ROOT, Tables

REGION = re.compile(
    r"^<!-- table: ([\w.:-]+) -->\n(.*?)^<!-- /table -->$", re.MULTILINE | re.DOTALL
)
MARKER = re.compile(r"^\s*<!-- /?table\b.*$", re.MULTILINE)


def pages() -> list[Path]:
    """The pages that may hold regions."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def names(text: str) -> list[str]:
    """The names of a page's regions."""
    return [match[1] for match in REGION.finditer(text)]


def filled(text: str, tables: Mapping[str, str] | Tables) -> str:
    r"""The page with the present text of its regions.

    Args:
        text: The page.
        tables: The text of each region, or what makes it, by name.

    Raises:
        ValueError: If a region has no table, or a marker no partner.

    Example:
        >>> filled("<!-- table: a -->\nold\n<!-- /table -->", {"a": "new"})
        '<!-- table: a -->\n\nnew\n\n<!-- /table -->'
    """
    markers, found = len(MARKER.findall(text)), len(names(text))
    if markers != 2 * found:
        raise ValueError(
            f"{markers} markers of tables make {found} regions: one has no partner, or is misspelt"
        )

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            close = get_close_matches(name, list(tables), 1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"there is no table {name!r}{meant} `python -m benchmarks.tables --list` lists them"
            )
        made = tables[name]
        content = made if isinstance(made, str) else made()
        return f"<!-- table: {name} -->\n\n{content.strip()}\n\n<!-- /table -->"

    return REGION.sub(replace, text)
