"""CAST's step against AdamS written out entry by entry, its end, and what a user relies on."""

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_nm import CAST, NMSparsifier, NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.methods.cast import SCALE
from tests.support.bame import batch, linear
from tests.support.kinds import KINDS, make
from tests.support.lightning_models import Data, make_trainer, new_model

RATE, BETAS, EPSILON = 0.02, (0.8, 0.9), 1e-8
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, RATE, BETAS, EPSILON),
    "adam-foreach": lambda p: torch.optim.Adam(p, RATE, BETAS, EPSILON, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, RATE, BETAS, EPSILON, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, RATE, BETAS, EPSILON, weight_decay=0.1),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(
        p, RATE, BETAS, EPSILON, weight_decay=0.1, amsgrad=True
    ),
}


def backward(module, optimizer, step):
    """A training step up to its gradients; the optimizer has the scale's, too."""
    optimizer.zero_grad()
    x, y = batch(step, next(module.parameters()).dtype)
    (module(x) - y).square().mean().backward()


def run(module, sparsifier, optimizer, steps, start=0):
    for step in range(start, start + steps):
        backward(module, optimizer, step)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


class Entry:
    """One number under Adam, or under AdamS where it is decayed."""

    def __init__(self, value, weight_decay, amsgrad):
        self.value, self.mu, self.v, self.most, self.t = value, 0.0, 0.0, 0.0, 0
        self.weight_decay, self.amsgrad = weight_decay, amsgrad

    def step(self, mu, square):
        """With the moment ``mu``, and the square that V takes."""
        self.t += 1
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * square
        self.most = max(self.most, self.v)
        second = (self.most if self.amsgrad else self.v) / (1 - BETAS[1] ** self.t)
        first = mu / (1 - BETAS[0] ** self.t)
        self.value -= RATE * self.weight_decay * self.value
        self.value -= RATE * first / (math.sqrt(second) + EPSILON)

    def adam(self, grad):
        self.mu = BETAS[0] * self.mu + (1 - BETAS[0]) * grad
        self.step(self.mu, grad**2)

    def adams(self, grad, kept, ramp, decay):
        self.mu = BETAS[0] * self.mu + (1 - BETAS[0]) * grad
        used = self.mu
        if not kept:
            sign = (self.value > 0) - (self.value < 0)
            used = (1 - ramp) * self.mu + ramp * decay * sign
        self.step(used, used**2)


def largest(weight, pattern):
    n, m = pattern
    kept = set()
    for i, row in enumerate(weight):
        for c in range(0, len(row), m):
            order = sorted(range(c, c + m), key=lambda j: (-abs(row[j].value), j))
            kept |= {(i, j) for j in order[:n]}
    return kept


