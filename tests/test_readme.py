"""What the README shows runs as it stands: its Python, its YAML, its commands."""

import importlib
import re
import shlex
import sys

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.cli import main
from lightning_nm.nn.adapters import adapter as adapters
from tests.docs.blocks import ROOT, ShortTrainer, benchmarks, blocks, read, run_commands, section
from tests.support.lightning_models import Data, Net

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_one_line(monkeypatch):
    code = next(block for block in blocks("python", README) if "Trainer" in block)
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    model = Net()
    exec(code, {"model": model, "data": Data()})
    assert nmf.is_nm(model.net[6].weight, "2:4")


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
@pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode at the start of training")
def test_distillation(monkeypatch):
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    (code,) = blocks("python", section(read("fine-tune.md"), "Distil"))
    student, teacher = Net(), Net()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    exec(code, {"student": student, "teacher": teacher, "data": Data()})
    assert nmf.is_nm(student.net[6].weight, "2:4")
    assert not nmf.is_nm(student.net[8].weight, "2:4")
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_hugging_face(tmp_path, monkeypatch, capsys):
    """The Trainer, what verify says of its folders, and the loop with Accelerate."""
    pytest.importorskip("transformers")
    hugging_face = importlib.import_module("tests.support.hf_models")
    page, _, _ = read("huggingface.md").partition("\n## LoRA on an N:M model\n")
    with_trainer, with_accelerate = blocks("python", page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["transformers"], "TrainingArguments", hugging_face.arguments)
    model = hugging_face.new(hugging_face.llama)
    data = hugging_face.data(model)
    exec(with_trainer, {"model": model, "data": data})
    assert nmf.is_nm(model.model.layers[1].mlp.up_proj.weight, "2:4")
    run_commands("".join(blocks("", page)))
    assert "3 of 3 checkpoints OK" in capsys.readouterr().out

    model = hugging_face.new(hugging_face.gpt2)
    batches = torch.utils.data.DataLoader(hugging_face.data(model), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    exec(with_accelerate, {"model": model, "batches": batches, "optimizer": optimizer})
    loaded = type(model).from_pretrained("runs/model")
    assert nmf.is_nm(loaded.transformer.h[1].mlp.c_fc.weight, "2:4", dim=0)


def test_mixtures_of_experts(monkeypatch, capsys):
    monkeypatch.setattr(adapters, "_ADAPTERS", list(adapters._ADAPTERS))
    monkeypatch.setattr(adapters, "_CLASSES", {})
    hugging_face, own_forward, own = blocks(
        "python", section(read("models.md"), "Mixtures of experts")
    )
    exec(own, {})
    pytest.importorskip("transformers")
    names = {}
    exec(hugging_face, names)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    transformers = sys.modules["transformers"]
    config = transformers.Llama4TextConfig(
        **names["sizes"], **special, intermediate_size_mlp=48, head_dim=8
    )
    llama, tokens = transformers.Llama4ForCausalLM(config), names["tokens"]
    expected = llama(tokens).logits
    exec(own_forward, names | {"model": llama})
    torch.testing.assert_close(llama(tokens).logits, expected)
    masked = NMSparsifier(llama, "2:4", "bi-mask").attach().layers
    assert "model.layers.0.feed_forward.experts.down_proj" in masked
    assert re.search(
        r"^\d\d% of the weight FLOPs are masked, 0 blocks are not 2:4$", capsys.readouterr().out
    )


def test_without_lightning():
    (code,) = blocks("python", section(read("start.md"), "Without Lightning"))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "data": [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(3)],
        "loss_function": nn.functional.cross_entropy,
    }
    exec(code, names)
    assert nmf.is_nm(model[0].weight, "2:4")
    assert type(model[0]) is nn.Linear


def test_yaml(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lightning-nm"])
    words = ["fit", "--model=ResidualCNN", "--print_config"]
    for number, block in enumerate(blocks("yaml", README)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block)
        words += ["-c", str(path)]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "method: bame" in printed
    assert "kernels: auto" in printed


def test_commands_name_what_is_there():
    """Files, make's targets, modules and subcommands; the commands themselves run in other tests."""
    text = README + section(read("flops.md"), "Doctor: what sparse kernels gain")
    shown = [line for block in blocks("", text) for line in block.splitlines()] + re.findall(
        r"`([^`\n]+)`", text
    )
    known = re.compile(r"(lightning-nm|make|python -m) ")
    commands = [shlex.split(line, comments=True) for line in shown if known.match(line)]
    assert len(commands) >= 9
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands:
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "lightning-nm":
            assert words[1] in ("fit", "doctor", "export", "report", "study", "verify")
        else:
            module = ROOT / words[2].replace(".", "/")
            assert module.is_dir() or module.with_suffix(".py").is_file()
        for word in words:
            if word.startswith(("configs/", "studies/")):
                assert (ROOT / word).is_file(), word


def test_the_export_is_the_one_that_another_test_runs():
    """Of docs/export.md, by tests/export/test_documented.py."""
    page = read("export.md")
    assert next(block for block in blocks("", README) if "export" in block) in page
    assert next(block for block in blocks("python", README) if "load_packed" in block) in page


def test_every_figure_is_one_of_the_benchmarks():
    """Of the prose: the tables are generated, and tested by their own."""
    found_there = benchmarks()
    prose = re.sub(r"<!-- table: .*?<!-- /table -->|```.*?```", "", README, flags=re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)|\d{4}\.\d{5}|`[^`]*`|torch 2\.6|Python 3\.10|-2\.0", "", prose)
    found = re.findall(r"\d+\.\d+", prose)
    assert len(found) >= 4
    for figure in found:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", found_there), figure
