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

DTYPES = (torch.float32, torch.bfloat16)


@st.composite
def weights(draw):
    """Rows of different sizes, a third of whose entries are zero."""
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    weight = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-80, 80))
    weight *= torch.rand(shape[0], 1, generator=generator)
    weight[torch.rand(shape, generator=generator) < 0.3] = 0
    return weight.to(draw(st.sampled_from(DTYPES)))


def assert_near(integers, scale, values):
    """By half a step at most; the scale and the quotient are rounded to float32, by 2^-24 of at most 127 each."""
    scale = scale.double()[:, None]
    moved = (integers.double() * scale - values.double()).abs()
    assert (moved <= scale * (0.5 + 2.0**-15)).all()


@given(weights())
def test_entries_move_by_half_a_step_and_integers_are_found_again(weight):
    integers, scale = quantise_weight(weight)
    assert_near(integers, scale, weight)
    assert not integers[weight == 0].any()
    assert torch.equal(integers.abs().amax(1) == 127, weight.abs().amax(1) > 0)
    assert_near(*quantise_tokens(weight), weight)
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
    ("integer", "scale", "message"),
    [
        (-128, torch.ones(1), "is -128"),
        (1, torch.tensor([torch.nan]), "a scale is not between"),
        (1, torch.tensor([torch.inf]), "a scale is not between"),
        (1, torch.tensor([0.0]), "a scale is not between"),
        (1, torch.tensor([-1.0]), "a scale is not between"),
        (1, torch.ones(2), "1 rows have 1 scales, not"),
        (1, torch.ones(1).double(), "int8 values with float32 scales"),
    ],
)
def test_integers_and_scales_that_are_damaged(integer, scale, message):
    with pytest.raises(ValueError, match=message):
        check_quantised(torch.tensor([[integer]], dtype=torch.int8), scale)


def test_tokens_that_are_zero_tiny_or_not_finite():
    x = torch.tensor([[0.0, 0.0], [1e-40, 0.0], [torch.nan, 1.0], [1.0, -torch.inf]])
    integers, scale = quantise_tokens(x)
    assert not integers[[0, 2, 3]].any()
    assert scale[:2].isfinite().all()
    assert scale[2:].isnan().all()
