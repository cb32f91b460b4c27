"""Weights that processes shard by FSDP2 train, are saved and resumed as those of one process."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import BAME, NMSparsityCallback
from tests.processes import in_processes
from tests.strategies.test_equality import METHODS, assert_equal

METHODS = {
    **{name: METHODS[name] for name in ("sr-ste", "bi-mask", "asp", "transposable")},
    "bame": lambda: BAME(stop=14, every=3, budget=1.0, score="taylor-abs"),
    "bame-bi-mask": lambda: BAME(stop=14, every=3, budget=1.0, score="taylor-abs", dgrad="bi-mask"),
}
STEPS = 8


class Net(pl.LightningModule):
    """Of every global batch each process takes its part; none of the layers' rows divide evenly by three."""

    def __init__(self, shard=False, optimizer="sgd", dtype=torch.float64, policy=None):
        super().__init__()
        self.shard, self.optimizer, self.dtype_, self.policy = shard, optimizer, dtype, policy

    def configure_model(self):
        if hasattr(self, "net"):
            return
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 4)
        ).to(self.dtype_)
        if self.shard:
            settings = {} if self.policy is None else {"mp_policy": self.policy}
            for part in (self.net[0], self.net[3]):
                fully_shard(part, mesh=self.device_mesh["data_parallel"], **settings)
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"], **settings)

    def _loss(self, batch):
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer.world_size > 1 else (0, 1)
        x, y = (part[rank::world] for part in batch)
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 1e-2)
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12 * STEPS, 4, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (len(x),), generator=generator)), batch_size=12)


def trainer(devices, callbacks, whole_file=True, **options):
    strategy = "auto"
    if devices > 1:
        strategy = ModelParallelStrategy(devices, 1, save_distributed_checkpoint=not whole_file)
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "num_sanity_val_steps": 0, "max_epochs": 1, **options},
    )


def whole(model):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}


def fit(method, devices, optimizer="sgd", ckpt_path=None, save=None, whole_file=True, **options):
    """Weights and the sparsifier's state after some epochs of eight batches."""
    callback = NMSparsityCallback(
        "2:4", METHODS[method](), skip_first_last=False, show_tables=False, compare_ranks_every=1
    )
    model = Net(devices > 1, optimizer)
    run = trainer(devices, [callback], whole_file, **options)
    run.fit(model, data(), data(), ckpt_path=ckpt_path)
    if save is not None:
        run.save_checkpoint(save)
    return whole(model), callback.state_dict()["layers"]


def sharded_runs(runs, devices):
    return [fit(method, devices, **options) for method, options in runs]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_weights_train_as_whole_ones(tmp_path, world):
    """On three processes no layer's rows divide evenly, and the last layer has fewer blocks than there are."""
    runs = [(method, {"accumulate_grad_batches": accumulate}) for method in METHODS for accumulate in (1, 2)]
    runs += [(method, {"optimizer": "adamw"}) for method in METHODS]
    everyone = in_processes(world, tmp_path / "run", sharded_runs, runs, world)
    for k, (method, options) in enumerate(runs):
        alone = fit(method, 1, **options)
        for found in everyone:
            try:
                assert_equal(found[k], alone, 1e-9)
            except AssertionError as error:
                raise AssertionError(f"{method}, {options}: {error}") from error
            assert_equal(found[k], everyone[0][k], tolerance=0)
        assert method == "asp" or all(layer["total_flips"] for layer in alone[1].values()), "masks moved"


def resumed_runs(runs, folder, devices):
    found = []
    for k, (method, optimizer, whole_file) in enumerate(runs):
        settings = {"optimizer": optimizer, "whole_file": whole_file}
        straight = fit(method, devices, max_epochs=2, **settings)
        path = f"{folder}/{k}.ckpt"
        fit(method, devices, max_epochs=2, limit_train_batches=STEPS, save=path, **settings, max_steps=STEPS)
        found.append((straight, fit(method, devices, max_epochs=2, ckpt_path=path, **settings)))
    return found


@pytest.mark.slow
def test_sharded_runs_resume(tmp_path):
    # Lightning cannot resume plain SGD, which has no state, from a single file.
    runs = [(method, optimizer, form) for method in METHODS for optimizer, form in (("adamw", True), ("sgd", False))]
    everyone = in_processes(2, tmp_path / "run", resumed_runs, runs, str(tmp_path), 2)
    for k, run in enumerate(runs):
        for found in everyone:
            straight, resumed = found[k]
            try:
                assert_equal(resumed, straight, tolerance=0)
            except AssertionError as error:
                raise AssertionError(f"{run}: {error}") from error
