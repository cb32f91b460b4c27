"""Where the decay of pruned weights enters, and its factor; tests/strategies/test_decay.py has the precisions."""

from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from lightning_nm import SRSTE, BiMask, NMSparsityCallback, TransposableMask
from lightning_nm import functional as nmf
from lightning_nm.kernels.cpu import mask_passes
from tests.support.lightning_models import Data, make_trainer, new_model
from tests.support.method_loop import Loop, mlp, one_layer

MOST = 0.01  # the norm that gradients are clipped to
PLACES = ("before-clipping", "after-clipping")
runs = mask_passes.runs


class Twice(SGD):
    """A step that calls its base class's."""

    def step(self, closure=None):
        return super().step(closure)


CALLS = {
    "no closure": lambda optimizer, closure: (closure(), optimizer.step())[0],
    "None": lambda optimizer, closure: (closure(), optimizer.step(None))[0],
    "positional": lambda optimizer, closure: optimizer.step(closure),
    "by name": lambda optimizer, closure: optimizer.step(closure=closure),
}


def trained(method, call=CALLS["no closure"], optimizer=SGD):
    """The weights after some clipped steps."""
    run = Loop(method, make=lambda p: optimizer(p, 0.1), model=mlp(16, 32, 16, dtype=torch.double))

    def gradients():
        run.backward()
        run.sparsifier.before_step(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), MOST)
        return 5.0

    for _ in range(5):
        assert call(run.optimizer, gradients) == 5.0
        run.sparsifier.step()
    assert run.sparsifier.clock == run.layer.step == 5
    return [layer.param.detach() for layer in run.layers.values()]


def by_formula(decay, *, after):
    """The same in plain torch."""
    model = mlp(16, 32, 16, dtype=torch.double)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = Loop("dense", model=model).batch
    for step in range(5):
        masks = {
            name: nmf.magnitude_mask(w, "2:4") if w.dim() == 2 else torch.ones_like(w).bool()
            for name, w in values.items()
        }
        used = {name: torch.where(masks[name], w, 0).requires_grad_() for name, w in values.items()}
        y = torch.func.functional_call(mlp(16, 32, 16), used, (batch(step),))
        grads = torch.autograd.grad((y - 1).square().mean(), used.values())
        pulls = [torch.where(masks[name], 0, w) for name, w in values.items()]
        if decay == "relative":
            kept = [torch.where(mask, g, 0) for mask, g in zip(masks.values(), grads, strict=True)]
            sizes = [0.5 * g.norm() / w.norm() for g, w in zip(kept, pulls, strict=True)]
        else:
            sizes = [decay] * len(pulls)
        pulls = [size * w if w.any() else w for size, w in zip(sizes, pulls, strict=True)]
        clipped = [g if after else g + pull for g, pull in zip(grads, pulls, strict=True)]
        norm = sum(g.square().sum() for g in clipped).sqrt()
        clip = min(1.0, MOST / (norm + 1e-6))
        if decay == "relative":  # to the gradient as it is then
            pulls = [pull * clip for pull in pulls]
        for w, g, pull in zip(values.values(), clipped, pulls, strict=True):
            w -= 0.1 * (g * clip + (pull if after else 0))
    return [w for w in values.values() if w.dim() == 2]


@pytest.mark.parametrize("decay_at", PLACES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("optimizer", [SGD, Twice])
@pytest.mark.parametrize("decay", [0.3, "relative"])
def test_the_decay_enters_once_before_or_after_clipping(decay_at, call, optimizer, decay):
    found = trained(SRSTE(decay, decay_at=decay_at), call, optimizer)
    torch.testing.assert_close(found, by_formula(decay, after=decay_at == "after-clipping"))
    for weight, other in zip(found, by_formula(decay, after=decay_at == PLACES[0]), strict=True):
        assert (weight - other).abs().max() > (1e-6 if decay == "relative" else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 10**6), pattern=st.sampled_from(["2:4", "1:4", "1:16"]))
