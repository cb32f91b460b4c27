"""Backward masks under a permutation, the scores of permutations, and the searches: against brute force."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import permutation as module
from lightning_nm.functional.masks import backward_mask, nm_mask
from lightning_nm.functional.permutation import permutation_score, search_permutation
from lightning_nm.pattern import NMPattern

PATTERNS = [
    "1:2",
    "2:4",
    "3:4",
    "1:4",
    "3:5",
    "2:8",
    "4:8",
    "7:8",
    "1:16",
    "8:16",
    "35:70",
    "1:256",
]
CRITERIA = ["retained", "eligible", "l1"]
SEARCHES = ["swap", "random", "redraw"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def weights(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=seeded(seed)).to(dtype)


def forward(weight):
    """Any mask with about half of the entries; backward masks do not need N:M of the forward mask."""
    return torch.rand(weight.shape, generator=seeded(1)) < 0.5


def within_groups(out, groups, seed=0):
    generator, size = seeded(seed), out // groups
    return torch.cat([torch.randperm(size, generator=generator) + g * size for g in range(groups)])


def blocks_of(weight, mask, m, order):
    """The magnitudes of the blocks, ``[blocks, M, K]``."""
    values = weight.double().abs() if mask is None else weight.double().abs() * mask
    return values.flatten(1)[order].view(-1, m, weight[0].numel())


def brute_mask(weight, mask, pattern, order):
    blocks = blocks_of(weight, mask, pattern.m, order).numpy()
    kept = np.zeros(blocks.shape, dtype=bool)
    first = np.argsort(-blocks, axis=1, kind="stable")[:, : pattern.n]
    np.put_along_axis(kept, first, True, axis=1)
    rows = torch.from_numpy(kept).view(len(weight), -1)[order.argsort()].view(weight.shape)
    return rows if mask is None else rows & mask


def brute_score(weight, mask, pattern, order, criterion):
    blocks = blocks_of(weight, mask, pattern.m, order)
    nonzeros = (blocks > 0).sum(1)
    if criterion == "l1":
        return blocks.sort(1).values[:, pattern.m - pattern.n :].sum().item()
    if criterion == "retained":
        return nonzeros.clamp(max=pattern.n).sum().item()
    return (nonzeros <= pattern.n).sum().item()


@st.composite
def problems(draw):
    """A weight, a forward mask or none, a pattern and a number of groups."""
    pattern = NMPattern.parse(draw(st.sampled_from(PATTERNS)))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inner = draw(st.sampled_from([(1,), (7,), (70,), (3, 2, 2)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
    out = draw(st.integers(1, 5 if pattern.m < 64 else 2)) * groups * pattern.m
    weight = weights(out, *inner, seed=draw(st.integers(0, 99)), dtype=dtype)
    if draw(st.booleans()):  # ties and zeros
        weight = weight.round()
    return weight, draw(st.sampled_from([None, forward(weight)])), pattern, groups


@settings(max_examples=80, deadline=None)
@given(problems(), st.sampled_from(CRITERIA))
def test_masks_and_scores_are_the_brute_force_ones(problem, criterion):
    weight, mask, pattern, groups = problem
    order = within_groups(len(weight), groups)
    found = backward_mask(weight, mask, pattern, order, groups)
    assert found.dtype == torch.bool
    assert torch.equal(found, brute_mask(weight, mask, pattern, order))
    identity = torch.arange(len(weight))
    found = backward_mask(weight, mask, pattern, groups=groups)
    assert torch.equal(found, brute_mask(weight, mask, pattern, identity))
    score = permutation_score(weight, mask, pattern, order, criterion=criterion, groups=groups)
    expected = brute_score(weight, mask, pattern, order, criterion)
    assert score == (pytest.approx(expected, rel=1e-6) if criterion == "l1" else expected)


def test_all_candidates_score_alike_whatever_the_chunks(monkeypatch):
    weight = weights(32, 200)
    orders = torch.stack([within_groups(32, 1, seed) for seed in range(20)])
    for criterion in CRITERIA:
        problem = module._problem(weight, forward(weight), "2:4", criterion, 1)
        whole = module._scores(problem, orders)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_CACHE", 300)
            torch.testing.assert_close(module._scores(problem, orders), whole)


@pytest.mark.parametrize("search", SEARCHES)
@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(CRITERIA), st.booleans(), st.integers(1, 200))
def test_search_never_gets_worse_and_never_crosses_groups(
    search, problem, criterion, default, candidates
):
    weight, mask, pattern, groups = problem
    initial = None if default else within_groups(len(weight), groups)
    options = {"criterion": criterion, "groups": groups}
    made = {"search": search, "initial": initial, "candidates": candidates, **options}
    found = search_permutation(weight, mask, pattern, generator=seeded(), **made)
    assert found.dtype == torch.int64
    in_order = found.view(groups, -1).sort(1).values.view(-1)
    assert torch.equal(in_order, torch.arange(len(weight)))
    before, after = (
        permutation_score(weight, mask, pattern, each, **options) for each in (initial, found)
    )
    if search != "redraw":  # which leaves the initial one out
        assert after >= before * (1 - 1e-12)  # the rounding of "l1"


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("count", [1, 5, 1003])
def test_redrawing_takes_the_first_of_the_best_drawn_permutations(criterion, count, monkeypatch):
    weight = weights(16, 12)
    drawn, shuffles = [], module._shuffles
    monkeypatch.setattr(
        module, "_shuffles", lambda *args: drawn.append(shuffles(*args)) or drawn[-1].clone()
    )
    options = {"criterion": criterion, "groups": 2}
    good = search_permutation(weight, None, "1:4", generator=seeded(5), **options)
    drawn.clear()
    redraw = {"search": "redraw", "candidates": count, "initial": good, **options}
    found = search_permutation(weight, None, "1:4", generator=seeded(), **redraw)
    candidates = torch.cat(drawn).view(count, 2, 8) + torch.tensor([[0], [8]])
    candidates = candidates.view(count, 16)
    scores = [permutation_score(weight, None, "1:4", each, **options) for each in candidates]
    assert torch.equal(found, candidates[scores.index(max(scores))])


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("pattern", ["1:2", "2:4", "2:8", "1:16"])
def test_swap_finds_more_than_random(pattern, criterion):
    weight = weights(128, 192)
    mask = nm_mask(weight.abs(), pattern)

    def score(order):
        return permutation_score(weight, mask, pattern, order, criterion=criterion)

    start, swap, random = (
        score(None),
        *(
            score(
                search_permutation(
                    weight, mask, pattern, search=search, criterion=criterion, generator=seeded()
                )
            )
            for search in ("swap", "random")
        ),
    )
    assert swap - start > 1.5 * (random - start) > 0


@pytest.mark.parametrize("criterion", ["retained", "eligible"])
@pytest.mark.parametrize("seed", range(4))
def test_swap_reaches_the_optimum_of_two_blocks(seed, criterion):
    weight, pattern = weights(8, 24, seed=seed), NMPattern(2, 4)
    mask = nm_mask(weight.abs(), pattern)

    def score(order):
        return brute_score(weight, mask, pattern, torch.as_tensor(order), criterion)

    best = max(
        score([0, *first, *(set(range(1, 8)) - set(first))])
        for first in itertools.combinations(range(1, 8), 3)
    )
    start, ends = within_groups(8, 1, seed), []
    for restart in range(3):
        options = {"initial": start, "candidates": 10_000, "criterion": criterion}
        found = search_permutation(weight, mask, pattern, generator=seeded(restart), **options)
        ends.append(score(found))
        # where it stops, no exchange of two rows helps
        for i, j in itertools.product(range(4), range(4, 8)):
            other = found.clone()
            other[[i, j]] = found[[j, i]]
            assert score(other) <= ends[-1]
        start = found[[0, 4, 1, 5, 2, 6, 3, 7]]
    assert max(ends) == best


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_search_is_a_function_of_the_generator(search, criterion):
    weight, initial = weights(96, 40), within_groups(96, 1)
    mask = nm_mask(weight.abs(), "2:8")
    copies = [tensor.clone() for tensor in (weight, mask, initial)]

    def run(generator):
        options = {"search": search, "criterion": criterion, "initial": initial}
        return search_permutation(
            weight, mask, "2:8", candidates=300, generator=generator, **options
        )

    first = run(seeded(0))
    assert torch.equal(run(seeded(0)), first)
    assert not torch.equal(run(seeded(1)), first)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert torch.equal(run(None), first)
        assert not torch.equal(run(None), first)
    first.zero_()
    for tensor, copy in zip((weight, mask, initial), copies, strict=True):
        assert torch.equal(tensor, copy), "inputs are left alone"


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_layout_dtype_autograd_and_autocast_do_not_matter(search, criterion):
    half = weights(64, 6, 3, 3, dtype=torch.bfloat16)
    mask = forward(half)
    options = {"search": search, "criterion": criterion}
    expected = search_permutation(half, mask, "2:4", generator=seeded(), **options)
    last = torch.channels_last
    variants = [
        (torch.nn.Parameter(half.float()), mask),
        (half.to(memory_format=last), mask.to(memory_format=last)),
        (half.flatten(1).t().contiguous().t(), mask.flatten(1)),
    ]
    for weight, own_mask in variants:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = search_permutation(weight, own_mask, "2:4", generator=seeded(), **options)
        assert torch.equal(found, expected)
        assert torch.equal(
            backward_mask(weight, own_mask, "2:4", found).flatten(1),
            backward_mask(half, mask, "2:4", found).flatten(1),
        )


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
@pytest.mark.parametrize("groups", [1, 3])
def test_many_tiles_and_chunks(monkeypatch, criterion, groups):
    monkeypatch.setattr(module, "_TILE", 3)
    monkeypatch.setattr(module, "_CACHE", 64)
    weight = weights(120, 33)
    mask, options = forward(weight), {"criterion": criterion, "groups": groups}
    found = search_permutation(weight, mask, "2:4", generator=seeded(), **options)
    in_order = found.view(groups, -1).sort(1).values.view(-1)
    assert torch.equal(in_order, torch.arange(120))
    gain = permutation_score(weight, mask, "2:4", found, **options)
    assert gain > permutation_score(weight, mask, "2:4", None, **options)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_assignments_are_permutations_and_exchange_never_loses(count, size, seed, integers):
    cost = weights(count, size, size, seed=seed)
    cost = cost.round() if integers else cost
    for order in (module._assign(cost), module._exchange(cost)):
        assert torch.equal(order.sort(1).values, torch.arange(size).expand(count, size))
    paid = cost.gather(2, order[..., None]).sum((1, 2), dtype=torch.float64)
    assert (paid <= cost.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64) + 1e-6).all()


ONES = torch.ones(8, 4)
CROSSING = torch.arange(8).flip(0)


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (ONES, {"search": "greedy"}, "search='greedy' is unknown: use 'swap' or 'random'"),
        (ONES, {"criterion": "l2"}, "criterion='l2' is unknown: use 'retained'"),
        (ONES, {"candidates": 0}, r"candidates=0: .* candidates=100"),
        (ONES[:6], {}, r"6 output rows in 1 group\(s\) are 6 rows each, not a multiple of M=4"),
        (torch.ones(12, 4), {"groups": 2}, r"12 output rows in 2 group\(s\) are 6 rows each"),
        (ONES, {"groups": 3}, "groups=3 does not split 8 output rows"),
        (ONES, {"groups": 0}, "groups=0"),
        (ONES[:, 0], {}, r"shape \(8,\) has no input axis"),
        (ONES, {"initial": CROSSING * 0}, r"must name each row 0\.\.7 once"),
        (ONES, {"initial": CROSSING[4:]}, r"\(4,\) must name each row 0\.\.7 once.*randperm\(8\)"),
        (ONES, {"initial": CROSSING.float()}, "float32"),
        (ONES, {"initial": CROSSING, "groups": 2}, "row 7 at position 0, out of its group"),
    ],
)
def test_errors_name_the_value_and_the_way_out(weight, options, message):
    with pytest.raises(ValueError, match=message):
        search_permutation(weight, None, "2:4", **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: backward_mask(ONES[:6], None, "2:4"), "6 output rows"),
        (
            lambda: backward_mask(ONES, None, "2:4", CROSSING, groups=2),
            "groups=1 if the layer is not grouped",
        ),
        (lambda: backward_mask(ONES, ONES, "2:4"), r"float32 \(8, 4\): pass booleans"),
        (lambda: backward_mask(ONES, ONES[:6].bool(), "2:4"), r"shape of the weight, \(8, 4\)"),
        (lambda: permutation_score(ONES, None, "2:4", CROSSING * 0), "must name each row"),
        (lambda: permutation_score(ONES, None, "2:4", None, criterion="l0"), "criterion='l0'"),
    ],
)
def test_backward_mask_and_score_check_their_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_device_scores_like_the_cpu(search, criterion):
    here = weights(256, 300), nm_mask(weights(256, 300).abs(), "2:4"), "2:4"
    there = here[0].cuda(), here[1].cuda(), "2:4"
    options = {"search": search, "criterion": criterion}
    found = search_permutation(*there, generator=seeded(), **options)
    assert found.device.type == "cuda"
    score = permutation_score(*here, found.cpu(), criterion=criterion)
    on_device = permutation_score(*there, found, criterion=criterion)
    assert on_device == pytest.approx(score, rel=1e-9)
    assert score > permutation_score(*here, None, criterion=criterion)
    kept = backward_mask(*there, found)
    assert torch.equal(kept.cpu(), backward_mask(*here, found.cpu()))
