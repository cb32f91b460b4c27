"""The example of the home page trains a sparse model."""

import lightning.pytorch as pl

from lightning_nm import functional as nmf
from tests.lightning_models import Data, Net
from tests.test_readme import ROOT, ShortTrainer, blocks


def test_home(monkeypatch):
    (code,) = blocks("python", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    model = Net()
    exec(code, {"model": model, "data": Data()})
    assert nmf.is_nm(model.net[6].weight, "2:4")
