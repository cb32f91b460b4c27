"""Several processes train as one does on the same global batch."""

from functools import cache

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import (
    ASP,
    BAME,
    CAST,
    LBC,
    SRSTE,
    SSTE,
    BiMask,
    DecayingMask,
    MaskLogits,
    MaxQ,
    NMDDPStrategy,
    NMSparsityCallback,
    RigL,
    SLoPe,
    TransposableMask,
)
from tests.support.outside import ScaledMask
from tests.support.processes import in_processes

METHODS = {
    "sr-ste": lambda: SRSTE(1e-2),
    "bi-mask": lambda: BiMask(permute_every=3),
    "asp": lambda: ASP(start=2),
    "bame": lambda: BAME(stop=0.9, every=3, budget=1.0, evidence_rate=0.5),
    "transposable": lambda: TransposableMask(update_every=2),
    "s-ste": SSTE,
    "decaying": lambda: DecayingMask(stop=3),
    "slope": lambda: SLoPe(refresh_every=3),
    "rigl": lambda: RigL(every=2, stop=10, drop=0.9),
    "cast": lambda: CAST(decay=1e-2, refresh_every=2, end=7),
    "scaled-mask": ScaledMask,
    "lbc": lambda: LBC(stop=5),
    "maxq": lambda: MaxQ(stop=5, decay=1e-2),
    "mask-logits": lambda: MaskLogits(temperature=(4, 1), stop=12),
    "sr-ste-scheduled": lambda: SRSTE(1e-2),
    "bame-scheduled": lambda: BAME(stop=8, every=3, budget=1.0, evidence_rate=0.5),
}
SCHEDULE = {"dense_start": 1, "ramp": ["3:4"], "ramp_ends": [4], "dense_end": 3}
"""Of the methods whose names say so."""
FIRST_MASKS_STAY = ("asp", "slope", "cast")
"""Methods whose masks do not move once they are chosen."""
STRATEGIES = {
    "auto": lambda: "auto",
    "ddp": lambda: "ddp",
    "nm_ddp": lambda: "nm_ddp",
    "static": lambda: NMDDPStrategy(static_graph=True, gradient_as_bucket_view=True),
}


OVERFLOWS = (0, 4, 5)
"""Batches whose gradients overflow in the last process alone, where a GradScaler looks."""


class Net(pl.LightningModule):
    """Of every global batch each process takes its part."""

    def __init__(self, overflows=(), optimizer="sgd"):
        super().__init__()
        self.overflows = overflows
        self.optimizer = optimizer
        self.net = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 32),
            nn.Tanh(),
            nn.Linear(32, 4),
        )

    def training_step(self, batch, batch_idx):
        x, y = (part[self.trainer.global_rank :: self.trainer.world_size] for part in batch)
        loss = F.cross_entropy(self.net(x), y)
        last = self.trainer.global_rank == self.trainer.world_size - 1
        return loss * torch.inf if last and batch_idx in self.overflows else loss

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 1e-2)
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def fit(method, strategy, devices, accumulate=1, scaled=False):
    """Weights and the sparsifier's state after a dozen batches."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 4, 4, 4, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 4, (96,), generator=generator))
    pl.seed_everything(0, verbose=False)
    model = Net(
        OVERFLOWS if scaled else (), "adamw" if method == "cast" else "sgd"
    ).double()  # float64 is not autocast: no rounding, but scaled gradients
    if method == "mask-logits":
        for layer in model.net:
            if hasattr(layer, "weight"):
                layer.weight.requires_grad_(False)
    callback = NMSparsityCallback(
        "2:4",
        METHODS[method](),
        skip_first_last=False,
        show_tables=False,
        schedule=SCHEDULE if method.endswith("-scheduled") else None,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=STRATEGIES[strategy](),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
        if scaled
        else None,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=8))
    return model.state_dict(), callback.state_dict()["layers"]


def fits(runs, devices):
    return [fit(method, strategy, devices, *options) for method, strategy, *options in runs]


def assert_equal(found, expected, tolerance=1e-10):
    (weights, layers), (expected_weights, expected_layers) = found, expected
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=tolerance)
    for name, layer in layers.items():
        other = expected_layers[name]
        assert (layer["step"], layer["total_flips"]) == (other["step"], other["total_flips"]), name
        for key in ("forward_mask", "backward_mask", "permutation", "latent", "parameters"):
            torch.testing.assert_close(layer[key], other[key], rtol=0, atol=tolerance) if layer[
                key
            ] is not None else 0
            assert (layer[key] is None) == (other[key] is None), (name, key)


RUNS = [(method, strategy, 1) for method in METHODS for strategy in ("ddp", "nm_ddp")]
RUNS += [
    ("bame", "nm_ddp", 2),
    ("asp", "static", 1),
    ("bame", "static", 1),
    ("scaled-mask", "ddp", 2),
]
RUNS += [(method, strategy, 1, True) for method, strategy, _ in RUNS[: 2 * len(METHODS)]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "runs"), [(2, RUNS), (4, [("bame", "nm_ddp", 1)])], ids=["2", "4"]
)
def test_processes_equal_one(tmp_path, world, runs):
    everyone = in_processes(world, tmp_path / "run", fits, runs, world)
    one = cache(lambda method, *options: fit(method, "auto", 1, *options))
    for k, (method, strategy, *options) in enumerate(runs):
        alone = one(method, *options)
        steps = 12 // options[0] - len(OVERFLOWS) * (True in options[1:])
        assert all(layer["step"] == steps for layer in alone[1].values())
        for found in everyone:
            try:
                assert_equal(found[k], alone)
            except AssertionError as error:
                raise AssertionError(f"{method} under {strategy}, {options}: {error}") from error
            assert_equal(found[k], everyone[0][k], tolerance=0)
        moved = all(layer["total_flips"] for layer in alone[1].values())
        assert moved or method in FIRST_MASKS_STAY
