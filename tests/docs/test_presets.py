"""What docs/recipes.md shows of presets runs, and its table is that of the presets."""

import re
import sys

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn

from lightning_nm import BiMask
from lightning_nm.cli import main
from lightning_nm.config import _PRESETS
from tests.docs.blocks import ShortTrainer, blocks, read, section
from tests.support.lightning_models import Data, Net

PAGE = section(read("recipes.md"), "Presets of the papers")


def test_python(monkeypatch, capsys):
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    names = {"model": Net(), "data": Data()}
    fitted, changed, learned = blocks("python", PAGE)
    exec(fitted, names)
    assert "preset paper, arXiv 2302.06058" in capsys.readouterr().out
    exec(changed, names)
    assert isinstance(names["changed"], BiMask)
    assert names["nm"].config.method.permute_every == 50

    names["language_model"] = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    names["calibration"] = [torch.randn(32, 8)]
    exec(learned, names)
    (layer,) = names["sparsifier"].layers.values()
    assert layer.name == "0"
    assert not layer.weight.requires_grad
    members = names["optimizer"].param_groups[0]["params"]
    assert any(member is layer.parameters["logits"] for member in members)
    kept = names["pruned"][0].weight != 0
    assert (layer.forward_mask == kept).float().mean() > 0.9


def test_yaml(tmp_path, monkeypatch, capsys):
    (block,) = blocks("yaml", PAGE)
    (tmp_path / "config.yaml").write_text(block)
    monkeypatch.setattr(sys, "argv", ["lightning-nm"])
    with pytest.raises(SystemExit):
        main(["fit", "--model=ResidualCNN", "-c", str(tmp_path / "config.yaml"), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"][0]["init_args"]
    assert (printed["preset"], printed["pattern"]) == ("paper", "2:4")


def value(text):
    return eval(text, {})  # numbers, a quotient and strings


def test_the_table():
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in PAGE.splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) == sum(name != "dense" for known in _PRESETS.values() for name in known)
    for method, preset, source, layout, first, last, settings in rows:
        known = _PRESETS[preset.strip("`")][method.strip("`")]
        assert re.fullmatch(r"\d{4}\.\d{5}", source)
        assert source in known.source
        assert layout == f"`{known.conv_layout}`" or preset == "`fst`"
        assert (first, last) == tuple(
            "dense" if skips else "sparse" for skips in (known.skip_first, known.skip_last)
        )
        found = {name: value(text) for name, text in re.findall(r"`(\w+)=([^`]*)`", settings)}
        assert found.pop("grad_estimator", None) == known.grad_estimator
        assert found == dict(known.settings)
