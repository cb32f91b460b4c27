"""Models that several processes train, whole or sharded, and how their trainings are compared."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import (
    ASP,
    BAME,
    CAST,
    LBC,
    SRSTE,
    SSTE,
    STEP,
    BiMask,
    DecayingMask,
    MaskLogits,
    MaxQ,
    RigL,
    SLoPe,
    TransposableMask,
)
from tests.support import lightning_models
from tests.support.lightning_models import callback
from tests.support.outside import ScaledMask

METHODS = {
    "sr-ste": lambda: SRSTE(1e-2),
    # Under the default decay few entries of the smallest layer move in so few steps.
    "bi-mask": lambda: BiMask(permute_every=3, decay=2e-4),
    "asp": lambda: ASP(start=2),
    "bame": lambda: BAME(stop=14, every=3, budget=1.0, evidence_rate=0.5),
    "bame-bi-mask": lambda: BAME(stop=14, every=3, budget=1.0, evidence_rate=0.5, dgrad="bi-mask"),
    "transposable": lambda: TransposableMask(update_every=2),
    "s-ste": SSTE,
    "decaying": lambda: DecayingMask(stop=2),
    "slope": lambda: SLoPe(refresh_every=3),
    "rigl": lambda: RigL(every=2, stop=10, drop=0.9),
    "cast": lambda: CAST(decay=1e-2, refresh_every=2, scale_groups=0, end=3),
    "cast-scaled": lambda: CAST(decay=1e-2, refresh_every=2, end=7),
    "scaled-mask": ScaledMask,
    # The changes of one shard alone would be below the threshold; those of all are above it, up to the latest step.
    "step": lambda: STEP(dense_start=2, latest=6, threshold=7e-8),
    "lbc": lambda: LBC(stop=5),
    "maxq": lambda: MaxQ(stop=3, decay=1e-2),
    "mask-logits": lambda: MaskLogits(temperature=(4, 1), stop=12),
    "sr-ste-scheduled": lambda: SRSTE(1e-2),
    "s-ste-scheduled": SSTE,
    "bame-scheduled": lambda: BAME(stop=8, every=3, budget=1.0, evidence_rate=0.5),
}
ADAM = ("step", "cast", "cast-scaled")
"""Methods of Adam alone."""
SCHEDULE = {"dense_start": 1, "ramp": ["3:4"], "ramp_ends": [3]}
"""Of the methods whose names say so."""
FIRST_MASKS_STAY = ("asp", "slope", "cast", "cast-scaled")
"""Methods whose masks do not move once they are chosen."""


class Net(pl.LightningModule):
    """Of every global batch each process takes its part, or each group of them that holds a whole model.

    In float64, so that no rounding moves a mask. None of the layers' rows divide evenly by three.

    Args:
        optimizer: SGD, or AdamW.
        infinite: Batches whose gradients overflow in the last process alone, where a GradScaler looks.
        freezes: Whether the weights are frozen.
        dtype: That of the weights.
        settings: Those of ``fully_shard``.
    """

    def __init__(
        self, optimizer="sgd", infinite=(), freezes=False, dtype=torch.float64, settings=None
    ):
        super().__init__()
        self.optimizer, self.infinite, self.freezes = optimizer, infinite, freezes
        self.dtype_, self.settings = dtype, settings or {}

    def build(self):
        return nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 32),
            nn.Tanh(),
            nn.Linear(32, 4),
        )

    def shard(self, mesh):
        for part in (self.net[0], self.net[3], self.net):
            fully_shard(part, mesh=mesh["data_parallel"], **self.settings)

    @property
    def is_sharded(self):
        return isinstance(self.trainer.strategy, ModelParallelStrategy)

    def configure_model(self):
        if hasattr(self, "net"):
            return
        torch.manual_seed(0)
        self.net = self.build().to(self.dtype_)
        for parameter in self.net.parameters():
            parameter.requires_grad_(parameter.dim() == 1 or not self.freezes)
        if self.is_sharded:
            self.shard(self.device_mesh)

    def loss(self, batch):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        if self.is_sharded:
            mesh = self.device_mesh["data_parallel"]
            rank, world = mesh.get_local_rank(), mesh.size()
        x, y = (part[rank::world] for part in batch)
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        overflows = self.trainer.global_rank == self.trainer.world_size - 1
        return self.loss(batch) * (torch.inf if overflows and batch_idx in self.infinite else 1)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self):
        return data(dtype=self.dtype_)

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 1e-2)
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


STEPS = 8


def data(*shape, dtype=torch.float64, batch_size=12, steps=STEPS):
    """Batches of inputs of a shape."""
    generator = torch.Generator().manual_seed(0)
    shape = (steps * batch_size, *(shape or (4, 4, 4)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 4, shape[:1], generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def fit(callbacks, model, world=1, strategy="auto", loader=None, ckpt_path=None, **options):
    """A Trainer after a fit of one epoch, and its model."""
    defaults = {"max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    options = {**defaults, **options, "devices": world, "strategy": strategy}
    return lightning_models.fit(
        ".", callbacks, model, loader or data(), ckpt_path, use_distributed_sampler=False, **options
    )


def whole(model):
    """The state dict of a model with whole weights."""
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in model.state_dict().items()
    }


def train(
    method,
    world=1,
    strategy="auto",
    model=None,
    optimizer="sgd",
    estimator=None,
    dense_end=0,
    save=None,
    **options,
):
    """Weights and the sparsifier's state after a fit, which may save a checkpoint."""
    schedule = SCHEDULE | {"dense_end": dense_end} if method.endswith("-scheduled") else None
    given = {"grad_estimator": estimator, "schedule": schedule, "skip_first_last": False}
    nm = callback(METHODS[method](), **given)
    if model is None:
        model = Net("adamw" if method in ADAM else optimizer)
    trainer, _ = fit([nm], model, world, strategy, **options)
    if save is not None:
        trainer.save_checkpoint(save)
    return whole(model), nm.state_dict()["layers"]


KEYS = ("forward_mask", "backward_mask", "permutation", "latent", "parameters", "step")


def assert_equal(found, expected, tolerance=1e-10, message=""):
    """Weights and states of two trainings."""
    (weights, layers), (expected_weights, expected_layers) = found, expected
    parts = [(weights, expected_weights)]
    for name, layer in layers.items():
        other = expected_layers[name]
        assert layer["total_flips"] == other["total_flips"], (message, name)
        assert [layer[key] is None for key in KEYS] == [other[key] is None for key in KEYS]
        parts += [(layer[key], other[key]) for key in KEYS if layer[key] is not None]

    def said(text):
        return f"{message}: {text}"

    for a, b in parts:
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=said)
