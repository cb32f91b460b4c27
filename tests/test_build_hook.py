"""What hatch_build.py gives hatchling, whose parts are stand-ins here: ``pip`` fetches it for a build alone."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
BUILD = """
from pathlib import Path
LIBRARY = Path(__file__).parent / "libnm.so"
def is_current(library):
    return library.exists()
def build(folder=LIBRARY.parent):
    if {reason!r}:
        (folder / "libnm.txt").write_text({reason!r})
    else:
        (folder / "libnm.so").write_text("compiled")
    return {reason!r}
"""


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """A hook of a checkout whose library cannot be compiled for a reason, or can."""
    interface, tags = ModuleType("interface"), ModuleType("tags")
    interface.BuildHookInterface = object
    tags.platform_tags = lambda: ["manylinux_2_36_x86_64", "musllinux_1_2_x86_64", "linux_x86_64"]
    monkeypatch.setitem(sys.modules, "packaging.tags", tags)
    for name in (
        "hatchling",
        "hatchling.builders",
        "hatchling.builders.hooks",
        "hatchling.builders.hooks.plugin",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(reason):
        kernels = tmp_path / module.KERNELS
        kernels.mkdir(parents=True, exist_ok=True)
        (kernels / "build.py").write_text(BUILD.format(reason=reason))
        made = module.LibraryBuildHook()
        made.root, made.warnings = str(tmp_path), []
        made.app = SimpleNamespace(display_warning=made.warnings.append)
        return made, kernels

    return make


def run(hook, version):
    data = {"force_include": {}}
    hook.initialize(version, data)
    included = {Path(at).name: (Path(file), at) for file, at in data.pop("force_include").items()}
    assert all(file.exists() for file, _ in included.values())
    hook.finalize(version, data, "")
    assert not any(file.exists() for file, _ in included.values())
    return data, {name: at for name, (_, at) in included.items()}


def test_a_wheel_carries_the_library_and_the_tag_of_the_platform(hook):
    made, kernels = hook("")
    data, included = run(made, "standard")
    assert data == {"pure_python": False, "tag": "py3-none-linux_x86_64"}
    assert included == {"libnm.so": "lightning_nm/kernels/cpu/libnm.so"}
    assert not (kernels / "libnm.so").exists()
    assert made.warnings == []


def test_a_wheel_without_the_library_is_pure_and_carries_the_reason(hook):
    made, kernels = hook("no compiler")
    data, included = run(made, "standard")
    assert data == {}
    assert included == {"libnm.txt": "lightning_nm/kernels/cpu/libnm.txt"}
    assert not (kernels / "libnm.txt").exists()
    assert made.warnings == ["There are no kernels for CPUs: no compiler"]


def test_an_editable_install_has_the_library_in_the_checkout(hook):
    made, kernels = hook("no compiler")
    assert run(made, "editable") == ({}, {})
    assert (kernels / "libnm.txt").read_text() == "no compiler"
    made, kernels = hook("")
    run(made, "editable")
    assert (kernels / "libnm.so").read_text() == "compiled"
    (kernels / "libnm.so").write_text("current")
    run(made, "editable")
    assert (kernels / "libnm.so").read_text() == "current"
