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
    st.sampled_from(["magnitude", "any"]),
    st.sampled_from(["normal", "ties", "nan"]),
)
def test_margins_are_those_of_the_definition(seed, nm, dim, dtype, kind, values):
    n, m = nm
    generator = torch.Generator().manual_seed(seed)
    shape = [2, 3, 2]
    shape[dim] *= m
    weight = torch.randn(shape, generator=generator).to(dtype)
    if values == "ties":
        weight = weight.round()
    if kind == "magnitude":
        mask = magnitude_mask(weight, f"{n}:{m}", dim)
    else:
        mask = torch.rand(shape, generator=generator) < n / m
    if values == "nan":
        weight.view(-1)[seed % weight.numel()] = torch.nan
    found = mask_margin(weight, mask, f"{n}:{m}", dim)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = oracle(weight.double().numpy(), mask.numpy(), m, dim)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    seen = found[~found.isnan()]
    assert ((seen >= -1) & (seen <= 1)).all()
    if kind == "magnitude" and values != "nan":
        assert (seen >= 0).all()


def test_a_margin_is_what_the_last_kept_weight_can_lose():
    weight = torch.tensor([4.0, -2.0, 1.5, 0.5])
    mask = magnitude_mask(weight, "2:4")
    assert mask_margin(weight, mask, "2:4").item() == pytest.approx(0.25)
    for share, stays in ((0.24, True), (0.26, False)):
        less = weight.clone()
        less[1] *= 1 - share
        assert torch.equal(magnitude_mask(less, "2:4"), mask) == stays


def test_extremes():
    mask = torch.tensor([True, True, False, False])
    assert mask_margin(torch.tensor([1.0, 2.0, 0.0, 0.0]), mask, "2:4").item() == 1
    assert mask_margin(torch.tensor([0.0, 0.0, 1.0, 2.0]), mask, "2:4").item() == -1
    assert mask_margin(torch.zeros(4), mask, "2:4").item() == 0
    assert mask_margin(torch.ones(4), torch.ones(4, dtype=torch.bool), "2:4").isnan().all()
    assert mask_margin(torch.empty(0, 4), torch.empty(0, 4, dtype=torch.bool), "2:4").shape == (
        0,
        1,
    )
    weight = torch.ones(4, requires_grad=True)
    assert not mask_margin(weight, mask, "2:4").requires_grad


def test_errors_name_the_values():
    mask = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"mask is torch\.float32, and a mask is a bool tensor"):
        mask_margin(mask.float(), mask.float(), "2:4")
    with pytest.raises(TypeError, match=r"weight is torch\.int64"):
        mask_margin(mask.long(), mask, "2:4")
    with pytest.raises(ValueError, match=r"weight has shape \(4,\) and mask has shape \(2, 4\)"):
        mask_margin(torch.ones(4), mask, "2:4")
    with pytest.raises(ValueError, match=r"\(2, 4\).*2:8.*M=8 does not divide size 4 of dim=-1"):
        mask_margin(torch.ones(2, 4), mask, "2:8")
    with pytest.raises(ValueError, match="without axes"):
        mask_margin(torch.tensor(1.0), torch.tensor(True), "2:4")
