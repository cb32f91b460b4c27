"""The list of modules is that of the package, and pages name no module that is not there."""

import re

import pytest

from tests.docs.blocks import DOCS, ROOT, prose
from tools.modules import PACKAGE, PAGE, first_line, modules, page

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def test_the_page_is_as_the_package():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tools.modules`"


def test_every_module_says_what_it_is():
    assert [path for path in modules(PACKAGE) if not first_line(path)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_files_that_a_page_names_exist(path):
    named = re.findall(
        r"`((?:lightning_nm|nn|kernels|functional|training|tests|benchmarks|tools)/[\w/]+\.py)`",
        prose(path),
    )
    missing = [
        name for name in named if not (ROOT / name).is_file() and not (PACKAGE / name).is_file()
    ]
    assert missing == []
