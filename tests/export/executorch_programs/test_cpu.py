"""Exports for CPUs: the program runs in ExecuTorch's runtime, and computes what torch computes. And the command."""

import os

import pytest
import torch

pytest.importorskip("executorch", reason="executorch is not installed: make ethos")

from benchmarks.executorch_accuracy import int8_accuracy
from lightning_nm.cli import main
from lightning_nm.export import export_executorch
from lightning_nm.export.executorch import program
from lightning_nm.export.executorch.program import outputs_of
from tests.export.executorch_programs.nets import images, sparse_conv_net
from tests.support.lightning_models import Data, callback, make_trainer, new_model

# ExecuTorch and torchao warn of each other's deprecated names.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EXAMPLE = (torch.zeros(1, 3, 32, 32),)


def test_the_runtime_computes_what_torch_computes(tmp_path):
    model = sparse_conv_net(width=16)
    path = tmp_path / "model.pte"
    result = export_executorch(
        model, path, images(1)[0][:1], target="cpu", calibration=images(8, 8)
    )
    assert result.difference < program.TOLERANCE
    assert result.operators == ()
    assert result.dense_cycles is None
    assert {each.pattern for each in result.layers} == {"", "2:4"}
    ((x, _),) = images(1)
    (found,) = outputs_of(path.read_bytes(), (x,))
    with torch.no_grad():
        expected = model(x)
    # int8 against float32.
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


def test_the_accuracy_of_int8_counts_every_image_once():
    model = sparse_conv_net(width=16)
    batches = [(x, model(x).argmax(dim=1)) for (x, _) in images(3, 4)]
    # A smaller last batch.
    batches[-1] = tuple(each[:1] for each in batches[-1])
    # Labels that the model never gives are wrong answers.
    wrong = [(x, torch.full_like(y, -1)) for x, y in batches]
    assert int8_accuracy(model, batches[:2], wrong) == 0
    right_first = [batches[0], *wrong[1:]]
    answers = int8_accuracy(model, batches[:2], batches)
    count = sum(len(x) for x, _ in batches)
    assert answers * count == pytest.approx(round(answers * count))
    first = int8_accuracy(model, batches[:2], right_first) * count
    # Rounding to int8 may change an answer, not most of them.
    assert answers > 0.5
    assert first <= len(batches[0][0])


def test_a_runtime_that_computes_something_else(tmp_path, monkeypatch):
    wrong = [torch.full((1, 10), 100.0)]
    monkeypatch.setattr(program, "outputs_of", lambda content, inputs: wrong)
    with pytest.raises(RuntimeError, match="runtime differs from torch by"):
        export_executorch(
            sparse_conv_net(width=8),
            tmp_path / "m.pte",
            EXAMPLE,
            target="cpu",
            calibration=images(2),
        )
    assert os.listdir(tmp_path) == []


MODULE = """
from tests.export.executorch_programs.nets import ConvNet

class Net(ConvNet):
    def __init__(self):
        super().__init__(width=8)
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net.py").write_text(MODULE)
    torch.save(sparse_conv_net(width=8).state_dict(), "model.pt")
    torch.save(images(8)[0][0], "images.pt")
    words = ["export", "model.pt", "--to", "executorch", "--model", "own_net.Net"]
    words += ["--input", "1x3x32x32", "--calibration", "images.pt"]
    assert main([*words, "--target", "cpu", "-o", "cpu.pte"]) == 0
    out = capsys.readouterr().out
    assert "3 of 6 weights are N:M as int8" in out
    assert "ExecuTorch's runtime differs from torch by" in out

    monkeypatch.setenv("COLUMNS", "100")
    pytest.importorskip("ethosu", reason="ethos-u-vela is not installed: make ethos")
    assert main([*words, "--target", "ethos-u85-128", "-o", "npu.pte"]) == 0
    out = capsys.readouterr().out
    assert "cycles on ethos-u85-128, estimated by Vela" in out
    assert "3 of 6 operators with weights run sparse" in out
    assert "no chip has confirmed" in out

    # The pattern of the option is demanded.
    assert main([*words, "--pattern", "1:4", "--target", "cpu", "-o", "other.pte"]) == 2
    assert "no weight of Net is N:M sparse" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["cpu.pte", "images.pt", "model.pt", "npu.pte", "own_net.py"]


def test_the_patterns_of_a_lightning_checkpoint(tmp_path, capsys):
    trainer = make_trainer(tmp_path, [callback()], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (batch, *_) = Data().train_dataloader()
    torch.save(batch[0], tmp_path / "images.pt")
    words = ["--to", "executorch", "--model", "tests.support.lightning_models.Net"]
    words += ["--input", "1x1x8x8", "--target", "cpu", "--calibration", str(tmp_path / "images.pt")]
    assert main(["export", str(tmp_path / "a.ckpt"), *words, "-o", str(tmp_path / "a.pte")]) == 0
    assert "2 of 4 weights are N:M as int8" in capsys.readouterr().out
