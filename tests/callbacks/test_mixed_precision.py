"""Precisions and the optimizers' implementations: steps that a GradScaler skips, fused steps, float32 masters."""

import itertools
from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_nm import ASP, BAME, MVUE, SRSTE, BiMask, RigL, TransposableMask
from lightning_nm import functional as nmf
from lightning_nm.nn.state import layer_state
from tests.support import lightning_models
from tests.support.lightning_models import Inspect, callback, is_plain

METHODS = {
    "sr-ste": lambda: SRSTE(1e-2),
    "asp": lambda: ASP(start=2),
    "transposable": lambda: TransposableMask(update_every=1, decay=1e-2),
    "bi-mask": lambda: BiMask(permute_every=3),
    "rigl": lambda: RigL(every=2, stop=7, drop=0.9),
    "bame": lambda: BAME(start=1, stop=7, every=2, budget=1.0, evidence_rate=0.5),
    "bame-bi-mask": lambda: BAME(stop=6, every=3, budget=1.0, evidence_rate=0.5, dgrad="bi-mask"),
    "three-gemms": lambda: TransposableMask(update_every=3),
}
FOLLOWS = ("sr-ste", "bi-mask", "transposable")
"""Methods whose masks follow the weights at every step."""
every_method = pytest.mark.parametrize(
    "method",
    [
        name if name in ("sr-ste", "bame") else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
    ],
)
OPTIMIZERS = {
    "sgd": lambda p, **how: torch.optim.SGD(p, 0.2, momentum=0.9, weight_decay=1e-3, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, 1e-2, **how),
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
    estimator = MVUE("1:2", dense_start=1) if method == "three-gemms" else None
    nm = callback(METHODS[method](), grad_estimator=estimator, skip_first_last=False)
    options = {"max_epochs": 1, "limit_val_batches": 0, **options}
    lightning_models.fit(tmp_path, [nm, *callbacks], model, loader, **options)
    assert is_plain(model)
    for module in model.net[::2]:
        assert nmf.is_nm(module.weight, "2:4", dim=1)
        assert module.weight.isfinite().all()


def layers_of(model):
    return [module.nm_layers["weight"] for module in model.net[::2]]


def plain(value):
    """Tensors as bytes, to compare with ``==``, bit for bit."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().numpy().tobytes()
    return value


def state(layer):
    """All of a layer but the number of its noise, which is another one in every micro-batch."""
    progress = layer.progress
    pending = (progress.clock, progress.dense_gradient, progress.estimating)
    return plain({**layer_state(layer), "draws": None, "weight": layer.weight}), pending


class Watch(pl.Callback):
    """States of all layers before the first batch and after each; noise that skipped batches used elsewhere."""

    def __init__(self, draws=()):
        self.states, self.draws = [], Counter(draws)

    def look(self, trainer, pl_module, *args):
        self.states.append([state(layer) for layer in layers_of(pl_module)])

    on_train_start = on_train_batch_end = look

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for layer in layers_of(pl_module):
            for _ in range(self.draws[batch_idx]):
                layer.draw_noise()


SKIPPED = (0, 3, 4, 7)
"""Windows of accumulation whose gradients overflow: among them the first, two in a row, and ones with a move due."""
WINDOWS = 11


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fused", [False, True])
@every_method
def test_steps_that_a_scaler_skips_leave_no_trace(method, fused, optimizer, accumulate, tmp_path):
    how = LOOP | {
        "fused": fused
    }  # a fused optimizer is called even then, and skips the step by itself
    # torch's own: fused SGD whose very first step is skipped goes on with a momentum that was never written.
    windows = SKIPPED[1:] if fused and optimizer == "sgd" else SKIPPED
    batches = range(WINDOWS * accumulate)
    skipped = [batch for batch in batches if batch // accumulate in windows]
    left = [batch for batch in batches if batch not in skipped]
    options = {"accumulate_grad_batches": accumulate, **fp16()}
    # In the last micro-batch of a window.
    model, watch = Net(optimizer, how, infinite=skipped[accumulate - 1 :: accumulate]), Watch()
    fit(tmp_path, method, model, data(len(batches)), watch, **options)
    for batch in skipped:
        assert watch.states[batch + 1] == watch.states[batch]

    pairs = itertools.pairwise([-1, *left])
    draws = {k: batch - before - 1 for k, (before, batch) in enumerate(pairs)}
    other, without, options = Watch(draws), Net(optimizer, how), options | fp16()
    fit(tmp_path, method, without, data(len(batches), left_out=skipped), other, **options)
    assert [watch.states[batch + 1] for batch in left] == other.states[1:]
    assert plain(model.state_dict()) == plain(without.state_dict())
    masks = {layers[0][0]["forward_mask"] for layers in other.states}
    assert len(masks) > 1, "the masks stood still"


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@every_method
def test_fused_and_foreach_are_the_loop(method, optimizer, scaled, tmp_path):
    """In float64, which autocast leaves alone: no rounding moves a mask."""

    def look(trainer, model):
        layers = layers_of(model)
        masks = [plain(part) for x in layers for part in (x.masks.bits, x.masks.permutation)]
        return masks, torch.cat([layer.weight.detach().flatten() for layer in layers])

    found = []
    for how in (LOOP, {"foreach": True}, {"fused": True}):
        inspect, model = Inspect(look), Net(optimizer, how).double()
        options = fp16(torch.amp.GradScaler) if scaled else {}
        fit(tmp_path, method, model, data(12, torch.float64), inspect, **options)
        found.append(list(zip(*inspect.seen, strict=True)))
    (masks, weights), *others = found
    for other_masks, other_weights in others:
        assert other_masks == masks
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-10)
    assert len({moment[0] for moment in masks}) > 1, "the masks stood still"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("bf16-mixed", torch.float32),
        ("16-mixed", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("64-true", torch.float64),
    ],
)
@every_method
def test_masks_are_selected_on_the_master_weight(method, precision, dtype, tmp_path):
    options = fp16() if precision == "16-mixed" else {"precision": precision}

    def selected(layer, weight):
        if method in ("transposable", "three-gemms"):
            return nmf.transposable_mask(weight, layer.pattern)
        return nmf.nm_mask(weight.abs(), layer.pattern, dim=1)

    def look(trainer, model):
        """Whether the weight in bfloat16 would have another mask than a layer has."""
        differs = False
        for layer in layers_of(model):
            weight = layer.weight.detach()
            assert weight.dtype == dtype
            if layer.forward_mask is None:  # dense so far
                assert (method, layer.step) == ("asp", 1)
                continue
            assert nmf.is_nm(layer.forward_weight(), "2:4", dim=1)
            if method in FOLLOWS:
                assert torch.equal(layer.forward_mask, selected(layer, weight))
            differs |= not torch.equal(layer.forward_mask, selected(layer, weight.bfloat16()))
        return differs

    class First(pl.Callback):
        def on_train_start(self, trainer, model):
            for layer, weight in zip(layers_of(model), before, strict=True):
                if layer.forward_mask is not None:
                    assert torch.equal(layer.forward_mask, selected(layer, weight.to(dtype)))

    model, inspect = Net(), Inspect(look)
    before = [module.weight.detach().clone() for module in model.net[::2]]
    fit(tmp_path, method, model, data(12), First(), inspect, **options)
    if method in FOLLOWS and dtype != torch.bfloat16:
        assert any(inspect.seen), "bfloat16 would have told as much"
