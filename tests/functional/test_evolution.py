import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import magnitude_mask
from lightning_nm.functional.evolution import (
    as_blocks,
    best_swaps,
    block_index,
    chosen_swaps,
    select_blocks,
    swap_budget,
    swap_scores,
)

PATTERNS = [(1, 2), (2, 4), (1, 4), (3, 4), (3, 8), (1, 16), (2, 5)]
patterns = st.sampled_from(PATTERNS)
scores = st.sampled_from(["virtual", "taylor-abs"])


def blocks_of(pattern, seed, blocks=12, step="number"):
    n, m = pattern
    generator = torch.Generator().manual_seed(seed)
    weight, grad = (torch.randn(blocks, m, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = magnitude_mask(torch.randn(blocks, m, generator=generator), f"{n}:{m}", dim=1)
    size = 0.7 if step == "number" else torch.rand(blocks, m, generator=generator, dtype=torch.float64) + 0.1
    return torch.where(mask, weight, 0), grad, mask, size


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), max_size=2),
    patterns,
    st.integers(0, 10),
    st.booleans(),
)
def test_an_entry_of_a_block_is_found_again(out, count, taps, pattern, seed, channels_last):
    m = pattern[1]
    rows = torch.randn(out, count * m, *taps, generator=torch.Generator().manual_seed(seed))
    if channels_last and len(taps) == 2:
        rows = rows.contiguous(memory_format=torch.channels_last)
    blocks = as_blocks(rows, m)
    assert blocks.shape == (rows.numel() // m, m)
    number, entry = torch.meshgrid(torch.arange(len(blocks)), torch.arange(m), indexing="ij")
    assert torch.equal(rows[block_index(rows.shape, m, number, entry)], blocks)
    for tap in itertools.product(*(range(size) for size in taps)):  # blocks lie along `in`, at one tap
        lying = rows[(0, slice(0, m), *tap)]
        assert any(torch.equal(lying, block) for block in blocks)


@settings(max_examples=60)
@given(patterns, scores, st.integers(1, 4), st.integers(0, 1000), st.sampled_from(["number", "tensor"]))
def test_the_best_swaps_are_the_best_of_all_masks_within_reach(pattern, score, max_swaps, seed, step):
    n, m = pattern
    weight, grad, mask, size = blocks_of(pattern, seed, blocks=3, step=step)
    max_swaps = min(max_swaps, n, m - n)
    swaps = best_swaps(weight, grad, mask, size, score, max_swaps)
    value = swap_scores(weight, grad, mask, size, score)
    steps = torch.as_tensor(size, dtype=torch.float64).expand_as(weight)
    for b in range(len(mask)):
        for k in range(m):  # the scores, written out
            g, w, e = grad[b, k].item(), weight[b, k].item(), steps[b, k].item()
            kept = bool(mask[b, k])
            expected = (abs(w * kept - e * g)) if score == "virtual" else (abs(g * w) if kept else e * g * g)
            assert value[b, k].item() == pytest.approx(expected)
        now = value[b][mask[b]].sum().item()
        best = max(
            value[b][list(kept)].sum().item()
            for kept in itertools.combinations(range(m), n)
            if n - sum(mask[b, k].item() for k in kept) <= max_swaps
        )
        assert swaps.gain[b].item() == pytest.approx(best - now, abs=1e-12)
        count = int(swaps.improving[b])
        made = mask[b].clone()
        made[swaps.pruned[b, :count].long()] = False
        made[swaps.regrown[b, :count].long()] = True
        assert made.sum() == n
        assert value[b][made].sum().item() == pytest.approx(best)


@given(patterns, scores, st.integers(0, 1000), st.sampled_from(["number", "tensor"]))
def test_the_predicted_loss_change_is_that_of_a_linear_loss_after_a_step(pattern, score, seed, step):
    n, m = pattern
    weight, grad, mask, size = blocks_of(pattern, seed, step=step)
    swaps = best_swaps(weight, grad, mask, size, score, min(2, n, m - n))
    blocks, pruned, regrown, regrown_ahead = chosen_swaps(swaps, torch.arange(len(mask)))
    assert len(blocks) == int(swaps.improving.sum())
    made = mask.clone()
    made[blocks, pruned] = False
    made[blocks, regrown] = True
    ahead = weight - size * grad
    torch.testing.assert_close(regrown_ahead, ahead[blocks, regrown])
    loss = (grad * torch.where(made, ahead, 0)).sum(1) - (grad * torch.where(mask, ahead, 0)).sum(1)
    torch.testing.assert_close(swaps.loss_change, loss)


def test_ties_go_to_the_lower_entry_and_equal_scores_do_not_swap():
    mask = torch.tensor([[True, True, False, False]])
    swaps = best_swaps(torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 2.0, 2.0]]), mask, 1.0)
    assert (swaps.pruned.item(), swaps.regrown.item(), swaps.gain.item()) == (0, 2, 1.0)
    swaps = best_swaps(torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]]), mask, 1.0)
    assert swaps.improving.item() == 0
    assert swaps.gain.item() == 0
    assert swaps.loss_change.item() == 0


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, math.inf, math.nan]), st.integers(0, 4)), min_size=1),
    st.integers(0, 20),
    st.sampled_from(["ratio", "quantile"]),
)
def test_selected_are_the_first_of_the_order(blocks, budget, selection):
    value = torch.tensor([v for v, _ in blocks])
    oscillation = torch.tensor([f for _, f in blocks], dtype=torch.uint8)
    chosen = select_blocks(value, oscillation, budget, selection).tolist()

    def joint(b):
        v, f = blocks[b]
        return v / (1 + f) if selection == "ratio" else v

    candidates = [b for b, (v, _) in enumerate(blocks) if 0 < v < math.inf]
    if selection == "quantile":
        ascending = sorted(f for _, f in blocks)
        threshold = ascending[max(math.ceil(0.9 * len(blocks)) - 1, 0)]
        frozen = [b for b, (_, f) in enumerate(blocks) if f > threshold]
        assert len(frozen) <= 0.1 * len(blocks)
        candidates = [b for b in candidates if b not in frozen]
    expected = sorted(sorted(candidates, key=lambda b: (-joint(b), b))[:budget])
    assert chosen == expected


def test_the_budget_falls_as_a_cosine_from_its_share_to_nothing():
    budgets = [swap_budget(1000, 0.3, t / 100) for t in range(101)]
    assert budgets[0] == 300
    assert budgets[50] == 150
    assert budgets[100] == 0
    assert budgets == sorted(budgets, reverse=True)
    assert swap_budget(3, 0.01, 0.0) == 1, "rounded up: a small layer may change, too"
