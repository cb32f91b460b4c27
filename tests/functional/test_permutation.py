import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import permutation as module
from lightning_nm.functional.masks import backward_mask, nm_mask
from lightning_nm.functional.permutation import (
    Criterion,
    Search,
    permutation_score,
    search_permutation,
)
from lightning_nm.pattern import NMPattern

PATTERNS = ["1:2", "2:4", "3:4", "1:4", "3:5", "2:8", "4:8", "7:8", "1:16", "8:16"]
CRITERIA = get_args(Criterion)
SEARCHES = get_args(Search)


def weights(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forward(weight: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Any mask with about half of the entries; backward masks do not need N:M of the forward mask."""
    return torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def within_groups(out: int, groups: int, seed: int = 0) -> torch.Tensor:
    generator, size = torch.Generator().manual_seed(seed), out // groups
    return torch.cat([torch.randperm(size, generator=generator) + g * size for g in range(groups)])


def brute_mask(weight: torch.Tensor, mask: torch.Tensor | None, n: int, m: int, order: list[int]) -> torch.Tensor:
    values = weight.double().flatten(1).numpy()
    allowed = np.ones(values.shape, dtype=bool) if mask is None else mask.flatten(1).numpy()
    kept = np.zeros(values.shape, dtype=bool)
    for first in range(0, len(order), m):
        for column in range(values.shape[1]):
            block = [(-abs(values[row, column]) * allowed[row, column], at) for at, row in enumerate(order)][first:][:m]
            for _, at in sorted(block)[:n]:
                kept[order[at], column] = True
    return torch.from_numpy(kept & allowed).view(weight.shape)


def brute_score(
    weight: torch.Tensor, mask: torch.Tensor | None, n: int, m: int, order: torch.Tensor, criterion: str
) -> float:
    values = weight.double().abs() if mask is None else weight.double().abs() * mask
    blocks = values.flatten(1)[order].view(-1, m, values[0].numel()).numpy()
    nonzeros = (blocks > 0).sum(1)
    if criterion == "l1":
        return float(np.sort(blocks, axis=1)[:, m - n :].sum())
    return float(np.minimum(nonzeros, n).sum() if criterion == "retained" else (nonzeros <= n).sum())


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, NMPattern, int]:
    pattern = NMPattern.parse(draw(st.sampled_from(PATTERNS)))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    shape = (draw(st.integers(1, 5)) * groups * pattern.m, *draw(st.sampled_from([(1,), (7,), (70,), (3, 2, 2)])))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
    weight = weights(*shape, seed=draw(st.integers(0, 99)), dtype=dtype)
    if draw(st.booleans()):  # ties and zeros
        weight = weight.round()
    return weight, draw(st.sampled_from([None, forward(weight)])), pattern, groups


# backward_mask --------------------------------------------------------------------------------------------------------


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
        backward_mask(weight, mask, "2:4"), backward_mask(weight, mask, NMPattern(2, 4), torch.arange(16))
    )


def test_blocks_of_one_group_do_not_see_another():
    weight = weights(16, 5)
    halves = torch.cat([backward_mask(half, None, "2:4") for half in weight.chunk(2)])
    assert torch.equal(backward_mask(weight, None, "2:4", groups=2), halves)


# permutation_score ----------------------------------------------------------------------------------------------------


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
        assert permutation_score(weight, None, pattern, order, criterion=criterion) == pytest.approx(expected, rel=1e-6)


def test_retained_is_what_the_backward_mask_keeps():
    weight = weights(64, 100)
    mask = nm_mask(weight.abs(), "2:4")
    order = within_groups(64, 1)
    kept = backward_mask(weight, mask, "2:4", order)
    assert permutation_score(weight, mask, "2:4", order) == kept.sum()
    l1 = permutation_score(weight, mask, "2:4", order, criterion="l1")
    assert l1 == pytest.approx(weight[kept].abs().sum().item(), rel=1e-6)


def test_all_candidates_score_alike_whatever_the_chunks(monkeypatch):
    weight, orders = weights(32, 200), torch.stack([within_groups(32, 1, seed) for seed in range(20)])
    for criterion in CRITERIA:
        problem = module._problem(weight, forward(weight), "2:4", criterion, 1)
        whole = module._scores(problem, orders)
        monkeypatch.setattr(module, "_CACHE", 300)
        torch.testing.assert_close(module._scores(problem, orders), whole)
        monkeypatch.undo()


# search_permutation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", SEARCHES)
@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(CRITERIA), st.booleans(), st.integers(1, 200))
def test_search_never_gets_worse_and_never_crosses_groups(search, problem, criterion, default, candidates):
    weight, mask, pattern, groups = problem
    initial = None if default else within_groups(len(weight), groups)
    options = {"criterion": criterion, "groups": groups}
    found = search_permutation(
        weight, mask, pattern, search=search, initial=initial, candidates=candidates, generator=_seeded(), **options
    )
    assert found.dtype == torch.int64
    size = len(weight) // groups
    assert torch.equal(found.view(groups, size).sort(1).values.view(-1), torch.arange(len(weight)))
    before, after = (permutation_score(weight, mask, pattern, p, **options) for p in (initial, found))
    if search != "redraw":  # which leaves the initial one out
        assert after >= before * (1 - 1e-12)  # the rounding of "l1"


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("count", [1, 5, 1003])
def test_redrawing_takes_the_first_of_the_best_drawn_permutations(criterion, count, monkeypatch):
    weight = weights(16, 12)
    mask = nm_mask(weight.abs(), "2:4")
    drawn, shuffles = [], module._shuffles
    monkeypatch.setattr(module, "_shuffles", lambda *args: drawn.append(shuffles(*args)) or drawn[-1].clone())
    options = {"criterion": criterion, "groups": 2}
    good = search_permutation(weight, mask, "2:4", candidates=2000, generator=_seeded(5), **options)
    drawn.clear()
    found = search_permutation(
        weight, mask, "2:4", search="redraw", candidates=count, initial=good, generator=_seeded(), **options
    )
    candidates = torch.cat(drawn).view(count, 2, 8) + torch.tensor([[0], [8]])
    scores = [permutation_score(weight, mask, "2:4", each, **options) for each in candidates.view(count, 16)]
    assert torch.equal(found, candidates.view(count, 16)[scores.index(max(scores))])
    if count == 1:
        assert max(scores) < permutation_score(weight, mask, "2:4", good, **options)


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
            search_permutation(weight, mask, pattern, search=search, criterion=criterion, generator=_seeded()),
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
        brute_score(weight, mask, 2, 4, torch.tensor([0, *first, *(set(range(1, 8)) - set(first))]), criterion)
        for first in itertools.combinations(range(1, 8), 3)
    )
    start = within_groups(8, 1, seed)
    ends = []
    for restart in range(3):
        found = search_permutation(
            weight, mask, "2:4", initial=start, candidates=10_000, criterion=criterion, generator=_seeded(restart)
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
    weight[torch.arange(64), torch.arange(64) // 2] = 1  # pairs share a column: together they lose one of the two
    for pattern in ("1:2", "1:4"):
        found = search_permutation(weight, None, pattern, candidates=500, criterion="eligible", generator=_seeded())
        assert permutation_score(weight, None, pattern, found) == 64


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_search_is_a_function_of_the_generator(search, criterion):
    weight = weights(96, 40)
    mask = nm_mask(weight.abs(), "2:8")

    def run(generator: torch.Generator | None) -> torch.Tensor:
        return search_permutation(
            weight, mask, "2:8", search=search, criterion=criterion, candidates=300, generator=generator
        )

    assert torch.equal(run(_seeded(0)), run(_seeded(0)))
    assert not torch.equal(run(_seeded(0)), run(_seeded(1)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first, second = run(None), run(None)
        torch.manual_seed(3)
        assert torch.equal(run(None), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_layout_dtype_autograd_and_autocast_do_not_matter(search, criterion):
    half = weights(64, 6, 3, 3, dtype=torch.bfloat16)
    mask = forward(half)
    expected = search_permutation(half, mask, "2:4", search=search, criterion=criterion, generator=_seeded())
    variants = [
        (half.float(), mask),
        (half.to(memory_format=torch.channels_last), mask.to(memory_format=torch.channels_last)),
        (torch.nn.Parameter(half.float()), mask),
        (half.flatten(1).t().contiguous().t(), mask.flatten(1)),
    ]
    for weight, its_mask in variants:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = search_permutation(weight, its_mask, "2:4", search=search, criterion=criterion, generator=_seeded())
        assert torch.equal(found, expected)
        assert torch.equal(
            backward_mask(weight, its_mask, "2:4", found).flatten(1), backward_mask(half, mask, "2:4", found).flatten(1)
        )


def test_inputs_are_left_alone():
    weight, mask, initial = weights(32, 20), forward(weights(32, 20)), within_groups(32, 1)
    copies = [t.clone() for t in (weight, mask, initial)]
    for search, criterion in itertools.product(SEARCHES, CRITERIA):
        found = search_permutation(weight, mask, "2:4", search=search, criterion=criterion, initial=initial)
        found.zero_()
    for tensor, copy in zip((weight, mask, initial), copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(16, 8),
        torch.ones(16, 8),
        torch.ones(16, 0),
        torch.ones(0, 8),
        torch.ones(4, 8),
        torch.full((16, 8), torch.nan),
        torch.full((16, 8), torch.inf),
        torch.eye(16) * 1e30,
        weights(16, 8) * 1e-30,
    ],
    ids=["zeros", "ones", "no columns", "no rows", "one block", "nan", "inf", "huge", "tiny"],
)
def test_degenerate_weights_give_a_permutation(weight, search, criterion):
    found = search_permutation(weight, None, "2:4", search=search, criterion=criterion)
    assert torch.equal(found.sort().values, torch.arange(len(weight)))
    permutation_score(weight, None, "2:4", found, criterion=criterion)
    assert backward_mask(weight, None, "2:4", found).shape == weight.shape


@pytest.mark.parametrize("criterion", CRITERIA)
def test_many_tiles_and_chunks(monkeypatch, criterion):
    monkeypatch.setattr(module, "_TILE", 3)
    monkeypatch.setattr(module, "_CACHE", 64)
    weight = weights(120, 33)
    mask = forward(weight)
    for groups in (1, 3):
        found = search_permutation(weight, mask, "2:4", criterion=criterion, groups=groups, generator=_seeded())
        assert (found // (120 // groups) == torch.arange(120) // (120 // groups)).all()
        gain = permutation_score(weight, mask, "2:4", found, criterion=criterion, groups=groups)
        assert gain > permutation_score(weight, mask, "2:4", None, criterion=criterion, groups=groups)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_assignments_are_permutations_and_exchange_never_loses(count, size, seed, integers):
    cost = weights(count, size, size, seed=seed)
    cost = cost.round() if integers else cost
    for order in (module._assign(cost), module._exchange(cost)):
        assert torch.equal(order.sort(1).values, torch.arange(size).expand(count, size))
    paid = cost.gather(2, order[..., None]).sum((1, 2), dtype=torch.float64)
    assert (paid <= cost.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64) + 1e-6).all()


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.ones(8, 4), {"search": "greedy"}, r"search='greedy' is unknown: choose one of 'swap', 'random'"),
        (torch.ones(8, 4), {"criterion": "l2"}, r"criterion='l2' is unknown: choose one of 'retained'"),
        (torch.ones(8, 4), {"candidates": 0}, r"candidates=0: .* candidates=100"),
        (torch.ones(6, 4), {}, r"6 output rows in 1 group\(s\) are 6 rows each, not a multiple of M=4"),
        (torch.ones(12, 4), {"groups": 2}, r"12 output rows in 2 group\(s\) are 6 rows each"),
        (torch.ones(8, 4), {"groups": 3}, r"groups=3 does not split 8 output rows"),
        (torch.ones(8, 4), {"groups": 0}, r"groups=0"),
        (torch.ones(8), {}, r"shape \(8,\) has no input axis"),
        (torch.ones(8, 4), {"initial": torch.zeros(8, dtype=torch.int64)}, r"must name each row 0\.\.7 once"),
        (torch.ones(8, 4), {"initial": torch.arange(4)}, r"\(4,\) must name each row 0\.\.7 once.*randperm\(8\)"),
        (torch.ones(8, 4), {"initial": torch.arange(8.0)}, r"float32"),
        (torch.ones(8, 4), {"initial": torch.arange(8).flip(0), "groups": 2}, r"row 7 at position 0, out of its group"),
    ],
)
def test_errors_name_the_value_and_the_way_out(weight, options, message):
    with pytest.raises(ValueError, match=message):
        search_permutation(weight, None, "2:4", **options)


def test_backward_mask_and_score_check_their_input():
    weight = torch.ones(8, 4)
    with pytest.raises(ValueError, match="6 output rows"):
        backward_mask(torch.ones(6, 4), None, "2:4")
    with pytest.raises(ValueError, match="groups=1 if the layer is not grouped"):
        backward_mask(weight, None, "2:4", torch.arange(8).flip(0), groups=2)
    with pytest.raises(ValueError, match="must name each row"):
        permutation_score(weight, None, "2:4", torch.ones(8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"forward_mask is torch.float32 \(8, 4\): pass booleans"):
        backward_mask(weight, weight, "2:4")
    with pytest.raises(ValueError, match=r"shape of the weight, \(8, 4\)"):
        backward_mask(weight, torch.ones(8, 5, dtype=torch.bool), "2:4")
    with pytest.raises(ValueError, match="criterion='l0'"):
        permutation_score(weight, None, "2:4", None, criterion="l0")


@pytest.mark.gpu
@pytest.mark.parametrize("criterion", CRITERIA)
def test_device_scores_like_the_cpu(criterion):
    weight = weights(256, 300)
    mask = nm_mask(weight.abs(), "2:4")
    for search in SEARCHES:
        found = search_permutation(
            weight.cuda(), mask.cuda(), "2:4", search=search, criterion=criterion, generator=_seeded()
        )
        assert found.device.type == "cuda"
        there = permutation_score(weight.cuda(), mask.cuda(), "2:4", found, criterion=criterion)
        here = permutation_score(weight, mask, "2:4", found.cpu(), criterion=criterion)
        assert there == pytest.approx(here, rel=1e-9)
        assert here > permutation_score(weight, mask, "2:4", None, criterion=criterion)
        kept = backward_mask(weight.cuda(), mask.cuda(), "2:4", found).cpu()
        assert torch.equal(kept, backward_mask(weight, mask, "2:4", found.cpu()))
