"""Where the decay of pruned weights enters, and its factor; tests/strategies/test_decay.py has the precisions."""

from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_nm import SRSTE, BiMask, NMSparsifier, NMSparsityCallback, TransposableMask
from tests.methods.plain_loop import sgd_steps
from tests.support.lightning_models import Data, make_trainer, new_model

MOST = 0.01  # the norm that gradients are clipped to


def trained(
    method, *, norm=MOST, closure=False, positional=False, steps=5, optimizer=torch.optim.SGD
):
    """The weights after some steps, and the sparsifier."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)).double()
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    optimizer = optimizer(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=generator, dtype=torch.float64)

        def gradients(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            sparsifier.before_step(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), norm)
            return loss

        if closure:
            assert (
                optimizer.step(gradients) if positional else optimizer.step(closure=gradients)
            ) > 0
        else:
            gradients()
            optimizer.step(None) if positional else optimizer.step()
        sparsifier.step()
    return [parameter.detach().clone() for parameter in model.parameters()], sparsifier


def by_formula(decay, *, after, steps=5):
    """The same in plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)).double()
    weights = [layer.weight.detach().clone() for layer in model]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
        masks = [
            torch.zeros_like(w.view(-1, 4))
            .scatter_(1, w.abs().view(-1, 4).topk(2, 1).indices, 1)
            .view_as(w)
            for w in weights
        ]
        used = [(w * mask).requires_grad_() for w, mask in zip(weights, masks, strict=True)]
        grads = torch.autograd.grad((x @ used[0].T @ used[1].T).square().mean(), used)
        pulls = [decay * (1 - mask) * w for w, mask in zip(weights, masks, strict=True)]
        clipped = [g if after else g + pull for g, pull in zip(grads, pulls, strict=True)]
        norm = sum(g.square().sum() for g in clipped).sqrt()
        clipped = [g * min(1.0, MOST / (norm + 1e-6)) for g in clipped]
        grads = [g + pull if after else g for g, pull in zip(clipped, pulls, strict=True)]
        weights = [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]
    return weights


@pytest.mark.parametrize("decay_at", ["before-clipping", "after-clipping"])
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("positional", [False, True])
def test_the_decay_enters_before_or_after_clipping(decay_at, closure, positional):
    found, _ = trained(SRSTE(0.3, decay_at=decay_at), closure=closure, positional=positional)
    expected = by_formula(0.3, after=decay_at == "after-clipping")
    other = by_formula(0.3, after=decay_at != "after-clipping")
    for weight, here, there in zip(found, expected, other, strict=True):
        torch.testing.assert_close(weight, here)
        assert (weight - there).abs().max() > 1e-3


@pytest.mark.parametrize("make", [SRSTE, BiMask, TransposableMask])
def test_the_factor_multiplies_the_decay(make):
    for decay_at in ("before-clipping", "after-clipping"):
        scaled, _ = trained(make(decay=0.1, decay_scale=3, decay_at=decay_at))
        plain, _ = trained(make(decay=0.3, decay_at=decay_at))
        none, _ = trained(make(decay=0.3, decay_scale=0, decay_at=decay_at))
        dense, _ = trained(make(decay=0.0))
        for a, b, c, d in zip(scaled, plain, none, dense, strict=True):
            torch.testing.assert_close(a, b)
            assert torch.equal(c, d)
            assert not torch.equal(a, d)


def test_the_world_size_is_the_number_of_processes(monkeypatch):
    alone, _ = trained(SRSTE(0.1, decay_scale="world-size"))
    torch.testing.assert_close(alone, trained(SRSTE(0.1))[0])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 8)
    eight, _ = trained(SRSTE(0.1, decay_scale="world-size"))
    torch.testing.assert_close(eight, trained(SRSTE(0.8))[0])


def test_a_step_whose_class_steps_its_base_class_adds_it_once():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    for closure in (False, True):
        found, _ = trained(SRSTE(0.3, decay_at="after-clipping"), closure=closure, optimizer=Twice)
        torch.testing.assert_close(found, by_formula(0.3, after=True))


def test_detached_optimizers_get_no_decay():
    _, sparsifier = trained(SRSTE(0.3, decay_at="after-clipping"))
    weight = sparsifier.layers["0"].param
    optimizer = torch.optim.SGD([weight], 0.1)
    sparsifier.register(optimizer)
    sparsifier.bake()
    sparsifier.detach()
    weight.grad, before = torch.zeros_like(weight), weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, before)


def test_a_step_that_is_none_gets_no_decay():
    """Distributed checkpoints make one at learning rate 0, with gradients of zeros, to allocate state."""
    model = nn.Linear(8, 8)
    sparsifier = NMSparsifier(
        model, "2:4", SRSTE(0.3, decay_at="after-clipping"), skip_first_last=False
    ).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    sparsifier.register(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert not sparsifier.step()
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())


