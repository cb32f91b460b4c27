"""MaxQ: hard masks that come block by block, soft factors of two axes, and what is said before masks are N:M."""

import math
from dataclasses import replace
from itertools import chain
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import LBC, MaxQ, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.functional.evolution import as_blocks
from lightning_nm.methods import maxq
from lightning_nm.methods.maxq import Ramp
from lightning_nm.nn.state import fits, layer_state
from tests.support.kinds import make


def attached(kind="conv2d", pattern="2:4", method=None, **options):
    module, x = make(kind, torch.float64)
    method = method or MaxQ(stop=0)
    return NMSparsifier(module, pattern, method, skip_first_last=False, **options).attach(), x


def steps_of(sparsifier, x, count):
    optimizer = torch.optim.SGD(sparsifier.model.parameters(), 0.05, momentum=0.9)
    sparsifier.register(optimizer)
    for step in range(count):
        optimizer.zero_grad()
        sparsifier.model(x + 0.1 * step).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        yield step + 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.data())
def test_a_selection_finds_what_sorting_finds(size, data):
    """Ties and NaN included: GPUs sort, CPUs select."""
    below = data.draw(st.integers(0, size - 1))
    numbers = st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf, math.nan])
    row = st.lists(numbers, min_size=size, max_size=size)
    magnitudes = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)))
    selected = maxq._by_selection(magnitudes, below)
    sorted_ = maxq._by_sorting(magnitudes, below)
    torch.testing.assert_close(selected, sorted_, rtol=0, atol=0, equal_nan=True)


def threshold(magnitudes, n, m):
    """By the paper: between the largest that is pruned and the smallest that is kept, if a share N / M is kept."""
    ranked = sorted(magnitudes)
    below = len(ranked) * (m - n) // m
    return (ranked[below - 1] + ranked[below]) / 2


def factor_of(weight):
    """What MaxQ multiplies each entry of a weight ``[out, in, *taps]`` by at 2:4."""

    def soft(rows):
        bounds = torch.tensor([threshold(row, 2, 4) for row in rows.tolist()], dtype=rows.dtype)
        above = rows - bounds[:, None]
        return torch.where(above > 0, torch.sigmoid(above / 0.01), 0)

    magnitudes = weight.abs()
    factor = 1 + soft(magnitudes.flatten(1)).view(weight.shape)
    if weight[0, 0].numel() > 1:
        by_tap = soft(magnitudes.flatten(2).flatten(0, 1).t())
        factor += by_tap.t().reshape(weight.shape)
    return factor


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([(2, 4), (1, 4), (3, 8)]), st.integers(1, 3))
def test_thresholds_and_factors_entry_by_entry(seed, pattern, taps):
    n, m = pattern
    generator = torch.Generator().manual_seed(seed)
    module = nn.Conv1d(2 * m, 3, taps, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.randn(3, 2 * m, taps, generator=generator, dtype=torch.float64))
    # At first all blocks are dense, so that the forward weight shows the factor of every entry.
    method = MaxQ(stop=10, temperature=0.3)
    sparsifier = NMSparsifier(module, f"{n}:{m}", method, skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    weight = layer.weight.detach()
    factor = layer.forward_weight() / weight
    assert len(layer.buffers) == 1 + (taps > 1)
    magnitudes = weight.abs().tolist()
    of_filter = [threshold([v for row in block for v in row], n, m) for block in magnitudes]
    of_tap = [threshold([row[t] for b in magnitudes for row in b], n, m) for t in range(taps)]

    def soft(value, bound):
        return 1 / (1 + math.exp(-(value - bound) / 0.3)) if value > bound else 0.0

    for o, block in enumerate(magnitudes):
        for i, row in enumerate(block):
            for t, value in enumerate(row):
                expected = 1 + soft(value, of_filter[o])
                if taps > 1:
                    expected += soft(value, of_tap[t])
                assert factor[o, i, t].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ramp", get_args(Ramp))
def test_ramps_fall_from_one_to_zero(ramp):
    shares = [maxq._share_left(ramp, k / 50) for k in range(-5, 56)]
    assert shares[:6] == [1] * 6
    assert shares[-6:] == [0] * 6
    assert shares == sorted(shares, reverse=True)
    if ramp == "exp":  # the code's table of 30 epochs, whose last epoch has nothing left
        table = [1 - math.exp(-0.05 * epoch) for epoch in range(31)]
        for epoch, value in enumerate(table):
            assert maxq._share_left(ramp, epoch / 30) == pytest.approx(
                1 - value / table[-1], abs=1e-12
            )


@pytest.mark.parametrize("kind", ["linear", "conv2d", "conv2d-groups", "hugging-face-conv1d"])
@pytest.mark.parametrize("ramp", ["linear", "cos"])
def test_the_smallest_blocks_stay_dense_longest(kind, ramp):
    sparsifier, x = attached(kind, method=MaxQ(1, 5, ramp))
    (layer,) = sparsifier.layers.values()
    counts = []
    for step in chain([0], steps_of(sparsifier, x, 6)):
        magnitudes = as_blocks(layer.view.rows(layer.weight.detach()).abs(), 4)
        kept = as_blocks(layer.view.rows(layer.forward_mask), 4)
        dense = kept.all(1)
        progress = (step - 1) / 4
        assert dense.sum() == int(maxq._share_left(ramp, progress) * len(kept))
        if 0 < dense.sum() < len(kept):
            sums = magnitudes.sum(1)
            assert sums[dense].max() <= sums[~dense].min()
        assert torch.equal(kept[~dense], nmf.magnitude_mask(magnitudes, "2:4", dim=1)[~dense])
        counts.append(int(dense.sum()))
        assert sparsifier.stats()["dense_blocks"] == pytest.approx(counts[-1] / len(kept))
        assert sparsifier.violations() == counts[-1]
        assert (layer.spec.method.current_pattern(layer) is None) == (step < 5)
        assert sparsifier.flops_ratios()["eligible"] == pytest.approx(1 if step < 5 else 2.5 / 3)
    assert counts[0] == counts[1] == layer.weight.numel() // 4
    assert counts[-2:] == [0, 0]
    assert len(set(counts)) == 5


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("linear", "channels"),
        ("conv2d", "channels"),
        ("conv2d", "flat"),
        ("hugging-face-conv1d", "channels"),
    ],
)
def test_forward_weights_are_the_product(kind, layout):
    sparsifier, _ = attached(kind, conv_layout=layout)
    (layer,) = sparsifier.layers.values()
    weight = layer.weight.detach()
    filters = weight if layout == "flat" else layer.view.rows(weight)
    factor = factor_of(filters)
    if kind == "hugging-face-conv1d":
        factor = factor.t()
    expected = torch.where(layer.forward_mask, weight * factor, 0)
    torch.testing.assert_close(layer.forward_weight(), expected)
    assert factor.min() == 1
    assert 1 + (kind == "conv2d") < factor.max() <= 2 + (kind == "conv2d")
    (state,) = [v for v in sparsifier.model.state_dict().values() if v.shape == weight.shape]
    assert torch.equal(state, layer.forward_weight())


