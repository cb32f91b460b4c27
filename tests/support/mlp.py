"""Linear layers whose sizes fit 2:4 kernels, their data, and a plugin that runs them on a kernel in software."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import NMPrecision
from tests.support import lightning_models
from tests.support.lightning_models import callback, new_model


class Mlp(pl.LightningModule):
    def __init__(self, sizes=(32, 64, 48, 4), checkpointed: bool = False):
        super().__init__()
        self.checkpointed = checkpointed
        a, b, c, d = sizes
        self.net = nn.Sequential(
            nn.Linear(a, b), nn.GELU(), nn.Linear(b, c), nn.GELU(), nn.Linear(c, d)
        )

    def forward(self, x):
        x = x.to(self.net[0].weight.dtype)
        return checkpoint(self.net, x, use_reentrant=False) if self.checkpointed else self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Blobs(pl.LightningDataModule):
    def __init__(self, size: int = 64, width: int = 32, classes: int = 4, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(0, classes, (size,), generator=generator)
        centers = torch.randn(classes, width, generator=generator)
        noise = torch.randn(size, width, generator=generator)
        self.data = TensorDataset(noise + centers[y], y)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=2 * self.batch_size)


def mlp(of=Mlp, **options):
    return new_model(of=of, **options)


def plugin(cls=NMPrecision, *args, kernels="sparse", **options):
    backends = [SimulatedSparseKernel()]
    return cls(*args, kernels=kernels, backends=backends, decisions=None, **options)


def sparse_callback(method="bi-mask", **options):
    """Masks the first two layers, with an estimator."""
    options = {"grad_estimator": "mvue", "include": "net.[02]"} | options
    return callback(method, skip_first_last=False, **options)


def fit(path, plugins, callbacks=None, model=None, **options):
    """A Trainer after a fit of two epochs of four batches, and its model."""
    callbacks = [sparse_callback()] if callbacks is None else callbacks
    model = mlp() if model is None else model
    return lightning_models.fit(path, callbacks, model, Blobs(), plugins=plugins, **options)


def kernels_of(router):
    return {(used.product.layer, used.product.key.gemm): used.kernel for used in router.used()}


def calls_of(router):
    return {(used.product.layer, used.product.key.gemm): used.calls for used in router.used()}
