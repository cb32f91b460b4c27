"""``lightning-nm flops`` on configs with and without data, callbacks and schedules, and its errors."""

import json
import re

import lightning.pytorch as pl
import pytest
import torch

from lightning_nm.cli import main
from tests.support.command import refused
from tests.support.loop import mlp, sgd

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
KINDS = ("arithmetic", "paper", "eligible")
WITH_EXAMPLE = """
seed_everything: 0
model: {class_path: tests.commands.test_flops.Example}
data: {class_path: FashionMNIST, init_args: {data_dir: nowhere}}
trainer:
  max_epochs: 1
  callbacks: {class_path: lightning_nm.NMSparsityCallback, init_args: {method: bi-mask, pattern: 2:4}}
"""


def report_of(capsys, path, *words):
    assert main(["flops", "--json", "-c", path, *words]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["schema"], content["command"]) == (1, "flops")
    return content


def said(capsys, path):
    assert main(["flops", "-c", path]) == 0
    return capsys.readouterr().out


def test_the_first_batch_and_the_whole_schedule(capsys, write):
    report = report_of(capsys, write(SMALL))
    assert report["inputs"] == ["int64 [8, 16]", "int64 [8, 16]"]
    assert report["planned_steps"] == 50
    # Four layers in each of two blocks; the head, which is dense.
    masked = 8 * 16 * 2 * 12 * 32**2
    assert (report["masked_macs"], report["macs"]) == (masked, masked + 8 * 16 * 32 * 256)
    expected = (0.5 + 0.5 + 0.8 * 0.5 + 0.2) / 3
    share = masked / report["macs"]
    for kind in KINDS:
        assert report["masked_ratios"][kind] == pytest.approx(expected)
        assert report["ratios"][kind] == pytest.approx(share * expected + 1 - share)

    out = said(capsys, write(SMALL))
    assert "FLOPs of GPT\n" in out
    assert re.search(r"blocks\.\{0,1\}\.fc1 x2 +128x32 +2:4 +transposable +2:4 +2:4 +", out)
    assert "MVUE: from training step 0 to 40, then wgrad is dense" in out
    assert "averaged over 50 planned training steps" in out
    assert f"{report['macs']:,} multiply-adds" in out


def test_another_pattern_and_other_steps(capsys, write):
    report = report_of(capsys, write(SMALL), "--pattern", "1:16", "--steps", "1000")
    assert (report["pattern"], report["planned_steps"]) == ("1:16", 1000)
    wgrad = 0.8 / 16 + 0.2
    assert report["masked_ratios"]["paper"] == pytest.approx((2 / 16 + wgrad) / 3)


def test_a_config_without_masks(capsys, write):
    path = write(SMALL[: SMALL.index("  callbacks")])
    report = report_of(capsys, path)
    assert report["ratios"] == dict.fromkeys(KINDS, 1.0)
    assert report["masked_ratios"] is None
    words = "no NMSparsityCallback is in the config, so every GEMM is dense"
    assert words in said(capsys, path)
    error = refused(capsys, "flops", "-c", path, "--pattern", "1:4")
    assert "--pattern 1:4: the config has no NMSparsityCallback" in error


class Example(pl.LightningModule):
    """A model that has an input itself."""

    def __init__(self):
        super().__init__()
        self.layers, self.example_input_array = mlp(16, 32, 32, 8), torch.randn(12, 16)

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean()

    def configure_optimizers(self):
        return sgd(self.parameters())


def test_data_are_not_read_for_a_model_with_an_example(capsys, write):
    """The data of the config are not there."""
    late = WITH_EXAMPLE.replace(
        "method: bi-mask", "method: {class_path: lightning_nm.ASP, init_args: {start: 0.5}}"
    )
    report = report_of(capsys, write(WITH_EXAMPLE))
    assert (report["inputs"], report["planned_steps"]) == (["float32 [12, 16]"], None)
    assert report["masked_macs"] == 12 * (16 * 32 + 32 * 32)
    error = refused(capsys, "flops", "-c", write(late))
    assert "a schedule of the config depends on the number of training steps" in error
    assert "give it by --steps N" in error
    half = report_of(capsys, write(late), "--steps", "100", "--input", "3x16")
    assert half["inputs"] == ["float32 [3, 16]"]
    # Half of the training is dense; then the forward GEMM has half of its multiply-adds.
    assert half["masked_ratios"]["paper"] == pytest.approx((0.75 + 2) / 3)
    known = report_of(capsys, write(late.replace("max_epochs: 1", "max_steps: 8")))
    assert known["planned_steps"] == 8
    assert known["masked_ratios"] == half["masked_ratios"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dim: 32", "dimm: 32", "did you mean 'dim'"),
        ("method: transposable", "method: transposible", "did you mean 'transposable'"),
        (
            "pattern: 2:4",
            "include: [blocks.0.fc3]",
            "'blocks.0.fc3' matches no layer; layers are",
        ),
        ("max_steps: 50", "max_steps: 0", "the training ended before its first batch"),
        ("max_steps: 50", "max_epochs: -1", "the Trainer does not know"),
    ],
)
def test_bad_configs(capsys, write, old, new, message):
    assert message in refused(capsys, "flops", "-c", write(SMALL.replace(old, new)))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--pattern", "4:2", "4:2"),
        ("--steps", "0", "--steps 0 must be at least 1"),
        ("--input", "1xtwo", "--input 1xtwo: a shape is written 2x3x32x32"),
        ("--input", "1x2x3", "GPT does not take --input 1x2x3"),
        ("-c", "nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_bad_options(capsys, write, option, value, message):
    assert message in refused(capsys, "flops", "-c", write(SMALL), option, value)


def test_a_config_is_needed(capsys):
    assert "required: -c/--config" in refused(capsys, "flops")