def test_a_relative_decay_is_half_as_long_as_the_gradient_of_kept_entries(dtype, seed, pattern):
    """By the library of CPU kernels and by torch, for gradients of any size."""
    run = Loop(SRSTE(), pattern=pattern, model=one_layer(dtype))
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(run.layer.param.shape, generator=generator) * 10.0 ** (seed % 9 - 6)
    mask, weight = run.layer.forward_mask, run.layer.param.detach().double()
    for by_library in (True, False):
        run.layer.param.grad = grad.to(dtype)
        before = run.layer.param.grad.double()
        with patch.object(mask_passes, "runs", runs if by_library else lambda *_: False):
            run.sparsifier.before_step(run.optimizer)
        added = run.layer.param.grad.double() - before
        expected = torch.where(mask, 0, weight)
        expected *= before[mask].norm() / 2 / expected.norm()
        rounding = torch.finfo(dtype).eps * (before.abs() + expected.abs())
        assert ((added - expected).abs() <= 2 * rounding).all()


@pytest.mark.parametrize("by_library", [True, False])
@pytest.mark.parametrize("size", [1e-40, 1e-6])
def test_the_leftovers_of_weights_that_were_set_to_zero_are_not_pulled_far(by_library, size):
    run = Loop(SRSTE(), model=one_layer(torch.float32))
    pruned = ~run.layer.forward_mask
    weight = run.layer.param.detach()
    weight[pruned] = 0
    weight[tuple(pruned.nonzero()[0])] = size
    run.layer.param.grad = torch.ones_like(weight)
    with patch.object(mask_passes, "runs", runs if by_library else lambda *_: False):
        run.sparsifier.before_step(run.optimizer)
    assert (run.layer.param.grad - 1).abs().max() < 0.05


@pytest.mark.parametrize("by_library", [True, False])
def test_an_infinite_gradient_stays_where_it_was(by_library):
    """Clipping by value makes it finite."""
    run = Loop(SRSTE(), model=one_layer(torch.float32))
    grad = run.layer.param.grad = torch.ones_like(run.layer.param)
    grad[tuple(run.layer.forward_mask.nonzero()[0])] = torch.inf
    before = grad.clone()
    with patch.object(mask_passes, "runs", runs if by_library else lambda *_: False):
        run.sparsifier.before_step(run.optimizer)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("by_library", [True, False])
def test_without_pruned_weights_or_gradients_nothing_decays(by_library):
    run = Loop(SRSTE(), model=one_layer())
    pruned = ~run.layer.forward_mask
    for what in ("weights", "gradients"):
        run.layer.param.grad = torch.ones_like(run.layer.param) * (what == "weights")
        if what == "weights":
            run.layer.param.detach()[pruned] = 0
        before = run.layer.param.grad.clone()
        with patch.object(mask_passes, "runs", runs if by_library else lambda *_: False):
            run.sparsifier.before_step(run.optimizer)
        assert torch.equal(run.layer.param.grad, before)


@pytest.mark.parametrize("make", [SRSTE, BiMask, TransposableMask])
@pytest.mark.parametrize("decay_at", PLACES)
def test_the_factor_multiplies_the_decay(make, decay_at):
    scaled = trained(make(decay=0.1, decay_scale=3, decay_at=decay_at))
    torch.testing.assert_close(scaled, trained(make(decay=0.3, decay_at=decay_at)))
    none, plain = trained(make(decay=0.3, decay_scale=0, decay_at=decay_at)), trained(make(decay=0))
    assert all(map(torch.equal, none, plain))
    assert not any(map(torch.equal, scaled, plain))


def test_the_world_size_is_the_number_of_processes(monkeypatch):
    method = SRSTE(0.1, decay_scale="world-size")
    torch.testing.assert_close(trained(method), trained(SRSTE(0.1)))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 8)
    torch.testing.assert_close(trained(method), trained(SRSTE(0.8)))


def decaying(decay_at, make=lambda p: SGD(p, 1.0)):
    """A layer whose pruned entries lose a tenth in a step without gradients."""
    run = Loop(SRSTE(0.1, decay_at=decay_at), make=make, model=one_layer(torch.float32))
    before = run.layer.param.detach().clone()
    return run, before, torch.where(run.layer.forward_mask, before, 0.9 * before)


