"""Makes the checkpoints of the present version: ``python -m tests.legacy.make_checkpoints`` when a version is released.

Each holds a run after 5 of 8 epochs of one step each and, as ``expected``, the model at its end. The packed files hold
:func:`packed_net`, and their ``.pt`` files the dense state dict of the packed model. Those of older versions stay as
they are.
"""

from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import (
    ASP,
    BAME,
    MVUE,
    BiMask,
    NMSparsityCallback,
    TransposableMask,
    pack,
    save_packed,
    unpacked_state_dict,
)
from lightning_nm.functional import nm_prune

FOLDER = Path(__file__).parent
EPOCHS, SAVED_AFTER = 8, 5


class Model(pl.LightningModule):
    """Two layers that are masked, trained on one batch."""

    def __init__(self):
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def callback(name):
    """What the checkpoint of this name was made with."""
    method, estimator = {
        "bi-mask": (BiMask(permute_every=3, decay=2e-4), None),
        "bame": (BAME(stop=8, every=2, budget=1.0, evidence="batch", evidence_rate=0.015), None),
        "three-gemms": (TransposableMask(update_every=3, decay=0), MVUE("1:2")),
        # Version 0.3 made these two with storage="packed", which later versions do not have.
        "asp-storage": (ASP(), None),
        "bame-storage": (BAME(stop=8, every=2, budget=1.0, evidence_rate=0.3, reach=None), None),
    }[name]
    return NMSparsityCallback("2:4", method, estimator, skip_first_last=False, show_tables=False)


def fit(name, *callbacks, ckpt_path=None):
    """A whole run, or the rest of one."""
    model = Model()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback(name), *callbacks],
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return model


class Save(pl.Callback):
    """Saves once."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


class PackedNet(nn.Module):
    """A convolution, linear layers of three patterns, batch norm, and a head that is tied to an embedding."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.linears = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16))
        self.embedding = nn.Embedding(24, 16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight


def packed_net(dtype=torch.float32):
    """The model of the packed files, with weights of its own at each call."""
    model = PackedNet().to(dtype)
    patterns = {"conv": "2:4", "linears.0": "2:4", "linears.1": "1:16", "linears.2": "1:8"}
    for name, pattern in patterns.items():
        weight = model.get_submodule(name).weight
        weight.data = nm_prune(weight.data, pattern, dim=1)
    return model.eval()


PACKED = {
    "packed-float32": (torch.float32, None),
    "packed-bfloat16": (torch.bfloat16, None),
    "packed-int8": (torch.bfloat16, "int8"),
}
"""The dtype of the model and that of the values, by the name of the file."""


def save_packed_files(prefix):
    """A packed file of each kind, and next to each the dense state dict that it stands for."""
    for name, (dtype, values) in PACKED.items():
        pl.seed_everything(0, verbose=False)
        model = pack(packed_net(dtype), dtype=values, kernels="reference")
        save_packed(model, FOLDER / f"{prefix}-{name}.safetensors")
        torch.save(unpacked_state_dict(model), FOLDER / f"{prefix}-{name}.pt")


def main():
    """One checkpoint for each kind of state, and one packed file for each kind of values."""
    save_packed_files(version("lightning-nm"))
    for name in ("bi-mask", "bame", "three-gemms"):
        path = FOLDER / f"{version('lightning-nm')}-{name}.ckpt"
        model = fit(name, Save(path))
        checkpoint = torch.load(path, weights_only=True)
        torch.save({**checkpoint, "expected": model.state_dict()}, path)


if __name__ == "__main__":
    main()
