"""Imports point one way, and only public Lightning API is used."""

import ast
import functools
import importlib
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "lightning_nm"
ORDER = [
    {"spelling"},
    {"pattern", "schedule"},
    {"functional"},
    {"kernels"},
    {"nn"},
    {"packed"},
    {"training"},
    {"methods", "estimators"},
    {"short_names"},
    {"config"},
    {"sparsifier"},
    {"callbacks", "plugins", "metrics", "export"},
    {"integrations"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
LIGHTNING = ("callbacks", "plugins", "commands", "cli", "demo", "integrations")
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


def test_imports_point_one_way():
    faults = []
    for path in FILES:
        here = room(path)
        assert here in RANK or here == "demo", f"{here} has no place in the order of the rooms"
        for name in imports(path):
            if not name.startswith("lightning_nm"):
                continue
            there = name.split(".")[1] if "." in name else ""
            if here == "demo":
                if there != "demo" and not name.startswith("lightning_nm.callbacks.rng_state."):
                    faults.append(f"{path} imports {name}: the demo runs without masks")
            elif there not in RANK and there != "demo":
                faults.append(f"{path} imports {name} from the package itself")
            elif there != "demo" and RANK[there] > RANK[here]:
                faults.append(f"{path} imports {name}: {here} lies below {there}")
    assert not faults, "\n".join(faults)


def test_no_two_files_have_one_name():
    names = [path.name for path in FILES if path.stem != "__init__"]
    assert sorted(set(names)) == sorted(names)


def test_only_public_lightning():
    faults = []
    for path in FILES:
        for name in imports(path):
            package, *parts = name.split(".")
            if package not in ("lightning", "pytorch_lightning", "lightning_fabric"):
                continue
            is_public = package == "lightning" and not any(part.startswith("_") for part in parts)
            if not is_public or room(path) not in LIGHTNING:
                faults.append(f"{path} imports {name}")
    assert not faults, "\n".join(faults)


# Each part of a layer: the file of its class, and who assigns its fields besides that file.
OWNERS = {
    "NMLayer": (
        "nn/layer.py",
        {
            "pending": ("methods/",),
            "replaced_state": (
                "nn/state.py",
                "training/optimizer_step.py",
                "training/checkpoint.py",
            ),
        },
    ),
    "LayerSpec": ("nn/layer.py", {}),
    "LayerMasks": ("nn/layer.py", {}),
    "LayerNoise": ("nn/layer.py", {}),
    "LayerProgress": (
        "nn/layer.py",
        {
            "": ("training/optimizer_step.py", "training/phases.py"),
            # A method has used the gradient of the window.
            "dense_gradient": ("methods/",),
            # A backward pass of the layer.
            "trained_by_layer": ("nn/products.py", "nn/adapters/experts.py"),
        },
    ),
    # Experts count the GEMMs of a call.
    "LayerCosts": ("nn/layer.py", {"last_call": ("nn/adapters/experts.py",)}),
    "PlainWeight": ("nn/weight.py", {}),
    "ShardedWeight": ("nn/weight.py", {}),
}


def targets(tree):
    """Every assignment to an attribute, as the expression that holds it and the attribute's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            assigned = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            assigned = [node.target]
        elif isinstance(node, ast.Delete):
            assigned = node.targets
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "setattr",
            "object.__setattr__",
            "delattr",
        ):
            name = node.args[1]
            yield node.args[0], name.value if isinstance(name, ast.Constant) else None
            continue
        else:
            continue
        for target in assigned:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, (ast.Store, ast.Del)):
                    yield part.value, part.attr


@functools.cache
def class_of(name):
    """The source of a part's class."""
    file, _ = OWNERS[name]
    body = ast.parse((PACKAGE / file).read_text()).body
    (cls,) = [each for each in body if isinstance(each, ast.ClassDef) and each.name == name]
    return cls


@functools.cache
def fields_of(name):
    """The fields of a part: its dataclass fields, and what its methods assign to ``self``."""
    cls = class_of(name)
    declared = {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}
    assigned = {field for held, field in targets(cls) if ast.unparse(held) == "self"}
    return (declared | assigned) - {None}


def test_a_layer_has_few_fields_and_methods():
    assert {"spec", "masks", "progress", "pending"} <= fields_of("NMLayer")
    assert len(fields_of("NMLayer")) <= 15
    assert sum(isinstance(node, ast.FunctionDef) for node in ast.walk(class_of("NMLayer"))) <= 25


def writers(field):
    """The parts that have the field, and the files and folders that may assign it."""
    owners = [name for name in OWNERS if field in fields_of(name)]
    allowed = []
    for name in owners:
        file, others = OWNERS[name]
        allowed += [file, *others.get("", ()), *others.get(field, ())]
    return owners, tuple(allowed)


def test_only_the_owner_assigns_the_fields_of_a_part():
    faults = []
    for path in FILES:
        here = path.relative_to(PACKAGE).as_posix()
        for held, field in targets(ast.parse(path.read_text())):
            expression = ast.unparse(held)
            owners, allowed = writers(field)
            if expression != "self" and owners and not here.startswith(allowed):
                faults.append(
                    f"{here} assigns {expression}.{field} of {owners}, which {allowed} may"
                )
    assert not faults, "\n".join(faults)


def test_public_names_exist_and_are_sorted():
    package = importlib.import_module("lightning_nm")
    assert all(hasattr(package, name) for name in package.__all__)
    for module in ("functional", "methods", "estimators", "callbacks", "metrics", "demo"):
        names = importlib.import_module(f"lightning_nm.{module}").__all__
        assert len(set(names)) == len(names)