def simulate(start, pattern, steps, *, decay, every, groups, end, weight_decay, amsgrad):
    """CAST one number at a time; W, A and the mask after the last step."""
    rows, cols = start.shape
    w = [[Entry(v, weight_decay, amsgrad) for v in row] for row in start.tolist()]
    a = [[Entry(1.0, weight_decay, amsgrad) for _ in range(groups)] for _ in range(rows)]
    kept = largest(w, pattern)
    mask = {(i, j) for i in range(rows) for j in range(cols)}
    for t in range(steps):
        x, y = batch(t)
        used = [
            [
                w[i][j].value * a[i][j * groups // cols].value if (i, j) in mask else 0.0
                for j in range(cols)
            ]
            for i in range(rows)
        ]
        current = torch.tensor(used, dtype=torch.float64, requires_grad=True)
        (x @ current.t() - y).square().mean().backward()
        g = [
            [v if (i, j) in mask else 0.0 for j, v in enumerate(row)]
            for i, row in enumerate(current.grad.tolist())
        ]
        for i in range(rows):
            by_group = [0.0] * groups
            for j in range(cols):
                by_group[j * groups // cols] += g[i][j] * w[i][j].value
            for j in range(cols):
                grad = g[i][j] * a[i][j * groups // cols].value
                w[i][j].adams(grad, t >= end or (i, j) in kept, t / end, decay)
            for c in range(groups):
                a[i][c].adam(by_group[c])
        if t + 1 == end:
            mask = largest(w, pattern)
        elif (t + 1) % every == 0:
            kept = largest(w, pattern)
        for i in range(rows):
            for j in range(cols):
                if (i, j) not in mask:
                    w[i][j].value = 0.0
    values = [[[entry.value for entry in row] for row in part] for part in (w, a)]
    return *(torch.tensor(part, dtype=torch.float64) for part in values), mask


@pytest.mark.parametrize(
    ("name", "pattern", "groups"),
    [*((name, (2, 4), 2) for name in OPTIMIZERS), ("adamw", (1, 8), 1)],
)
def test_the_training_is_what_is_written(name, pattern, groups):
    method = CAST(decay=0.01, refresh_every=3, scale_groups=groups, end=14)
    module, sparsifier, optimizer, layer = linear(
        method, "{}:{}".format(*pattern), OPTIMIZERS[name]
    )
    start = module[0].weight.detach().clone()
    run(module, sparsifier, optimizer, 18)
    weight, scale, mask = simulate(
        start,
        pattern,
        18,
        decay=0.01,
        every=3,
        groups=groups,
        end=14,
        weight_decay=0.1 if name.startswith("adamw") else 0.0,
        amsgrad="amsgrad" in name,
    )
    torch.testing.assert_close(layer.weight.detach(), weight)
    torch.testing.assert_close(layer.parameters[SCALE].detach(), scale)
    assert {tuple(place) for place in layer.forward_mask.nonzero().tolist()} == mask
    assert (scale - 1).abs().max() > 0.01, "the scale did not learn"


def test_the_moment_and_the_gradient_are_adams_after_the_step():
    module, sparsifier, optimizer, layer = linear(CAST(decay=1.0, end=8), make=OPTIMIZERS["adam"])
    mean = torch.zeros(8, 16, dtype=torch.float64)
    for step in range(10):
        backward(module, optimizer, step)
        grad = layer.weight.grad.clone()
        mean.lerp_(grad, 1 - BETAS[0])
        sparsifier.before_step(optimizer)
        optimizer.step()
        assert torch.equal(layer.weight.grad, grad)
        torch.testing.assert_close(optimizer.state[layer.weight]["exp_avg"], mean)
        sparsifier.step()


def trained(decay, steps=120):
    """The share of the magnitude that the projection takes away."""
    method = CAST(decay=decay, refresh_every=10, end=steps)
    module, sparsifier, optimizer, _ = linear(
        method, make=lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0)
    )
    assert sparsifier.stats()["decayed_magnitude"] > 0.1
    for step in range(steps - 1):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / steps)
        run(module, sparsifier, optimizer, 1, start=step)
    decayed = sparsifier.stats()["decayed_magnitude"]
    run(module, sparsifier, optimizer, 1, start=steps)
    assert sparsifier.stats()["decayed_magnitude"] == 0
    return decayed


def test_the_decay_empties_what_the_projection_takes_away():
    assert trained(0.1) < 0.02


@pytest.mark.slow
def test_without_a_decay_the_projection_takes_much_away():
    assert trained(0.0) > 0.05


def test_the_model_is_dense_until_the_end_and_says_so():
    module, sparsifier, optimizer, layer = linear(CAST(end=3), make=OPTIMIZERS["adamw"])
    for step in range(5):
        is_sparse = step >= 3
        assert (sparsifier.violations() == 0) == is_sparse
        assert nmf.is_nm(layer.forward_weight(), "2:4") == is_sparse
        assert sparsifier.stats()["density"] == (0.5 if is_sparse else 1.0)
        kinds = [gemm.kind for gemm in layer.gemms()]
        assert kinds == (["n:m", "masked", "outputs"] if is_sparse else ["dense"] * 3)
        assert layer.gemms().forward.paper == (0.5 if is_sparse else 1.0)
        run(module, sparsifier, optimizer, 1, start=step)
    assert sparsifier.flops_ratios(mean=True)["eligible"] == pytest.approx((3 + 2 * 2.5 / 3) / 5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_and_its_gradient_are_those_of_autograd(kind):
    module, _ = make(kind)
    sparsifier = NMSparsifier(module, "2:4", CAST(end=5), skip_first_last=False).attach()
    generator = torch.Generator().manual_seed(0)
    for layer in sparsifier.layers.values():
        if layer.spec.forward_reason:
            assert not layer.parameters
            continue
        scale = layer.parameters[SCALE]
        scale.data.copy_(1 + torch.rand(scale.shape, generator=generator, dtype=scale.dtype))
        weight = layer.weight.detach().clone().requires_grad_()
        rows = layer.view.rows(weight)
        assert scale.shape == (rows.shape[0], 2)
        factor = scale.detach().clone().requires_grad_()
        parts = [
            part * factor[:, c].view(-1, *[1] * (rows.dim() - 1))
            for c, part in enumerate(rows.chunk(2, 1))
        ]
        wanted = layer.view.unrows(torch.cat(parts, 1))
        torch.testing.assert_close(layer.forward_weight(), wanted.detach())
        grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        wanted.backward(grad)
        found = layer.spec.method.weight_gradient(layer, layer.weight.detach(), grad.clone())
        torch.testing.assert_close(found[0], weight.grad)
        torch.testing.assert_close(found[1], factor.grad)


def test_a_skipped_step_of_a_fused_optimizer_changes_nothing():
    module, sparsifier, optimizer, layer = linear(
        CAST(decay=1.0, end=8), make=OPTIMIZERS["adam-fused"], dtype=torch.float32
    )
    run(module, sparsifier, optimizer, 2)
    weight = layer.weight.detach().clone()
    moment = optimizer.state[layer.weight]["exp_avg"].clone()
    backward(module, optimizer, 2)
    sparsifier.before_step(optimizer)
    # As a GradScaler does.
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    sparsifier.step()
    assert torch.equal(layer.weight, weight)
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], moment)


