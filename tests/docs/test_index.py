"""The example of the home page trains a sparse model."""

import lightning.pytorch as pl

from lightning_nm import functional as nmf
from tests.docs.blocks import ShortTrainer, blocks, read
from tests.support.lightning_models import Data, Net


def test_home(monkeypatch):
    (code,) = blocks("python", read("index.md"))
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    model = Net()
    exec(code, {"model": model, "data": Data()})
    assert nmf.is_nm(model.net[6].weight, "2:4")
