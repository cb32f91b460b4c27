"""Exchanges of kept entries in blocks, one entry at a time."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import magnitude_mask
from lightning_nm.functional.evolution import (
    BlockGrid,
    as_blocks,
    best_swaps,
    drop_and_grow,
    evidence_scores,
    expected_loss_change,
    look_ahead_scores,
    select_blocks,
    swap_budget,
)

patterns = st.sampled_from([(1, 2), (2, 4), (1, 4), (3, 4), (3, 8), (1, 16), (2, 5)])
seeds = st.integers(0, 1000)
steps = st.sampled_from(["number", "tensor"])


def blocks_of(pattern, seed, step="number", blocks=3):
    """Masked weights, gradients, masks and the size of the next step."""
    n, m = pattern
    generator = torch.Generator().manual_seed(seed)
    weight, grad, size = torch.randn(3, blocks, m, generator=generator, dtype=torch.float64)
    mask = magnitude_mask(torch.randn(blocks, m, generator=generator), f"{n}:{m}", dim=1)
    return torch.where(mask, weight, 0), grad, mask, 0.7 if step == "number" else size.abs() + 0.1


def exchanged(mask, swaps):
    """The masks after the exchanges that gain."""
    made, blocks = mask.clone(), swaps.gain > 0
    made[blocks, swaps.pruned[blocks].long()] = False
    made[blocks, swaps.regrown[blocks].long()] = True
    return made


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), max_size=2),
    patterns,
    st.booleans(),
)
def test_an_entry_of_a_block_is_found_again(out, count, taps, pattern, transposed):
    m = pattern[1]
    shape = (out, count * m, *taps)
    in_memory = torch.arange(math.prod(shape))
    rows = in_memory.view(shape)
    if transposed and not taps:
        rows = in_memory.view(shape[::-1]).t()
    blocks = as_blocks(rows, m)
    assert blocks.shape == (rows.numel() // m, m)
    number, entry = torch.meshgrid(torch.arange(len(blocks)), torch.arange(m), indexing="ij")
    assert torch.equal(BlockGrid.of(rows, m).places(number, entry), blocks)
    for tap in itertools.product(*map(range, taps)):  # blocks lie along `in`, at one tap
        assert rows[(0, slice(0, m), *tap)].tolist() in blocks.tolist()


@settings(max_examples=60)
@given(patterns, seeds)
def test_the_best_exchange_is_the_best_of_all_masks_that_differ_in_one_entry(pattern, seed):
    n, m = pattern
    value, other, mask, _ = blocks_of(pattern, seed)
    value = value.abs() + other.abs()
    swaps = best_swaps(value, mask)
    made = exchanged(mask, swaps)
    for scores, kept, after, gain in zip(value, mask, made, swaps.gain, strict=True):
        best = max(
            scores[list(choice)].sum().item()
            for choice in itertools.combinations(range(m), n)
            if kept[list(choice)].sum() >= n - 1
        )
        assert after.sum() == n
        assert scores[after].sum().item() == pytest.approx(best)
        assert gain.item() == pytest.approx(best - scores[kept].sum().item(), abs=1e-12)


@given(patterns, seeds, steps)
def test_the_scores_entry_by_entry(pattern, seed, step):
    weight, grad, mask, size = blocks_of(pattern, seed, step)
    ahead = look_ahead_scores(weight, grad, mask, size)
    evidence = evidence_scores(weight, grad, mask)
    sizes = torch.as_tensor(size, dtype=torch.float64).expand_as(weight)
    for index in itertools.product(range(3), range(pattern[1])):
        g, w, e = grad[index].item(), weight[index].item(), sizes[index].item()
        assert ahead[index].item() == pytest.approx(abs(w - e * g))
        assert evidence[index].item() == pytest.approx(abs(w if mask[index] else g))


@given(patterns, seeds, steps)
def test_the_expected_loss_change_is_that_of_a_linear_loss_after_a_step(pattern, seed, step):
    weight, grad, mask, size = blocks_of(pattern, seed, step)
    swaps = best_swaps(look_ahead_scores(weight, grad, mask, size), mask)
    ahead = weight - size * grad
    loss = grad * ahead * (exchanged(mask, swaps).int() - mask.int())
    found = expected_loss_change(weight, grad, mask, size, swaps)
    torch.testing.assert_close(found, loss.sum(1))


def test_ties_go_to_the_lower_entry_and_equal_scores_do_not_swap():
    mask = torch.tensor([[True, True, False, False]])
    swaps = best_swaps(torch.tensor([[1.0, 1.0, 2.0, 2.0]]), mask)
    assert (swaps.pruned.item(), swaps.regrown.item(), swaps.gain.item()) == (0, 2, 1.0)
    for scores in ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, math.nan, 2.0]):  # of a diverged entry
        assert best_swaps(torch.tensor([scores]), mask).gain.item() == 0


values = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, math.inf, math.nan])


@given(st.lists(st.tuples(values, st.integers(0, 4)), min_size=1), st.integers(0, 20))
def test_selected_are_the_first_of_the_order(blocks, budget):
    value = torch.tensor([v for v, _ in blocks])
    oscillation = torch.tensor([f for _, f in blocks], dtype=torch.uint8)
    candidates = [b for b, (v, _) in enumerate(blocks) if 0 < v < math.inf]
    order = sorted(candidates, key=lambda b: (-blocks[b][0] / (1 + blocks[b][1]), b))
    assert select_blocks(value, oscillation, budget).tolist() == sorted(order[:budget])


def test_the_budget_falls_as_a_cosine_from_its_share_to_nothing():
    budgets = [swap_budget(1000, 0.3, t / 100) for t in range(101)]
    assert (budgets[0], budgets[50], budgets[100]) == (300, 150, 0)
    assert budgets == sorted(budgets, reverse=True)
    assert swap_budget(3, 0.01, 0.0) == 1, "rounded up: a small layer may change, too"


def dropped_and_grown(weight, grad, mask, drops):
    """The kept places after RigL's update, one entry at a time."""
    kept = {(b, k) for b, row in enumerate(mask) for k, is_kept in enumerate(row) if is_kept}
    lost = sorted(kept, key=lambda place: (abs(weight[place[0]][place[1]]), place))[:drops]
    new = kept - set(lost)
    for b, row in enumerate(grad):
        free = [k for k in range(len(row)) if (b, k) not in new]
        free.sort(key=lambda k: (-abs(row[k]), k))
        new |= {(b, k) for k in free[: sum(place[0] == b for place in lost)]}
    return new


@given(patterns, st.integers(1, 6), seeds, st.floats(0, 1), st.booleans())
def test_entries_are_dropped_and_grown_one_by_one(pattern, blocks, seed, share, ties):
    weight, grad, mask, _ = blocks_of(pattern, seed, blocks=blocks)
    if ties:
        weight, grad = weight.round(), grad.round()
    drops = int(share * int(mask.sum()))
    grown = drop_and_grow(weight, grad, mask, drops)
    expected = dropped_and_grown(weight.tolist(), grad.tolist(), mask.tolist(), drops)
    assert {tuple(place) for place in grown.nonzero().tolist()} == expected
    assert torch.equal(grown.sum(1), mask.sum(1))
