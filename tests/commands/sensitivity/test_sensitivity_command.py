"""``lightning-nm sensitivity`` on checkpoints with and without a model, what it chooses, and its errors."""

import itertools
import json
import sys

import pytest
import torch

from lightning_nm import sensitivity
from lightning_nm.cli import main
from lightning_nm.demo import Digits
from studies.models import MLP

CONFIG = """
seed_everything: 0
model: {class_path: studies.models.MLP, init_args: {pixels: 64, width: 32, depth: 2}}
data: {class_path: Digits, init_args: {batch_size: 32}}
trainer:
  accelerator: cpu
  callbacks: {class_path: lightning_nm.NMSparsityCallback}
"""
ARGUMENTS = {"pixels": 64, "width": 32, "depth": 2}


@pytest.fixture(autouse=True)
def _own_process(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["lightning-nm", "sensitivity"])
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (tmp_path / "config.yaml").write_text(CONFIG)
    content = {"state_dict": MLP(**ARGUMENTS).state_dict(), "hyper_parameters": ARGUMENTS}
    torch.save(content, "model.ckpt")


def model():
    made = MLP(**ARGUMENTS)
    made.load_state_dict(torch.load("model.ckpt")["state_dict"])
    return made


def data(number):
    digits = Digits(batch_size=32)
    digits.prepare_data()
    digits.setup("fit")
    return list(itertools.islice(digits.train_dataloader(), number))


def document(capsys, *words):
    assert main(["sensitivity", "model.ckpt", "--json", *words]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 1
    assert content["checkpoint"] == "model.ckpt"
    return content


def refused(capsys, *words):
    try:
        status = main(["sensitivity", *words])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert not captured.out
    return captured.err


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "config.yaml"),
        ("--model", "studies.models.MLP", "--data", "lightning_nm.demo.Digits"),
    ],
)
def test_errors_are_those_of_the_function(capsys, words):
    content = document(capsys, *words, "--pattern-m", "4", "--batches", "2")
    if "-c" in words:
        batches = data(2)
    else:
        digits = Digits()
        digits.setup("fit")
        batches = list(itertools.islice(digits.train_dataloader(), 2))
    expected = sensitivity(model(), batches, ["1:4", "2:4", "3:4"])
    assert content["patterns"] == ["1:4", "2:4", "3:4"]
    assert list(content["layers"]) == list(expected.layers) == ["hidden.0", "hidden.1"]
    for name, layer in expected.layers.items():
        assert content["layers"][name]["errors"] == pytest.approx(layer.errors, rel=1e-5)
        assert content["layers"][name]["macs"] == layer.macs
    assert content["skipped"] == {"head": "last linear layer"}
    assert "choices" not in content


def test_a_budget_is_chosen_for(capsys):
    words = ("-c", "config.yaml", "--pattern", "2:8", "4:8", "--batches", "1", "--budget", "0.5")
    content = document(capsys, *words)
    expected = sensitivity(model(), data(1), ["2:8", "4:8"]).choose(0.5)
    found = {name: choice["pattern"] for name, choice in content["choices"].items()}
    assert found == {name: choice.pattern for name, choice in expected.items()}

    assert main(["sensitivity", "model.ckpt", *words]) == 0
    out = capsys.readouterr().out
    assert "relative output error, entries by magnitude" in out
    assert "head is left out: last linear layer" in out
    kept = 320 + sum(
        {"hidden.0": 2048, "hidden.1": 1024}[n] * c.density for n, c in expected.items()
    )
    assert f"kept: {kept / 3392:.4f} of all entries; 320 of 3,392 entries stay dense" in out


def test_a_bound_is_chosen_for(capsys):
    content = document(capsys, "-c", "config.yaml", "--max-error", "0.5", "--score", "wanda")
    for name, choice in content["choices"].items():
        errors = content["layers"][name]["errors"]
        assert errors[choice["pattern"]] == choice["value"] <= 0.5


def test_a_file_alone_has_magnitudes(capsys):
    content = document(capsys, "--pattern", "2:4", "8:16", "--budget", "0.6")
    weights = torch.load("model.ckpt")["state_dict"]
    expected = sensitivity(model(), patterns=["2:4", "8:16"], skip_first_last=False)
    assert set(content["layers"]) == {key for key in weights if weights[key].dim() > 1}
    for name, layer in expected.layers.items():
        assert content["layers"][f"{name}.weight"]["retained"] == pytest.approx(layer.retained)
        assert content["layers"][f"{name}.weight"]["errors"] == {}
    assert set(content["choices"]) == set(content["layers"])
    assert main(["sensitivity", "model.ckpt"]) == 0
    out = capsys.readouterr().out
    assert "retained magnitude" in out
    assert "output error" not in out


def test_without_data_there_are_magnitudes_alone(capsys):
    content = document(capsys, "-c", "config.yaml", "--no-data", "--include", "hidden.1")
    assert list(content["layers"]) == ["hidden.1"]
    assert content["layers"]["hidden.1"]["errors"] == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none.ckpt",), "'none.ckpt' is neither a file nor a folder"),
        (("model.ckpt", "--pattern-m", "1"), "m=1 must be the length of a block"),
        (("model.ckpt", "--pattern-m", "8", "--pattern", "2:4"), "give one of --pattern and"),
        (("model.ckpt", "--pattern", "4:2"), "pattern '4:2' prunes nothing"),
        (("model.ckpt", "--pattern", "3:7"), "holds no matrix that a candidate pattern fits"),
        (("model.ckpt", "--batches", "0"), "--batches 0 must be at least 1"),
        (("model.ckpt", "--max-error", "0.1"), "--max-error needs the model"),
        (("model.ckpt", "--score", "wanda"), "--score needs the model"),
        (("model.ckpt", "--model", "nowhere.Net"), "--model nowhere.Net"),
        (("model.ckpt", "-c", "config.yaml", "--include", "body"), "`include` 'body' matches no"),
        (("model.ckpt", "-c", "config.yaml", "--budget", "2"), "budget=2.0 must be the share"),
        (
            ("model.ckpt", "-c", "config.yaml", "--budget", "0.01"),
            "budget=0.01 cannot be reached",
        ),
    ],
)
def test_what_is_refused(capsys, words, message):
    assert message in refused(capsys, *words)


def test_weights_of_another_model_are_refused(capsys):
    torch.save(MLP(pixels=64, width=16, depth=2).state_dict(), "other.pt")
    error = refused(capsys, "other.pt", "-c", "config.yaml")
    assert "the weights of 'other.pt' do not fit the config's model" in error
