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
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def masks(seed, shape, count=1, density=0.5):
    generator = seeded(seed)
    return [torch.rand(shape, generator=generator) < density for _ in range(count)]


def close(value, expected):
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert not value.requires_grad
    assert value.item() == pytest.approx(expected, rel=1e-6, nan_ok=True)


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES, st.sampled_from([0.0, 0.3, 1.0]))
def test_counts_of_masks(seed, shape, density):
    one, two = masks(seed, shape, 2, density)
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
@given(SEEDS, SHAPES, DTYPES, DTYPES, st.sampled_from([1.0, 0.0, 1e-3, 1e3]))
def test_magnitudes_and_gradients(seed, shape, dtype, other, scale):
    (mask,) = masks(seed, shape)
    exact = (torch.randn(shape, generator=seeded(seed)) * scale).to(dtype)
    estimate = (exact.double() + 0.1 * torch.randn(shape, generator=seeded(seed + 1))).to(other)
    x, y = exact.double().numpy(), estimate.double().numpy()
    exact.requires_grad_()
    close(kept_magnitude(exact, mask), oracle.kept_magnitude([x], [mask.numpy()]))
    close(gradient_snr(exact, estimate), oracle.snr([x], [y]))


def test_sums_beyond_the_dtype():
    many = torch.ones(1 << 13, dtype=torch.bfloat16)  # in bfloat16, 256 + 1 is 256
    quarter = torch.arange(1 << 13) % 4 == 0
    close(kept_magnitude(many, quarter), 0.25)
    close(kept_magnitude(many.half() * 6e4, quarter), 0.25)  # the sum is no float16
    close(gradient_snr(many, many + many), 1.0)
    for size in (1e-30, 1e30):  # squares are not in float32
        close(gradient_snr(torch.tensor([3.0, 4.0]) * size, torch.tensor([3.0, 2.0]) * size), 2.5)


def test_values_that_are_no_numbers():
    ones, both = torch.ones(2), torch.tensor([True, True])
    close(mask_density(torch.tensor([1.0, torch.nan])), 1.0)
    close(mask_density(torch.tensor([-0.0, 1.0])), 0.5)
    for bad in (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])):
        close(kept_magnitude(bad, both), torch.nan)
        close(gradient_snr(bad, ones), torch.nan)
    for equal in (ones, torch.zeros(2)):
        close(gradient_snr(equal, equal), torch.inf)


MASK = torch.ones(2, 4, dtype=torch.bool)
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: mask_flip_rate(MASK, MASK.float()),
            TypeError,
            "after is torch.float32, and a mask is a bool tensor: pass `after != 0`",
        ),
        (
            lambda: mask_overlap(MASK, MASK.t()),
            ValueError,
            r"forward has shape \(2, 4\) and backward has shape \(4, 2\)",
        ),
        (
            lambda: kept_magnitude(MASK.char(), MASK),
            TypeError,
            "weight is torch.int8: pass a tensor of a floating dtype",
        ),
        (
            lambda: kept_magnitude(torch.ones(4), MASK),
            ValueError,
            r"weight has shape \(4,\) and mask has shape \(2, 4\)",
        ),
        (lambda: kept_magnitude(MASK.float(), MASK.byte()), TypeError, "mask is torch.uint8"),
        (
            lambda: mask_oscillation([MASK, MASK.flatten()]),
            ValueError,
            r"masks\[0\] has shape \(2, 4\) and masks\[1\] has shape \(8,\)",
        ),
        (lambda: mask_oscillation([MASK.long()]), TypeError, r"masks\[0\] is torch.int64"),
        (lambda: mask_oscillation([]), ValueError, "no masks were given"),
        (
            lambda: gradient_snr(ONE, torch.ones(2)),
            ValueError,
            r"exact has shape \(1,\) and estimate has shape \(2,\)",
        ),
        (lambda: gradient_snr(ONE, ONE.long()), TypeError, "estimate is torch.int64"),
    ],
)
def test_errors_name_the_values(call, error, message):
    with pytest.raises(error, match=message):
        call()
