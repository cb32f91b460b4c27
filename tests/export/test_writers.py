"""What cannot be written is said in one sentence, and leaves an older file, and nothing else, behind."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_nm import pack, save_packed
from lightning_nm.export.atomic_write import replacing
from lightning_nm.export.graphs import export_pt2
from lightning_nm.functional import nm_prune
from tests.support.full_disk import full_disk


def sparse():
    layer = nn.Linear(128, 128)
    layer.weight.data = nm_prune(layer.weight.data, "2:4")
    return layer


def write_packed(name):
    save_packed(pack(sparse(), "2:4", kernels="reference"), name)


def write_program(name):
    # torch 2.6 exports no layer by itself.
    export_pt2(nn.Sequential(sparse()), (torch.randn(2, 128),), name)


def write_study(name):
    pytest.importorskip("scipy")
    from lightning_nm.commands.study.analysis import write
    from lightning_nm.commands.study.spec import Spec

    row = {"variant": "x" * 1000, "state": "missing"}
    rows = [row | {"seed": seed} for seed in range(100)]
    write(Path(name).parent, Spec("s", {}, "m", {"a": {}}), rows)


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_packed, "a.safetensors"), (write_program, "a.pt2"), (write_study, "results.csv")],
)
def test_a_full_disk_leaves_the_old_file(write, name):
    Path(name).write_text("old")
    with full_disk(), pytest.raises(OSError, match=f"'{name}' was not written: "):
        write(name)
    assert os.listdir() == [name]
    assert Path(name).read_text() == "old"


@pytest.fixture
def folder_of_transformers():
    os.mkdir("in")
    torch.save(sparse().state_dict(), "in/pytorch_model.bin")
    Path("in/config.json").write_text("{}")


@pytest.mark.usefixtures("folder_of_transformers")
@pytest.mark.parametrize(
    ("to", "name"),
    [("torch", "a.pt"), ("torch", "a.safetensors"), ("torch", "out"), ("packed", "a.safetensors")],
)
def test_an_export_to_a_full_disk_says_one_sentence(command, name, to):
    with full_disk():
        said = command(f"export in --to {to} -o {name}", 2)
    assert f"lightning-nm export: '{name}' was not written: " in said
    assert len(said.splitlines()) == 1
    assert os.listdir() == ["in"]


@pytest.fixture
def ctrl_c():
    """Python's own handler of SIGINT: a Trainer that was interrupted in this process ignores it from then on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("folder_of_transformers", "ctrl_c")
@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(command, monkeypatch, interrupt):
    monkeypatch.setattr(Path, "replace", lambda self, target: signal.raise_signal(interrupt))
    before = signal.getsignal(signal.SIGTERM)
    assert "export: stopped, " in command("export in --to packed -o a.safetensors", 130)
    assert os.listdir() == ["in"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_is_no_file():
    os.mkdir("a")
    with pytest.raises(IsADirectoryError, match="is a folder"), replacing(Path("a")):
        pytest.fail("the folder was noticed too late")


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="of the model"), replacing(Path("a")):
        raise RuntimeError("of the model")
    assert os.listdir() == []


def test_a_study_that_cannot_write_says_one_sentence(command, monkeypatch):
    for name in ("matplotlib", "optuna", "scipy"):
        pytest.importorskip(name)

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("lightning_nm.commands.study.spec.read", denied)
    said = command("study study.yaml", 2)
    assert "lightning-nm study: [Errno 13] Permission denied" in said
    assert len(said.splitlines()) == 1
