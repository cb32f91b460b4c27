"""A LightningModule as a user has it, and its data."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
        "enable_checkpointing": any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks),
        "default_root_dir": str(path),
        "num_sanity_val_steps": 1,
        "log_every_n_steps": 2,
    }
    return pl.Trainer(**{**defaults, **options}, callbacks=list(callbacks))


def new_model(seed=0, **options):
    pl.seed_everything(seed, verbose=False)
    return Net(**options)
