"""Estimated gradients in several processes: equal to one process's given the same noise, and in the mean without."""

from functools import cache

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import (
    ASP,
    MVUE,
    SRSTE,
    ApproxMVUE,
    BiMask,
    NMSparsifier,
    NMSparsityCallback,
    TopN,
    TransposableMask,
)
from lightning_nm.functional import counter_uniform, fold_seed
from lightning_nm.training.comm_hook import CommHookState, kept_entries_hook
from tests.support.contract import METHODS
from tests.support.lightning_models import make_trainer
from tests.support.processes import in_processes


def place():
    """This process's number, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class ByGlobalSample:
    """Mixed into an estimator: a block's random numbers depend on where it lies in the global batch, not on the rank.

    Each process holds a stretch of the global batch of its own, and no block of tokens straddles two of them.
    """

    def estimate(self, layer, grad, seed):
        rank, world = place()
        pattern, (tokens, out) = self.pattern_of(layer), grad.shape
        assert tokens % pattern.m == 0
        blocks = tokens // pattern.m
        everyone = counter_uniform(
            self.numbers * world * blocks * out, fold_seed(layer.name, layer.noise.draws)
        )
        uniform = everyone.view(world * blocks, self.numbers, out)[
            rank * blocks : (rank + 1) * blocks
        ]
        return self.prune(grad, pattern, uniform.movedim(1, 0))


class SharedMVUE(ByGlobalSample, MVUE):
    pass


class SharedApproxMVUE(ByGlobalSample, ApproxMVUE):
    pass


ESTIMATORS = {
    "shared 1:2": lambda: SharedMVUE("1:2"),
    "shared 2:4": lambda: SharedMVUE("2:4"),
    "shared approx": SharedApproxMVUE,
    "own": lambda: MVUE("2:4"),
}


class Net(pl.LightningModule):
    """Of every global batch each process takes a stretch."""

    def __init__(self):
        super().__init__()
        hidden = (nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 4))
        self.net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), *hidden)

    def training_step(self, batch, batch_idx):
        x, y = (part.chunk(self.trainer.world_size)[self.trainer.global_rank] for part in batch)
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(method, estimator, strategy, accumulate, devices=1):
    """Weights, latent ones too, and masks after a dozen batches in float64, and how many bits moved."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(192, 4, 4, 4, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 4, (192,), generator=generator))
    pl.seed_everything(0, verbose=False)
    model = Net().double()
    nm = NMSparsityCallback(
        "2:4", METHODS[method](), ESTIMATORS[estimator](), skip_first_last=False, show_tables=False
    )
    options = {
        "devices": devices,
        "strategy": strategy,
        "max_epochs": 1,
        "accumulate_grad_batches": accumulate,
        "use_distributed_sampler": False,
    }
    make_trainer(".", [nm], **options).fit(model, DataLoader(data, batch_size=16))
    layers = nm.state_dict()["layers"].values()
    masks = [layer[f"{key}_mask"] for layer in layers for key in ("forward", "backward")]
    masks += [layer["permutation"] for layer in layers]
    weights = [*model.state_dict().values(), *(layer["latent"] for layer in layers)]
    moved = sum(int(layer["total_flips"]) for layer in layers)
    return *([part for part in parts if part is not None] for parts in (weights, masks)), moved


NAMES = ("transposable", "sr-ste", "bi-mask", "asp-late", "bame-late")
RUNS = [(method, "shared 2:4", strategy, 1) for method in NAMES for strategy in ("ddp", "nm_ddp")]
RUNS += [("transposable", "shared 1:2", "nm_ddp", 2), ("transposable", "shared approx", "ddp", 2)]
OWN = ("transposable", "own", "ddp", 1)


def fits():
    return [fit(*run, devices=2) for run in [*RUNS, OWN]]


def same(found, expected, tolerance):
    pairs = zip(found[0], expected[0], strict=True)
    close = all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in pairs)
    return close and all(map(torch.equal, found[1], expected[1]))


