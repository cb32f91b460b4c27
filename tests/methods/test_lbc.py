"""Learning Best Combination: which patterns are removed, what the scores get, and what is said before masks are N:M."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import LBC, NMPattern
from lightning_nm import functional as nmf
from lightning_nm.functional.evolution import as_blocks
from lightning_nm.functional.soft import block_patterns
from tests.support.method_loop import Loop, mlp

PATTERNS = ["1:2", "2:4", "3:4", "1:4", "2:8", "1:16"]


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


def convolution():
    torch.manual_seed(0)
    parts = (nn.Conv2d(16, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8))
    return {"model": nn.Sequential(*parts).double(), "shape": (8, 16, 4, 4)}


def at(layer, clock):
    """The layer after so many training steps."""
    layer.progress.clock = clock
    layer.spec.method.update(layer)
    return layer


def surviving(total, step, stop):
    """How many patterns of a block the paper leaves after a step."""
    return 1 + math.ceil((total - 1) * (1 - Fraction(min(step, stop), stop)) ** 3)


@given(st.integers(2, 8), st.data())
def test_patterns_are_all_ways_to_keep_n_of_m(m, data):
    n = data.draw(st.integers(1, m - 1))
    every = {p for p in itertools.product((False, True), repeat=m) if sum(p) == n}
    found = block_patterns(NMPattern(n, m)).tolist()
    assert len(found) == len(every)
    assert set(map(tuple, found)) == every


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([(1, 2), (2, 4), (1, 16), (4, 8), (3, 11)]), st.integers(1, 100))
def test_the_number_left_is_the_papers(pattern, stop):
    n, m = pattern
    run = Loop(LBC(stop), f"{n}:{m}", model=mlp(m, 1), planned_steps=None)
    total = math.comb(m, n)
    for step in range(stop + 3):
        at(run.layer, step)
        assert run.sparsifier.stats()["surviving_patterns"] == surviving(total, step, stop)
    assert surviving(total, 0, stop) == total


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_the_union_of_what_is_left(pattern):
    run = Loop(LBC(5), pattern, adamw, **convolution())
    patterns = block_patterns(pattern)
    gone = {name: torch.zeros(()).bool() for name in run.layers}
    masks = {name: torch.ones(()).bool() for name in run.layers}
    for step in itertools.chain([0], run.steps(7, windows=2)):
        for name, layer in run.layers.items():
            removed = layer.parameters["scores"] == 0
            assert (removed | ~gone[name]).all(), "a removed pattern came back"
            left = (~removed).flatten(0, 1)  # [blocks, C]
            assert (left.sum(1) == surviving(len(patterns), step, 5)).all()
            union = (left[:, :, None] & patterns).any(1)
            kept = as_blocks(layer.view.rows(layer.forward_mask), patterns.shape[1])
            assert torch.equal(kept, union)
            assert (masks[name] | ~layer.forward_mask).all(), "a pruned entry came back"
            assert not layer.weight[~layer.forward_mask].any()
            gone[name], masks[name] = removed, layer.forward_mask
    assert run.sparsifier.violations() == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scores_that_are_left_get_the_gradient_of_their_entries(pattern):
    run = Loop(LBC(5), pattern, **convolution()).train(3)
    run.backward()
    for layer in run.layers.values():
        scores, patterns = layer.parameters["scores"], block_patterns(pattern).double()
        of_mask = as_blocks(layer.view.rows(layer.param * layer.param.grad), patterns.shape[1])
        expected = (of_mask @ patterns.t()).view_as(scores)
        assert expected.any()
        torch.testing.assert_close(scores.grad, torch.where(scores != 0, expected, 0))


def test_the_lowest_scores_go_and_ties_by_magnitude():
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    model[0].weight.data.copy_(torch.tensor([[0.4, -3.0, 1.0, 2.0]]))
    layer = Loop(LBC(stop=4), model=model).layer
    # By magnitude 1 + 3 and 2 + 3 are the largest two; their scores are equal, and the others' are lower.
    scores = layer.parameters["scores"]
    scores.data.copy_(torch.tensor([[[0.1, -0.2, 0.3, 0.5, 0.5, 0.2]]]))
    at(layer, 1)  # 4 are left: all but the lowest two
    assert scores.flatten().tolist() == pytest.approx([0, 0, 0.3, 0.5, 0.5, 0.2])
    # Of the last two, 0110 keeps 4 and 0101 keeps 5.
    assert at(layer, 4).forward_mask.tolist() == [[False, True, False, True]]


def test_before_the_end_nothing_is_called_nm():
    run = Loop(LBC(6), **convolution())
    layer, arithmetic = run.layers["3"], []
    for step in run.steps(7):
        ratios = run.sparsifier.flops_ratios()
        arithmetic.append(ratios["arithmetic"])
        density = run.sparsifier.layer_stats()["3"]["density"]
        assert density == layer.forward_mask.double().mean()
        kept = as_blocks(layer.view.rows(layer.forward_weight()), 4)
        others = as_blocks(run.layer.view.rows(run.layer.forward_weight()), 4)
        violations = int((torch.cat([kept, others]) != 0).sum(1).gt(2).sum())
        assert run.sparsifier.violations() == violations
        forward, dgrad, wgrad = layer.gemms()
        if step < 6:
            assert layer.spec.method.current_pattern(layer) is None
            assert (forward.kind, forward.reason) == ("masked", "not N:M yet")
            assert forward.arithmetic == forward.paper == dgrad.arithmetic == density
            assert forward.eligible == dgrad.eligible == wgrad.eligible == 1
            assert ratios["eligible"] == 1
        else:
            assert (forward.label, density, ratios["paper"]) == ("2:4", 0.5, 0.5)
            assert ratios["eligible"] == pytest.approx(2.5 / 3)
    assert arithmetic == sorted(arithmetic, reverse=True)
    assert 0.5 < arithmetic[3] < 1


def test_a_stop_at_once_keeps_the_largest():
    for layer in Loop(LBC(0)).layers.values():
        mask = nmf.magnitude_mask(layer.weight.detach(), "2:4", dim=1)
        assert torch.equal(layer.forward_mask, mask)


def test_the_last_scores_get_no_gradient_and_stay():
    run = Loop(LBC(2), make=adamw).train(2)
    scores = run.layer.parameters["scores"]
    before = scores.detach().clone()
    for _ in run.steps(3):
        assert scores.grad is None
    assert torch.equal(scores, before)


def test_scores_join_the_group_of_the_weight():
    model = mlp(16, 32, 16)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    run = Loop(LBC(6), make=lambda _: torch.optim.SGD(groups, 0.1), model=model)
    for layer, group in zip(run.layers.values(), run.optimizer.param_groups, strict=True):
        scores = layer.parameters["scores"]
        assert any(scores is parameter for parameter in group["params"])
        assert scores.numel() == layer.weight.numel() * 6 // 4
