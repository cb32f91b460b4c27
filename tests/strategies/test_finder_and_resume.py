"""Two processes: a fit after the learning-rate finder, and one that stops at half and goes on, bit for bit."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner

from lightning_nm import BAME, MVUE, SRSTE, BiMask, NMSparsityCallback, RNGState, TransposableMask
from lightning_nm import functional as nmf
from lightning_nm.nn.adapters import Adapter
from tests.support.lightning_models import Data, Net, SaveAt
from tests.support.processes import in_processes

METHODS = {
    "sr-ste": lambda: (SRSTE(1e-2), None),
    "bi-mask": lambda: (BiMask(permute_every=4), None),
    "bame": lambda: (BAME(stop=0.9, every=3, budget=1.0, evidence_rate=0.5), None),
    "three-gemms": lambda: (
        TransposableMask(update_every=3, decay=1e-3),
        MVUE("1:2", dense_end=0.2),
    ),
}
RUNS = list(itertools.product(METHODS, ("ddp", "nm_ddp")))
HALF = 9
"""In the middle of the second of three epochs of six batches."""


class Tuned(Net):
    def __init__(self):
        super().__init__("adamw")
        self.lr = 1e-2

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)


class StopAt(SaveAt):
    """Saves after a batch, and stops."""

    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        if self.seen == self.batch:
            trainer.should_stop = True


def trainer_of(folder, method, strategy, *callbacks):
    method, estimator = METHODS[method]()
    nm = NMSparsityCallback("2:4", method, estimator, show_tables=False)
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        callbacks=[nm, RNGState(), *callbacks],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def everything(trainer, model):
    """What is compared: the model, the sparsifier with its latent weights, the optimizer; and that it ended well."""
    assert not any(isinstance(module, Adapter) for module in model.modules())
    assert all(nmf.is_nm(model.net[k].weight, "2:4", dim=1) for k in (3, 6))
    nm = trainer.callbacks[0].state_dict()
    assert all(layer["step"] == trainer.global_step for layer in nm["layers"].values())
    return {
        "model": model.state_dict(),
        "sparsifier": nm,
        "optimizer": trainer.optimizers[0].state_dict(),
    }


def found(folder):
    """Per run: of a fit after the finder, of an uninterrupted fit, and of one that was resumed."""
    results = []
    for k, (method, strategy) in enumerate(RUNS):
        pl.seed_everything(0, verbose=False)
        model, trainer = Tuned(), trainer_of(folder, method, strategy)
        before = model.net[6].weight.detach().clone()
        finder = Tuner(trainer).lr_find(model, datamodule=Data(batch_size=8), num_training=20)
        assert torch.equal(model.net[6].weight, before)
        trainer.fit(model, datamodule=Data(batch_size=8))
        results.append([{**everything(trainer, model), "lr": [model.lr, finder.suggestion()]}])

        for name in ("straight", "resumed"):
            pl.seed_everything(0, verbose=False)
            model, path = Tuned(), f"{folder}/{k}.ckpt"
            if name == "resumed":
                trainer = trainer_of(folder, method, strategy, StopAt(path, HALF))
                trainer.fit(model, datamodule=Data(batch_size=8))
                assert trainer.global_step == HALF
                pl.seed_everything(7, verbose=False)
                model = Tuned()
            trainer = trainer_of(folder, method, strategy)
            trainer.fit(
                model, datamodule=Data(batch_size=8), ckpt_path=path if name == "resumed" else None
            )
            results[-1].append(everything(trainer, model))
    return results


def differences(one, other, path=""):
    """Where two nested structures are not equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, (dict, list, tuple)):
        keys = list(one) if isinstance(one, dict) else range(len(one))
        same = [*other] == keys if isinstance(one, dict) else len(one) == len(other)
        assert same, path
        return [
            found for key in keys for found in differences(one[key], other[key], f"{path}/{key}")
        ]
    return [] if one == other else [path]


@pytest.mark.slow
def test_two_processes(tmp_path):
    first, second = in_processes(2, tmp_path / "run", found, str(tmp_path))
    for run, one, other in zip(RUNS, first, second, strict=True):
        for name, mine, theirs in zip(("tuned", "straight", "resumed"), one, other, strict=True):
            parts = differences(mine, theirs)
            assert all("net.1.running" in part for part in parts), (
                run,
                name,
                parts,
            )  # each rank's own batches
        _, straight, resumed = one
        assert not differences(straight, resumed), (run, differences(straight, resumed))
        assert not differences(other[1], other[2]), run
        assert all(layer["total_flips"] for layer in straight["sparsifier"]["layers"].values()), (
            "the masks stood still"
        )
