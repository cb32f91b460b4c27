"""Flip rates of candidate decays."""

import copy
from itertools import pairwise

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer

from lightning_nm import NMSparsityCallback
from lightning_nm import functional as nmf
from studies.flip_rates import Flips, main
from tests.support.lightning_models import Data, Net
from tests.test_card import QUIET

CONFIG = {
    "model": {"class_path": "lightning_nm.demo.ResidualCNN", "init_args": {"width": 16}},
    "data": {"class_path": "lightning_nm.demo.Digits", "init_args": {"batch_size": 16}},
    "trainer": {
        "max_steps": 8,
        "callbacks": [
            {
                "class_path": "lightning_nm.NMSparsityCallback",
                "init_args": {
                    "pattern": "2:4",
                    "method": {"class_path": "lightning_nm.TransposableMask"},
                },
            }
        ],
    },
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def test_a_large_decay_holds_masks_and_dense_training_counts(config, capsys):
    assert main([str(config), "--decays", "0", "50", "--steps", "6", "--every", "2"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["dense", "0", "50"]
    dense, none, large = (float(row[1]) for row in rows)
    assert 0 < large < none
    assert dense > 0
    assert [float(row[2]) for row in rows[1:]] == pytest.approx(
        [none / dense, large / dense], abs=0.01
    )


class Weights(Callback):
    """Copies the weights that are masked after every batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *rest):
        self.seen.append([module.net[i].weight.detach().clone() for i in (3, 6)])


@pytest.mark.parametrize("transposable", [False, True])
def test_rates_are_those_of_the_weights(transposable):
    def select(weight):
        return (
            nmf.transposable_mask(weight, "2:4")
            if transposable
            else nmf.nm_mask(weight.abs(), "2:4", dim=1)
        )

    flips, weights = Flips(2, transposable), Weights()
    callbacks = [NMSparsityCallback("2:4", "dense", show_tables=False), flips, weights]
    Trainer(
        max_steps=7, callbacks=callbacks, logger=False, enable_checkpointing=False, **QUIET
    ).fit(Net(), Data())
    masks = [
        torch.cat([select(weight).flatten() for weight in weights.seen[step]]) for step in (1, 3, 5)
    ]
    expected = [(a != b).double().mean().item() for a, b in pairwise(masks)]
    assert flips.rates == pytest.approx(expected)
    assert all(expected)


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("bi-mask", [], "'bi-mask' has no decay: write one as class_path"),
        ({"class_path": "lightning_nm.ASP"}, [], "has no decay"),
        (
            {"class_path": "lightning_nm.SRSTE"},
            ["--every", "4", "--steps", "6"],
            "--every 4 --steps 6",
        ),
    ],
)
def test_bad_input(tmp_path, capsys, method, options, says):
    config = copy.deepcopy(CONFIG)
    config["trainer"]["callbacks"][0]["init_args"]["method"] = method
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main([str(tmp_path / "config.yaml"), "--decays", "1e-3", *options]) == 2
    assert says in capsys.readouterr().err
