"""Weights that processes shard by FSDP2 train, are saved and resumed as those of one process."""

import runpy
import sys
import time
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import SRSTE, NMPattern, NMPrecision, NMSparsifier
from lightning_nm.export.sources import read_checkpoint
from lightning_nm.export.verification import verify_state
from lightning_nm.functional import is_nm, magnitude_mask, unpack_mask
from tests.support.lightning_models import callback, is_plain
from tests.support.outside import ScaledMask
from tests.support.parallel import (
    FIRST_MASKS_STAY,
    METHODS,
    STEPS,
    Net,
    assert_equal,
    data,
    fit,
    train,
    whole,
)
from tests.support.processes import in_processes

UNSUPPORTED = ("scaled-mask", "lbc", "mask-logits", "cast-scaled")
NAMES = [name for name in METHODS if name not in (*UNSUPPORTED, "step", "sr-ste-scheduled")]
FORMS = ({}, {"accumulate_grad_batches": 2}, {"optimizer": "adamw"})


def sharded(method, world=2, whole_file=True, **options):
    strategy = ModelParallelStrategy(world, 1, save_distributed_checkpoint=not whole_file)
    return train(method, world, strategy, **options)


def sharded_runs(runs, world):
    return [sharded(method, world, **options) for method, options in runs]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_weights_train_as_whole_ones(tmp_path, world):
    """On three processes no layer's rows divide evenly, and the last layer has fewer blocks than there are."""
    # Each pair of any two of method, form and number of processes occurs.
    runs = [
        (method, form)
        for i, method in enumerate(NAMES)
        for j, form in enumerate(FORMS)
        if (i + j - world) % 2
    ]
    runs += [("step", {})]
    runs += [
        (name, {"dense_end": 2, "optimizer": "adamw"}) for name in NAMES if "scheduled" in name
    ]
    everyone = in_processes(world, tmp_path / "run", sharded_runs, runs, world)
    for each, *ranks in zip(runs, *everyone, strict=True):
        method, options = each
        alone = train(method, **options)
        for found in ranks:
            assert_equal(found, alone, 1e-9, each)
            assert_equal(found, ranks[0], 0, each)
        moving = [layer for layer in alone[1].values() if layer["total_flips"]]
        # The masks of step come late, when few of the smallest layer's entries still move.
        least = 1 if method == "step" else len(alone[1])
        assert len(moving) >= least or method in FIRST_MASKS_STAY


def resumed_runs(runs, folder):
    found = []
    for k, (method, options) in enumerate(runs):
        options = {"max_epochs": 2, "limit_val_batches": 1, **options}
        path = f"{folder}/{k}.ckpt"
        straight = sharded(method, **options)
        sharded(method, max_steps=STEPS, save=path, **options)
        found.append((straight, sharded(method, ckpt_path=path, **options)))
    return found


def one_file(path):
    """A checkpoint as one file, by the command that `verify` names for a sharded one."""
    if path.is_file():
        return path
    module = "lightning.fabric.utilities.consolidate_checkpoint"
    with mock.patch.object(sys, "argv", [module, str(path)]):
        runpy.run_module(module, run_name="__main__")
    return path.with_name(f"{path.name}.consolidated")


@pytest.mark.slow
def test_sharded_runs_resume_bit_for_bit(tmp_path):
    # Lightning cannot resume plain SGD, which has no state, from a single file.
    forms = [{"optimizer": "adamw"}, {"optimizer": "sgd", "whole_file": False}]
    runs = [(method, form) for method in NAMES for form in forms]
    options = {"optimizer": "adamw", "whole_file": False, "estimator": "mvue"}
    runs += [("transposable", options), ("step", {})]
    everyone = in_processes(2, tmp_path / "run", resumed_runs, runs, str(tmp_path))
    for k, each in enumerate(runs):
        source = read_checkpoint(one_file(tmp_path / f"{k}.ckpt"))
        verdicts = verify_state(source.weights, source.states[0])
        assert {verdict.verdict for verdict in verdicts} == {"N:M"}, each
        for found in everyone:
            straight, resumed = found[k]
            assert_equal(resumed, straight, 0, each)


BI_MASK = {"optimizer": "adamw", "max_epochs": 2}


def continued(folder):
    """Two sharded runs: one that goes on from a file of one process, one whose files another number goes on from."""
    sharded("bi-mask", max_steps=STEPS, save=f"{folder}/two.ckpt", **BI_MASK)
    options = {"max_epochs": 2, "max_steps": STEPS, "whole_file": False}
    sharded("bame", save=f"{folder}/shards.ckpt", **options)
    return sharded("bi-mask", ckpt_path=f"{folder}/alone.ckpt", **BI_MASK)


def three(folder):
    return sharded("bame", 3, False, max_epochs=2, ckpt_path=f"{folder}/shards.ckpt")


@pytest.mark.slow
def test_checkpoints_move_between_one_two_and_three_processes(tmp_path):
    alone = train("bi-mask", **BI_MASK)
    train("bi-mask", max_steps=STEPS, save=tmp_path / "alone.ckpt", **BI_MASK)
    for found in in_processes(2, tmp_path / "two", continued, str(tmp_path)):
        assert_equal(found, alone, 1e-9)
    assert_equal(train("bi-mask", ckpt_path=tmp_path / "two.ckpt", **BI_MASK), alone, 1e-9)
    alone = train("bame", max_epochs=2)
    for found in in_processes(3, tmp_path / "three", three, str(tmp_path)):
        assert_equal(found, alone, 1e-9)


