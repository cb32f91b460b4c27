"""``lightning-nm flops`` on configs with and without data, callbacks and schedules, and its errors."""

import json
import re
import sys

import pytest
from torch import nn

from lightning_nm.cli import main
from lightning_nm.training.forwards import can_watch

SMALL = """
seed_everything: 0
model: {class_path: GPT, init_args: {dim: 32, heads: 4, depth: 2, context: 16}}
data: {class_path: HelpTopics, init_args: {context: 16, batch_size: 8}}
trainer:
  max_steps: 50
  callbacks:
    - class_path: lightning_nm.NMSparsityCallback
      init_args:
        pattern: 2:4
        method: transposable
        grad_estimator: {class_path: lightning_nm.MVUE, init_args: {dense_end: 0.2}}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
"""
MIXTURE = """
seed_everything: 0
model: {class_path: tests.commands.flops.mixture.Mixture}
data: {class_path: FashionMNIST, init_args: {data_dir: nowhere}}
trainer:
  max_epochs: 1
  callbacks: {class_path: lightning_nm.NMSparsityCallback, init_args: {method: bi-mask, pattern: 2:4}}
"""


@pytest.fixture(autouse=True)
def _own_process(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["lightning-nm", "flops"])
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path):
    def write(text, name="config.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def reports(capsys, *words):
    assert main(["flops", "--json", *words]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 1
    return content["reports"]


def refused(capsys, *words):
    try:
        status = main(["flops", *words])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert not captured.out
    return captured.err


def test_the_first_batch_and_the_whole_schedule(capsys, write):
    (report,) = reports(capsys, write(SMALL))
    assert report["inputs"] == ["int64 [8, 16]", "int64 [8, 16]"]
    assert report["planned_steps"] == 50
    assert report["phases"] == ["MVUE: from training step 0 to 40, then wgrad is dense"]
    layers = {layer["name"]: layer for layer in report["layers"]}
    fc1 = layers["blocks.1.fc1"]
    assert (fc1["parameters"], fc1["macs"]) == (4096, 8 * 16 * 4096)
    assert (fc1["pattern"], fc1["method"], fc1["estimator"]) == ("2:4", "transposable", "MVUE")
    for kind in ("arithmetic", "paper", "eligible"):
        expected = {"forward": 0.5, "dgrad": 0.5, "wgrad": 0.8 * 0.5 + 0.2}
        assert fc1[kind] == pytest.approx({**expected, "all": sum(expected.values()) / 3})
        assert report["masked_ratios"][kind] == pytest.approx(fc1[kind])
        assert fc1[kind]["all"] < report["ratios"][kind]["all"] < 1
    assert layers["head"]["why"].startswith("last linear layer")
    assert sum(layer["macs"] for layer in report["layers"]) == report["macs"]

    assert main(["flops", "-c", write(SMALL)]) == 0
    out = capsys.readouterr().out
    assert "FLOPs of GPT" in out
    assert re.search(
        r"blocks\.\{0,1\}\.fc1 x2 +4\.1k +524\.3k +2:4 transposable MVUE +0\.500 +0\.500 +0\.600 +0\.533",
        out,
    )
    assert "averaged over 50 planned training steps" in out
    assert f"{report['macs']:,} multiply-adds" in out


def test_several_patterns_and_other_steps(capsys, write):
    found = reports(capsys, write(SMALL), "--pattern", "1:4", "1:16", "--steps", "1000")
    assert [report["pattern"] for report in found] == ["1:4", "1:16"]
    assert [report["masked_ratios"]["paper"]["forward"] for report in found] == [0.25, 0.0625]
    assert {report["planned_steps"] for report in found} == {1000}
    assert main(["flops", write(SMALL), "--pattern", "1:4"]) == 0
    assert "FLOPs of GPT at 1:4" in capsys.readouterr().out


def test_a_config_without_masks(capsys, write):
    path = write(SMALL[: SMALL.index("  callbacks")])
    (report,) = reports(capsys, path)
    assert {tuple(ratios.values()) for ratios in report["ratios"].values()} == {
        (1.0, 1.0, 1.0, 1.0)
    }
    assert set(report["masked_ratios"].values()) == {None}
    assert main(["flops", path]) == 0
    assert (
        "there is no NMSparsityCallback in the config, so every GEMM is dense"
        in capsys.readouterr().out
    )
    assert "--pattern 1:4: the config has no NMSparsityCallback" in refused(
        capsys, path, "--pattern", "1:4"
    )


@pytest.mark.skipif(not can_watch(nn.Identity()), reason="modes prevent compilation in this torch")
def test_experts(capsys, write):
    """Each token counts for the expert that it reaches, and experts are masked."""
    (report,) = reports(capsys, write(MIXTURE))
    layers = {layer["name"]: layer for layer in report["layers"]}
    assert layers["experts.up"]["macs"] == 12 * 16 * 32
    assert layers["experts.up"]["parameters"] == 4 * 16 * 32
    assert layers["experts.up"]["paper"]["forward"] == 0.5
    assert report["inputs"] == ["float32 [12, 16]"]


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
def test_data_are_read_only_for_schedules(capsys, write):
    """The model of the config has an example input; its data are not there."""
    late = MIXTURE.replace(
        "method: bi-mask", "method: {class_path: lightning_nm.ASP, init_args: {start: 0.5}}"
    )
    (report,) = reports(capsys, write(MIXTURE))
    assert report["planned_steps"] is None
    error = refused(capsys, write(late))
    assert "a schedule of the config depends on the number of training steps" in error
    assert "in nowhere: pass the folder" in error
    assert "--steps N" in error
    (half,) = reports(capsys, write(late), "--steps", "100", "--input", "3x16")
    assert half["inputs"] == ["float32 [3, 16]"]
    assert half["masked_ratios"]["paper"]["forward"] == 0.75


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (("dim: 32", "dimm: 32"), (), "did you mean 'dim'"),
        (("method: transposable", "method: transposible"), (), "did you mean 'transposable'"),
        (
            ("pattern: 2:4", "include: [blocks.0.fc3]"),
            (),
            "'blocks.0.fc3' matches no layer; layers are",
        ),
        (("", ""), ("--pattern", "4:2"), "4:2"),
        (("", ""), ("--steps", "0"), "--steps 0 must be at least 1"),
        (("", ""), ("--input", "1,two"), "--input 1,two is no shape: write it as 1,3,224,224"),
        (
            ("", ""),
            ("--input", "1,2,3,4"),
            "GPT does not take an input of float32 [1, 2, 3, 4]",
        ),
        (("max_steps: 50", "max_steps: 0"), (), "the training ended before its first batch"),
    ],
)
def test_errors(capsys, write, change, words, message):
    assert message in refused(capsys, write(SMALL.replace(*change)), *words)


def test_a_config_is_needed(capsys):
    assert "give the CONFIG of a training" in refused(capsys)
    assert "nowhere.yaml" in refused(capsys, "nowhere.yaml")
