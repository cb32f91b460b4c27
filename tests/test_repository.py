"""The files for people who report, cite, contribute and release."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import lightning_nm
from tests.docs.blocks import prose

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_nm"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere():
    now = lightning_nm.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", now)
    assert now == version("lightning-nm")
    assert 'dynamic = ["version"]' in text_of("pyproject.toml")
    released = re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", text_of("CHANGELOG.md"), re.M)
    assert released[0] == now
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["version"] == now
    assert (citation["cff-version"], citation["license"]) == ("1.2.0", "Apache-2.0")
    assert {"message", "title", "authors"} <= citation.keys()


def test_installations_work_from_a_checkout():
    """The package is not on PyPI: its name there would be somebody else's."""
    toml = text_of("pyproject.toml")
    extras = toml.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    known = set(re.findall(r"^([\w-]+) = \[", extras, re.MULTILINE))
    named = set()
    for folder in ("docs", "lightning_nm", "notebooks", "studies"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".md", ".py", ".ipynb", ".yaml"):
                text = path.read_text(encoding="utf-8")
                assert not re.search(r"pip install '?lightning[-_]nm|lightning-nm\[", text), path
                for extra in re.findall(r"pip install (?:-e )?'\.\[(.*?)\]'", text):
                    named |= set(extra.split(","))
    assert {"cli", "hf", "ethos-u"} <= named <= known


@pytest.mark.parametrize(
    "path", [form for form in FORMS if form.stem != "config"], ids=lambda path: path.stem
)
def test_issue_forms_can_be_filled_in(path):
    """A bug comes with the doctor's document."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = {field["id"]: field for field in form["body"] if field["type"] != "markdown"}
    assert len(fields) == sum(field["type"] != "markdown" for field in form["body"])
    assert all(field["attributes"]["label"] for field in fields.values())
    assert any(field.get("validations", {}).get("required") for field in fields.values())
    for named in re.findall(r"\b(?:docs/)?[\w-]+\.md\b", path.read_text()):
        assert (ROOT / named).is_file() or named == "docs/troubleshooting.md", named
    if path.stem == "bug":
        assert "`lightning-nm doctor --json`" in fields["doctor"]["attributes"]["label"]
        assert fields["doctor"]["validations"]["required"]


def test_readers_are_those_of_the_security_policy():
    """A module that loads files by torch, pickle or YAML is new: the policy has to say how."""
    loads = re.compile(
        r"(?<!`)torch\.load\(|pickle\.|Unpickler\(|yaml\.load|load_file\(|safe_open\("
    )
    texts = {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }
    readers = {path: text for path, text in texts.items() if loads.search(text)}
    assert set(readers) == {"export/packed_file.py", "export/sources.py"}
    for path, text in readers.items():
        assert text.count("torch.load(") == text.count("weights_only=True"), path
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(ROOT / "SECURITY.md")):
        assert (ROOT / target).exists(), target


def test_a_release_builds_wheels_by_targets_that_exist():
    section = text_of("CONTRIBUTING.md").partition("## Release")[2].partition("\n## ")[0]
    targets = re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE)
    assert {"wheel"} <= set(re.findall(r"`make ([\w-]+)`", section)) <= set(targets)
    assert re.search(r"^checks=\(.*\bwheel\b", text_of(".ci/run"), re.MULTILINE)


@pytest.mark.parametrize("old", ["0.1", "0.3"])
def test_replacements_in_the_upgrade_notes_exist(old):
    notes = text_of("CHANGELOG.md").partition(f"### Upgrade from {old}")[2].partition("\n### ")[0]
    rows = [line.split(" | ") for line in notes.splitlines() if line.startswith("| `")]
    dotted = {name for row in rows for name in re.findall(r"`\w+\.([\w.]+)[(=`]", row[1])}
    assert len(dotted) > 12
    words = set()
    for folder in ("lightning_nm", "benchmarks", "studies"):
        for path in (ROOT / folder).rglob("*.py"):
            words |= {path.stem, *re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    assert not [name for name in dotted if not words.issuperset(name.split("."))]
