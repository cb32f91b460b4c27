"""``lightning-nm doctor``: mistakes in its options and configs, and configs of a LightningCLI of one's own."""

import json
import sys
from pathlib import Path

import pytest

from lightning_nm import NMPrecision
from lightning_nm.cli import main
from lightning_nm.commands.doctor.training import router_for
from tests.commands.doctor.runs import SMALL, write
from tests.support.lightning_models import make_trainer


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokens", "64"], ["--config"]),
        (["--kernels", "auto"], ["--config"]),
        (["--kernels", "fastest"], ["fastest", "auto"]),
        (["-c", "CONFIG", "--tokens", "0"], ["--tokens 0", "at least 1"]),
        (
            ["-c", "CONFIG", "--kernels", "auto"],
            ["--kernels auto", "works here: cpu-permute, cpu-csr:"],
        ),
    ],
)
def test_impossible_options(tmp_path, capsys, words, says):
    path = write(tmp_path, SMALL)
    assert main(["doctor", *(path if word == "CONFIG" else word for word in words), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in says:
        assert word in captured.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("lightning_nm.NMSparsityCallback", "lightning.pytorch.callbacks.LambdaCallback"),
            "NMSparsityCallback",
        ),
        (("2:4", "1:3"), "no layer can be masked"),
    ],
)
def test_trainings_that_are_not_sparse(tmp_path, capsys, change, says):
    text = SMALL.replace(*change)
    if "Lambda" in change[1]:
        text = text.replace(
            "init_args: {pattern: 2:4, method: transposable, grad_estimator: mvue}", "init_args: {}"
        )
    else:
        text = text.replace("transposable, grad_estimator: mvue", "sr-ste")
    assert main(["doctor", "-c", write(tmp_path, text)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [("trainer: {max_stepz: 3}", "max_stepz"), (SMALL.replace("2:4", "5:4"), "smaller than M")],
)
def test_bad_configs(tmp_path, capsys, text, says):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "-c", write(tmp_path, text), "--json"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_a_config_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "-c", "none.yaml"])
    assert stop.value.code == 2
    assert "none.yaml" in capsys.readouterr().err


def test_the_plugins_mode_holds(tmp_path):
    plugin = NMPrecision(kernels="sparse", decisions=None)
    own, bare = (make_trainer(tmp_path, [], plugins=plugins) for plugins in ([plugin], None))
    assert router_for(own) is router_for(own, "sparse") is plugin.router
    with pytest.raises(ValueError, match=r"--kernels auto contradicts .* kernels='sparse'"):
        router_for(own, "auto")
    assert router_for(bare).kernels == "auto"
    assert router_for(bare, "sparse").kernels == "sparse"


OWN = """
from lightning_nm.demo import GPT, HelpTopics

class OwnNet(GPT):
    pass

class OwnData(HelpTopics):
    pass
"""
OWN_CONFIG = """
model: {dim: 32, heads: 4, depth: 1, context: 16}
data: {context: 16, batch_size: 8}
trainer:
  max_steps: 100
  callbacks:
    - class_path: lightning_nm.NMSparsityCallback
      init_args: {pattern: 2:4, method: transposable}
"""


@pytest.fixture
def own(monkeypatch):
    """A project with a LightningCLI(OwnNet, OwnData), in the working folder."""
    Path("own_train.py").write_text(OWN)
    Path("own.yaml").write_text(OWN_CONFIG)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield
    sys.modules.pop("own_train", None)


def test_a_config_of_ones_own_cli(own, no_library, capsys):
    arguments = [
        "-c",
        "own.yaml",
        "--model",
        "own_train.OwnNet",
        "--data",
        "own_train.OwnData",
        "--json",
    ]
    assert main(["doctor", *arguments]) == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert {row["layer"] for row in report["rows"]} == {
        "blocks.0.fc1",
        "blocks.0.fc2",
        "blocks.0.proj",
        "blocks.0.qkv",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--model", "own_train.Net"],
            "--model own_train.Net: module 'own_train' has no attribute 'Net'",
        ),
        (
            ["--model", "nowhere.Net"],
            "--model nowhere.Net: No module named 'nowhere'; give a class as module.Class",
        ),
        (["--model", "Net"], "--model Net: Empty module name; give a class as module.Class"),
        (["--data", "own_train.OwnNet"], "--data own_train.OwnNet: is no LightningDataModule"),
    ],
)
def test_wrong_classes_are_named(own, capsys, arguments, words):
    assert main(["doctor", "-c", "own.yaml", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_class_needs_a_config(capsys):
    assert main(["doctor", "--model", "own_train.OwnNet"]) == 2
    assert "--model is about a training: give its --config" in capsys.readouterr().err
