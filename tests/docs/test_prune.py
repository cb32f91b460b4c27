"""docs/prune.md runs as it stands: a model is pruned, fine-tuned, packed and loaded."""

import shlex

import lightning.pytorch as pl
import pytest
import torch

from lightning_nm import functional as nmf
from lightning_nm import packed_summary
from lightning_nm.cli import main
from lightning_nm.export import PackedFile
from tests.docs.blocks import ShortTrainer, blocks, read
from tests.support.lightning_models import Data, Net
from tests.support.packed_models import copied

# The small network's data are few.
pytestmark = pytest.mark.filterwarnings("ignore:score='sparsegpt' has fewer")

PAGE = read("prune.md")


def test_the_page(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    monkeypatch.chdir(tmp_path)
    prune, *_, save, load = blocks("python", PAGE)
    names = {"model": Net(), "data": Data()}
    names["calibration"] = list(names["data"].val_dataloader())
    exec(prune, names)
    assert nmf.is_nm(names["model"].net[6].weight, "2:4")
    assert "net.6" in capsys.readouterr().out
    exec(save, names)
    dense = copied(names["model"]).eval()
    (commands,) = blocks("", PAGE)
    for line in commands.splitlines():
        assert main(shlex.split(line)[1:]) == 0
    assert "OK: " in capsys.readouterr().out
    packed = PackedFile("pruned.safetensors").packed
    assert set(packed) == {f"{name}.weight" for name in names["result"].layers}
    names["x"] = names["calibration"][0][0]
    exec(load, names)
    assert {weight.pattern for weight in packed_summary(names["packed"]).weights} == {"2:4"}
    with torch.no_grad():
        assert torch.allclose(names["packed"](names["x"]), dense(names["x"]), atol=1e-5)


LAYERS = (0, 3, 6, 8)  # the weights of the network


def test_patterns_per_layer(monkeypatch, capsys):
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    prune, choose, _, _ = blocks("python", PAGE)
    names = {"model": Net(), "data": Data(), "trained": Net()}
    names["calibration"] = list(names["data"].val_dataloader())
    exec(prune.partition("result =")[0], names)  # its imports
    exec(choose, names)
    out = capsys.readouterr().out
    result = names["result"]
    kept = sum(int(names["trained"].net[place].weight.count_nonzero()) for place in LAYERS)
    total = sum(names["trained"].net[place].weight.numel() for place in LAYERS)
    assert kept <= total / 2
    assert result.table() in out
    assert names["nm"].config.rules == result.rules
    ShortTrainer(max_epochs=1, callbacks=[names["nm"]]).fit(names["trained"], names["data"])
    weights = [names["trained"].net[place].weight for place in LAYERS]
    assert sum(int(weight.count_nonzero()) for weight in weights) == kept
