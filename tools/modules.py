"""Write docs/modules.md, the list of the package's modules by their docstrings: ``python -m tools.modules``."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_nm"
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# Modules

Every folder and module of the package with the first line of its docstring. `python -m tools.modules` writes this page.
[Architecture](architecture.md) says how they work together.

"""


def first_line(path: Path) -> str:
    """The first line of a module's docstring, without the marks of reStructuredText; empty if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return plain(docstring.partition("\n")[0]).replace("|", r"\|")


def plain(text: str) -> str:
    """A docstring's text without the marks of reStructuredText, for Markdown."""
    for role in (":mod:", ":class:", ":func:", ":meth:", ":data:", ":attr:"):
        text = text.replace(role, "")
    return text.replace("``", "`").replace("`~", "`")


def modules(folder: Path) -> list[Path]:
    """The modules of a folder, and after them those of the folders in it."""
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    inner = sorted(path.parent for path in folder.glob("*/__init__.py"))
    return files + [module for each in inner for module in [each / "__init__.py", *modules(each)]]


def page() -> str:
    """The text of the page."""
    rows = ["| module | |", "|---|---|"]
    for path in modules(PACKAGE):
        name = path.relative_to(PACKAGE).as_posix()
        if path.name == "__init__.py":
            rows.append(f"| **{name.removesuffix('__init__.py')}** | **{first_line(path)}** |")
        else:
            rows.append(f"| {name} | {first_line(path)} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
