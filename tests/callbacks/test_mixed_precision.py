"""Precisions and the optimizers' implementations: steps that a GradScaler skips, fused steps, float32 masters."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_nm import (
    ASP,
    BAME,
    MVUE,
    SRSTE,
    BiMask,
    NMSparsityCallback,
    RigL,
    TransposableMask,
)
from lightning_nm import functional as nmf
from lightning_nm.nn.adapters import Adapter
from lightning_nm.nn.state import layer_state
from tests.support.lightning_models import Inspect, make_trainer

METHODS = {
    "sr-ste": lambda: (SRSTE(1e-2), None),
    "asp": lambda: (ASP(start=2), None),
    "transposable": lambda: (TransposableMask(update_every=1, decay=1e-2), None),
    "bi-mask": lambda: (BiMask(permute_every=3), None),
    "rigl": lambda: (RigL(every=2, stop=7, drop=0.9), None),
    "bame": lambda: (BAME(start=1, stop=7, every=2, budget=1.0, evidence_rate=0.5), None),
    "bame-bi-mask": lambda: (
        BAME(stop=6, every=3, budget=1.0, evidence_rate=0.5, dgrad="bi-mask"),
        None,
    ),
    "three-gemms": lambda: (TransposableMask(update_every=3), MVUE("1:2", dense_start=1)),
}
FAST = ("sr-ste", "bame")
every_method = pytest.mark.parametrize(
    "method",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
)
OPTIMIZERS = {
    "sgd": lambda parameters, **how: torch.optim.SGD(
        parameters, 0.2, momentum=0.9, weight_decay=1e-3, **how
    ),
    "adamw": lambda parameters, **how: torch.optim.AdamW(parameters, 1e-2, **how),
}
LOOP = {"foreach": False, "fused": False}


class Net(pl.LightningModule):
    """No batch norm and no dropout: a batch whose step is skipped leaves no trace."""

    def __init__(self, optimizer="sgd", how=LOOP, infinite=()):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)
        )
        self.optimizer, self.how, self.infinite = optimizer, how, infinite

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss * torch.inf if batch_idx in self.infinite else loss

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters(), **self.how)


def data(batches, dtype=torch.float32, left_out=()):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (batches * 8,), generator=generator)
    x = torch.randn(batches * 8, 16, generator=generator, dtype=dtype) + y[:, None]
    kept = [k for k in range(batches * 8) if k // 8 not in left_out]
    return DataLoader(Subset(TensorDataset(x, y), kept), batch_size=8)


class FixedScale(torch.amp.GradScaler):
    """Skips steps, and never changes its scale, which would round the gradients in fp16 otherwise."""

    def update(self, new_scale=None):
        super().update(self._init_scale)


def fp16(scaler=FixedScale):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler("cpu", init_scale=256.0))]}


def fit(tmp_path, method, model, loader, *callbacks, **options):
    """The callback after a fit of one epoch."""
    method, estimator = METHODS[method]()
    nm = NMSparsityCallback("2:4", method, estimator, skip_first_last=False, show_tables=False)
    options = {"max_epochs": 1, "limit_val_batches": 0, **options}
    make_trainer(tmp_path, [nm, *callbacks], **options).fit(model, loader)
    assert not any(isinstance(module, Adapter) for module in model.modules())
    for module in model.net[::2]:
        assert nmf.is_nm(module.weight, "2:4", dim=1)
        assert module.weight.isfinite().all()
    return nm


def plain(value):
    """Tensors as bytes, to compare with ``==``, bit for bit."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return (
        value.detach().contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else value
    )


def state(layer):
    """All of a layer but the number of its noise, which is another one in every micro-batch."""
    pending = {
        "clock": layer.progress.clock,
        "dense_gradient": layer.progress.dense_gradient,
        "estimating": layer.progress.estimating,
    }
    saved = {key: value for key, value in layer_state(layer).items() if key != "draws"}
    return plain({**saved, **pending, "weight": layer.weight})


