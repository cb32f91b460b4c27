"""Docstrings as Markdown for the API reference: a griffe extension.

The docstrings of the package have Sphinx's roles and formulas in LaTeX, which ``help()`` and editors show as they are.
Here roles become links to the reference, formulas MathML, which browsers draw without a script, and examples a section.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from latex2mathml.converter import convert

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`(~?)([^`<]+?)(?:\s*<[^>`]+>)?`")
FORMULA = re.compile(r":math:`([^`]+)`")
DISPLAYED = re.compile(
    r"^([ \t]*)\.\. math::[ ]*(.*(?:\n(?:\1[ \t]+\S.*|[ \t]*(?=\n\1[ \t]+\S)))*)", re.MULTILINE
)
EXAMPLE = re.compile(r"^([ \t]*)Example::?[ \t]*\n((?:\n*\1[ \t]+\S.*\n?)+)", re.MULTILINE)
LITERAL = re.compile(r"::[ \t]*$", re.MULTILINE)
DIRECTIVE = re.compile(r"^::: ([\w.]+)", re.MULTILINE)
# What Markdown would read as its own between the tags of a formula.
MARKDOWN = {ord(mark): f"&#{ord(mark)};" for mark in "[]*_`\\"}


def documented(folder: Path) -> dict[str, str]:
    """The last part of each name that the reference documents, and the whole name.

    Of a name that is there twice, as those of the plugins of Lightning and of Fabric, the first counts.
    """
    found: dict[str, str] = {}
    for page in sorted(folder.glob("*.md"), key=lambda path: (path.stem != "index", path.stem)):
        for name in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            found.setdefault(name.rpartition(".")[2], name)
    return found


def mathml(latex: str, display: bool = False) -> str:
    """A formula as MathML that Markdown leaves alone."""
    made: str = convert(" ".join(latex.split()), display="block" if display else "inline")
    tags = re.split(r"(<[^>]+>)", made)
    return "".join(part if part.startswith("<") else part.translate(MARKDOWN) for part in tags)


def markdown(text: str, names: dict[str, str]) -> str:
    """A docstring as Markdown.

    Args:
        text: The docstring, without the indentation of the source.
        names: What can be linked to, see :func:`documented`.
    """

    def link(match: re.Match[str]) -> str:
        short, target = match[1], match[2].removesuffix("()")
        last = target.rpartition(".")[2]
        shown = f"`{last if short else target}`"
        if last in names:
            return f"[{shown}][{names[last]}]"
        owner = target.rpartition(".")[0].rpartition(".")[2]
        return f"[{shown}][{names[owner]}]" if owner in names else shown

    def displayed(match: re.Match[str]) -> str:
        return f'{match[1]}<div class="formula">{mathml(match[2], display=True)}</div>'

    def example(match: re.Match[str]) -> str:
        indent, lines = match[1], match[2].strip("\n").splitlines()
        if any(line.lstrip().startswith(">>>") for line in lines):
            return f"{indent}Examples:\n" + "\n".join(lines) + "\n"
        inner = indent + "    "
        return "\n".join([f"{indent}Examples:", f"{inner}```python", *lines, f"{inner}```"]) + "\n"

    text = DISPLAYED.sub(displayed, text)
    text = FORMULA.sub(lambda match: f'<span class="formula">{mathml(match[1])}</span>', text)
    return LITERAL.sub(":", EXAMPLE.sub(example, ROLE.sub(link, text)))


class Docstrings(Extension):
    """Rewrites every docstring before it is parsed."""

    def __init__(self, folder: str = "docs/api") -> None:
        super().__init__()
        self.names = documented(Path(folder))

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """When griffe has read an object."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, self.names)
