"""Tables that fit narrow screens: a Markdown extension.

It writes into each cell its column's heading, which ``docs/site.css`` shows where a row becomes a block, and lets
dotted names in headings break.
"""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor


class _Headings(Treeprocessor):
    def run(self, root: Element) -> None:
        for table in root.iter("table"):
            headings = [html.unescape("".join(cell.itertext())) for cell in table.iter("th")]
            for row in table.iterfind("tbody/tr"):
                for heading, cell in zip(headings, row, strict=False):
                    if heading:
                        cell.set("data-heading", heading)
            for cell in table.iter("th"):
                cell.text, *parts = re.split(r"(?<=\w\.)(?=\w)", cell.text or "")
                for at, part in enumerate(parts):
                    pause = Element("wbr")
                    pause.tail = part
                    cell.insert(at, pause)


class Stacked(Extension):
    """Writes headings into the cells of tables, and breaks between the parts of dotted names into headings."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the processor, after those that read inline Markdown."""
        md.treeprocessors.register(_Headings(md), "stacked", -1)


def makeExtension(**options: Any) -> Stacked:
    """What Markdown calls by the module's name."""
    return Stacked(**options)
