"""Rounding to int8: how far entries move, and what comes back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.functional import (
    dequantise_weight,
    quantise_tokens,
    quantise_weight,
)
from lightning_nm.functional.int8 import LEAST_SCALE, check_quantised
from tests.support.cpu_int8 import int8_linear

DTYPES = (torch.float32, torch.bfloat16)

weights = {
    "rows": st.integers(1, 9),
    "depth": st.integers(1, 40),
    "dtype": st.sampled_from(DTYPES),
    "exponent": st.integers(-80, 80),
    "seed": st.integers(0, 10**6),
}


def weight_of(rows, depth, dtype, exponent, seed):
    """Rows of different sizes, a third of whose entries are zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, depth, generator=generator) * 2.0**exponent
    weight *= torch.rand(rows, 1, generator=generator)
    weight[torch.rand(rows, depth, generator=generator) < 0.3] = 0
    return weight.to(dtype)


@given(st.fixed_dictionaries(weights))
def test_an_entry_moves_by_half_a_step_at_most(arguments):
    weight = weight_of(**arguments)
    integers, scale = quantise_weight(weight)
    moved = (integers.double() * scale.double()[:, None] - weight.double()).abs()
    # The scale and the quotient are rounded to float32: each moves an integer of at most 127 by 127 * 2^-24.
    assert bool((moved <= scale.double()[:, None] * (0.5 + 2.0**-15)).all())
    assert not integers[weight == 0].any()
    largest = weight.abs().amax(1)
    assert torch.equal(integers.abs().amax(1) == 127, largest > 0)


@given(st.fixed_dictionaries(weights))
def test_the_integers_are_found_again(arguments):
    integers, scale = quantise_weight(weight_of(**arguments))
    for dtype in DTYPES:
        dense = dequantise_weight(integers, scale, dtype)
        again, same_scale = quantise_weight(dense, scale)
        assert torch.equal(again, integers)
        assert same_scale is scale


def test_the_smallest_and_largest_rows():
    weight = torch.tensor([[0.0, 0.0], [1e-38, -1e-38], [127 * 2.0**100, 1.0]])
    integers, scale = quantise_weight(weight)
    assert integers.tolist() == [[0, 0], [0, 0], [127, 0]]
    assert scale.tolist() == [LEAST_SCALE, LEAST_SCALE, 2.0**100]
    check_quantised(integers, scale)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_weights_without_an_int8_form(value):
    with pytest.raises(ValueError, match="cannot be rounded to int8"):
        quantise_weight(torch.tensor([[1.0], [value]]))


@pytest.mark.parametrize(
    ("integers", "scale", "message"),
    [
        (torch.tensor([[-128]]), torch.ones(1), "is -128"),
        (torch.tensor([[1]]), torch.tensor([torch.nan]), "a scale is not between"),
        (torch.tensor([[1]]), torch.tensor([torch.inf]), "a scale is not between"),
        (torch.tensor([[1]]), torch.tensor([0.0]), "a scale is not between"),
        (torch.tensor([[1]]), torch.tensor([-1.0]), "a scale is not between"),
        (torch.tensor([[1]]), torch.ones(2), "1 rows have 1 scales, not"),
        (torch.tensor([[1]]), torch.ones(1).double(), "int8 values with float32 scales"),
    ],
)
def test_integers_and_scales_that_are_damaged(integers, scale, message):
    with pytest.raises(ValueError, match=message):
        check_quantised(integers.to(torch.int8), scale)


@given(st.fixed_dictionaries(weights))
def test_tokens_move_by_half_a_step_at_most(arguments):
    x = weight_of(**arguments)
    integers, scale = quantise_tokens(x)
    moved = (integers.double() * scale.double()[:, None] - x.double()).abs()
    assert bool((moved <= scale.double()[:, None] * (0.5 + 2.0**-15)).all())


def test_tokens_that_are_zero_tiny_or_not_finite():
    x = torch.tensor([[0.0, 0.0], [1e-40, 0.0], [torch.nan, 1.0], [1.0, -torch.inf]])
    integers, scale = quantise_tokens(x)
    assert not integers[[0, 2, 3]].any()
    assert scale[:2].isfinite().all()
    assert scale[2:].isnan().all()


@given(
    tokens=st.integers(1, 5),
    rows=st.integers(1, 5),
    depth=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_products_are_as_near_as_the_steps_allow(tokens, rows, depth, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, depth, generator=generator)
    weight = torch.randn(rows, depth, generator=generator)
    bias = torch.randn(rows, generator=generator)
    integers, scale = quantise_weight(weight)
    found = int8_linear(x, integers, scale, bias).double()
    exact = x.double() @ weight.double().t() + bias.double()
    # |(x + a)(w + b) - x w| <= |a| |w| + |b| |x| + |a| |b|, with a and b of half a step, and rounding to float32.
    half_x = 0.5001 * quantise_tokens(x)[1].double()[:, None]
    half_w = 0.5001 * scale.double()
    sizes_w = weight.double().abs().sum(1)
    sizes_x = x.double().abs().sum(1, keepdim=True)
    bound = half_x * sizes_w + half_w * sizes_x + depth * half_x * half_w
    assert bool(((found - exact).abs() <= bound + 1e-5 * (1 + exact.abs())).all())
