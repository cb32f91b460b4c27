"""``lightning-nm export --to executorch`` refuses what cannot be done, and writes nothing."""

import os

import pytest
import torch
from torch import nn

from lightning_nm.export import export_executorch
from lightning_nm.export.executorch import targets
from lightning_nm.functional import nm_prune


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)


MODEL, TARGET = "--model torch.nn.Linear", "--target cpu"
COMPLETE = f"{MODEL} {TARGET} --calibration x.pt"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (MODEL, "--target ethos-u85-256"),
        (TARGET, "--model train.Net"),
        (f"{MODEL} {TARGET}", "--calibration images.pt"),
        (f"{COMPLETE} --target ethos-u85-265", "did you mean 'ethos-u85-256'?"),
        (f"{COMPLETE} --target ethos-u55-128", "has no 2:4 sparse weights"),
        (COMPLETE, "target 'cpu' needs executorch, torchao: pip install -e '.[ethos-u]'"),
        (f"{COMPLETE} --target ethos-u85-256", "ethosu, tosa_serializer: pip install"),
        (f"{COMPLETE} -o model.pt2", "writes .pte, not 'model.pt2'"),
        ("--to pt2 --target cpu", "--target is for --to executorch, not pt2"),
        ("--to torch --target cpu", "--target is for --to executorch, not torch"),
    ],
)
def test_impossible_options(command, words, says):
    torch.save({"weight": nm_prune(torch.randn(8, 8), "2:4")}, "model.pt")
    said = command(f"export model.pt --to executorch -o model.pte {words}", 2)
    assert says in said
    assert len(said.splitlines()) == 1
    assert os.listdir() == ["model.pt"]


X = torch.zeros(1, 8)


@pytest.mark.parametrize(
    ("example", "options", "error", "says"),
    [
        ((X,), {"target": "ethosu85-256", "calibration": []}, ValueError, "did you mean"),
        (X, {"calibration": [X]}, ValueError, "tuple of the model's input tensors, got Tensor"),
        ((X,), {"calibration": None}, ValueError, "give calibration="),
        ((X,), {"calibration": [X]}, ImportError, r"install -e '\.\[ethos-u\]'"),
    ],
)
def test_the_function_refuses_what_the_command_does(example, options, error, says):
    with pytest.raises(error, match=says):
        export_executorch(nn.Linear(8, 8), "model.pte", example, **options)
    assert os.listdir() == []
