import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import magnitude_mask, mask_margin


def oracle(weight, mask, m, dim):
    """Block by block in float64."""
    rows, kept = (np.moveaxis(x, dim, -1) for x in (weight, mask))
    found = np.empty((*rows.shape[:-1], rows.shape[-1] // m))
    for place in np.ndindex(found.shape):
        inside = slice(place[-1] * m, place[-1] * m + m)
        values, keeps = np.abs(rows[place[:-1]][inside]), kept[place[:-1]][inside]
        if keeps.all() or not keeps.any() or np.isnan(values).any():
            found[place] = np.nan
            continue
        a, b = values[keeps].min(), values[~keeps].max()
        found[place] = 0 if a == b == 0 else (a - b) / max(a, b)
    return np.moveaxis(found, -1, dim)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**16),
    st.sampled_from([(1, 4), (2, 4), (2, 8), (1, 16), (3, 4)]),
    st.integers(0, 2),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.booleans(),
    st.sampled_from(["normal", "ties", "nan"]),
)
def test_margins_are_those_of_the_definition(seed, nm, dim, dtype, by_magnitude, values):
    n, m = nm
    generator = torch.Generator().manual_seed(seed)
    shape = [2, 3, 2]
    shape[dim] *= m
    weight = torch.randn(shape, generator=generator).to(dtype)
    if values == "ties":
        weight = weight.round()
    mask = torch.rand(shape, generator=generator) < n / m
    if by_magnitude:
        mask = magnitude_mask(weight, f"{n}:{m}", dim)
    if values == "nan":
        weight.view(-1)[seed % weight.numel()] = torch.nan
    found = mask_margin(weight.requires_grad_(), mask, f"{n}:{m}", dim)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not found.requires_grad
    expected = oracle(weight.detach().double().numpy(), mask.numpy(), m, dim)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_margin_is_what_the_last_kept_weight_can_lose():
    weight = torch.tensor([4.0, -2.0, 1.5, 0.5])
    mask = magnitude_mask(weight, "2:4")
    margin = mask_margin(weight, mask, "2:4").item()
    for less, stays in ((margin - 0.01, True), (margin + 0.01, False)):
        smaller = weight * torch.tensor([1, 1 - less, 1, 1])
        assert torch.equal(magnitude_mask(smaller, "2:4"), mask) == stays


def test_nothing_has_no_margins():
    assert mask_margin(torch.empty(0, 4), torch.empty(0, 4).bool(), "2:4").shape == (0, 1)


MASK = torch.ones(2, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("weight", "mask", "pattern", "error", "message"),
    [
        (
            MASK.float(),
            MASK.float(),
            "2:4",
            TypeError,
            "mask is torch.float32, and a mask is a bool",
        ),
        (MASK.long(), MASK, "2:4", TypeError, "weight is torch.int64"),
        (
            torch.ones(4),
            MASK,
            "2:4",
            ValueError,
            r"weight has shape \(4,\) and mask has shape \(2, 4\)",
        ),
        (
            MASK.float(),
            MASK,
            "2:8",
            ValueError,
            r"\(2, 4\).*2:8.*M=8 does not divide size 4 of dim=-1",
        ),
        (torch.tensor(1.0), torch.tensor(True), "2:4", ValueError, "without axes"),
    ],
)
def test_errors_name_the_values(weight, mask, pattern, error, message):
    with pytest.raises(error, match=message):
        mask_margin(weight, mask, pattern)
