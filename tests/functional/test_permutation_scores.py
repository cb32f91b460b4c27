"""Backward masks under a permutation, and the scores of permutations, against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import permutation as module
from lightning_nm.functional.masks import backward_mask, nm_mask
from lightning_nm.functional.permutation import permutation_score, search_permutation
from lightning_nm.pattern import NMPattern
from tests.functional.permutations import (
    CRITERIA,
    brute_mask,
    brute_score,
    forward,
    problems,
    weights,
    within_groups,
)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_backward_mask_is_the_brute_force_one(problem):
    weight, mask, pattern, groups = problem
    order = within_groups(len(weight), groups)
    found = backward_mask(weight, mask, pattern, order, groups)
    assert found.dtype == torch.bool
    assert torch.equal(found, brute_mask(weight, mask, pattern.n, pattern.m, order.tolist()))
    blocks = found.flatten(1)[order].view(-1, pattern.m, weight[0].numel())
    assert blocks.sum(1).max() <= pattern.n
    if mask is not None:
        assert not (found & ~mask).any()
    else:
        assert (blocks.sum(1) == pattern.n).all()


def test_backward_mask_without_permutation_is_the_identity():
    weight = weights(16, 3, 2)
    mask = forward(weight)
    assert torch.equal(
        backward_mask(weight, mask, "2:4"),
        backward_mask(weight, mask, NMPattern(2, 4), torch.arange(16)),
    )


def test_blocks_of_one_group_do_not_see_another():
    weight = weights(16, 5)
    halves = torch.cat([backward_mask(half, None, "2:4") for half in weight.chunk(2)])
    assert torch.equal(backward_mask(weight, None, "2:4", groups=2), halves)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(CRITERIA))
def test_score_is_the_brute_force_one(problem, criterion):
    weight, mask, pattern, groups = problem
    order = within_groups(len(weight), groups)
    found = permutation_score(weight, mask, pattern, order, criterion=criterion, groups=groups)
    expected = brute_score(weight, mask, pattern.n, pattern.m, order, criterion)
    assert found == (pytest.approx(expected, rel=1e-6) if criterion == "l1" else expected)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("pattern", ["20:40", "35:70", "1:256"])
def test_score_and_search_with_long_blocks(pattern, criterion):
    n, m = NMPattern.parse(pattern).n, NMPattern.parse(pattern).m
    weight = weights(2 * m, 130)
    found = search_permutation(weight, None, pattern, criterion=criterion, candidates=30)
    for order in (torch.arange(2 * m), found):
        expected = brute_score(weight, None, n, m, order, criterion)
        assert permutation_score(
            weight, None, pattern, order, criterion=criterion
        ) == pytest.approx(expected, rel=1e-6)


def test_retained_is_what_the_backward_mask_keeps():
    weight = weights(64, 100)
    mask = nm_mask(weight.abs(), "2:4")
    order = within_groups(64, 1)
    kept = backward_mask(weight, mask, "2:4", order)
    assert permutation_score(weight, mask, "2:4", order) == kept.sum()
    l1 = permutation_score(weight, mask, "2:4", order, criterion="l1")
    assert l1 == pytest.approx(weight[kept].abs().sum().item(), rel=1e-6)


def test_all_candidates_score_alike_whatever_the_chunks(monkeypatch):
    weight, orders = (
        weights(32, 200),
        torch.stack([within_groups(32, 1, seed) for seed in range(20)]),
    )
    for criterion in CRITERIA:
        problem = module._problem(weight, forward(weight), "2:4", criterion, 1)
        whole = module._scores(problem, orders)
        monkeypatch.setattr(module, "_CACHE", 300)
        torch.testing.assert_close(module._scores(problem, orders), whole)
        monkeypatch.undo()
