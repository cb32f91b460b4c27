"""The section on CPUs: its training runs on the kernels that it names, and its figures are those of the benchmarks."""

import importlib
import re

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import functional as nmf
from lightning_nm.kernels.cpu import library
from tests.docs.blocks import QuietTrainer, benchmarks, blocks, execute, read, section

PAGE = section(read("flops.md"), "Very sparse on CPUs")


class Regressor(pl.LightningModule):
    def __init__(self, width=512):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


@pytest.mark.slow
def test_switched_on(tmp_path, monkeypatch, capsys):
    """In the mode ``auto``, which measures for seconds: what it chooses depends on the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(pl, "Trainer", QuietTrainer)
    x = torch.randn(4096, 64)
    data = DataLoader(TensorDataset(x, x[:, :8].prod(1, keepdim=True)), batch_size=64)
    names = execute(PAGE, model=Regressor(), data=data)
    trainer = names["trainer"]
    assert nmf.is_nm(trainer.lightning_module.net[2].weight, "1:16")
    assert "N:M kernels" in capsys.readouterr().out
    router = trainer.precision_plugin.router
    assert {used.product.key.gemm for used in router.used()} == {"forward", "dgrad", "wgrad"}
    if not library.unavailable():
        assert any(
            used.decision is not None and used.decision.source == "measured"
            for used in router.used()
        )
        assert (tmp_path / ".cache/lightning_nm/kernels.json").is_file()


def test_the_yaml_names_what_is_there():
    (block,) = blocks("yaml", PAGE)
    settings = yaml.safe_load(block)["trainer"]
    made = []
    for entry in settings["plugins"] + settings["callbacks"]:
        module, _, name = entry["class_path"].rpartition(".")
        made.append(getattr(importlib.import_module(module), name)(**entry["init_args"]))
    plugin, callback = made
    assert plugin.router.kernels == "auto"
    assert str(callback.config.pattern) == "1:16"


def test_gains_are_those_of_the_benchmarks():
    gains = re.findall(r"(?<![\w:.])(\d\.\d+)(?=x| to \d\.\d+x)", PAGE)
    assert len(gains) > 50
    there = re.findall(r"(\d+\.\d+)(?=x| to \d+\.\d+x)", benchmarks())
    assert set(gains) <= {*there, "1.03"}  # the last is the least gain that is taken
