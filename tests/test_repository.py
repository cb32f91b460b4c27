"""The files for people who report, cite, contribute and release."""

import dis
import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

import lightning_nm
from lightning_nm.kernels import Router
from tests.docs.blocks import prose

ROOT = Path(__file__).parent.parent
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_has_the_required_keys_and_this_version():
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "lightning_nm contributors"}]
    assert citation["version"] == lightning_nm.__version__
    assert citation["license"] == "Apache-2.0"


def test_the_changelog_has_this_version_first():
    found = re.findall(r"^## \[(.*?)\]( - \d{4}-\d\d-\d\d)?$", CHANGELOG, re.MULTILINE)
    versions = [name for name, _ in found if name != "Unreleased"]
    assert versions[0] == lightning_nm.__version__
    assert "### Upgrade from 0.1" in CHANGELOG


def test_installations_work_from_a_checkout():
    """The package is not on PyPI: its name there would be somebody else's."""
    toml = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
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
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
    for named in re.findall(r"\b(?:docs/)?[\w-]+\.md\b", path.read_text()):
        assert (ROOT / named).is_file() or named == "docs/troubleshooting.md", named


def test_a_bug_comes_with_the_doctors_document():
    fields = {
        field.get("id"): field for field in load(ROOT / ".github/ISSUE_TEMPLATE/bug.yml")["body"]
    }
    assert "`lightning-nm doctor --json`" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"]
    assert "lightning-nm" in fields["versions"]["attributes"]["description"]


def test_readers_are_those_of_the_security_policy():
    """A module that loads files by torch, pickle or YAML is new: the policy has to say how."""
    loads = re.compile(
        r"(?<!`)torch\.load\(|pickle\.|Unpickler\(|yaml\.load|load_file\(|safe_open\("
    )
    found = {
        str(path.relative_to(ROOT / "lightning_nm"))
        for path in (ROOT / "lightning_nm").rglob("*.py")
        if loads.search(path.read_text(encoding="utf-8"))
    }
    known = {
        "export/packed_file.py",
        "export/sources.py",
    }
    assert found == known, found ^ known
    for path in known:
        text = (ROOT / "lightning_nm" / path).read_text(encoding="utf-8")
        assert text.count("torch.load(") == text.count("weights_only=True"), path


def test_links_of_the_security_policy():
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(ROOT / "SECURITY.md")):
        assert (ROOT / target).exists(), target


def test_the_release_checklist_names_targets_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Release")[2].partition("\n## ")[0]
    targets = re.findall(
        r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = re.findall(r"`make ([\w-]+)`", section)
    assert {"wheel"} <= set(named) <= set(targets)


def test_wheels_are_built_in_ci():
    assert re.search(
        r"^checks=\(.*\bwheel\b", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE
    )


# What names in the upgrade tables begin with, and where that is.
OWNERS = {
    "sparsifier": "lightning_nm.NMSparsifier",
    "layer": "lightning_nm.nn.layer.NMLayer",
    "Method": "lightning_nm.methods.Method",
    "Router": "lightning_nm.kernels.Router",
    "MaskMonitor": "lightning_nm.MaskMonitor",
    "Layout": "lightning_nm.nn.weight.Layout",
}
SUBPACKAGES = {path.parent.name for path in (ROOT / "lightning_nm").glob("*/__init__.py")}


def full_name(name):
    """The dotted name in the package of what an upgrade table names; "" if it names something else."""
    first, _, rest = name.partition(".")
    if first == "lightning_nm":
        return name
    if first in SUBPACKAGES and rest:
        return f"lightning_nm.{name}"
    return f"{OWNERS[first]}.{rest}" if first in OWNERS and rest else ""


def attributes(cls):
    """The names of a class, those annotated in its bases, and those that its constructors assign."""
    names = set(dir(cls))
    for base in cls.__mro__:
        names |= set(vars(base).get("__annotations__", {}))
        if inspect.isfunction(vars(base).get("__init__")):
            assigned = dis.get_instructions(base.__init__)
            names |= {each.argval for each in assigned if each.opname == "STORE_ATTR"}
    return names


def resolve(name):
    """Whether there is an object of this name, which may be an attribute of a class or of its instances."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if inspect.isclass(found) and not hasattr(found, part):
                return part in attributes(found)
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("version", ["0.1", "0.3"])
def test_replacements_in_the_upgrade_notes_exist(version):
    notes = CHANGELOG.partition(f"### Upgrade from {version}")[2].partition("\n### ")[0]
    rows = [line.split(" | ") for line in notes.splitlines() if line.startswith("| `")]
    written = [name for row in rows for name in re.findall(r"`([a-zA-Z_][\w.]+)[(=`]", row[1])]
    named = {name: full_name(name) for name in written}
    assert sum(map(bool, named.values())) > 12
    missing = [name for name, full in named.items() if full and not resolve(full)]
    assert not missing


@pytest.mark.parametrize("name", ["sparsifier.check_optimizer_states", "functional.stages"])
def test_a_replacement_that_does_not_exist_is_noticed(name):
    assert not resolve(full_name(name))


@pytest.mark.parametrize("owner", ["Tuner", "HasHandle", "lookup", "Router"])
def test_replacements_among_the_kernels_exist(owner):
    found = [
        vars(importlib.import_module(f"lightning_nm.kernels.{name}"))
        for name in ("tuner", "api", "router")
    ]
    assert any(owner in names for names in found)
    if owner == "Router":
        made = Router("reference")
        names = "kernels active_or_none unavailable_reason record initialize tune_if_single"
        assert all(hasattr(made, name) for name in names.split())
