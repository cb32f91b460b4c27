"""``lightning-nm export --to executorch`` and ``doctor --target`` refuse what cannot be done, and write nothing."""

import json
import os

import pytest
import torch
from torch import nn

from lightning_nm.cli import main
from lightning_nm.commands.doctor import target as doctor_target
from lightning_nm.export.executorch import export_executorch, targets
from lightning_nm.functional import nm_prune
from tests.commands.doctor.runs import write


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
        (["--to", "pt2", "--target", "cpu"], "--model train.Net"),
        (["--to", "torch", "--target", "cpu"], "--target, --calibration and --allow-float are for"),
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


CONFIG = """
seed_everything: 0
model: {class_path: lightning_nm.demo.ResidualCNN, init_args: {width: 16}}
data: {class_path: lightning_nm.demo.Digits}
trainer:
  callbacks:
    - class_path: lightning_nm.NMSparsityCallback
      init_args: {pattern: 2:4, method: sr-ste}
"""


def report(capsys, *words):
    assert main(["doctor", "--json", "--target", "ethos-u85-256", *words]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content) == {"schema", "target"}
    return content["target"]


@pytest.mark.usefixtures("nothing_installed")
def test_the_doctor_judges_shapes_without_executorch(tmp_path, capsys):
    pytest.importorskip("jsonargparse")
    pytest.importorskip("sklearn")
    config = write(tmp_path, CONFIG)
    found = report(capsys, "-c", config)
    reasons = {row["layer"]: row["reason"] for row in found["rows"]}
    assert "first convolution" in reasons.pop("stem.0")
    assert "last linear layer" in reasons.pop("head")
    assert set(reasons.values()) == {""}
    assert "pip install -e '.[ethos-u]'" in found["not_compiled"]
    assert found["cycles"] is None

    denser = write(tmp_path, CONFIG.replace("2:4", "4:8"), "denser.yaml")
    reasons = {row["layer"]: row["reason"] for row in report(capsys, "-c", denser)["rows"]}
    assert "fewer than 2 zeros" in reasons["stages.0.0.conv1"]

    assert main(["doctor", "--target", "ethos-u85-256", "-c", config]) == 0
    out = capsys.readouterr().out
    assert "8 of 10 weights would run sparse on ethos-u85-256" in out
    assert "cycles are not known: not installed: executorch" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--target", "ethos-u85-256"], "--config"),
        (["--target", "ethos-u85", "-c", "CONFIG"], "did you mean"),
        (["--target", "cpu", "-c", "CONFIG"], "measures this machine"),
        (["--target", "ethos-u85-256", "-c", "CONFIG", "--tokens", "8"], "--tokens and --kernels"),
        (["--target", "ethos-u85-256", "-c", "DENSE"], "no NMSparsityCallback"),
    ],
)
def test_impossible_options_of_the_doctor(tmp_path, capsys, words, says):
    pytest.importorskip("jsonargparse")
    pytest.importorskip("sklearn")
    paths = {
        "CONFIG": write(tmp_path, CONFIG),
        "DENSE": write(tmp_path, CONFIG.partition("trainer:")[0], "dense.yaml"),
    }
    assert main(["doctor", *(paths.get(word, word) for word in words)]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_a_model_that_cannot_be_compiled_is_still_judged(tmp_path, capsys, monkeypatch):
    pytest.importorskip("jsonargparse")
    pytest.importorskip("sklearn")

    def fail(*args, **kwargs):
        raise ValueError("torch.export cannot trace ResidualCNN")

    monkeypatch.setattr(doctor_target, "missing_packages", lambda target: [])
    monkeypatch.setattr(doctor_target, "export_executorch", fail)
    found = report(capsys, "-c", write(tmp_path, CONFIG))
    assert found["not_compiled"] == "torch.export cannot trace ResidualCNN"
    assert len(found["rows"]) == 10