def test_detached_optimizers_get_no_decay():
    run, before, _ = decaying("after-clipping")
    run.sparsifier.detach()
    run.model[0].weight.grad = torch.zeros_like(before)
    run.optimizer.step()
    assert torch.equal(run.model[0].weight, before)


def test_a_step_that_is_none_gets_no_decay():
    """Distributed checkpoints make one at learning rate 0, with gradients of zeros, to allocate state."""
    run, before, _ = decaying("after-clipping", lambda p: SGD(p, 0.0, momentum=0.9))
    run.layer.param.grad = torch.zeros_like(before)
    run.optimizer.step()
    assert not run.sparsifier.step()
    assert not run.state["momentum_buffer"].any()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("decay_at", "order"),
    [
        *((place, order) for place in PLACES for order in ("scaled", "unscaled", "unscaled late")),
        ("after-clipping", "not announced"),
    ],
)
def test_a_gradient_scaler_does_not_scale_the_decay(decay_at, order, fused):
    """The gradients may be unscaled between ``before_step`` and the step, or within a fused optimizer's step."""
    run, _, decayed = decaying(decay_at, lambda p: SGD(p, 1.0, fused=fused))
    optimizer, scaler = run.optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(run.model(run.batch(0)).sum() * 0).backward()
    if order == "unscaled":
        scaler.unscale_(optimizer)
    if order != "not announced":
        scale = 1.0 if order == "unscaled" else scaler.get_scale()
        run.sparsifier.before_step(optimizer, scale)
    if order == "unscaled late":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert run.sparsifier.step()
    torch.testing.assert_close(run.layer.param.detach(), decayed)


@pytest.mark.parametrize("call", ["positional", "by name"])
@pytest.mark.parametrize("decay_at", PLACES)
def test_the_step_after_a_closure_that_raised_counts(decay_at, call):
    run, before, decayed = decaying(decay_at)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CALLS[call](run.optimizer, interrupted)
    run.layer.param.grad = torch.zeros_like(before)
    run.step()
    assert run.layer.step == run.sparsifier.clock == 1
    torch.testing.assert_close(run.layer.param.detach(), decayed)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_trainer_clips_what_is_not_the_decay(tmp_path, algorithm):
    def norms(decay_at):
        def note(trainer, module, *_):
            found.append(float(torch.stack([p.grad.norm() for p in module.parameters()]).norm()))

        found, record = [], pl.callbacks.LambdaCallback(on_train_batch_end=note)
        masks = NMSparsityCallback("2:4", SRSTE(10.0, decay_at=decay_at), show_tables=False)
        options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm, "max_steps": 3}
        make_trainer(tmp_path, [masks, record], **options).fit(new_model(), Data())
        return found

    size = sum(p.numel() for p in new_model().parameters()) ** 0.5
    most = 1e-3 * (1 if algorithm == "norm" else size)
    assert max(norms("before-clipping")) <= most * 1.001
    assert min(norms("after-clipping")) > 10 * most


@pytest.mark.parametrize(
    ("first", "expected"), [(None, [3, 6, 9]), (1, [1, 4, 7, 10]), (7, [7, 10])]
)
def test_the_first_update_shifts_the_others(first, expected):
    run = Loop(TransposableMask(update_every=3, decay=0.0, first_update=first), model=one_layer())
    moved, mask = [], run.layer.forward_mask
    for step in run.steps(10):
        best = nmf.transposable_mask(run.layer.weight.detach(), "2:4")
        assert torch.equal(run.layer.forward_mask, best if step in expected else mask)
        moved += [step] if not torch.equal(run.layer.forward_mask, mask) else []
        mask = run.layer.forward_mask
    assert moved


@pytest.mark.parametrize(("first", "expected"), [(0, [0, 4, 8]), (3, [3, 7]), (6, [6, 10])])
def test_the_first_search_shifts_the_others(first, expected):
    method = BiMask(permute_every=4, first_search=first, search="redraw")
    run = Loop(method, model=mlp(16, 32, 16))
    known, searched = torch.arange(32), []
    for step in range(11):
        if not torch.equal(run.layer.masks.permutation, known):
            searched.append(step)
            known = run.layer.masks.permutation.clone()
        run.train(1)
    assert searched == expected
