"""The pages of the site in one folder: those of docs/, and those of the project that lie next to it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent.parent
BESIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages next to docs/, and their names in the site."""
ELSEWHERE = BESIDE | {"README.md": "index.md"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def stage(folder: Path) -> None:
    """Copy the pages into a folder, with links that hold there.

    A link to a file of the project that is no page, such as a study, gets a copy of the file.
    """
    pages = {
        f"docs/{path.relative_to(ROOT / 'docs').as_posix()}": path
        for path in sorted((ROOT / "docs").rglob("*"))
    }
    pages |= {name: ROOT / name for name in BESIDE}
    for name, path in pages.items():
        if path.is_dir():
            continue
        target = folder / place(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(
                relinked(path.read_text(encoding="utf-8"), name, folder), encoding="utf-8"
            )
        else:
            shutil.copyfile(path, target)


def place(name: str) -> str:
    """Where a file of the project is in the site.

    Example:
        >>> place("docs/gpu.md"), place("CHANGELOG.md"), place("studies/a.yaml")
        ('gpu.md', 'changelog.md', 'source/studies/a.yaml')
    """
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return ELSEWHERE.get(name, f"source/{name}")


def relinked(text: str, name: str, folder: Path) -> str:
    """The text of a page with links that hold in the site; files that are linked to are copied there.

    Args:
        text: The page.
        name: Its path in the project.
        folder: The folder of the site's pages.
    """

    def relink(match: re.Match[str]) -> str:
        target, mark, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        linked = os.path.normpath(PurePosixPath(name).parent / target)
        here, there = place(name), place(linked)
        source = ROOT / linked
        if there.startswith("source/") and source.is_file():
            copy = folder / there
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        return (
            match[1] + os.path.relpath(there, PurePosixPath(here).parent) + mark + anchor + match[3]
        )

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(relink, part) for part in parts)