@pytest.mark.slow
def test_processes_with_the_same_noise_equal_one(tmp_path):
    first, second = in_processes(2, tmp_path / "run", fits)
    in_one = cache(lambda method, estimator, accumulate: fit(method, estimator, "auto", accumulate))
    for run, one, other in zip([*RUNS, OWN], first, second, strict=True):
        assert same(one, other, 0), run
        alone = in_one(*run[:2], run[3])
        assert same(one, alone, 1e-10) == (run != OWN), run  # noise of its own must be seen
        assert alone[2] or run[0] == "asp-late", "the masks stood still"


# ------------------------------------------------------------------------------------------------- in the mean

SEEDS, DIRECTIONS, LIMIT = 200, 32, 7.0
"""Of a t-distributed mean of 200 values, 7 standard errors are 4e-11; 33 figures in 10 comparisons make it 1.3e-8."""


class Shrunk(MVUE):
    """Biased by a tenth."""

    def prune(self, grad, pattern, uniform):
        return 0.9 * super().prune(grad, pattern, uniform)


CASES = {
    "1:2": (lambda: TransposableMask(), lambda: MVUE("1:2")),
    "2:4": (lambda: SRSTE(0), lambda: MVUE("2:4")),
    "2:4, kept entries": (ASP, lambda: MVUE("2:4")),
    "approx": (lambda: BiMask(decay=0), ApproxMVUE),
}
BIASED = {
    "top-n": (lambda: TransposableMask(), lambda: TopN("1:2")),
    "shrunk": (lambda: SRSTE(0), lambda: Shrunk("2:4")),
}
INSTEAD_OF = {"top-n": "1:2", "shrunk": "2:4"}
"""What the biased ones are compared with: both must be told from it."""
EXACT = lambda: None  # noqa: E731


def gradients(method, estimator, strategy="ddp", seeds=SEEDS):
    """The weights' gradients just before a step, one row for each seed: float64 [seeds, weights]."""
    rank, world = place()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator, dtype=torch.float64).chunk(world)[rank]
    y = torch.randint(0, 4, (64,), generator=generator).chunk(world)[rank]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    sparsifier = NMSparsifier(model, "2:4", method(), estimator(), skip_first_last=False).attach()
    layers = sparsifier.layers.values()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    sparsifier.register(optimizer)
    parallel = DistributedDataParallel(model) if world > 1 else model
    if strategy == "nm_ddp":
        wire = CommHookState()
        wire.add(layers)
        parallel.register_comm_hook(wire, kept_entries_hook)
    found = []
    for seed in range(seeds):
        optimizer.zero_grad()
        for layer in layers:
            layer.noise.seed = seed
            layer.draw_noise(0)
        F.cross_entropy(parallel(x), y).backward()
        sparsifier.before_step(optimizer)
        found.append(torch.cat([layer.weight.grad.flatten() for layer in layers]))
    return torch.stack(found)


def all_gradients():
    found = {(name, "ddp"): gradients(*case) for name, case in {**CASES, **BIASED}.items()}
    name = "2:4, kept entries"
    return {**found, (name, "nm_ddp"): gradients(*CASES[name], "nm_ddp")}


def deviation(found, expected, along):
    """The largest deviation of the mean, in standard errors, in some fixed directions and in that of `along`."""
    generator = torch.Generator().manual_seed(1)
    directions = torch.cat(
        [torch.randn(DIRECTIONS, found.shape[1], generator=generator).double(), along[None]]
    )
    differences = (found - expected) @ directions.t()
    return float((differences.mean(0).abs() / (differences.std(0) / SEEDS**0.5)).max())


@pytest.mark.slow
def test_processes_equal_one_in_the_mean(tmp_path):
    first, second = in_processes(2, tmp_path / "run", all_gradients)
    alone = {
        name: (gradients(*case), gradients(case[0], EXACT, seeds=1)) for name, case in CASES.items()
    }
    for (name, strategy), found in first.items():
        assert torch.equal(found, second[name, strategy])
        one, exact = alone[INSTEAD_OF.get(name, name)]
        for expected in (one, exact):
            z = deviation(found, expected, along=exact[0])
            assert (z > LIMIT) == (name in INSTEAD_OF), (
                f"{name} under {strategy} is off by {z:.1f} standard errors"
            )
