"""Weights that processes shard by FSDP2 train, are saved and resumed as those of one process."""

import runpy
import sys
import time
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import (
    BAME,
    CAST,
    SRSTE,
    SSTE,
    STEP,
    DecayingMask,
    MaxQ,
    NMPattern,
    NMPrecision,
    NMSparsifier,
    NMSparsityCallback,
)
from lightning_nm.export.sources import read_checkpoint
from lightning_nm.export.verification import verify_state
from lightning_nm.functional import is_nm, magnitude_mask, unpack_mask
from lightning_nm.nn.adapters import Adapter
from tests.strategies.test_equality import FIRST_MASKS_STAY, METHODS, assert_equal
from tests.support.outside import ScaledMask
from tests.support.processes import in_processes

METHODS = {
    **{
        name: METHODS[name]
        for name in ("sr-ste", "bi-mask", "asp", "transposable", "slope", "rigl")
    },
    "maxq": lambda: MaxQ(stop=3, decay=1e-2),
    "cast": lambda: CAST(decay=1e-2, refresh_every=2, scale_groups=0, end=3),
    "bame": lambda: BAME(stop=14, every=3, budget=1.0, evidence_rate=0.5),
    "bame-bi-mask": lambda: BAME(stop=14, every=3, budget=1.0, evidence_rate=0.5, dgrad="bi-mask"),
    "s-ste": SSTE,
    "decaying": lambda: DecayingMask(stop=2),
    "bame-scheduled": lambda: BAME(stop=14, every=3, budget=1.0, evidence_rate=0.5),
    "s-ste-scheduled": SSTE,
}
SCHEDULE = {"dense_start": 1, "ramp": ["3:4"], "ramp_ends": [3]}
"""Of the methods whose names say so."""
SCHEDULED = [name for name in METHODS if name.endswith("-scheduled")]
# The changes of one shard alone would be below the threshold; those of all are above it, up to the latest step.
ADAM_METHODS = {"step": lambda: STEP(dense_start=2, latest=6, threshold=7e-8)}
STEPS = 8


class Net(pl.LightningModule):
    """Of every global batch each process takes its part; none of the layers' rows divide evenly by three."""

    def __init__(self, shard=False, optimizer="sgd", dtype=torch.float64, policy=None):
        super().__init__()
        self.shard, self.optimizer, self.dtype_, self.policy = shard, optimizer, dtype, policy

    def configure_model(self):
        if hasattr(self, "net"):
            return
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 32),
            nn.Tanh(),
            nn.Linear(32, 4),
        ).to(self.dtype_)
        if self.shard:
            settings = {} if self.policy is None else {"mp_policy": self.policy}
            for part in (self.net[0], self.net[3]):
                fully_shard(part, mesh=self.device_mesh["data_parallel"], **settings)
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"], **settings)

    def _loss(self, batch):
        rank, world = (
            (self.trainer.global_rank, self.trainer.world_size)
            if self.trainer.world_size > 1
            else (0, 1)
        )
        x, y = (part[rank::world] for part in batch)
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 1e-2)
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12 * STEPS, 4, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    return DataLoader(
        TensorDataset(x, torch.randint(0, 4, (len(x),), generator=generator)), batch_size=12
    )


def trainer(devices, callbacks, whole_file=True, **options):
    strategy = "auto"
    if devices > 1:
        strategy = ModelParallelStrategy(devices, 1, save_distributed_checkpoint=not whole_file)
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "num_sanity_val_steps": 0, "max_epochs": 1, **options},
    )


def whole(model):
    return {
        k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()
    }


def fit(
    method,
    devices,
    optimizer="sgd",
    ckpt_path=None,
    save=None,
    whole_file=True,
    estimator=None,
    dense_end=0,
    **options,
):
    """Weights and the sparsifier's state after some epochs of eight batches."""
    callback = NMSparsityCallback(
        "2:4",
        (METHODS | ADAM_METHODS)[method](),
        estimator,
        skip_first_last=False,
        show_tables=False,
        schedule=SCHEDULE | {"dense_end": dense_end} if method.endswith("-scheduled") else None,
    )
    model = Net(devices > 1, "adamw" if method == "cast" else optimizer)
    run = trainer(devices, [callback], whole_file, **options)
    run.fit(model, data(), data(), ckpt_path=ckpt_path)
    if save is not None:
        run.save_checkpoint(save)
    return whole(model), callback.state_dict()["layers"]


