"""Every module says what it is, and pages name no module that is not there."""

import ast
import re

import pytest

from tests.docs.blocks import DOCS, ROOT, prose

PACKAGE = ROOT / "lightning_nm"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def test_every_module_says_what_it_is():
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    silent = [path for path in modules if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert silent == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_files_that_a_page_names_exist(path):
    named = re.findall(
        r"`((?:lightning_nm|nn|kernels|functional|training|methods|estimators|callbacks|plugins|tests|benchmarks|tools)"
        r"/[\w/]+\.py)`",
        prose(path),
    )
    missing = [
        name for name in named if not (ROOT / name).is_file() and not (PACKAGE / name).is_file()
    ]
    assert missing == []
