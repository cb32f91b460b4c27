"""What cannot be written is said in one sentence, and leaves an older file, and nothing else, behind."""

import os
import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lightning_nm import pack, save_packed
from lightning_nm.cli import main
from lightning_nm.export.atomic_write import replacing
from lightning_nm.export.graphs import export_pt2
from lightning_nm.functional import nm_prune


@contextmanager
def full_disk(size=20_000):
    """Files cannot grow beyond a size, as on a full disk; the error is another one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def sparse():
    layer = nn.Linear(128, 128)
    layer.weight.data = nm_prune(layer.weight.data, "2:4")
    return layer


def folder_of_transformers(path):
    path.mkdir()
    torch.save(sparse().state_dict(), path / "pytorch_model.bin")
    (path / "config.json").write_text("{}")
    return path


WRITERS = {
    "packed": (
        "a.safetensors",
        lambda path: save_packed(pack(sparse(), "2:4", kernels="reference"), path),
    ),
    "pt2": ("a.pt2", lambda path: export_pt2(sparse(), (torch.randn(2, 128),), path)),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_leaves_the_old_file(tmp_path, kind):
    name, write = WRITERS[kind]
    (tmp_path / name).write_bytes(b"old")
    with full_disk(), pytest.raises(OSError, match=rf"'.*{name}' was not written: "):
        write(tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"old"


@pytest.mark.parametrize(
    ("to", "name"),
    [
        ("torch", "a.pt"),
        ("torch", "a.safetensors"),
        ("torch", "folder"),
        ("packed", "a.safetensors"),
    ],
)
def test_an_export_to_a_full_disk_says_one_sentence(tmp_path, capsys, name, to):
    source, target = folder_of_transformers(tmp_path / "in"), tmp_path / "out"
    target.mkdir()
    with full_disk():
        assert main(["export", str(source), "--to", to, "-o", str(target / name)]) == 2
    said = capsys.readouterr().err
    assert f"lightning-nm export: '{target / name}' was not written: " in said
    assert len(said.splitlines()) == 1
    assert os.listdir(target) == []


@pytest.fixture
def ctrl_c():
    """Python's own handler of SIGINT: a Trainer that was interrupted in this process ignores it from then on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(tmp_path, capsys, monkeypatch, interrupt):
    def interrupted(self, target):
        signal.raise_signal(interrupt)

    source, target = folder_of_transformers(tmp_path / "in"), tmp_path / "out"
    target.mkdir()
    monkeypatch.setattr(type(target), "replace", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert (
        main(["export", str(source), "--to", "packed", "-o", str(target / "a.safetensors")]) == 130
    )
    assert "export: stopped, " in capsys.readouterr().err
    assert os.listdir(target) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_is_no_file(tmp_path, capsys):
    source = folder_of_transformers(tmp_path / "in")
    (tmp_path / "a.safetensors").mkdir()
    assert main(["export", str(source), "-o", str(tmp_path / "a.safetensors")]) == 2
    assert "is a folder: name a file" in capsys.readouterr().err
    with (
        pytest.raises(IsADirectoryError, match="is a folder"),
        replacing(tmp_path / "a.safetensors"),
    ):
        pytest.fail("the folder was noticed too late")


def test_other_errors_stay_as_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="of the model"), replacing(tmp_path / "a"):
        raise RuntimeError("of the model")
    assert os.listdir(tmp_path) == []


def test_the_results_of_a_study_on_a_full_disk_leave_the_old_ones(tmp_path):
    pytest.importorskip("scipy")
    from lightning_nm.commands.study.analysis import write
    from lightning_nm.commands.study.spec import Spec

    path = tmp_path / "results.csv"
    path.write_text("old")
    row = {"variant": "x" * 1000, "state": "missing"}
    with full_disk(), pytest.raises(OSError, match=r"results\.csv' was not written: "):
        write(
            tmp_path, Spec("s", {}, "m", {"a": {}}), [row | {"seed": seed} for seed in range(100)]
        )
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["results.csv"]


def test_a_study_that_cannot_write_says_one_sentence(tmp_path, capsys, monkeypatch):
    for name in ("matplotlib", "optuna", "scipy"):
        pytest.importorskip(name)

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("lightning_nm.commands.study.spec.read", denied)
    assert main(["study", str(tmp_path / "study.yaml")]) == 2
    said = capsys.readouterr().err
    assert "lightning-nm study: [Errno 13] Permission denied" in said
    assert len(said.splitlines()) == 1
