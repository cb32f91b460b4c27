"""MaxQ: hard masks that come block by block, soft factors of two axes, and what is said before masks are N:M."""

import math
from dataclasses import replace
from itertools import chain
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import LBC, MaxQ
from lightning_nm import functional as nmf
from lightning_nm.functional.evolution import as_blocks
from lightning_nm.methods import maxq
from lightning_nm.nn.state import fits, layer_state
from tests.support.kinds import KINDS, make
from tests.support.method_loop import Loop, sgd


def attached(kind, pattern="2:4", method=None, **options):
    module, _ = make(kind, torch.float64)
    return Loop(method or MaxQ(stop=0), pattern, sgd, module, KINDS[kind][1], **options)


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


def factor_of(weight, pattern):
    """What MaxQ multiplies each entry of a weight ``[out, in, *taps]`` by, at a temperature of 0.3."""

    def soft(row):
        ranked = row.sort().values
        # Between the largest that is pruned and the smallest that is kept, if a fraction N / M is kept.
        below = len(ranked) * (pattern.m - pattern.n) // pattern.m
        above = row - (ranked[below - 1] + ranked[below]) / 2
        return torch.where(above > 0, torch.sigmoid(above / 0.3), 0)

    magnitudes = weight.abs().flatten(2) if weight.dim() > 2 else weight.abs()[..., None]
    factor = torch.stack([1 + soft(each.flatten()).view(each.shape) for each in magnitudes])
    if magnitudes.shape[2] > 1:
        taps = [soft(each.flatten()).view(each.shape) for each in magnitudes.unbind(2)]
        factor += torch.stack(taps, 2)
    return factor.view(weight.shape)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:8"])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, "channels") for kind in ("linear", "conv1d", "conv2d", "hugging-face-conv1d")),
        ("conv2d", "flat"),
    ],
)
def test_forward_weights_are_the_product(kind, layout, pattern):
    run = attached(kind, pattern, MaxQ(stop=0, temperature=0.3), conv_layout=layout)
    layer, weight = run.layer, run.layer.weight.detach()
    # Flat blocks cross the taps, but filters and positions are those of the convolution.
    filters = weight if layout == "flat" else layer.view.rows(weight)
    factor = factor_of(filters, layer.pattern)
    factor = factor if layout == "flat" else layer.view.unrows(factor)
    expected = torch.where(layer.forward_mask, weight * factor, 0)
    torch.testing.assert_close(layer.forward_weight(), expected)
    assert len(layer.buffers) == 1 + kind.startswith("conv")
    assert factor.max() > 1 + kind.startswith("conv") / 2


@pytest.mark.parametrize("ramp", get_args(maxq.Ramp))
def test_ramps_fall_from_one_to_zero(ramp):
    shares = [maxq._share_left(ramp, k / 50) for k in range(-5, 56)]
    assert shares[:6] == [1] * 6
    assert shares[-6:] == [0] * 6
    assert shares == sorted(shares, reverse=True)
    if ramp == "exp":  # the code's table of 30 epochs, whose last epoch has nothing left
        table = [1 - math.exp(-0.05 * epoch) for epoch in range(31)]
        expected = [1 - value / table[-1] for value in table]
        found = [maxq._share_left(ramp, epoch / 30) for epoch in range(31)]
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "ramp"),
    [("linear", "linear"), ("conv2d-groups", "cos"), ("hugging-face-conv1d", "linear")],
)
def test_the_smallest_blocks_stay_dense_longest(kind, ramp):
    run = attached(kind, method=MaxQ(1, 5, ramp))
    layer, counts = run.layer, []
    for step in chain([0], run.steps(6)):
        magnitudes = as_blocks(layer.view.rows(layer.weight.detach()).abs(), 4)
        kept = as_blocks(layer.view.rows(layer.forward_mask), 4)
        dense = kept.all(1)
        counts.append(int(dense.sum()))
        assert counts[-1] == int(maxq._share_left(ramp, (step - 1) / 4) * len(kept))
        sums = magnitudes.sum(1)
        if 0 < counts[-1] < len(kept):
            assert sums[dense].max() <= sums[~dense].min()
        assert torch.equal(kept[~dense], nmf.magnitude_mask(magnitudes, "2:4", dim=1)[~dense])
        assert run.sparsifier.stats()["dense_blocks"] == pytest.approx(counts[-1] / len(kept))
        assert run.sparsifier.violations() == counts[-1]
        assert (layer.spec.method.current_pattern(layer) is None) == (step < 5)
        eligible = run.sparsifier.flops_ratios()["eligible"]
        assert eligible == pytest.approx(1 if step < 5 else 2.5 / 3)
    assert counts[0] == counts[1] == layer.weight.numel() // 4
    assert len(set(counts)) == 5


def test_a_state_of_another_machine_fits():
    """Whose sigmoid may differ in the last bit; a change that is none of rounding does not fit."""
    module, _ = make("linear", torch.float32)
    layer = Loop(MaxQ(stop=0), model=module).layer
    state, weight = layer_state(layer), layer.forward_weight()
    assert fits(layer, state, weight)
    assert fits(layer, state, weight * (1 + 2e-7))
    assert not fits(layer, state, weight[[1, 0, *range(2, 64)]])


@pytest.mark.parametrize("method", [MaxQ(stop=0), LBC(stop=0)], ids=str)
def test_weights_that_tensor_parallelism_cuts_are_refused(method):
    layer = attached("linear", method=method).layer
    layer.spec = replace(layer.spec, tensor_parallel=True)
    with pytest.raises(ValueError, match=r"cuts the weight of layer 'weight'.*use DDP"):
        method.init_masks(layer)
