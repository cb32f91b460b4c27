"""Decaying masks: what the forward weight is at each step, and that nothing calls it N:M before it is."""

import io
import math

import pytest
import torch
from torch import nn

from lightning_nm import DecayingMask, NMPattern, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.methods.decaying import narrowing_patterns
from tests.methods.plain_loop import sgd_steps

PLAN = 20


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def attach(model, method, pattern="2:4", **options):
    options = {"skip_first_last": False, "planned_steps": PLAN} | options
    return NMSparsifier(model, pattern, method, **options).attach()


def faded(weight, factor):
    mask = nmf.magnitude_mask(weight, "2:4")
    return torch.where(mask, weight, weight * factor)


@pytest.mark.parametrize("decay", ["linear", "exponential"])
def test_pruned_entries_fade(decay):
    model = network()
    method = DecayingMask(decay, dense_start=4, stop=12, dense_end=3, rate=4.0)
    sparsifier = attach(model, method)
    layer = sparsifier.layers["0"]
    for step in sgd_steps(model, sparsifier, PLAN, (16, 16)):
        weight = layer.weight.detach()
        clock = step + 1
        share = (clock - 4) / 8
        if clock < 4 or clock >= 17:
            expected = weight
        elif clock < 12:
            factor = 1 - share if decay == "linear" else math.exp(-4 * share)
            expected = faded(weight, factor)
        else:
            expected = nmf.nm_prune(weight, "2:4")
        torch.testing.assert_close(layer.forward_weight(), expected)
        hard = 12 <= clock < 17
        assert layer.masks.has_forward == hard
        assert bool(layer.buffers) == (4 <= clock < 12)
        assert (sparsifier.violations() == 0) == hard


@pytest.mark.parametrize("decay", ["linear", "exponential"])
def test_a_fading_layer_counts_as_dense(decay):
    model = network()
    sparsifier = attach(model, DecayingMask(decay, stop=10))
    layer = sparsifier.layers["0"]
    for step in sgd_steps(model, sparsifier, PLAN, (16, 16)):
        hard = step + 1 >= 10
        labels = [gemm.label for gemm in layer.gemms()]
        assert labels == (["2:4", "masked", "dense"] if hard else ["dense"] * 3)
        assert sparsifier.stats()["density"] == (0.5 if hard else 1.0)
        assert sparsifier.flops_ratios()["eligible"] == pytest.approx(5 / 6 if hard else 1.0)
    # Half of the steps at 5/6.
    for kind in ("eligible", "paper"):
        assert sparsifier.flops_ratios(mean=True)[kind] == pytest.approx(11 / 12)


def test_the_whole_weight_gets_the_gradient_of_the_faded_one():
    model = network()
    sparsifier = attach(model, DecayingMask("exponential", stop=10))
    for _ in sgd_steps(model, sparsifier, 3, (16, 16)):
        model.zero_grad()
    twin = network()
    twin.load_state_dict(model.state_dict())  # W_F
    x = torch.randn(8, 16)
    inputs = []
    for each in (model, twin):
        x_own = x.clone().requires_grad_()
        each(x_own).square().mean().backward()
        inputs.append(x_own.grad)
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)
    torch.testing.assert_close(*inputs)


def test_the_patterns_of_the_frames():
    def found(n, m):
        return [each.n for each in narrowing_patterns(NMPattern(n, m))]

    assert found(1, 16) == [15, 8, 4, 2, 1], "the papers' example"
    assert found(2, 4) == [3, 2]
    assert found(1, 4) == [3, 2, 1]
    assert found(2, 8) == [7, 4, 2]
    assert found(3, 8) == [7, 4, 3]
    assert found(1, 2) == [1]
    assert found(15, 16) == [15]
    for m in (2, 3, 5, 6, 8, 12, 16):
        for n in range(1, m):
            counts = found(n, m)
            assert counts == sorted(set(counts), reverse=True)
            assert counts[-1] == n


