"""When BAME adapts: clocks, shares of a plan, settings."""

import copy
import math

import pytest
import torch
from torch import nn

from lightning_nm import BAME, NMSparsifier
from tests.support.bame import backward, linear, run


@pytest.mark.parametrize(
    ("evidence", "turns"),
    [({"evidence": "batch"}, [2, 6, 10]), ({"evidence_rate": 0.5}, [2, 6, 10])],
    ids=["batch", "own"],
)
def test_between_adaptations_the_mask_stands_still_and_after_stop_for_good(evidence, turns):
    module, sparsifier, optimizer, layer = linear(
        BAME(start=2, stop=11, every=4, budget=1.0, **evidence)
    )
    masks = [layer.forward_mask]
    run(module, sparsifier, optimizer, 24, look=lambda step: masks.append(layer.forward_mask))
    moved = [step for step in range(24) if not torch.equal(masks[step], masks[step + 1])]
    assert moved == turns


@pytest.mark.parametrize(
    "masked", ["*", "1"], ids=["beside-another", "no-masked-layer-trains-before"]
)
def test_a_layer_that_joins_late_evolves_and_freezes_with_the_others(masked):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    method = BAME(stop=8, every=2, budget=1.0, evidence="batch")
    sparsifier = NMSparsifier(module, "2:4", method, include=masked, skip_first_last=False).attach()
    optimizer = torch.optim.SGD(module[0].parameters(), 0.5)
    sparsifier.register(optimizer)
    late = sparsifier.layers["1"]
    masks = [late.forward_mask]
    for step in range(14):
        if step == 5:
            optimizer.add_param_group({"params": module[1].parameters(), "lr": 20.0})
        optimizer.zero_grad()
        (module(torch.randn(8, 16)) - 1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        masks.append(late.forward_mask)
    moved = [step for step in range(14) if not torch.equal(masks[step], masks[step + 1])]
    assert moved == [5, 6], "at once what it missed, then with the others until they all freeze"
    assert (sparsifier.clock, late.step, late.progress.dense_gradient) == (14, 9, False)


def test_a_step_that_raises_does_not_stop_the_clock():
    module, sparsifier, optimizer, layer = linear(BAME(stop=20, every=2))

    def closure():
        raise MemoryError

    with pytest.raises(MemoryError):
        optimizer.step(closure)
    sparsifier.step()
    run(module, sparsifier, optimizer, 4)
    assert layer.step == sparsifier.clock == 4


def test_a_step_of_a_subclass_that_calls_its_bases_counts_once():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch hooks a class when it is first used
    module, sparsifier, optimizer, layer = linear(
        BAME(stop=20, every=1), make=lambda p: Twice(p, 0.1)
    )
    run(module, sparsifier, optimizer, 5)
    assert layer.step == sparsifier.clock == 5


def test_a_window_without_a_gradient_leaves_the_adaptation_pending():
    module, sparsifier, optimizer, layer = linear(
        BAME(start=2, stop=6, every=3, budget=1.0, evidence="batch")
    )
    masks = [layer.forward_mask]
    other = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [other]})
    for step in range(8):
        backward(module, step)
        other.grad = torch.ones(1)
        if step in (2, 3):
            layer.weight.grad = None
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        masks.append(layer.forward_mask)
    assert [step for step in range(8) if not torch.equal(masks[step], masks[step + 1])] == [4, 5]


