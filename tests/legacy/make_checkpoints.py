"""Makes the checkpoints of the present version: ``python -m tests.legacy.make_checkpoints`` when a version is released.

Each holds a run after 5 of 8 epochs of one step each and, as ``expected``, the model at its end. Those of older
versions stay as they are.
"""

from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import BAME, MVUE, BiMask, NMSparsityCallback, TransposableMask

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
        "bi-mask": (BiMask(permute_every=3), None),
        "bame": (BAME(stop=8, every=2, budget=1.0, evidence="batch"), None),
        "three-gemms": (TransposableMask(update_every=3, decay=0), MVUE("1:2")),
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


def main():
    """One checkpoint for each kind of state."""
    for name in ("bi-mask", "bame", "three-gemms"):
        path = FOLDER / f"{version('lightning-nm')}-{name}.ckpt"
        model = fit(name, Save(path))
        checkpoint = torch.load(path, weights_only=True)
        torch.save({**checkpoint, "expected": model.state_dict()}, path)


if __name__ == "__main__":
    main()
