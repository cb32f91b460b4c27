"""RigL in blocks against a simulation written out entry by entry, and what a user relies on."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier, RigL
from lightning_nm import functional as nmf
from tests.support.bame import OPTIMIZERS, backward, batch, linear, run
from tests.support.kinds import KINDS, make


def simulate(weight, pattern, steps, *, every, stop, drop, rate, mu):
    """RigL under SGD with momentum, one number at a time."""
    n, m = pattern
    rows, cols = weight.shape
    mask = nmf.magnitude_mask(weight, f"{n}:{m}", dim=1).tolist()
    w = [
        [v if mask[i][j] else 0.0 for j, v in enumerate(row)]
        for i, row in enumerate(weight.tolist())
    ]
    buffer = [[0.0] * cols for _ in range(rows)]
    places = [(i, j) for i in range(rows) for j in range(cols)]
    exchanged = []
    for t in range(steps):
        x, y = batch(t)
        current = torch.tensor(w, dtype=torch.float64, requires_grad=True)
        (x @ current.t() - y).square().mean().backward()
        g = current.grad.tolist()
        new = {(i, j) for i, j in places if mask[i][j]}
        if t and t % every == 0 and t < stop:
            k = int(len(new) * drop * 0.5 * (1 + math.cos(math.pi * t / stop)))
            dropped = sorted(new, key=lambda p: (abs(w[p[0]][p[1]]), p))[:k]
            new -= set(dropped)
            for i in range(rows):
                for c in range(0, cols, m):
                    block = [(i, c + e) for e in range(m)]
                    lost = sum(place in dropped for place in block)
                    free = [place for place in block if place not in new]
                    free.sort(key=lambda p: (-abs(g[p[0]][p[1]]), p))
                    new |= set(free[:lost])
        for i, j in places:
            if mask[i][j]:
                buffer[i][j] = mu * buffer[i][j] + g[i][j] if t else g[i][j]
                w[i][j] -= rate * buffer[i][j]
        moved = [(i, j) for i, j in places if mask[i][j] != ((i, j) in new)]
        for i, j in moved:
            mask[i][j] = not mask[i][j]
            w[i][j] = buffer[i][j] = 0.0
        exchanged.append(len(moved) // 2)
    return torch.tensor(w, dtype=torch.float64), torch.tensor(mask), exchanged


@pytest.mark.parametrize("pattern", [(2, 4), (1, 4), (3, 4), (1, 16), (3, 8)])
@pytest.mark.parametrize("options", [{"every": 3}, {"every": 1, "drop": 1.0}], ids=["some", "all"])
def test_the_training_is_what_is_written(pattern, options):
    options = {"drop": 0.5, "stop": 15, **options}

    def optimizer_of(parameters):
        return torch.optim.SGD(parameters, 0.4, momentum=0.5)

    module, sparsifier, optimizer, layer = linear(
        RigL(**options), "{}:{}".format(*pattern), optimizer_of
    )
    start = module[0].weight.detach().clone()
    flips = [0]
    run(
        module, sparsifier, optimizer, 18, look=lambda _: flips.append(int(layer.masks.total_flips))
    )
    weight, mask, exchanged = simulate(start, pattern, 18, rate=0.4, mu=0.5, **options)
    torch.testing.assert_close(layer.weight.detach(), weight)
    assert torch.equal(layer.forward_mask, mask)
    assert [(b - a) // 2 for a, b in pairwise(flips)] == exchanged
    assert sum(exchanged) > 3, "no mask moved"
    assert exchanged[15:] == [0, 0, 0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_exchanged_entries_starts_anew(name):
    module, sparsifier, optimizer, layer = linear(
        RigL(every=2, stop=100, drop=1.0), make=OPTIMIZERS[name]
    )
    grown_ever = 0
    for step in range(8):
        before = layer.forward_mask.clone()

        def look(_, before=before):
            nonlocal grown_ever
            after = layer.forward_mask
            grown = after & ~before
            grown_ever += int(grown.sum())
            assert not layer.weight[grown].any()
            assert not layer.weight[~after].any()
            for key, state in optimizer.state[layer.weight].items():
                if not isinstance(state, torch.Tensor) or state.shape != layer.weight.shape:
                    continue
                assert not state[before & ~after].any(), key
                if "sq" in key:
                    assert (state[grown] > 0).all(), key
                else:
                    assert not state[grown].any(), key

        run(module, sparsifier, optimizer, 1, start=step, look=look)
    assert grown_ever > 10


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_keeps_exactly_n(kind):
    module, x = make(kind, torch.float32)
    sparsifier = NMSparsifier(
        module, "2:4", RigL(every=1, stop=100, drop=0.9), skip_first_last=False
    ).attach()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    sparsifier.register(optimizer)
    masked = [layer for layer in sparsifier.layers.values() if layer.masks.has_forward]
    assert masked
    for step in range(3):
        optimizer.zero_grad()
        module(x + step).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        for layer in masked:
            rows = layer.view.rows(layer.forward_mask).movedim(1, -1)
            assert (rows.unflatten(-1, (-1, 4)).sum(-1) == 2).all()
    assert all(int(layer.masks.total_flips) for layer in masked)


def test_only_the_windows_of_an_update_have_a_dense_gradient():
    module, sparsifier, optimizer, layer = linear(RigL(every=3, stop=10))
    dense = []
    for step in range(14):
        dense.append(layer.progress.dense_gradient)
        run(module, sparsifier, optimizer, 1, start=step, windows=2)
    assert [step for step, is_dense in enumerate(dense) if is_dense] == [3, 6, 9]


def test_a_step_that_did_not_happen_leaves_the_update_pending():
    module, sparsifier, optimizer, layer = linear(RigL(every=2, stop=100, drop=1.0))
    run(module, sparsifier, optimizer, 2)
    backward(module, 2)
    sparsifier.before_step(optimizer)  # a gradient scaler skips the step
    sparsifier.step()
    assert layer.progress.dense_gradient
    assert not int(layer.masks.total_flips)
    run(module, sparsifier, optimizer, 1, start=3)
    assert not layer.progress.dense_gradient
    assert int(layer.masks.total_flips)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    found = []
    for windows in (1, 4):
        module, sparsifier, optimizer, layer = linear(RigL(every=2, stop=20, drop=0.8))
        run(module, sparsifier, optimizer, 12, windows=windows)
        found.append((layer.weight.detach(), layer.forward_mask))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_second_call_before_the_step_changes_nothing():
    weights = []
    for calls in (1, 2):
        module, sparsifier, optimizer, layer = linear(RigL(every=1, stop=20, drop=0.8))
        for step in range(5):
            backward(module, step)
            for _ in range(calls):
                sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        weights.append(layer.weight.detach())
    assert torch.equal(*weights)


def test_a_forgotten_call_is_an_error_where_the_mask_would_move():
    module, sparsifier, optimizer, _ = linear(RigL(every=1, stop=20))
    run(module, sparsifier, optimizer, 1)
    backward(module, 1)
    with pytest.raises(RuntimeError, match=r"without before_step\(\) for layer '0'"):
        optimizer.step()


def test_costs_are_those_of_the_present_step():
    _, sparsifier, _, layer = linear(RigL(every=4, stop=100))
    assert [gemm.kind for gemm in layer.gemms()] == ["n:m", "masked", "outputs"]
    assert [gemm.paper for gemm in layer.gemms()] == [0.5, 0.5, 0.5]
    assert [gemm.eligible for gemm in layer.gemms()] == [0.5, 1.0, 1.0]
    layer.progress.dense_gradient = True
    assert layer.gemms().wgrad.paper == 1.0
    assert sparsifier.violations() == 0


def test_a_mask_that_cannot_move_is_warned_of():
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"RigL never moves a mask: every=100 .* before step 75"):
        NMSparsifier(model, "2:4", "rigl", skip_first_last=False, planned_steps=100).attach()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 2.0}, "every=2.0"),
        ({"drop": 0}, "drop=0 "),
        ({"drop": 1.5}, "drop=1.5"),
        ({"stop": 1.5}, "stop=1.5"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RigL(**options)


def test_a_share_needs_the_planned_steps():
    with pytest.raises(ValueError, match=r"RigL's stop=0\.75 is a share"):
        NMSparsifier(nn.Linear(8, 8), "2:4", "rigl", skip_first_last=False).attach()


def test_the_masks_of_the_last_exchange_stay_when_the_schedule_ends():
    """Regrown entries are zero then, and would not be among the largest."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    sparsifier = NMSparsifier(model, "2:4", RigL(every=1, stop=4), skip_first_last=False).attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    for _ in range(6):
        model(torch.randn(16, 32)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        exchanged = layer.masks.forward.clone()
        sparsifier.step()
        assert torch.equal(layer.masks.forward, exchanged)
        optimizer.zero_grad()
