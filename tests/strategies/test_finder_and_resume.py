"""Two processes: a fit after the learning-rate finder, and one that stops at half and goes on, bit for bit."""

from itertools import product

import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils._pytree import tree_flatten_with_path

from lightning_nm import RNGState
from tests.support.features import ends_sparse
from tests.support.lightning_models import Data, Net, SaveAt, callback, make_trainer, new_model
from tests.support.processes import in_processes

RUNS = list(product(("sr-ste", "bi-mask", "bame", "three-gemms"), ("ddp", "nm_ddp")))
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
        trainer.should_stop = self.seen == self.batch


def train(folder, method, strategy, *callbacks, seed=0, finds=False, ckpt_path=None):
    """What is compared: the model, the sparsifier with its latent weights, the optimizer, the learning rate."""
    model, nm, data = new_model(seed, Tuned), callback(method), Data(batch_size=8)
    options = {"devices": 2, "strategy": strategy, "max_epochs": 3, "limit_val_batches": 0}
    trainer = make_trainer(folder, [nm, RNGState(), *callbacks], **options)
    if finds:
        before = model.net[6].weight.detach().clone()
        Tuner(trainer).lr_find(model, datamodule=data, num_training=20)
        assert torch.equal(model.net[6].weight, before)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    if method != "three-gemms":  # it ends with a dense phase
        ends_sparse(model)
    state = nm.state_dict()
    assert {layer["step"] for layer in state["layers"].values()} == {trainer.global_step}
    optimizer = trainer.optimizers[0].state_dict()
    return {"model": model.state_dict(), "state": state, "optimizer": optimizer, "lr": model.lr}


def found(folder):
    """Per run: of a fit after the finder, of an uninterrupted fit, and of one that was resumed."""
    results = []
    for run in RUNS:
        path = f"{folder}/{'-'.join(run)}.ckpt"
        train(folder, *run, StopAt(path, HALF))
        straight, resumed = train(folder, *run), train(folder, *run, seed=7, ckpt_path=path)
        results.append([train(folder, *run, finds=True), straight, resumed])
    return results


def differences(one, other):
    """Where two nested structures are not equal bit for bit."""
    leaves = [tree_flatten_with_path(each)[0] for each in (one, other)]
    return [
        str(path)
        for (path, a), (_, b) in zip(*leaves, strict=True)
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
    ]


@pytest.mark.slow
def test_two_processes(tmp_path):
    first, second = in_processes(2, tmp_path / "run", found, str(tmp_path))
    for run, one, other in zip(RUNS, first, second, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            # Each rank normalizes its own batches.
            assert all("net.1.running" in part for part in differences(mine, theirs)), run
        for _, straight, resumed in (one, other):
            assert not differences(straight, resumed), run
            layers = straight["state"]["layers"].values()
            assert all(layer["total_flips"] for layer in layers), "the masks stood still"