def test_a_layer_without_a_gradient_in_its_window_is_left_alone():
    _, sparsifier, optimizer, layer = linear(BAME(stop=20, every=1))
    mask = layer.forward_mask
    other = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [other]})
    for _ in range(3):
        other.grad = torch.ones(1)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert torch.equal(layer.forward_mask, mask)
    assert layer.step == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": -1}, "start=-1 must be a training step"),
        ({"stop": 1.5}, r"stop=1\.5 is not a share.*an integer for training steps"),
        ({"start": 0.5, "stop": 0.2}, r"stop=0\.2 lies before start=0\.5"),
        ({"start": 10, "stop": 5}, "stop=5 lies before start=10"),
        ({"every": 0}, "every=0 must be an integer of at least 1"),
        ({"every": 2.5}, r"every=2\.5 must be an integer"),
        ({"budget": 0.0}, r"budget=0\.0 .* must lie in \(0, 1\]"),
        ({"budget": 1.1}, r"budget=1\.1"),
        ({"budget": math.nan}, "budget=nan"),
        ({"stop": math.nan}, "stop=nan is not a share"),
        ({"evidence": "mean"}, "evidence='mean' is unknown: use 'accumulated' or 'batch'"),
        ({"gradient_every": 0}, "gradient_every=0 must be an integer of at least 1"),
        (
            {"evidence": "batch", "gradient_every": 2},
            "gradient_every=2 has no meaning for evidence='batch'",
        ),
        ({"evidence_rate": 0.0}, r"evidence_rate=0\.0 must be a positive number"),
        ({"evidence_rate": math.nan}, "evidence_rate=nan"),
        ({"dgrad": "transposable"}, "dgrad='transposable'"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BAME(**options)


@pytest.mark.parametrize("moment", [True, "0.5", None])
def test_moments_are_numbers(moment):
    with pytest.raises(
        TypeError, match=r"stop=.* must be an integer \(training steps\) or a float"
    ):
        BAME(stop=moment)


def test_shares_need_a_plan_and_become_steps():
    module = nn.Linear(16, 8)
    with pytest.raises(
        ValueError, match=r"stop=0\.66 is a share.*not known: write BAME\(stop=10000\)"
    ):
        NMSparsifier(module, "2:4", "bame", skip_first_last=False).attach()
    assert type(module) is nn.Linear
    with pytest.raises(ValueError, match=r"stop=0\.1 is step 10 of 100, before start=50"):
        NMSparsifier(
            module, "2:4", BAME(50, 0.1), skip_first_last=False, planned_steps=100
        ).attach()
    assert BAME(0.1, 0.5).schedule(1000) == (100, 500)
    assert BAME(1, 1.0).schedule(1000) == (1, 1000)
    assert BAME(1, 7).schedule(None) == (1, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 1.0, "stop": 1.0}, "never adapts: it starts at step 100 of 100"),
        ({"start": 200, "stop": 300}, "never adapts: it starts at step 200 of 100"),
        (
            {"every": 500},
            "adapts once and never again: every=500 steps do not fit between step 0 and step 65",
        ),
    ],
)
def test_an_interval_that_never_fires_is_warned_of(options, message):
    with pytest.warns(UserWarning, match=message):
        NMSparsifier(
            nn.Linear(16, 8), "2:4", BAME(**options), skip_first_last=False, planned_steps=100
        ).attach()


def test_flops_follow_the_schedule():
    module, sparsifier, optimizer, _ = linear(
        BAME(start=1, stop=5, every=2, evidence="batch"), "1:4"
    )
    module(torch.zeros(1, 16, dtype=torch.float64))
    shares = []
    run(
        module,
        sparsifier,
        optimizer,
        10,
        look=lambda step: shares.append(sparsifier.flops_ratios()),
    )
    r, dense = 1 / 4, 2  # steps 1 and 3 need the dense gradient
    mean = sparsifier.flops_ratios(mean=True)
    assert (
        mean["paper"]
        == mean["arithmetic"]
        == pytest.approx((10 * 2 * r + dense + (10 - dense) * r) / 30)
    )
    assert mean["eligible"] == pytest.approx((r + 2) / 3)
    module, sparsifier, optimizer, _ = linear(BAME(start=1, stop=5, gradient_every=2), "1:4")
    run(module, sparsifier, optimizer, 10)  # gradients of steps 1 and 3 are dense
    assert sparsifier.flops_ratios(mean=True)["paper"] == mean["paper"]
    with_own, sparsifier, optimizer, _ = linear(
        BAME(start=1, stop=5, every=2, dgrad="bi-mask"), "1:4"
    )
    run(with_own, sparsifier, optimizer, 10)
    assert sparsifier.flops_ratios(mean=True)["eligible"] == pytest.approx((2 * r + 1) / 3)


def test_a_state_keeps_its_schedule_and_says_so():
    def make(stop, planned):
        return linear(BAME(stop=stop, every=2), planned_steps=planned)

    module, sparsifier, optimizer, layer = make(0.5, 20)
    run(module, sparsifier, optimizer, 12)
    frozen = layer.forward_mask
    states = copy.deepcopy((module.state_dict(), sparsifier.state_dict()))
    for stop, planned in ((0.5, 40), (20, None)):  # a longer run; another setting
        other, other_sparsifier, other_optimizer, layer = make(stop, planned)
        other.load_state_dict(states[0])
        with pytest.warns(
            UserWarning, match=r"BAME scheduled at steps \(0, 10\), which stays; .* \(0, 20\)"
        ):
            other_sparsifier.load_state_dict(states[1])
        assert layer.progress.schedule == (0, 10)
        run(other, other_sparsifier, other_optimizer, 4, start=12)
        assert torch.equal(layer.forward_mask, frozen), "frozen for good"
    other, other_sparsifier, _, _ = make(0.5, 20)
    other.load_state_dict(states[0])
    other_sparsifier.load_state_dict(states[1])  # the same plan: no warning
