"""Layers under tensor parallelism, alone and with FSDP2, train as those of one process."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import ASP, BAME, SRSTE, BiMask, NMSparsityCallback, TransposableMask
from tests.processes import in_processes
from tests.strategies.test_equality import assert_equal

METHODS = {
    "sr-ste": lambda: SRSTE(1e-2),
    "asp": lambda: ASP(start=2),
    "bame": lambda: BAME(stop=14, every=3, budget=1.0, score="taylor-abs"),
    "transposable": lambda: TransposableMask(update_every=2),
    "bi-mask": lambda: BiMask(permute_every=3),
}
STEPS = 8


class Net(pl.LightningModule):
    def __init__(self, data=1, tensor=1, hidden=32):
        super().__init__()
        self.data, self.tensor, self.hidden = data, tensor, hidden

    def configure_model(self):
        if hasattr(self, "net"):
            return
        torch.manual_seed(0)
        parts = {"up": nn.Linear(16, self.hidden), "act": nn.Tanh(), "down": nn.Linear(self.hidden, 8)}
        self.net = nn.Sequential(nn.ModuleDict(parts), nn.Linear(8, 4)).double()
        if self.tensor > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self.net[0], self.device_mesh["tensor_parallel"], plan)
        if self.data > 1:
            for part in (self.net[0]["up"], self.net[0]["down"]):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        part, parts = 0, 1
        if self.data > 1:
            part, parts = self.device_mesh["data_parallel"].get_local_rank(), self.data
        x, y = (tensor[part::parts] for tensor in batch)
        ff = self.net[0]
        return F.cross_entropy(self.net[1](x[:, :8] + ff["down"](ff["act"](ff["up"](x)))), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(method, data=1, tensor=1, estimator=None, ckpt_path=None, save=None, hidden=32, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * STEPS, 16, generator=generator, dtype=torch.float64)
    batches = DataLoader(TensorDataset(x, torch.randint(0, 4, (len(x),), generator=generator)), batch_size=8)
    callback = NMSparsityCallback("2:4", METHODS[method](), estimator, skip_first_last=False, show_tables=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=data * tensor,
        strategy=ModelParallelStrategy(data, tensor) if data * tensor > 1 else "auto",
        use_distributed_sampler=False,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"max_epochs": 1, **options},
    )
    model = Net(data, tensor, hidden)
    trainer.fit(model, batches, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    weights = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    return weights, callback.state_dict()["layers"]


def fits(data, tensor, folder):
    found = [fit(method, data, tensor) for method in METHODS]
    resumed = []
    for method, estimator in (("bame", None), ("bi-mask", "mvue")):
        straight = fit(method, data, tensor, estimator, max_epochs=2)
        fit(method, data, tensor, estimator, save=f"{folder}/{method}.ckpt", max_epochs=2, max_steps=STEPS)
        resumed.append((straight, fit(method, data, tensor, estimator, f"{folder}/{method}.ckpt", max_epochs=2)))
    return found, resumed


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 2)])
def test_tensor_parallel_layers_train_as_whole_ones(tmp_path, data, tensor):
    everyone = in_processes(data * tensor, tmp_path / "run", fits, data, tensor, str(tmp_path))
    for k, method in enumerate(METHODS):
        alone = fit(method)
        for found, resumed in everyone:
            assert_equal(found[k], everyone[0][0][k], tolerance=0)
            for straight, again in resumed:
                assert_equal(again, straight, tolerance=0)
            if method == "bi-mask":  # its permutation must not leave a process's rows, so it is another
                continue
            try:
                assert_equal(found[k], alone, 1e-9)
            except AssertionError as error:
                raise AssertionError(f"{method}: {error}") from error
        assert method == "asp" or all(layer["total_flips"] for layer in alone[1].values()), "masks moved"
