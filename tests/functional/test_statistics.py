from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import (
    gradient_snr,
    kept_magnitude,
    mask_density,
    mask_flip_rate,
    mask_oscillation,
    mask_overlap,
)
from tests.support import metric_oracles as oracle

SEEDS = st.integers(0, 2**16)
SHAPES = st.lists(st.integers(0, 6), max_size=3)
HALVES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def masks(seed, shape, count=1, share=0.5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator) < share for _ in range(count)]


def close(value, expected):
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert value.item() == pytest.approx(expected, rel=1e-6, nan_ok=True)


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES, st.sampled_from([0.0, 0.3, 1.0]))
def test_counts_of_masks(seed, shape, share):
    one, two = masks(seed, shape, 2, share)
    if len(shape) > 1:
        one, two = one.transpose(0, 1), two.transpose(0, 1).contiguous()
    close(mask_density(one), oracle.density([one.numpy()]))
    close(mask_flip_rate(one, two), oracle.flip_rate([[one.numpy(), two.numpy()]]))
    close(mask_overlap(one, two), oracle.overlap([one.numpy()], [two.numpy()]))


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES, st.integers(1, 7))
def test_oscillation_counts_all_flips_of_an_entry_but_the_first(seed, shape, count):
    history = masks(seed, shape, count)
    value = mask_oscillation(iter(history))
    close(value, oracle.oscillation([[mask.numpy() for mask in history]]))
    flips = [mask_flip_rate(*pair).item() for pair in pairwise(history)]
    assert value.item() <= np.mean(flips or [0.0]) + 1e-6


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES, HALVES, st.sampled_from([1.0, 0.0, 1e-3, 1e3]))
def test_kept_magnitude(seed, shape, dtype, scale):
    (mask,) = masks(seed, shape)
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    close(
        kept_magnitude(weight, mask),
        oracle.kept_magnitude([weight.double().numpy()], [mask.numpy()]),
    )


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES, HALVES, HALVES)
def test_gradient_snr(seed, shape, dtype, other):
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(shape, generator=generator).to(dtype)
    estimate = (exact.double() + 0.1 * torch.randn(shape, generator=generator)).to(other)
    close(
        gradient_snr(exact, estimate),
        oracle.snr([exact.double().numpy()], [estimate.double().numpy()]),
    )


@pytest.mark.parametrize("size", [1e-30, 1e30], ids=["underflow", "overflow"])
def test_squares_beyond_float32(size):
    close(gradient_snr(torch.tensor([3.0, 4.0]) * size, torch.tensor([3.0, 2.0]) * size), 2.5)


def test_half_types_are_summed_wide():
    many = torch.ones(1 << 13, dtype=torch.bfloat16)  # in bfloat16, 256 + 1 is 256
    close(kept_magnitude(many, torch.arange(1 << 13) % 4 == 0), 0.25)
    close(
        kept_magnitude(many.half() * 6e4, torch.arange(1 << 13) % 4 == 0), 0.25
    )  # the sum is no float16
    close(gradient_snr(many, many + many), 1.0)


def test_values_that_are_no_numbers():
    nan, inf, ones = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf]), torch.ones(2)
    close(mask_density(nan), 1.0)
    close(mask_density(torch.tensor([-0.0, 1.0])), 0.5)
    for bad in (nan, inf):
        close(kept_magnitude(bad, torch.tensor([True, True])), torch.nan)
        close(gradient_snr(bad, ones), torch.nan)
    close(gradient_snr(ones, ones), torch.inf)
    close(gradient_snr(torch.zeros(2), torch.zeros(2)), torch.inf)


def test_results_have_no_history():
    weight = torch.randn(8, requires_grad=True)
    mask = weight.detach() > 0
    for value in (
        mask_density(weight),
        kept_magnitude(weight, mask),
        gradient_snr(weight, 2 * weight),
    ):
        assert not value.requires_grad


def test_errors_name_the_values():
    mask = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(
        TypeError, match=r"after is torch.float32, and a mask is a bool tensor: pass `after != 0`"
    ):
        mask_flip_rate(mask, mask.float())
    with pytest.raises(
        ValueError, match=r"forward has shape \(2, 4\) and backward has shape \(4, 2\)"
    ):
        mask_overlap(mask, mask.t())
    with pytest.raises(TypeError, match=r"weight is torch.int8: pass a tensor of a floating dtype"):
        kept_magnitude(torch.ones(2, 4, dtype=torch.int8), mask)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\) and mask has shape \(2, 4\)"):
        kept_magnitude(torch.ones(4), mask)
    with pytest.raises(TypeError, match=r"mask is torch.uint8"):
        kept_magnitude(torch.ones(2, 4), mask.byte())
    with pytest.raises(
        ValueError, match=r"masks\[0\] has shape \(2, 4\) and masks\[1\] has shape \(8,\)"
    ):
        mask_oscillation([mask, mask.flatten()])
    with pytest.raises(TypeError, match=r"masks\[0\] is torch.int64"):
        mask_oscillation([mask.long()])
    with pytest.raises(ValueError, match="no masks were given"):
        mask_oscillation([])
    with pytest.raises(ValueError, match=r"exact has shape \(1,\) and estimate has shape \(2,\)"):
        gradient_snr(torch.ones(1), torch.ones(2))
    with pytest.raises(TypeError, match=r"estimate is torch.int64"):
        gradient_snr(torch.ones(1), torch.ones(1, dtype=torch.int64))
