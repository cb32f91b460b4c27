"""What the searches find: never less, more than by chance, and the optimum of small problems."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import permutation as module
from lightning_nm.functional.masks import backward_mask, nm_mask
from lightning_nm.functional.permutation import permutation_score, search_permutation
from tests.functional.permutations import (
    CRITERIA,
    SEARCHES,
    brute_score,
    problems,
    seeded,
    weights,
    within_groups,
)


@pytest.mark.parametrize("search", SEARCHES)
@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(CRITERIA), st.booleans(), st.integers(1, 200))
def test_search_never_gets_worse_and_never_crosses_groups(
    search, problem, criterion, default, candidates
):
    weight, mask, pattern, groups = problem
    initial = None if default else within_groups(len(weight), groups)
    options = {"criterion": criterion, "groups": groups}
    found = search_permutation(
        weight,
        mask,
        pattern,
        search=search,
        initial=initial,
        candidates=candidates,
        generator=seeded(),
        **options,
    )
    assert found.dtype == torch.int64
    size = len(weight) // groups
    assert torch.equal(found.view(groups, size).sort(1).values.view(-1), torch.arange(len(weight)))
    before, after = (
        permutation_score(weight, mask, pattern, p, **options) for p in (initial, found)
    )
    if search != "redraw":  # which leaves the initial one out
        assert after >= before * (1 - 1e-12)  # the rounding of "l1"


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("count", [1, 5, 1003])
def test_redrawing_takes_the_first_of_the_best_drawn_permutations(criterion, count, monkeypatch):
    weight = weights(16, 12)
    mask = nm_mask(weight.abs(), "2:4")
    drawn, shuffles = [], module._shuffles
    monkeypatch.setattr(
        module, "_shuffles", lambda *args: drawn.append(shuffles(*args)) or drawn[-1].clone()
    )
    options = {"criterion": criterion, "groups": 2}
    good = search_permutation(weight, mask, "2:4", candidates=2000, generator=seeded(5), **options)
    drawn.clear()
    found = search_permutation(
        weight,
        mask,
        "2:4",
        search="redraw",
        candidates=count,
        initial=good,
        generator=seeded(),
        **options,
    )
    candidates = torch.cat(drawn).view(count, 2, 8) + torch.tensor([[0], [8]])
    scores = [
        permutation_score(weight, mask, "2:4", each, **options)
        for each in candidates.view(count, 16)
    ]
    assert torch.equal(found, candidates.view(count, 16)[scores.index(max(scores))])
    if count == 1:
        assert max(scores) < permutation_score(weight, mask, "2:4", good, **options)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("pattern", ["1:2", "2:4", "1:4", "2:8", "1:16"])
def test_swap_finds_more_than_random(pattern, criterion):
    weight = weights(128, 192)
    mask = nm_mask(weight.abs(), pattern)
    scores = {
        search: permutation_score(
            weight,
            mask,
            pattern,
            search_permutation(
                weight, mask, pattern, search=search, criterion=criterion, generator=seeded()
            ),
            criterion=criterion,
        )
        for search in SEARCHES
    }
    start = permutation_score(weight, mask, pattern, None, criterion=criterion)
    assert scores["swap"] - start > 1.5 * (scores["random"] - start) > 0


@pytest.mark.parametrize("criterion", ["retained", "eligible"])
@pytest.mark.parametrize("seed", range(6))
def test_swap_reaches_the_optimum_of_two_blocks(seed, criterion):
    weight = weights(8, 24, seed=seed)
    mask = nm_mask(weight.abs(), "2:4")
    best = max(
        brute_score(
            weight,
            mask,
            2,
            4,
            torch.tensor([0, *first, *(set(range(1, 8)) - set(first))]),
            criterion,
        )
        for first in itertools.combinations(range(1, 8), 3)
    )
    start = within_groups(8, 1, seed)
    ends = []
    for restart in range(3):
        found = search_permutation(
            weight,
            mask,
            "2:4",
            initial=start,
            candidates=10_000,
            criterion=criterion,
            generator=seeded(restart),
        )
        ends.append(brute_score(weight, mask, 2, 4, found, criterion))
        # where it stops, no exchange of two rows helps
        for i, j in itertools.product(range(4), range(4, 8)):
            other = found.clone()
            other[[i, j]] = found[[j, i]]
            assert brute_score(weight, mask, 2, 4, other, criterion) <= ends[-1]
        start = found[torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])]
    assert max(ends) == best


def test_search_undoes_a_shuffle_that_has_a_perfect_answer():
    weight = torch.zeros(64, 32)
    # Pairs share a column: together they lose one of the two.
    weight[torch.arange(64), torch.arange(64) // 2] = 1
    for pattern in ("1:2", "1:4"):
        found = search_permutation(
            weight, None, pattern, candidates=500, criterion="eligible", generator=seeded()
        )
        assert permutation_score(weight, None, pattern, found) == 64


@pytest.mark.gpu
@pytest.mark.parametrize("criterion", CRITERIA)
def test_device_scores_like_the_cpu(criterion):
    weight = weights(256, 300)
    mask = nm_mask(weight.abs(), "2:4")
    for search in SEARCHES:
        found = search_permutation(
            weight.cuda(),
            mask.cuda(),
            "2:4",
            search=search,
            criterion=criterion,
            generator=seeded(),
        )
        assert found.device.type == "cuda"
        there = permutation_score(weight.cuda(), mask.cuda(), "2:4", found, criterion=criterion)
        here = permutation_score(weight, mask, "2:4", found.cpu(), criterion=criterion)
        assert there == pytest.approx(here, rel=1e-9)
        assert here > permutation_score(weight, mask, "2:4", None, criterion=criterion)
        kept = backward_mask(weight.cuda(), mask.cuda(), "2:4", found).cpu()
        assert torch.equal(kept, backward_mask(weight, mask, "2:4", found.cpu()))