def test_the_gradient_is_that_of_the_forward_weight_and_the_decay_of_pruned_ones():
    sparsifier, x = attached(method=MaxQ(stop=0, decay=0.5))
    (layer,) = sparsifier.layers.values()
    values = layer.forward_weight().requires_grad_()
    bias = sparsifier.model.bias.detach()
    nn.functional.conv2d(x, values, bias, padding=1).square().mean().backward()
    optimizer = torch.optim.SGD(sparsifier.model.parameters(), 0.1)
    sparsifier.register(optimizer)
    sparsifier.model(x).square().mean().backward()
    sparsifier.before_step(optimizer)
    decay = 0.5 * torch.where(layer.forward_mask, 0, layer.weight.detach())
    torch.testing.assert_close(layer.weight.grad, values.grad + decay)


def test_the_trained_model_needs_no_further_operation():
    sparsifier, x = attached(method=MaxQ(stop=2))
    for _ in steps_of(sparsifier, x, 4):
        pass
    model = sparsifier.model.eval()
    y = model(x)
    sparsifier.bake()
    sparsifier.detach()
    torch.testing.assert_close(model(x), y)
    assert nmf.is_nm(model.weight, "2:4", dim=1)


def test_a_state_of_another_machine_fits():
    """Whose sigmoid may differ in the last bit; a change that is none of rounding does not fit."""
    module, _ = make("linear", torch.float32)
    sparsifier = NMSparsifier(module, "2:4", MaxQ(stop=0), skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    state = layer_state(layer)
    weight = layer.forward_weight()
    assert fits(layer, state, weight)
    assert fits(layer, state, weight * (1 + 2e-7))
    swapped = weight.clone()
    swapped[0], swapped[1] = weight[1], weight[0]
    assert not fits(layer, state, swapped)


@pytest.mark.parametrize("method", [MaxQ(stop=0), LBC(stop=0)], ids=str)
def test_weights_that_tensor_parallelism_cuts_are_refused(method):
    sparsifier, _ = attached("linear", method=method)
    (layer,) = sparsifier.layers.values()
    layer.spec = replace(layer.spec, tensor_parallel=True)
    with pytest.raises(ValueError, match=r"cuts the weight of layer 'weight'.*use DDP"):
        method.init_masks(layer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ramp": "log"}, "ramp='log' is unknown"),
        ({"temperature": 0}, "temperature=0 must be a positive number"),
        ({"start": 5, "stop": 4}, "stop=4 lies before start=5"),
        ({"stop": 1.5}, r"stop=1\.5"),
        ({"decay": -1}, "decay=-1 must be 0 or a positive number"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MaxQ(**settings)


def test_plans_that_cannot_be_are_named():
    with pytest.raises(ValueError, match=r"stop=5 is step 5 of 100, before start=0\.5 \(50\)"):
        attached(method=MaxQ(0.5, 5), planned_steps=100)
    with pytest.warns(UserWarning, match="never become N:M: stop=30 is step 30 of 10"):
        attached(method=MaxQ(stop=30), planned_steps=10)
