"""A LightningModule as a user has it, and its data."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import (
    ASP,
    BAME,
    CAST,
    MVUE,
    BiMask,
    NMSparsityCallback,
    RigL,
    SLoPe,
    TransposableMask,
)
from lightning_nm.demo import ResumableDataModule


class Net(pl.LightningModule):
    """Convolutions, batch norm, dropout and linear layers; knows nothing of sparsity."""

    def __init__(self, optimizer="sgd", dropout=0.2, width=16):
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 16, 3, stride=2, padding=1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(256, 32),
            nn.ReLU(),
            nn.Linear(32, 4),
        )

    def forward(self, x):
        return self.net(x)

    def step(self, batch, stage):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log(f"{stage}_loss", loss)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def test_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 1e-2)
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


class _Whole(TensorDataset):
    def __getitems__(self, indices):
        return [tensor[indices] for tensor in self.tensors]


class Data(ResumableDataModule):
    """Noisy classes, in an order that resumes."""

    def __init__(self, size=96, batch_size=16):
        super().__init__(batch_size)
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(0, 4, (size,), generator=generator)
        x = torch.randn(size, 1, 8, 8, generator=generator) + y[:, None, None, None] * 0.3
        self.train_set = self.val_set = self.test_set = _Whole(x, y)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*self.train_set.tensors), batch_size=48)

    test_dataloader = val_dataloader


def make_trainer(path, callbacks=(), **options):
    defaults = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        "default_root_dir": str(path),
        "num_sanity_val_steps": 1,
        "log_every_n_steps": 2,
    }
    return pl.Trainer(**{**defaults, **options}, callbacks=list(callbacks))


def new_model(seed=0, **options):
    pl.seed_everything(seed, verbose=False)
    return Net(**options)


def callback(method="bi-mask", **options):
    if method == "bi-mask":
        method = BiMask(permute_every=3)
    if method == "asp-late":
        method = ASP(start=4)
    if method == "bame":
        method = BAME(stop=0.9, every=3, budget=1.0, evidence_rate=0.5)
    if method == "bame-bi-mask":
        method = BAME(start=1, stop=12, every=2, budget=1.0, evidence_rate=0.5, dgrad="bi-mask")
    if method == "slope":
        method = SLoPe(refresh_every=3)
    if method == "rigl":
        method = RigL(every=2, stop=12, drop=0.9)
    if method == "cast":
        method = CAST(decay=1e-2, refresh_every=3, end=0.8)
    if method == "three-gemms":  # the checkpoints of these tests lie in every phase
        method, options["grad_estimator"] = TransposableMask(3, 1e-3, 4, 0.2), MVUE("1:2", 2, 0.3)
    if method == "mvue":
        method, options["grad_estimator"] = "dense", "mvue"
    if method == "bi-mask-phases":
        method, options["grad_estimator"] = (
            BiMask(permute_every=3, dense_start=2, dense_end=0.5),
            "approx-mvue",
        )
    return NMSparsityCallback("2:4", method, show_tables=False, **options)


def assert_equal_models(a, b):
    for (key, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), key


class SaveAt(pl.Callback):
    """Saves after given micro-batches, counted over the run."""

    def __init__(self, path, batch):
        self.path, self.batch, self.seen = path, batch, 0

    def on_train_batch_end(self, trainer, *args):
        self.seen += 1
        if self.seen == self.batch:
            trainer.save_checkpoint(self.path)


class Inspect(pl.Callback):
    """Looks at the model while it trains."""

    def __init__(self, look):
        self.look = look
        self.calls = 0

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.calls += 1
        self.look(trainer, pl_module)