def sharded_runs(runs, devices):
    return [fit(method, devices, **options) for method, options in runs]


FORMS = ({}, {"accumulate_grad_batches": 2}, {"optimizer": "adamw"})


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_weights_train_as_whole_ones(tmp_path, world):
    """On three processes no layer's rows divide evenly, and the last layer has fewer blocks than there are."""
    # Each pair of any two of method, form and number of processes occurs.
    runs = [
        (method, form)
        for i, method in enumerate(METHODS)
        for j, form in enumerate(FORMS)
        if (i + j - world) % 2
    ]
    runs.append(("step", {"optimizer": "adamw"}))
    runs += [(name, {"dense_end": 2, "optimizer": "adamw"}) for name in SCHEDULED]
    everyone = in_processes(world, tmp_path / "run", sharded_runs, runs, world)
    for k, (method, options) in enumerate(runs):
        alone = fit(method, 1, **options)
        for found in everyone:
            try:
                assert_equal(found[k], alone, 1e-9)
            except AssertionError as error:
                raise AssertionError(f"{method}, {options}: {error}") from error
            assert_equal(found[k], everyone[0][k], tolerance=0)
        moving = [layer for layer in alone[1].values() if layer["total_flips"]]
        if method == "step":
            assert (
                moving
            )  # its masks come late, when few of the smallest layer's entries still move
        else:
            assert len(moving) == len(alone[1]) or method in FIRST_MASKS_STAY


def resumed_runs(runs, folder, devices):
    found = []
    for k, (method, optimizer, whole_file, estimator) in enumerate(runs):
        settings = {"optimizer": optimizer, "whole_file": whole_file, "estimator": estimator}
        settings |= {"max_epochs": 2, "limit_val_batches": 1}
        straight = fit(method, devices, **settings)
        path = f"{folder}/{k}.ckpt"
        fit(method, devices, max_steps=STEPS, save=path, **settings)
        found.append((straight, fit(method, devices, ckpt_path=path, **settings)))
    return found


@pytest.mark.slow
def test_sharded_runs_resume_bit_for_bit(tmp_path):
    # Lightning cannot resume plain SGD, which has no state, from a single file.
    forms = [("adamw", True, None), ("sgd", False, None)]
    runs = [(method, *form) for method in METHODS for form in forms]
    runs.append(("transposable", "adamw", False, "mvue"))
    runs.append(("step", "adamw", True, None))
    everyone = in_processes(2, tmp_path / "run", resumed_runs, runs, str(tmp_path), 2)
    for k, run in enumerate(runs):
        source = read_checkpoint(one_file(tmp_path / f"{k}.ckpt"))
        weights, states = source.weights, source.states
        assert all(verdict.verdict == "N:M" for verdict in verify_state(weights, states[0])), run
        for found in everyone:
            straight, resumed = found[k]
            try:
                assert_equal(resumed, straight, tolerance=0)
            except AssertionError as error:
                raise AssertionError(f"{run}: {error}") from error


def one_file(path):
    """A checkpoint as one file, by the command that `verify` names for a sharded one."""
    if path.is_file():
        return path
    module = "lightning.fabric.utilities.consolidate_checkpoint"
    with mock.patch.object(sys, "argv", [module, str(path)]):
        runpy.run_module(module, run_name="__main__")
    return path.with_name(f"{path.name}.consolidated")


def continued(folder):
    """Two sharded runs: one that goes on from a file of one process, one whose files another number goes on from."""
    goes_on = fit("bi-mask", 2, "adamw", max_epochs=2, ckpt_path=f"{folder}/alone.ckpt")
    fit("bi-mask", 2, "adamw", max_epochs=2, max_steps=STEPS, save=f"{folder}/two.ckpt")
    fit(
        "bame", 2, max_epochs=2, max_steps=STEPS, save=f"{folder}/two-shards.ckpt", whole_file=False
    )
    return goes_on


