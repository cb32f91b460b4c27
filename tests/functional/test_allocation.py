"""Patterns under a budget: against every choice, and fractions of magnitude against masks."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import allocation, nm_prune
from lightning_nm.functional.allocation import allocate, retained_magnitudes

NUMBERS = st.one_of(
    st.integers(0, 8).map(float), st.floats(0, 8, allow_nan=False, allow_subnormal=False)
)


@st.composite
def problems(draw):
    """Losses and costs of up to four layers, and a budget that the cheapest choice keeps."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    losses, costs = (
        [draw(st.lists(NUMBERS, min_size=size, max_size=size)) for size in sizes] for _ in range(2)
    )
    least, most = sum(map(min, costs)), sum(map(max, costs))
    return losses, costs, least + draw(st.floats(0, 1)) * (most - least)


def sums(losses, costs, choice):
    """The loss and the cost of a choice."""
    return tuple(
        math.fsum(layer[j] for layer, j in zip(table, choice, strict=True))
        for table in (losses, costs)
    )


def all_sums(losses, costs):
    choices = itertools.product(*(range(len(layer)) for layer in losses))
    return [sums(losses, costs, choice) for choice in choices]


@settings(max_examples=120, deadline=None)
@given(problems())
def test_the_least_loss_of_all_choices(problem):
    losses, costs, budget = problem
    loss, cost = sums(losses, costs, allocate(losses, costs, budget))
    # A choice that exceeds the budget by a rounding error may count or not.
    about = budget + 1e-8 * max(budget, 1)
    assert cost <= about
    every = all_sums(losses, costs)
    assert min(loss for loss, cost in every if cost <= about) - 1e-6 <= loss
    assert loss <= min((loss for loss, cost in every if cost <= budget), default=math.inf) + 1e-6


@pytest.mark.parametrize("most_states", [1, 3])
def test_where_too_many_states_are_left_a_good_choice_is_found(monkeypatch, most_states):
    monkeypatch.setattr(allocation, "_MOST_STATES", most_states)
    generator = random.Random(0)
    excess = []
    for _ in range(60):
        sizes = [generator.randint(2, 4) for _ in range(4)]
        losses, costs = ([[generator.random() for _ in range(n)] for n in sizes] for _ in range(2))
        budget = 1.3 * sum(map(min, costs))
        loss, cost = sums(losses, costs, allocate(losses, costs, budget))
        best = min(loss for loss, cost in all_sums(losses, costs) if cost <= budget)
        assert cost <= budget + 1e-8
        excess.append(loss / best - 1)
    assert min(excess) >= -1e-9
    assert sum(excess) / len(excess) < 0.05
    if most_states == 1:
        assert max(excess) > 1e-9  # else the limit was not felt


def test_hundreds_of_layers_are_solved_exactly():
    generator = random.Random(0)
    losses, costs = [], []
    for _ in range(300):
        size = generator.choice([64 * 64, 64 * 256, 3 * 3 * 64 * 64, 147456])
        scale = generator.random()
        losses.append([scale * (1 - n / 16) ** 2 for n in range(1, 17)])
        costs.append([size * n / 16 for n in range(1, 17)])
    budget = 0.4 * sum(map(max, costs))
    loss, cost = sums(losses, costs, allocate(losses, costs, budget))
    assert cost <= budget * (1 + 1e-9)
    # No choice has less: the bound of the relaxed problem, at its best price.
    loss_lj, cost_lj = torch.tensor(losses).double(), torch.tensor(costs).double()
    prices = torch.logspace(-8, -3, 2000, dtype=torch.float64)
    relaxed = [(loss_lj + price * cost_lj).amin(1).sum() - price * budget for price in prices]
    assert max(relaxed) - 1e-4 <= loss <= max(relaxed) * (1 + 1e-4)


@pytest.mark.parametrize(
    ("losses", "costs", "message"),
    [
        ([[1.0]], [[5.0]], "budget=4 cannot be reached: the cheapest candidates cost 5"),
        ([[1.0]], [], "is shorter than"),
        ([[]], [[]], "layer 0 has no candidate"),
        ([[1.0], [1.0, 2.0]], [[1.0], [1.0]], "is shorter than"),
        ([[0.0], [math.nan]], [[1.0], [1.0]], "layer 1 has .* a loss or a cost that is not finite"),
    ],
)
def test_what_is_refused(losses, costs, message):
    with pytest.raises(ValueError, match=message):
        allocate(losses, costs, 4)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**16),
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_fractions_are_those_of_masks(seed, m, dtype):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2 * m, 5, generator=generator).to(dtype)
    found = retained_magnitudes(weight, m, dim=1)
    total = weight.double().abs().sum()
    expected = [nm_prune(weight, f"{n}:{m}", 1).double().abs().sum() / total for n in range(1, m)]
    torch.testing.assert_close(
        found, torch.stack([*expected, torch.ones_like(total)]), rtol=1e-9, atol=0
    )


def test_fractions_of_zeros_and_of_blocks_that_do_not_fit():
    assert retained_magnitudes(torch.zeros(2, 8), 4).tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"blocks of 4 do not fit along dim 0 of \(6, 8\)"):
        retained_magnitudes(torch.zeros(6, 8), 4, dim=0)
