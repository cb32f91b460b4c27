"""The site's navigation has every page, every public name is in the API reference, and no link leads nowhere."""

import importlib
import os
import re
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import DOCS, ROOT, prose
from tools.site.pages import BESIDE, LINK, place, relinked, stage

PAGES = [ROOT / name for name in ("README.md", *BESIDE)] + sorted(DOCS.rglob("*.md"))
PAGES += sorted(ROOT.glob("notebooks/*.ipynb"))

# Pages that are in the navigation and not written yet.
NOT_YET: set[str] = set()

PUBLIC = (
    "functional",
    "methods",
    "estimators",
    "kernels",
    "nn",
    "metrics",
    "export",
    "plugins",
    "integrations",
    "callbacks",
    "demo",
)


class Loader(yaml.SafeLoader):
    """Reads the tags of MkDocs as text."""


Loader.add_multi_constructor("!ENV", lambda loader, suffix, node: loader.construct_sequence(node))
Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def navigation(entry):
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [
        page
        for part in (entry.values() if isinstance(entry, dict) else entry)
        for page in navigation(part)
    ]


def nav():
    return navigation(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"])


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them, and those of the API reference."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r"^::: (\S+)$", prose(page), re.MULTILINE))


def is_missing(path):
    return path.is_relative_to(DOCS) and path.relative_to(DOCS).as_posix() in NOT_YET


def test_every_entry_of_the_navigation_is_a_page():
    pages = nav()
    assert len(pages) == len(set(pages))
    there = {place(path.relative_to(ROOT).as_posix()) for path in PAGES}
    assert set(pages) - there == NOT_YET


def test_every_page_is_in_the_navigation():
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} <= set(nav())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_link_leads_nowhere(page):
    for _, target, _ in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = Path(os.path.normpath(page.parent / name)) if name else page
        if is_missing(linked):
            continue
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def directives():
    """The names in the API reference."""
    return re.findall(
        r"^::: (\S+)$",
        "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md")),
        re.MULTILINE,
    )


def resolve(name):
    """The object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_name_is_in_the_reference():
    names = directives()
    assert len(names) == len(set(names))
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    documented = [resolve(name) for name in names]
    package = importlib.import_module("lightning_nm")
    modules = [package, *(importlib.import_module(f"lightning_nm.{name}") for name in PUBLIC)]
    assert {module.__name__.partition(".")[2] for module in modules[1:]} == set(PUBLIC)
    for module in modules:
        for name in module.__all__:
            found = getattr(module, name)
            if name == "__version__" or found in modules:
                continue
            assert any(found is each or found == each for each in documented), (
                f"{module.__name__}.{name}"
            )


def test_links_of_staged_pages(tmp_path):
    text = "[a](docs/gpu.md#commands) [b](studies/__init__.py) [c](https://a.b) [d](#e)\n```\n[x](docs/y.md)\n```\n"
    assert relinked(text, "CHANGELOG.md", tmp_path) == (
        "[a](gpu.md#commands) [b](source/studies/__init__.py) [c](https://a.b) [d](#e)\n```\n[x](docs/y.md)\n```\n"
    )
    assert (tmp_path / "source/studies/__init__.py").is_file()
    assert relinked("[a](../../README.md) [b](../gpu.md)", "docs/api/index.md", tmp_path) == (
        "[a](../index.md) [b](../gpu.md)"
    )


def test_staged_folder(tmp_path):
    stage(tmp_path)
    assert (tmp_path / "changelog.md").is_file()
    assert (tmp_path / "api/methods.md").is_file()
    assert not list(tmp_path.rglob("*.py")) or all(
        "source" in path.parts for path in tmp_path.rglob("*.py")
    )
    for page in tmp_path.rglob("*.md"):
        for _, target, _ in LINK.findall(prose(page)):
            name = target.partition("#")[0]
            if name and not re.match(r"[a-z]+:", target):
                linked = Path(os.path.normpath(page.parent / name))
                assert linked.exists() or linked.relative_to(tmp_path).as_posix() in NOT_YET, (
                    page.name,
                    target,
                )


def test_a_cell_knows_its_heading():
    """What site.css shows on a narrow screen, where each row of a table is a block."""
    markdown = pytest.importorskip("markdown")
    page = "| | a `b<c` | torch.nn.d |\n|---|---|---|\n| row | 1.5 | [x](y.md) |\n| | 2 | |\n"
    made = markdown.markdown(page, extensions=["tables", "tools.site.tables"])
    cells = re.findall(r"<td(?: data-heading=\"(.*?)\")?>(.*?)</td>", made)
    first, second = ("", "row"), ("", "")
    assert cells == [
        first,
        ("a b&lt;c", "1.5"),
        ("torch.nn.d", '<a href="y.md">x</a>'),
        second,
        ("a b&lt;c", "2"),
        ("torch.nn.d", ""),
    ]
    assert re.search(r"<th>torch\.<wbr ?/?>nn\.<wbr ?/?>d</th>", made)
    assert "<th>a <code>b&lt;c</code></th>" in made
    assert "content: attr(data-heading)" in (DOCS / "site.css").read_text()
    assert "- tools.site.tables\n" in (ROOT / "mkdocs.yml").read_text()
