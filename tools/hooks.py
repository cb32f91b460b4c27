"""Write the lists of hooks and attributes of a method into docs/extend/method.md: ``python -m tools.hooks``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from lightning_nm.methods import base

PAGE = Path(__file__).parent.parent / "docs" / "extend" / "method.md"
BEGIN = "<!-- `python -m tools.hooks` writes what follows. -->\n"
END = "<!-- end of the lists -->\n"
# What the class derives, and no method sets.
DERIVED = {"uses_masks", "selects_entries", "has_training_weight"}


def plain(text: str) -> str:
    """A docstring's text without the marks of reStructuredText, for Markdown."""
    return re.sub(r":[a-z]+:`", "`", text).replace("``", "`").replace("`~", "`")


def members() -> list[ast.stmt]:
    """The statements of the class ``Method``."""
    tree = ast.parse(inspect.getsource(base))
    (method,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Method"
    )
    return method.body


def hooks() -> Iterator[tuple[str, str, str]]:
    """The section, the signature and the first sentence of the docstring of each hook."""
    lines = inspect.getsource(base).splitlines()
    section = ""
    start = 0
    for node in members():
        for line in lines[start : node.lineno]:
            heading = re.fullmatch(r"    # -+ (.+)", line)
            section = heading[1] if heading else section
        start = node.lineno
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = ", ".join(argument.arg for argument in node.args.args[1:])
            meaning = plain(ast.get_docstring(node) or "").partition("\n")[0]
            yield section, f"{node.name}({arguments})", meaning


def attributes() -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each attribute that a method may set."""
    for node, after in pairwise(members()):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and ast.unparse(node.target) not in DERIVED
        ):
            meaning = " ".join(plain(str(after.value.value)).split())
            yield ast.unparse(node.target), ast.unparse(node.value) if node.value else "", meaning


def lists() -> str:
    """Both lists."""
    sections: dict[str, list[str]] = {}
    for section, signature, _ in hooks():
        sections.setdefault(section, []).append(f"`{signature}`")
    rows = ["| hooks for | |", "|---|---|"]
    rows += [f"| {section} | {', '.join(names)} |" for section, names in sections.items()]
    rows += ["", "| attribute | default | meaning |", "|---|---|---|"]
    rows += [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in attributes()]
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page with today's lists."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{lists()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
