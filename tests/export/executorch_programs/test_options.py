"""``lightning-nm export --to executorch`` refuses what cannot be done, and writes nothing."""

import os

import pytest
import torch
from torch import nn

from lightning_nm.cli import main
from lightning_nm.export import export_executorch
from lightning_nm.export.executorch import targets
from lightning_nm.functional import nm_prune


@pytest.fixture
def checkpoint(tmp_path):
    layer = nn.Linear(8, 8)
    layer.weight.data = nm_prune(layer.weight.data, "2:4")
    torch.save(layer.state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)


COMPLETE = ["--model", "torch.nn.Linear", "--target", "cpu", "--calibration", "x.pt"]


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (COMPLETE[:2], "--target ethos-u85-256"),
        (COMPLETE[2:], "--model train.Net"),
        (COMPLETE[:4], "--calibration images.pt"),
        ([*COMPLETE, "--target", "ethos-u85-265"], "did you mean 'ethos-u85-256'?"),
        ([*COMPLETE, "--target", "ethos-u55-128"], "has no 2:4 sparse weights"),
        (COMPLETE, "target 'cpu' needs executorch, torchao: pip install -e '.[ethos-u]'"),
        ([*COMPLETE, "--target", "ethos-u85-256"], "ethosu, tosa_serializer: pip install"),
        ([*COMPLETE, "-o", "model.pt2"], "writes .pte, not 'model.pt2'"),
        (["--to", "pt2", "--target", "cpu"], "--target is for --to executorch, not pt2"),
        (["--to", "torch", "--target", "cpu"], "--target is for --to executorch, not torch"),
    ],
)
def test_impossible_options(checkpoint, monkeypatch, capsys, words, says):
    monkeypatch.chdir(checkpoint.parent)
    given = ["export", str(checkpoint), "--to", "executorch", "-o", "model.pte", *words]
    assert main(given) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert os.listdir() == ["model.pt"]


@pytest.mark.usefixtures("nothing_installed")
def test_the_function_refuses_what_the_command_does(tmp_path):
    example = (torch.zeros(1, 8),)
    path = tmp_path / "model.pte"
    with pytest.raises(ValueError, match="did you mean"):
        export_executorch(nn.Linear(8, 8), path, example, target="ethosu85-256", calibration=[])
    with pytest.raises(ValueError, match="tuple of the model's input tensors, got Tensor"):
        export_executorch(nn.Linear(8, 8), path, example[0], calibration=[example])
    with pytest.raises(ValueError, match="give calibration="):
        export_executorch(nn.Linear(8, 8), path, example, calibration=None)
    with pytest.raises(ImportError, match=r"install -e '\.\[ethos-u\]'"):
        export_executorch(nn.Linear(8, 8), path, example, calibration=[example])
    assert os.listdir(tmp_path) == []
