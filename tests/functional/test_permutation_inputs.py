"""The searches for any generator, layout, dtype and size of the weight, and their errors."""

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
    forward,
    seeded,
    weights,
    within_groups,
)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_search_is_a_function_of_the_generator(search, criterion):
    weight = weights(96, 40)
    mask = nm_mask(weight.abs(), "2:8")

    def run(generator: torch.Generator | None) -> torch.Tensor:
        return search_permutation(
            weight,
            mask,
            "2:8",
            search=search,
            criterion=criterion,
            candidates=300,
            generator=generator,
        )

    assert torch.equal(run(seeded(0)), run(seeded(0)))
    assert not torch.equal(run(seeded(0)), run(seeded(1)))
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
    expected = search_permutation(
        half, mask, "2:4", search=search, criterion=criterion, generator=seeded()
    )
    variants = [
        (half.float(), mask),
        (half.to(memory_format=torch.channels_last), mask.to(memory_format=torch.channels_last)),
        (torch.nn.Parameter(half.float()), mask),
        (half.flatten(1).t().contiguous().t(), mask.flatten(1)),
    ]
    for weight, its_mask in variants:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = search_permutation(
                weight, its_mask, "2:4", search=search, criterion=criterion, generator=seeded()
            )
        assert torch.equal(found, expected)
        assert torch.equal(
            backward_mask(weight, its_mask, "2:4", found).flatten(1),
            backward_mask(half, mask, "2:4", found).flatten(1),
        )


def test_inputs_are_left_alone():
    weight, mask, initial = weights(32, 20), forward(weights(32, 20)), within_groups(32, 1)
    copies = [t.clone() for t in (weight, mask, initial)]
    for search, criterion in itertools.product(SEARCHES, CRITERIA):
        found = search_permutation(
            weight, mask, "2:4", search=search, criterion=criterion, initial=initial
        )
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
        found = search_permutation(
            weight, mask, "2:4", criterion=criterion, groups=groups, generator=seeded()
        )
        assert (found // (120 // groups) == torch.arange(120) // (120 // groups)).all()
        gain = permutation_score(weight, mask, "2:4", found, criterion=criterion, groups=groups)
        assert gain > permutation_score(
            weight, mask, "2:4", None, criterion=criterion, groups=groups
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_assignments_are_permutations_and_exchange_never_loses(count, size, seed, integers):
    cost = weights(count, size, size, seed=seed)
    cost = cost.round() if integers else cost
    for order in (module._assign(cost), module._exchange(cost)):
        assert torch.equal(order.sort(1).values, torch.arange(size).expand(count, size))
    paid = cost.gather(2, order[..., None]).sum((1, 2), dtype=torch.float64)
    assert (paid <= cost.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64) + 1e-6).all()


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (
            torch.ones(8, 4),
            {"search": "greedy"},
            r"search='greedy' is unknown: use 'swap' or 'random'",
        ),
        (
            torch.ones(8, 4),
            {"criterion": "l2"},
            r"criterion='l2' is unknown: use 'retained'",
        ),
        (torch.ones(8, 4), {"candidates": 0}, r"candidates=0: .* candidates=100"),
        (
            torch.ones(6, 4),
            {},
            r"6 output rows in 1 group\(s\) are 6 rows each, not a multiple of M=4",
        ),
        (torch.ones(12, 4), {"groups": 2}, r"12 output rows in 2 group\(s\) are 6 rows each"),
        (torch.ones(8, 4), {"groups": 3}, r"groups=3 does not split 8 output rows"),
        (torch.ones(8, 4), {"groups": 0}, r"groups=0"),
        (torch.ones(8), {}, r"shape \(8,\) has no input axis"),
        (
            torch.ones(8, 4),
            {"initial": torch.zeros(8, dtype=torch.int64)},
            r"must name each row 0\.\.7 once",
        ),
        (
            torch.ones(8, 4),
            {"initial": torch.arange(4)},
            r"\(4,\) must name each row 0\.\.7 once.*randperm\(8\)",
        ),
        (torch.ones(8, 4), {"initial": torch.arange(8.0)}, r"float32"),
        (
            torch.ones(8, 4),
            {"initial": torch.arange(8).flip(0), "groups": 2},
            r"row 7 at position 0, out of its group",
        ),
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