class Norms(pl.Callback):
    """The norm of the gradients that the optimizer used."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        grads = [p.grad for p in pl_module.parameters()]
        self.found.append(float(torch.stack([g.norm() for g in grads]).norm()))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_trainer_clips_what_is_not_the_decay(tmp_path, algorithm):
    def norms(decay_at):
        record = Norms()
        masks = NMSparsityCallback("2:4", SRSTE(10.0, decay_at=decay_at), show_tables=False)
        options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm, "max_steps": 3}
        make_trainer(tmp_path, [masks, record], **options).fit(new_model(), Data())
        return record.found

    size = sum(p.numel() for p in new_model().parameters()) ** 0.5
    most = 1e-3 * (1 if algorithm == "norm" else size)
    assert max(norms("before-clipping")) <= most * 1.001
    assert min(norms("after-clipping")) > 10 * most


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (
            SRSTE,
            {"decay_at": "clipping"},
            "decay_at='clipping' is unknown: use 'before-clipping' or 'after-clipping'",
        ),
        (
            SRSTE,
            {"decay_scale": -1},
            "decay_scale=-1 must be 0 or a positive number: a factor, or 'world-size'",
        ),
        (
            BiMask,
            {"decay_scale": "ranks"},
            "decay_scale='ranks' must be a number, .* or 'world-size'",
        ),
        (BiMask, {"first_search": -1}, "first_search=-1 must be an integer of at least 0"),
        (TransposableMask, {"first_update": 0}, "first_update=0 must be an integer of at least 1"),
        (TransposableMask, {"decay_at": ""}, "decay_at='' is unknown"),
    ],
)
def test_bad_settings_are_refused(make, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make(**options)


@pytest.mark.parametrize(
    ("first", "expected"), [(None, [3, 6, 9]), (1, [1, 4, 7, 10]), (2, [2, 5, 8]), (7, [7, 10])]
)
def test_the_first_update_shifts_the_others(first, expected):
    method, selected = TransposableMask(update_every=3, first_update=first), []
    select = method.select
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    method.select = lambda layer: (selected.append(layer.step), select(layer))
    assert len(list(sgd_steps(model, sparsifier, 10, (4, 8)))) == 10
    assert selected == expected


@pytest.mark.parametrize(("first", "expected"), [(0, [0, 4, 8]), (3, [3, 7]), (6, [6, 10])])
def test_the_first_search_shifts_the_others(first, expected):
    method, searched = BiMask(permute_every=4, first_search=first, search="redraw"), []
    torch.manual_seed(0)
    model = nn.Linear(8, 16)
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    layer, known = sparsifier.layers["weight"], torch.arange(16)
    if not torch.equal(layer.masks.permutation, known):
        searched.append(0)
        known = layer.masks.permutation.clone()
    for _ in sgd_steps(model, sparsifier, 10, (4, 8)):
        if not torch.equal(layer.masks.permutation, known):
            searched.append(layer.step)
            known = layer.masks.permutation.clone()
    assert searched == expected


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("decay_at", "order"),
    [
        *product(
            ("before-clipping", "after-clipping"), ("scaled", "unscaled before", "unscaled after")
        ),
        ("after-clipping", "not announced"),
    ],
)
def test_a_gradient_scaler_does_not_scale_the_decay(decay_at, order, fused):
    """The gradients may be unscaled between ``before_step`` and the step, or within a fused optimizer's step."""
    model = nn.Linear(16, 16, bias=False)
    sparsifier = NMSparsifier(
        model, "2:4", SRSTE(0.1, decay_at=decay_at), skip_first_last=False
    ).attach()
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=fused)
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    before, mask = layer.param.detach().clone(), layer.forward_mask
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.randn(4, 16)).sum() * 0).backward()
    if order == "unscaled before":
        scaler.unscale_(optimizer)
    if order != "not announced":
        sparsifier.before_step(optimizer, 1.0 if order == "unscaled before" else scaler.get_scale())
    if order == "unscaled after":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert sparsifier.step()
    torch.testing.assert_close(layer.param.detach(), torch.where(mask, before, 0.9 * before))


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("decay_at", ["before-clipping", "after-clipping"])
def test_the_step_after_a_closure_that_raised_counts(decay_at, positional):
    model = nn.Linear(16, 16, bias=False)
    sparsifier = NMSparsifier(
        model, "2:4", SRSTE(0.1, decay_at=decay_at), skip_first_last=False
    ).attach()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    before, mask = layer.param.detach().clone(), layer.forward_mask

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted) if positional else optimizer.step(closure=interrupted)
    (model(torch.randn(4, 16)).sum() * 0).backward()
    sparsifier.before_step(optimizer)
    optimizer.step()
    assert sparsifier.step()
    assert layer.step == 1
    torch.testing.assert_close(layer.param.detach(), torch.where(mask, before, 0.9 * before))