@pytest.mark.parametrize(
    ("pattern", "settings", "frames"),
    [
        ("1:16", {}, [(0, 15), (4, 8), (8, 4), (12, 2), (16, 1)]),
        ("2:4", {}, [(0, 3), (10, 2)]),
        ("2:4", {"dense_start": 4, "dense_end": 4}, [(4, 3), (10, 2)]),
        ("1:4", {"dense_start": 0.1, "stop": 0.5}, [(2, 3), (6, 2), (10, 1)]),
        ("1:2", {"stop": 9}, [(0, 1)]),
    ],
)
def test_frames_have_equal_lengths(pattern, settings, frames):
    model = network()
    sparsifier = attach(model, DecayingMask("structure", **settings), pattern)
    layer = sparsifier.layers["0"]
    m = layer.pattern.m
    dense_end = settings.get("dense_end", 0)

    def check(clock):
        begun = [n for start, n in frames if start <= clock]
        kept = (layer.forward_weight() != 0).sum() / layer.weight.numel()
        if not begun or (dense_end and clock >= PLAN - dense_end):
            assert kept == 1
            assert not layer.masks.has_forward
            return
        assert float(kept) == begun[-1] / m
        assert str(layer.spec.method.current_pattern(layer)) == f"{begun[-1]}:{m}"
        assert layer.gemms().forward.eligible == begun[-1] / m
        assert sparsifier.violations() == 0

    check(0)
    for step in sgd_steps(model, sparsifier, PLAN, (16, 16)):
        check(step + 1)


def test_mixed_patterns_have_frames_of_their_own():
    model = network()
    rules = [{"include": "2", "pattern": "1:16"}]
    sparsifier = attach(model, DecayingMask("structure"), rules=rules)
    assert sparsifier.layers["0"].progress.schedule == (0, 10)
    assert sparsifier.layers["2"].progress.schedule == (0, 4, 8, 12, 16)


@pytest.mark.parametrize("stop", range(1, PLAN, 3))
@pytest.mark.parametrize("decay", ["linear", "structure"])
def test_a_resumed_run_skips_no_frame(decay, stop):
    """Wherever it stops, it goes on by the clock and the schedule that are saved."""

    def run(stops):
        model = network()
        torch.manual_seed(1)
        sparsifier = attach(model, DecayingMask(decay, dense_start=2), "1:16")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sparsifier.register(optimizer)
        seen = []
        for step in range(PLAN):
            generator = torch.Generator().manual_seed(step)
            model.zero_grad()
            model(torch.randn(16, 16, generator=generator)).square().mean().backward()
            optimizer.step()
            sparsifier.step()
            if step in stops:
                buffer = io.BytesIO()
                torch.save([model.state_dict(), sparsifier.state_dict()], buffer)
                buffer.seek(0)
                weights, state = torch.load(buffer, weights_only=True)
                model = network()
                model.load_state_dict(weights)
                # The plan that is given now is another one; the saved schedule stays.
                method = DecayingMask(decay, dense_start=2)
                sparsifier = attach(model, method, "1:16", planned_steps=99)
                with pytest.warns(UserWarning, match="which stays"):
                    sparsifier.load_state_dict(state)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                sparsifier.register(optimizer)
            seen.append(sparsifier.layers["0"].forward_weight().clone())
        return seen

    for whole, resumed in zip(run(()), run((stop,)), strict=True):
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decay": "cosine"}, "decay='cosine' is unknown: use 'linear' or"),
        ({"rate": 0.0}, "rate=0.0 must be a positive number"),
        ({"rate": math.inf}, "rate=inf must be a positive number"),
        ({"stop": 1.5}, "stop=1.5 is not a share"),
        ({"dense_start": 0.5, "stop": 0.2}, "stop=0.2 is step 4, .* dense_start=0.5 at step 10"),
        ({"stop": 20}, "would never be N:M: stop=20 is step 20"),
        ({"stop": 0.8, "dense_end": 0.3}, "stop=0.8 is step 16, .* at step 14"),
    ],
)
def test_settings_that_it_refuses(settings, words):
    with pytest.raises(ValueError, match=words):
        DecayingMask(**settings).schedule(PLAN)


def test_a_training_of_unknown_length():
    with pytest.raises(
        ValueError, match=r"stop=None is a share .* write DecayingMask\(stop=10000\)"
    ):
        DecayingMask().schedule(None)
    assert DecayingMask(dense_start=5, stop=50).schedule(None) == (5, 50)