def three(folder):
    return fit("bame", 3, max_epochs=2, ckpt_path=f"{folder}/two-shards.ckpt", whole_file=False)


@pytest.mark.slow
def test_checkpoints_move_between_one_two_and_three_processes(tmp_path):
    alone = fit("bi-mask", 1, "adamw", max_epochs=2)
    fit("bi-mask", 1, "adamw", max_epochs=2, max_steps=STEPS, save=tmp_path / "alone.ckpt")
    for found in in_processes(2, tmp_path / "two", continued, str(tmp_path)):
        assert_equal(found, alone, 1e-9)
    assert_equal(
        fit("bi-mask", 1, "adamw", max_epochs=2, ckpt_path=tmp_path / "two.ckpt"), alone, 1e-9
    )
    for found in in_processes(3, tmp_path / "three", three, str(tmp_path)):
        assert_equal(found, fit("bame", 1, max_epochs=2), 1e-9)


class Look(pl.Callback):
    """The state dict is N:M in the midst of a fit, too, where an evaluation has left the whole parameters."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        weights = [value for key, value in whole(pl_module).items() if key.endswith("weight")]
        self.seen.append((all(is_nm(w, NMPattern(2, 4), dim=1) for w in weights), len(weights)))


def half_precision(method):
    """The masks follow the float32 shard; figures, tables and evaluation work."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    callback = NMSparsityCallback("2:4", method, log_layers=True, skip_first_last=False)
    model, look = Net(True, "adamw", torch.float32, policy), Look()
    run = trainer(
        2, [callback, look], val_check_interval=3, log_every_n_steps=2, num_sanity_val_steps=1
    )
    run.fit(model, data(torch.float32), data(torch.float32))
    state = callback.state_dict()["layers"]["net.3"]
    figures = {key: float(value) for key, value in run.callback_metrics.items()}
    run.validate(model, data(torch.float32), verbose=False)
    return look.seen, figures, state["forward_mask"], state["latent"], whole(model)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask"])
def test_masks_follow_the_float32_shards(tmp_path, method):
    first, second = in_processes(2, tmp_path / "run", half_precision, method)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    seen, figures, packed, latent, weights = first
    assert seen == [(True, 3)] * 4, "in the sanity check, twice within the epoch, after the fit"
    assert figures["nm/density/net.3"] == 0.5
    assert figures["loss"] < 2
    mask = unpack_mask(packed, (32, 128))
    before = weights["net.3.weight"].clone()
    before[~mask] = latent
    assert before.dtype == torch.float32
    assert not torch.equal(before, before.bfloat16().float())
    assert torch.equal(mask, magnitude_mask(before, NMPattern(2, 4), dim=1))
    assert torch.equal(weights["net.3.weight"], torch.where(mask, before, 0))


def routed(folder):
    """A run whose products a kernel in software makes, and what it ran; the same without."""
    found = []
    for plugins in (
        [
            NMPrecision(
                kernels="sparse",
                backends=[SimulatedSparseKernel()],
                decisions=f"{folder}/kernels.json",
            )
        ],
        [],
    ):
        model, method = Net(True, "adamw"), METHODS["transposable"]()
        nm = NMSparsityCallback("2:4", method, "mvue", include="net.3", show_tables=False)
        trainer(2, [nm], plugins=plugins, accumulate_grad_batches=2).fit(model, data())
        found.append(whole(model))
        found += [
            [[use.product.key.gemm, use.kernel] for use in plugin.router.used()]
            for plugin in plugins
        ]
    return found


@pytest.mark.slow
def test_kernels_multiply_what_fsdp_gathers(tmp_path):
    for weights, kernels, expected in in_processes(2, tmp_path / "run", routed, str(tmp_path)):
        assert [kernel for kernel in kernels if kernel[1] == "simulated"] == [
            [gemm, "simulated"] for gemm in ("forward", "dgrad", "wgrad")
        ]
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


class Ridge(SRSTE):
    """A penalty of the whole weight, beside the decay of the part that is here."""

    def penalty(self, layer):
        return layer.weight.square().sum() / 2


