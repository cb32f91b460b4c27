"""Learning Best Combination: which patterns are removed, what the scores get, and what is said before masks are N:M."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import LBC, NMPattern, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.functional.evolution import as_blocks
from lightning_nm.functional.soft import block_patterns

PATTERNS = ["1:2", "2:4", "3:4", "1:4", "2:8", "1:16"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8)).double()


def attached(pattern="2:4", stop=6, model=None, **options):
    model = model or network()
    return NMSparsifier(model, pattern, LBC(stop), skip_first_last=False, **options).attach()


def surviving(total, step, stop):
    """How many patterns of a block the paper leaves after a step."""
    return 1 + math.ceil((total - 1) * (1 - Fraction(min(step, stop), stop)) ** 3)


def train(sparsifier, steps, optimizer=None, accumulated=1):
    """Yields after every step."""
    optimizer = optimizer or torch.optim.SGD(
        sparsifier.model.parameters(), 0.1, momentum=0.9, weight_decay=1e-2
    )
    sparsifier.register(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulated):
            generator = torch.Generator().manual_seed(100 * step + micro)
            x = torch.randn(8, 4, 4, 4, generator=generator, dtype=torch.float64)
            sparsifier.model(x).square().mean().backward()
            if micro < accumulated - 1:
                sparsifier.step()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        yield step + 1


@given(st.integers(2, 8), st.data())
def test_patterns_are_all_ways_to_keep_n_of_m(m, data):
    n = data.draw(st.integers(1, m - 1))
    found = block_patterns(NMPattern(n, m))
    every = {p for p in itertools.product((False, True), repeat=m) if sum(p) == n}
    assert found.shape == (math.comb(m, n), m)
    assert set(map(tuple, found.tolist())) == every


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([(1, 2), (2, 4), (1, 16), (4, 8), (2, 16), (3, 11)]), st.integers(1, 300))
def test_the_number_left_is_the_papers(pattern, stop):
    n, m = pattern
    module = nn.Linear(m, 1, bias=False)
    sparsifier = attached(f"{n}:{m}", stop, module)
    (layer,) = sparsifier.layers.values()
    counts = []
    for step in range(stop + 3):
        layer.progress.clock = step
        layer.spec.method.update(layer)
        counts.append(sparsifier.stats()["surviving_patterns"])
    total = math.comb(m, n)
    assert counts[:stop] == [surviving(total, step, stop) for step in range(stop)]
    assert counts[0] == total
    assert counts[stop:] == [1, 1, 1]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_masks_are_the_union_of_what_is_left(pattern, optimizer):
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8)).double()
    model = nn.Sequential(nn.Conv2d(4, 16, 1, bias=False).double(), *model)
    sparsifier = attached(pattern, 5, model, exclude="0")
    made = None
    if optimizer == "adamw":
        made = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    patterns = block_patterns(pattern)
    gone = {name: torch.zeros(()).bool() for name in sparsifier.layers}
    masks = {name: torch.ones(()).bool() for name in sparsifier.layers}
    for name, layer in sparsifier.layers.items():
        assert layer.forward_mask.all(), name
    for step in train(sparsifier, 7, made, accumulated=2):
        for name, layer in sparsifier.layers.items():
            removed = layer.parameters["scores"] == 0
            assert (removed | ~gone[name]).all(), "a removed pattern came back"
            left = (~removed).flatten(0, 1)  # [blocks, C]
            assert (left.sum(1) == surviving(len(patterns), step, 5)).all()
            kept = as_blocks(layer.view.rows(layer.forward_mask), patterns.shape[1])
            for block, survivors in zip(kept[:20], left[:20], strict=True):
                assert torch.equal(block, patterns[survivors].any(0))
            assert (masks[name] | ~layer.forward_mask).all(), "a pruned entry came back"
            assert not layer.weight[~layer.forward_mask].any()
            gone[name], masks[name] = removed, layer.forward_mask
    assert sparsifier.violations() == 0
    assert sparsifier.stats()["surviving_patterns"] == 1


def test_the_lowest_scores_go_and_ties_by_magnitude():
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.4, -3.0, 1.0, 2.0]]))
    sparsifier = NMSparsifier(
        model, "2:4", LBC(stop=4), skip_first_last=False, include="0"
    ).attach()
    layer = sparsifier.layers["0"]
    # By magnitude 1 + 3 and 2 + 3 are the largest two; their scores are equal, and the others' are lower.
    scores = layer.parameters["scores"]
    with torch.no_grad():
        scores.copy_(torch.tensor([[[0.1, -0.2, 0.3, 0.5, 0.5, 0.2]]]))
    layer.progress.clock = 1  # 4 are left: all but the lowest two
    layer.spec.method.update(layer)
    assert scores.tolist() == [[[0, 0, pytest.approx(0.3), 0.5, 0.5, pytest.approx(0.2)]]]
    layer.progress.clock = 4
    layer.spec.method.update(layer)
    # Of the last two, 0110 keeps 4 and 0101 keeps 5.
    assert layer.forward_mask.tolist() == [[False, True, False, True]]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(PATTERNS), st.integers(0, 4), st.integers(0, 10**6))
def test_scores_get_the_gradient_of_a_mask_of_real_numbers(pattern, clock, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)).double()
    sparsifier = NMSparsifier(
        model, pattern, LBC(stop=5), skip_first_last=False, include="0"
    ).attach()
    layer = sparsifier.layers["0"]
    scores = layer.parameters["scores"]
    with torch.no_grad():
        scores.add_(torch.rand_like(scores))
    layer.progress.clock = clock
    layer.spec.method.update(layer)
    x = torch.randn(5, 16, dtype=torch.float64)
    model(x).square().sum().backward()

    patterns = block_patterns(pattern).double()
    left = (scores.detach() != 0).double()
    twin = (left * 1.0).requires_grad_()  # each survivor counts as one
    sums = (twin.flatten(0, 1) @ patterns).view(layer.weight.shape)
    mask = (
        sums + ((sums > 0).double() - sums).detach()
    )  # the value of the mask, the gradient of the sums
    weight = layer.weight.detach()
    hidden = torch.tanh(x @ (weight * mask).t())
    model[2](hidden).square().sum().backward()
    torch.testing.assert_close(scores.grad, twin.grad * left)
    assert not scores.grad[scores == 0].any()
    assert not layer.weight.grad[~layer.forward_mask].any()


def test_before_the_end_nothing_is_called_nm():
    sparsifier = attached(stop=6)
    layer = sparsifier.layers["3"]
    ratios = []
    for step in train(sparsifier, 7):
        ratios.append(sparsifier.flops_ratios())
        density = sparsifier.layer_stats()["3"]["density"]
        assert density == layer.forward_mask.double().mean()
        assert sparsifier.violations() == sum(map(violating, sparsifier.layers.values()))
        forward, dgrad, wgrad = layer.gemms()
        if step < 6:
            assert layer.spec.method.current_pattern(layer) is None
            assert (forward.kind, forward.reason) == ("masked", "not N:M yet")
            assert forward.arithmetic == forward.paper == dgrad.arithmetic == density
            assert forward.eligible == dgrad.eligible == wgrad.eligible == 1
            assert ratios[-1]["eligible"] == 1
        else:
            assert forward.label == "2:4"
            assert density == 0.5
            assert ratios[-1]["eligible"] == pytest.approx(2.5 / 3)
            assert ratios[-1]["paper"] == 0.5
    arithmetic = [each["arithmetic"] for each in ratios]
    assert arithmetic == sorted(arithmetic, reverse=True)
    assert 0.5 < arithmetic[3] < 1


def violating(layer):
    kept = as_blocks(layer.view.rows(layer.forward_weight()), 4)
    return sum(int((block != 0).sum() > 2) for block in kept)


def test_a_stop_at_once_keeps_the_largest():
    sparsifier = attached(stop=0)
    for layer in sparsifier.layers.values():
        expected = nmf.magnitude_mask(layer.view.rows(layer.weight.detach()), "2:4", dim=1)
        assert torch.equal(layer.view.rows(layer.forward_mask), expected)
    assert sparsifier.violations() == 0


def test_the_last_scores_get_no_gradient_and_stay():
    sparsifier = attached(stop=2)
    optimizer = torch.optim.AdamW(sparsifier.model.parameters(), 0.1, weight_decay=0.5)
    steps = train(sparsifier, 5, optimizer)
    next(steps), next(steps)
    scores = sparsifier.layers["3"].parameters["scores"]
    before = scores.detach().clone()
    for _ in steps:
        assert scores.grad is None
    assert torch.equal(scores, before)


def test_scores_join_the_group_of_the_weight():
    sparsifier = attached()
    first, second = sparsifier.model[0].parameters(), sparsifier.model[3].parameters()
    optimizer = torch.optim.SGD(
        [{"params": list(first)}, {"params": list(second), "lr": 0.5}], lr=0.1
    )
    sparsifier.register(optimizer)
    for layer, group in zip(sparsifier.layers.values(), optimizer.param_groups, strict=True):
        scores = layer.parameters["scores"]
        assert any(scores is parameter for parameter in group["params"])
        assert scores.numel() == layer.weight.numel() * 6 // 4


def test_too_many_patterns_are_refused_by_name():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))
    with pytest.raises(
        ValueError, match=r"layer '0'.*8:16.*= 12870 patterns.*smaller M.*another method"
    ):
        NMSparsifier(model, "8:16", LBC(stop=5)).attach()
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(("stop", "error"), [(1.5, ValueError), (-1, ValueError), ("1", TypeError)])
def test_bad_stops_are_named(stop, error):
    with pytest.raises(error, match=f"stop={stop!r}"):
        LBC(stop)


def test_a_share_needs_a_plan_and_a_late_stop_is_warned_of():
    with pytest.raises(ValueError, match=r"LBC's stop=0\.5 is a share"):
        NMSparsifier(network(), "2:4", "lbc", skip_first_last=False).attach()
    with pytest.warns(UserWarning, match="never become N:M: stop=30 is step 30 of 10"):
        attached(stop=30, planned_steps=10)
