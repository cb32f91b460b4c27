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
from lightning_nm import functional as nmf
from lightning_nm.demo import ExactResume, ResumableDataModule
from lightning_nm.nn.adapters import Adapter

MASKED = ("net.3.weight", "net.6.weight")
"""The weights of Net that are masked by default: not those of the first convolution and the last linear layer."""


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


class TwoOptimizers(Net):
    """Each of two optimizers has a part of the model; the second one steps in every second batch."""

    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.05) for part in (self.net[:6], self.net[6:])]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second) if batch_idx % 2 == 0 else (first,):
            optimizer.zero_grad()
            self.manual_backward(self.step(batch, "train"))
            optimizer.step()


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


def fit(path, callbacks=(), model=None, data=None, ckpt_path=None, **options):
    """A Trainer after a fit, and its model."""
    model = new_model() if model is None else model
    trainer = make_trainer(path, callbacks, **options)
    trainer.fit(model, Data() if data is None else data, ckpt_path=ckpt_path)
    return trainer, model


def new_model(seed=0, of=Net, **options):
    pl.seed_everything(seed, verbose=False)
    return of(**options)


def whole_and_resumed(
    path, callbacks, batch, *, new=new_model, data=Data, saves_first=False, **options
):
    """Two models: of a fit, and of one that goes on from its checkpoint after so many micro-batches.

    Args:
        path: A folder.
        callbacks: Makes those of a fit.
        batch: The number of the micro-batch.
        new: Makes a model of a seed.
        data: Makes the data.
        saves_first: Whether the checkpoint is saved before these callbacks end the batch.
        options: Those of the Trainer.
    """
    file = path / "mid.ckpt"
    whole, resumed = new(0), None
    own, save = [*callbacks(), ExactResume()], SaveAt(file, batch)
    fit(path, [save, *own] if saves_first else [*own, save], whole, data(), **options)
    resumed = new(7)
    fit(path, [*callbacks(), ExactResume()], resumed, data(), file, **options)
    return whole, resumed


def callback(method="bi-mask", pattern="2:4", **options):
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
    return NMSparsityCallback(pattern, method, show_tables=False, **options)


def is_plain(model):
    """Whether no module is masked any more."""
    return not any(isinstance(module, Adapter) for module in model.modules())


def is_sparse(model, pattern="2:4"):
    """Whether the weights that are masked by default are N:M, in a Net or in a state dict of one."""
    weights = model if isinstance(model, dict) else model.state_dict()
    return all(nmf.is_nm(weights[key], pattern, dim=1) for key in MASKED)


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
    """Looks at the model after each batch, and keeps what it saw."""

    def __init__(self, look):
        self.look = look
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.seen.append(self.look(trainer, pl_module))


class FailsAt(pl.Callback):
    """Raises an error in a hook when the Trainer has made so many steps."""

    def __init__(self, hook, step=0, error=None):
        self.step, self.error = step, error or RuntimeError("out of luck")
        setattr(self, hook, self.fail)

    def fail(self, trainer, *args, **kwargs):
        if trainer.global_step == self.step:
            raise self.error