def shaped(scale):
    """The gradient after a penalty, a decay and a loss scale, and what they should make of it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6, bias=False)).double()
    weight = net[0].weight.detach().clone()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    sparsifier = NMSparsifier(net, "2:4", Ridge(0.5), skip_first_last=False).attach()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sparsifier.register(optimizer)
    (net(torch.ones(4, 8, dtype=torch.float64)).sum() * scale).backward()
    kept = net[0].weight.grad
    sparsifier.before_step(optimizer, scale)
    assert net[0].weight.grad is kept
    mask = sparsifier.layers["0"].forward_mask
    expected = scale * (4 + weight + 0.5 * torch.where(mask, 0, weight))
    found = net[0].weight.grad.full_tensor()
    sparsifier.detach()
    return found, expected


@pytest.mark.slow
def test_methods_that_read_the_whole_weight_shape_scaled_gradients(tmp_path):
    for found, expected in in_processes(2, tmp_path / "run", shaped, 8.0):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def refused():
    mesh = init_device_mesh("cpu", (2,))
    left_behind = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(left_behind, mesh=mesh)
    for names, reason in (
        (True, "its weight is flat"),
        (False, "its weight is computed, not stored"),
    ):
        first = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
            use_orig_params=names,
            device_id=torch.device("cpu"),
        )
        with pytest.raises(ValueError, match=rf"no layer can be masked.*'0': {reason}"):
            NMSparsifier(first, "2:4", "sr-ste").attach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMesh, "device_type", "cuda")  # as if products were made there
        with pytest.raises(
            ValueError, match=r"'0' is named .* cannot be masked: FSDP keeps it on the cpu"
        ):
            NMSparsifier(left_behind, "2:4", "sr-ste", include="0").attach()
    model = Net(True)
    with pytest.raises(ValueError, match=r"ScaledMask owns parameters at layer 'net\.0'"):
        trainer(2, [NMSparsityCallback("2:4", ScaledMask(), skip_first_last=False)]).fit(
            model, data()
        )
    return not any(isinstance(module, Adapter) for module in model.modules())


@pytest.mark.slow
def test_what_cannot_be_saved_is_refused(tmp_path):
    assert in_processes(2, tmp_path / "run", refused) == [True, True]


class OneFails(pl.Callback):
    """The second process fails first; the first fails when it hears of the end of the other's fit, or after a while."""

    def __init__(self, news):
        self.news = news

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3:
            end = time.monotonic() + 20
            while trainer.global_rank == 0 and not self.news.exists() and time.monotonic() < end:
                time.sleep(0.01)
            raise ArithmeticError


def broken_off(folder):
    news = Path(folder) / "news"
    nm = NMSparsityCallback("2:4", "bi-mask", skip_first_last=False, show_tables=False)
    model = Net(True, "adamw")
    with pytest.raises(ArithmeticError):
        trainer(2, [nm, OneFails(news)]).fit(model, data())
    heard = news.exists()
    news.touch()
    sparse = all(
        is_nm(w, NMPattern(2, 4), dim=1)
        for key, w in whole(model).items()
        if key.endswith("weight")
    )
    step = nm.state_dict()["clock"]
    run = trainer(2, [nm])
    run.fit(model, data())
    steps = nm.state_dict()["clock"] - step
    run.save_checkpoint(f"{folder}/other.ckpt")
    other = Net(True, "adamw")
    nm = NMSparsityCallback("2:4", "asp", skip_first_last=False, show_tables=False)
    with pytest.raises(ValueError, match="of another sparse model"):
        trainer(2, [nm]).fit(other, data(), ckpt_path=f"{folder}/other.ckpt")
    return (
        heard,
        sparse,
        step,
        steps,
        any(isinstance(part, Adapter) for m in (model, other) for part in m.modules()),
    )


@pytest.mark.slow
def test_a_process_that_fails_alone_waits_for_no_other(tmp_path):
    for rank, found in enumerate(in_processes(2, tmp_path / "run", broken_off, str(tmp_path))):
        assert found == (rank == 0, True, 4, STEPS, False)
