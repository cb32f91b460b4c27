"""The dense gradient of a packed weight as factors: rows of the sum of products, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.nn.layer.factors import GradientFactors


def factors_of(parts, out, width, dtype=torch.float64):
    factors = GradientFactors("net.0", out, width)
    for first_row, dy, x in parts:
        factors.add(dy, x, dtype, first_row)
    return factors


def summed(parts, out, width):
    total = torch.zeros(out, width, dtype=torch.float64)
    for first_row, dy, x in parts:
        total[first_row : first_row + dy.shape[1]] += dy.t() @ x
    return total


@settings(max_examples=40, deadline=None)
@given(data=st.data(), out=st.integers(1, 12), width=st.integers(1, 12), seed=st.integers(0, 99))
def test_rows_are_those_of_the_sum_of_products(data, out, width, seed):
    """Also of products with some rows, and of more tokens than it is worth to keep."""
    torch.manual_seed(seed)
    parts = []
    for _ in range(data.draw(st.integers(1, 4))):
        first_row = data.draw(st.integers(0, out - 1))
        rows = data.draw(st.integers(1, out - first_row))
        tokens = data.draw(st.integers(1, 9))
        dy = torch.randn(tokens, rows, dtype=torch.float64)
        parts.append((first_row, dy, torch.randn(tokens, width, dtype=torch.float64)))
    begin = data.draw(st.integers(0, out - 1))
    end = data.draw(st.integers(begin + 1, out))
    factors = factors_of(parts, out, width)
    rows = factors.rows(begin, end)
    torch.testing.assert_close(rows, summed(parts, out, width)[begin:end])
    # Rows belong to the caller.
    rows.zero_()
    torch.testing.assert_close(factors.rows(begin, end), summed(parts, out, width)[begin:end])
    factors.clear()
    assert not factors
    assert factors.rows(begin, end) is None


@pytest.mark.parametrize("tokens", [2, 40])
def test_the_smaller_of_factors_and_gradient_is_kept(tokens):
    factors = factors_of([(0, torch.randn(tokens, 16), torch.randn(tokens, 32))], 16, 32)
    held = [part for product in factors._products for part in product[1:3]]
    held += [] if factors._whole is None else [factors._whole]
    assert sum(part.numel() for part in held) == min(tokens * (16 + 32), 16 * 32)


@pytest.mark.parametrize("changed", [0, 1])
def test_factors_that_were_overwritten_are_refused(changed):
    part = (torch.randn(2, 16), torch.randn(2, 32))
    factors = factors_of([(0, *part)], 16, 32)
    part[changed].zero_()
    with pytest.raises(RuntimeError, match=r"layer 'net\.0' or the gradient .* changed in place"):
        factors.rows(0, 16)


def test_float16_is_refused():
    half = torch.randn(2, 16).half()
    with pytest.raises(RuntimeError, match=r"layer 'net\.0' multiplies in float16"):
        factors_of([(0, half, half)], 16, 16)