def test_a_step_that_fails_is_undone_by_the_next():
    weights = []
    for fails in (False, True):
        module, sparsifier, optimizer, layer = linear(
            CAST(decay=1.0, end=8), make=OPTIMIZERS["adam"]
        )
        run(module, sparsifier, optimizer, 3)
        if fails:
            backward(module, optimizer, 3)
            sparsifier.before_step(optimizer)
            handle = optimizer.register_step_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            handle.remove()
            sparsifier.step()
        run(module, sparsifier, optimizer, 2, start=3)
        weights.append(layer.weight.detach())
    assert torch.equal(*weights)


def fail(*_):
    raise KeyboardInterrupt


def test_it_works_without_a_scale():
    module, sparsifier, optimizer, layer = linear(
        CAST(scale_groups=0, end=3), make=OPTIMIZERS["adamw"]
    )
    assert torch.equal(layer.forward_weight(), layer.weight)
    run(module, sparsifier, optimizer, 4)
    assert not layer.parameters
    assert nmf.is_nm(layer.weight, "2:4")


def test_columns_that_no_group_divides_have_one_number_a_row():
    sparsifier = NMSparsifier(
        nn.Linear(9, 4), "1:3", CAST(scale_groups=2, end=3), skip_first_last=False
    ).attach()
    (layer,) = sparsifier.layers.values()
    assert layer.parameters[SCALE].shape == (4, 1)


def test_a_fit_ends_with_an_nm_model_and_checkpoint(tmp_path):
    """By the default end, which is that of the plan."""
    saves = ModelCheckpoint(str(tmp_path), filename="{step}", save_top_k=-1, save_last=True)
    nm = NMSparsityCallback("2:4", "cast", show_tables=False)
    model = new_model(optimizer="adamw")
    trainer = make_trainer(tmp_path, [nm, saves])
    trainer.fit(model, Data())
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    first = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["state_dict"]
    for key in ("net.3.weight", "net.6.weight"):
        assert not nmf.is_nm(first[key], "2:4", dim=1), "CAST is dense until its end"
        assert nmf.is_nm(last[key], "2:4", dim=1)
        assert torch.equal(last[key], model.state_dict()[key])


