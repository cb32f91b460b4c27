"""Exports for CPUs: the program runs in ExecuTorch's runtime, and computes what torch computes. And the command."""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("executorch", reason="executorch is not installed: make ethos")

from benchmarks.executorch_accuracy import int8_accuracy
from lightning_nm.export import export_executorch
from lightning_nm.export.executorch import program
from lightning_nm.export.executorch.program import outputs_of
from tests.export.executorch_programs.nets import images, sparse_conv_net
from tests.support.lightning_models import Data, callback, make_trainer, new_model

# ExecuTorch and torchao warn of each other's deprecated names.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FILE = "model.pte"
EXAMPLE = (torch.zeros(1, 3, 32, 32),)


def test_the_runtime_computes_what_torch_computes():
    model = sparse_conv_net(width=16)
    ((x, _),) = images(1)
    result = export_executorch(model, FILE, (x,), target="cpu", calibration=images(8, 8))
    assert result.difference < program.TOLERANCE
    assert result.operators == ()
    assert result.dense_cycles is None
    assert {each.pattern for each in result.layers} == {"", "2:4"}
    (found,) = outputs_of(Path(FILE).read_bytes(), (x,))
    expected = model(x)
    # int8 against float32.
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


def test_the_accuracy_of_int8_counts_every_image_once():
    model = sparse_conv_net(width=16)
    calibration = images(3, 4)
    (first, _), (x, _) = calibration
    # A smaller last batch, and labels that the model never gives.
    batches = [(each, model(each).argmax(dim=1)) for each in (first, x[:1])]
    wrong = [(each, torch.full_like(labels, -1)) for each, labels in batches]
    assert int8_accuracy(model, calibration, wrong) == 0
    right = int8_accuracy(model, calibration, batches) * 4
    assert right == pytest.approx(round(right))
    # Rounding to int8 may change an answer, not most of them.
    assert right > 2
    assert int8_accuracy(model, calibration, [batches[0], wrong[1]]) * 4 <= 3


def test_a_runtime_that_computes_something_else(monkeypatch):
    monkeypatch.setattr(program, "outputs_of", lambda *_: [torch.full((1, 10), 100.0)])
    model = sparse_conv_net(width=8)
    with pytest.raises(RuntimeError, match="runtime differs from torch by"):
        export_executorch(model, FILE, EXAMPLE, target="cpu", calibration=images(2))
    assert os.listdir() == []


MODULE = """
from tests.export.executorch_programs.nets import ConvNet

class Net(ConvNet):
    def __init__(self):
        super().__init__(width=8)
"""


def test_the_command(command, monkeypatch):
    Path("own_net.py").write_text(MODULE)
    torch.save(sparse_conv_net(width=8).state_dict(), "model.pt")
    torch.save(images(8)[0][0], "images.pt")
    words = "export model.pt --to executorch --model own_net.Net"
    words += " --input 1x3x32x32 --calibration images.pt"
    said = command(f"{words} --target cpu -o cpu.pte")
    assert "3 of 6 weights are N:M as int8" in said
    assert "ExecuTorch's runtime differs from torch by" in said

    monkeypatch.setenv("COLUMNS", "100")
    pytest.importorskip("ethosu", reason="ethos-u-vela is not installed: make ethos")
    said = command(f"{words} --target ethos-u85-128 -o npu.pte")
    assert "cycles on ethos-u85-128, estimated by Vela" in said
    assert "3 of 6 operators with weights run sparse" in said
    assert "no chip has confirmed" in said

    # The pattern of the option is demanded.
    said = command(f"{words} --pattern 1:4 --target cpu -o other.pte", 2)
    assert "no weight of Net is N:M sparse" in said
    assert sorted(os.listdir()) == ["cpu.pte", "images.pt", "model.pt", "npu.pte", "own_net.py"]


def test_the_patterns_of_a_lightning_checkpoint(command):
    trainer = make_trainer(Path(), [callback()], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint("a.ckpt")
    (batch, *_) = Data().train_dataloader()
    torch.save(batch[0], "images.pt")
    words = "--to executorch --model tests.support.lightning_models.Net --input 1x1x8x8"
    said = command(f"export a.ckpt {words} --target cpu --calibration images.pt -o a.pte")
    assert "2 of 4 weights are N:M as int8" in said
