"""Docstrings as Markdown for the API reference: roles, formulas, examples."""

import textwrap

import pytest

pytest.importorskip("griffe")
pytest.importorskip("latex2mathml")

from tools.site.docstrings import documented, markdown
from tools.site.pages import ROOT

NAMES = {"BAME": "lightning_nm.methods.BAME", "nm_mask": "lightning_nm.functional.nm_mask"}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (":class:`BAME` is", "[`BAME`][lightning_nm.methods.BAME] is"),
        (":class:`~lightning_nm.BAME`", "[`BAME`][lightning_nm.methods.BAME]"),
        (":meth:`BAME.update`", "[`BAME.update`][lightning_nm.methods.BAME]"),
        (
            ":func:`~a.b.nm_mask`, :func:`other()`",
            "[`nm_mask`][lightning_nm.functional.nm_mask], `other`",
        ),
        ("``x`` and `y`", "``x`` and `y`"),
        ("As follows::\n\n    x = 1", "As follows:\n\n    x = 1"),
    ],
)
def test_roles(given, made):
    assert markdown(given, NAMES) == made


@pytest.mark.parametrize("head", ["Example:", "Example::"])
def test_examples(head):
    doctest = textwrap.dedent(f"""\
        First.

        {head}
            >>> 1 + 1
            2

        Last.
        """)
    assert markdown(doctest, {}) == doctest.replace(head, "Examples:")
    code = f"First.\n\n{head}\n\n    x = 1\n\n    y = 2\n"
    made = markdown(code, {})
    assert made.startswith("First.\n\nExamples:\n    ```python\n")
    assert made.rstrip().endswith("    x = 1\n\n    y = 2\n    ```")


def test_formulas():
    inline = markdown(r"So :math:`a_{i} * b_{i} * c` holds.", {})
    assert inline.startswith('So <span class="formula"><math')
    assert inline.endswith("</math></span> holds.")
    assert not set("*_[") & set(inline)  # Markdown would read them
    displayed = markdown("Then\n\n.. math:: x = 1, \\quad\n          y = 2\n\nand more.", {})
    assert displayed.count("<math") == 1
    assert '<div class="formula">' in displayed
    assert displayed.endswith("</div>\n\nand more.")
    apart = markdown("Then\n\n.. math::\n\n    x = 1,\n    y = 2\n\nand more.", {})
    assert apart.count("<math") == 1
    assert "x = 1" not in apart
    assert apart.endswith("</div>\n\nand more.")


def test_names():
    found = documented(ROOT / "docs" / "api")
    assert found["BAME"] == "lightning_nm.methods.BAME"
    assert found["NMPrecision"] == "lightning_nm.plugins.NMPrecision"