class Overflows(pl.Callback):
    """Makes the first gradients infinite, so that the scaler skips their steps."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step < 3:
            pl_module.net[6].weight.grad.fill_(math.inf)


def test_a_fit_with_skipped_steps_ends_with_an_nm_model_and_checkpoint(tmp_path):
    """The clock does not count them, so that it never reaches the planned end."""
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    saves = ModelCheckpoint(str(tmp_path), save_last=True)
    nm = NMSparsityCallback("2:4", "cast", show_tables=False)
    model = new_model(optimizer="adamw")
    make_trainer(tmp_path, [nm, Overflows(), saves], plugins=[scaled]).fit(model, Data())
    layers = nm.state_dict()["layers"]
    assert {name: (layer["step"], layer["schedule"]) for name, layer in layers.items()} == {
        name: (9, [12]) for name in ("net.3", "net.6")
    }
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    for key in ("net.3.weight", "net.6.weight"):
        assert nmf.is_nm(last[key], "2:4", dim=1)
        assert torch.equal(last[key], model.state_dict()[key])


def test_a_plain_loop_that_stops_early_can_finish():
    module, sparsifier, optimizer, layer = linear(CAST(end=9), make=OPTIMIZERS["adamw"])
    run(module, sparsifier, optimizer, 4)
    assert sparsifier.violations()
    sparsifier.finish()
    weight = layer.forward_weight()
    assert nmf.is_nm(weight, "2:4")
    sparsifier.finish()
    assert torch.equal(layer.forward_weight(), weight)
    run(module, sparsifier, optimizer, 2, start=4)
    assert sparsifier.violations() == 0


def test_an_early_stop_leaves_a_dense_model_and_says_so(tmp_path, capsys):
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step >= 4

    nm = NMSparsityCallback("2:4", "cast")
    make_trainer(tmp_path, [nm, Stops()], limit_val_batches=0).fit(
        new_model(optimizer="adamw"), Data()
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "the trained model is dense in 2 of 2 layers" in printed


@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), "not for SGD"),
        (lambda p: torch.optim.NAdam(p, 0.1), "not for NAdam"),
        (lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1), r"weight_decay=0\.1 .* use AdamW"),
        (lambda p: torch.optim.Adam(p, 0.1, maximize=True), "maximize=True"),
    ],
)
def test_other_optimizers_are_refused(make_optimizer, message):
    module = nn.Sequential(nn.Linear(8, 8))
    sparsifier = NMSparsifier(module, "2:4", CAST(end=5), skip_first_last=False).attach()
    with pytest.raises(ValueError, match=message):
        sparsifier.register(make_optimizer(module.parameters()))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"decay": -1}, ValueError, "decay=-1"),
        ({"decay": math.inf}, ValueError, "decay=inf"),
        ({"refresh_every": 0}, ValueError, "refresh_every=0"),
        ({"scale_groups": -1}, ValueError, "scale_groups=-1"),
        ({"end": 0}, ValueError, "end=0 leaves no step"),
        ({"end": 1.5}, ValueError, "end=1.5"),
        ({"end": "1"}, TypeError, "end='1'"),
    ],
)
def test_bad_settings_are_named(options, error, message):
    with pytest.raises(error, match=message):
        CAST(**options)


def test_an_end_beyond_the_plan_is_refused():
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"end=20 is step 20 of 10, so the model would stay dense"):
        NMSparsifier(model, "2:4", CAST(end=20), skip_first_last=False, planned_steps=10).attach()
    with pytest.raises(ValueError, match=r"CAST's end=1\.0 is a share"):
        NMSparsifier(model, "2:4", "cast", skip_first_last=False).attach()