class Watch(pl.Callback):
    """States of all layers before the first batch and after each; noise that skipped batches used elsewhere."""

    def __init__(self, draws=()):
        self.states, self.draws = [], dict(draws)

    def look(self, pl_module):
        self.layers = [module.nm_layers["weight"] for module in pl_module.net[::2]]
        self.states.append([state(layer) for layer in self.layers])

    def on_train_start(self, trainer, pl_module):
        self.look(pl_module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for _ in range(self.draws.get(batch_idx, 0)):
            for layer in self.layers:
                layer.draw_noise()

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.look(pl_module)


SKIPPED = (0, 3, 4, 7)
"""Windows of accumulation whose gradients overflow: among them the first, two in a row, and ones with a move due."""
WINDOWS = 11


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fused", [False, True])
@every_method
def test_steps_that_a_scaler_skips_leave_no_trace(method, fused, optimizer, accumulate, tmp_path):
    how = {
        **LOOP,
        "fused": fused,
    }  # a fused optimizer is called even then, and skips the step by itself
    # torch's own: fused SGD whose very first step is skipped goes on with a momentum that was never written.
    windows = SKIPPED[1:] if fused and optimizer == "sgd" else SKIPPED
    of_window = [range(w * accumulate, (w + 1) * accumulate) for w in range(WINDOWS)]
    skipped = [batch for w in windows for batch in of_window[w]]
    options = {"accumulate_grad_batches": accumulate}
    watch, batches = Watch(), WINDOWS * accumulate
    model = Net(
        optimizer, how, infinite=[of_window[w][-1] for w in windows]
    )  # in the last micro-batch of a window
    fit(tmp_path, method, model, data(batches), watch, **options, **fp16())
    for batch in skipped:
        assert watch.states[batch + 1] == watch.states[batch]

    left = [batch for batch in range(batches) if batch not in skipped]
    draws = {
        k: batch - before - 1 for k, (before, batch) in enumerate(itertools.pairwise([-1, *left]))
    }
    other, without = Watch(draws), Net(optimizer, how)
    fit(tmp_path, method, without, data(batches, left_out=skipped), other, **options, **fp16())
    assert [watch.states[batch + 1] for batch in left] == other.states[1:]
    assert plain(model.state_dict()) == plain(without.state_dict())
    assert len({layers[0]["forward_mask"] for layers in other.states}) > 1, "the masks stood still"


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@every_method
def test_fused_and_foreach_are_the_loop(method, optimizer, scaled, tmp_path):
    """In float64, which autocast leaves alone: no rounding moves a mask."""

    def look(trainer, model):
        for layer in (module.nm_layers["weight"] for module in model.net[::2]):
            masks.append(plain({"masks": layer.masks.bits, "permutation": layer.masks.permutation}))
            weights.append(layer.weight.detach().flatten().clone())

    found = []
    for how in (LOOP, {"foreach": True}, {"fused": True}):
        masks, weights = [], []
        options = fp16(torch.amp.GradScaler) if scaled else {}
        fit(
            tmp_path,
            method,
            Net(optimizer, how).double(),
            data(12, torch.float64),
            Inspect(look),
            **options,
        )
        found.append((masks, torch.cat(weights)))
    (masks, weights), *others = found
    for other_masks, other_weights in others:
        assert other_masks == masks
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-10)
    assert len({moment["masks"] for moment in masks[::3]}) > 1, "the masks stood still"


def selected(method, layer, weight):
    """The mask of a weight, in the weight's own precision."""
    if method in ("transposable", "three-gemms"):
        return nmf.transposable_mask(weight, layer.pattern)
    return nmf.nm_mask(weight.abs(), layer.pattern, dim=1)


PRECISIONS = {
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}


@pytest.mark.parametrize("precision", PRECISIONS)
@every_method
def test_masks_are_selected_on_the_master_weight(method, precision, tmp_path):
    dtype = PRECISIONS[precision]
    options = fp16() if precision == "16-mixed" else {"precision": precision}
    coarse = []

    def look(trainer, model):
        for layer in (module.nm_layers["weight"] for module in model.net[::2]):
            weight = layer.weight.detach()
            assert weight.dtype == dtype
            if layer.forward_mask is None:  # dense so far
                assert (method, layer.step) == ("asp", 1)
                continue
            assert nmf.is_nm(layer.forward_weight(), "2:4", dim=1)
            if method in ("sr-ste", "bi-mask", "transposable"):  # at every step anew
                assert torch.equal(layer.forward_mask, selected(method, layer, weight))
            coarse.append(
                bool((layer.forward_mask ^ selected(method, layer, weight.bfloat16())).any())
            )

    class First(pl.Callback):
        def on_train_start(self, trainer, model):
            for layer in (module.nm_layers["weight"] for module in model.net[::2]):
                if layer.forward_mask is not None:
                    assert torch.equal(
                        layer.forward_mask, selected(method, layer, before[layer.name].to(dtype))
                    )

    model = Net()
    before = {f"net.{k}": model.net[k].weight.detach().clone() for k in (0, 2, 4)}
    fit(tmp_path, method, model, data(12), First(), Inspect(look), **options)
    if method in ("sr-ste", "bi-mask", "transposable") and dtype != torch.bfloat16:
        assert any(coarse), "bfloat16 would have told as much"