def is_sparse(model):
    weights = [value for key, value in whole(model).items() if key.endswith("weight")]
    return len(weights) == 3 and all(is_nm(w, NMPattern(2, 4), dim=1) for w in weights)


class Look(pl.Callback):
    """The state dict is N:M in the midst of a fit, too, where an evaluation has left the whole parameters."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        self.seen.append(is_sparse(pl_module))


def half_precision(method):
    """The masks follow the float32 shard; figures, tables and evaluation work."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Net("adamw", dtype=torch.float32, settings={"mp_policy": policy})
    nm, look = callback(method, log_layers=True, skip_first_last=False), Look()
    nm.show_tables = True
    loader = data(dtype=torch.float32)
    options = {"val_check_interval": 3, "log_every_n_steps": 2, "num_sanity_val_steps": 1}
    options |= {"loader": loader, "limit_val_batches": 1.0}
    trainer, _ = fit([nm, look], model, 2, ModelParallelStrategy(2, 1), **options)
    state = nm.state_dict()["layers"]["net.3"]
    figures = {key: float(value) for key, value in trainer.callback_metrics.items()}
    trainer.validate(model, loader, verbose=False)
    return look.seen, figures, state["forward_mask"], state["latent"], whole(model)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask"])
def test_masks_follow_the_float32_shards(tmp_path, method):
    first, second = in_processes(2, tmp_path / "run", half_precision, method)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    seen, figures, packed, latent, weights = first
    assert seen == [True] * 4, "in the sanity check, twice within the epoch, after the fit"
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
    """A run whose GEMMs a kernel in software makes, and what it ran; the same without."""
    options = {"backends": [SimulatedSparseKernel()], "decisions": f"{folder}/kernels.json"}
    plugin, found = NMPrecision(kernels="sparse", **options), []
    for plugins in ([plugin], []):
        nm = callback(METHODS["transposable"](), grad_estimator="mvue", include="net.3")
        strategy = ModelParallelStrategy(2, 1)
        options = {"plugins": plugins, "accumulate_grad_batches": 2}
        found.append(whole(fit([nm], Net("adamw"), 2, strategy, **options)[1]))
    used = [use.product.key.gemm for use in plugin.router.used() if use.kernel == "simulated"]
    return used, *found


@pytest.mark.slow
def test_kernels_multiply_what_fsdp_gathers(tmp_path):
    for used, weights, expected in in_processes(2, tmp_path / "run", routed, str(tmp_path)):
        assert used == ["forward", "dgrad", "wgrad"]
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


class Ridge(SRSTE):
    """A penalty of the whole weight, next to the decay of the part that is here."""

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


def linears():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def refused():
    for names, reason in ((True, "is flat"), (False, "is computed, not stored")):
        device = torch.device("cpu")
        first = FullyShardedDataParallel(linears(), use_orig_params=names, device_id=device)
        with pytest.raises(ValueError, match=rf"no layer can be masked.*'0': its weight {reason}"):
            NMSparsifier(first, "2:4", "sr-ste").attach()
    left_behind = fully_shard(linears(), mesh=init_device_mesh("cpu", (2,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMesh, "device_type", "cuda")  # as if GEMMs were made there
        with pytest.raises(
            ValueError, match=r"'0' is named .* cannot be masked: FSDP keeps it on the cpu"
        ):
            NMSparsifier(left_behind, "2:4", "sr-ste", include="0").attach()
    model, nm = Net(), callback(ScaledMask(), skip_first_last=False)
    with pytest.raises(ValueError, match=r"ScaledMask owns parameters at layer 'net\.0'"):
        fit([nm], model, 2, ModelParallelStrategy(2, 1))
    return is_plain(model)


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
    news, model, other = Path(folder) / "news", Net("adamw"), Net("adamw")
    nm = callback("bi-mask", skip_first_last=False)

    def again(nm, model, *callbacks, **options):
        return fit([nm, *callbacks], model, 2, ModelParallelStrategy(2, 1), **options)[0]

    with pytest.raises(ArithmeticError):
        again(nm, model, OneFails(news))
    heard = news.exists()
    news.touch()
    # After it: what follows takes both processes.
    step = nm.state_dict()["clock"]
    assert is_sparse(model)
    trainer = again(nm, model)
    steps = nm.state_dict()["clock"] - step
    trainer.save_checkpoint(f"{folder}/other.ckpt")
    with pytest.raises(ValueError, match="of another sparse model"):
        again(callback("asp", skip_first_last=False), other, ckpt_path=f"{folder}/other.ckpt")
    return heard, step, steps, is_plain(model) and is_plain(other)


@pytest.mark.slow
def test_a_process_that_fails_alone_waits_for_no_other(tmp_path):
    for rank, found in enumerate(in_processes(2, tmp_path / "run", broken_off, str(tmp_path))):
        assert found == (rank == 0, 4, STEPS, True)
