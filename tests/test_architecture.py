"""Imports point one way, and only public Lightning API is used."""

import ast
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_nm"
ORDER = [
    {"pattern", "schedule"},
    {"functional"},
    {"kernels"},
    {"nn"},
    {"training", "distributed"},
    {"methods", "estimators"},
    {"sparsifier"},
    {"callbacks", "plugins", "strategies", "metrics", "export"},
    {"lightning_cli"},
    {"doctor"},
    {"cli"},
    {"__main__"},
]
LIGHTNING = ("callbacks", "plugins", "strategies", "lightning_cli", "doctor", "cli", "demo")
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """Imported names, leaving out those for type checking only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for child in block.body
        for node in ast.walk(child)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    here = room(path)
    assert here in RANK or here == "demo", f"{here} has no place in the order of the rooms"
    for name in imports(path):
        if not name.startswith("lightning_nm"):
            continue
        there = name.split(".")[1] if "." in name else ""
        if here == "demo":
            maskless = name.startswith("lightning_nm.callbacks.rng_state.")
            assert there == "demo" or maskless, f"{path} imports {name}: the demo runs without masks"
        elif there != "demo":
            assert there in RANK, f"{path} imports {name} from the package itself"
            assert RANK[there] <= RANK[here], f"{path} imports {name}: {here} lies below {there}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_public_lightning(path):
    for name in imports(path):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            assert name.split(".")[0] == "lightning", f"{path} imports {name}"
            assert not any(part.startswith("_") for part in name.split(".")), f"{path} imports {name}"
            assert room(path) in ("callbacks", "plugins", "strategies", "lightning_cli", "doctor", "cli", "demo"), (
                f"{path} imports {name}"
            )


def test_public_names_exist_and_are_sorted():
    package = importlib.import_module("lightning_nm")
    assert all(hasattr(package, name) for name in package.__all__)
    for module in ("functional", "methods", "estimators", "callbacks", "metrics", "demo"):
        names = importlib.import_module(f"lightning_nm.{module}").__all__
        assert len(set(names)) == len(names)
