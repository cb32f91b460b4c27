"""The soft threshold against a loop over blocks, and what makes it more than a mask: it is continuous."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import functional as nmf

PATTERNS = ["2:4", "1:2", "1:4", "3:4", "2:8", "1:16"]
# Few values, so that blocks have ties, zeros and both signs.
VALUES = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5, -3.0])


def by_sorting(block, n):
    """The definition for one block of numbers."""
    threshold = sorted(abs(value) for value in block)[len(block) - n - 1]
    shrunk = []
    for value in block:
        size = max(abs(value) - threshold, 0.0)
        shrunk.append(size if value > 0 else -size if size else 0.0)
    return shrunk


@st.composite
def blocks(draw):
    pattern = draw(st.sampled_from(PATTERNS))
    size = int(pattern[2:]) * draw(st.integers(1, 4))
    return pattern, torch.tensor(draw(st.lists(VALUES, min_size=size, max_size=size)))


@settings(max_examples=60, deadline=None)
@given(
    blocks(),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_it_is_the_definition(case, dim, dtype):
    pattern, values = case
    n, m = map(int, pattern.split(":"))
    expected = [by_sorting(block, n) for block in values.view(-1, m).tolist()]
    other = (dim + 1) % 3
    shape = [-1 if axis == dim else 1 for axis in range(3)]
    x = values.to(dtype).view(shape).repeat_interleave(2, other)
    found = nmf.soft_threshold_nm(x, pattern, dim)
    assert found.dtype == dtype
    for part in found.unbind(other):
        assert part.reshape(-1, m).tolist() == expected
    assert not torch.signbit(found[found == 0]).any(), "-0.0 breaks compressors"


@settings(max_examples=60, deadline=None)
@given(blocks(), st.integers(0, 2**31), st.floats(1e-9, 1e-1))
def test_it_is_continuous_across_ties(case, seed, distance):
    """Its entries move at most twice as far as the farthest entry of x; those of the hard threshold jump."""
    pattern, x = case
    x = x.double()
    step = 2 * torch.rand(len(x), generator=torch.Generator().manual_seed(seed)).double() - 1
    moved = x + distance * step
    change = nmf.soft_threshold_nm(x, pattern) - nmf.soft_threshold_nm(moved, pattern)
    assert change.abs().max() <= 2 * distance * step.abs().max() + 1e-12


def test_with_a_mask_of_other_weights_it_stays_within_the_mask():
    x = torch.tensor([1.0, -4.0, 3.0, 2.0])
    mask = torch.tensor([True, True, False, False])
    # The threshold is 3: the first entry is allowed, and too small.
    assert nmf.soft_threshold_nm(x, "2:4", mask=mask).tolist() == [0.0, -1.0, 0.0, 0.0]
    own = nmf.magnitude_mask(x, "2:4")
    assert torch.equal(nmf.soft_threshold_nm(x, "2:4", mask=own), nmf.soft_threshold_nm(x, "2:4"))


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ([torch.inf, 1.0, -2.0, 0.5], [torch.inf, 0.0, -1.0, 0.0]),
        ([torch.nan, 1.0, -3.0, 0.5], [0.0, 0.5, -2.5, 0.0]),
    ],
)
def test_infinities_and_nan(block, expected):
    assert nmf.soft_threshold_nm(torch.tensor(block), "2:4").tolist() == expected


@pytest.mark.parametrize(
    ("shape", "options", "error", "message"),
    [
        ((6,), {}, ValueError, "M=4 does not divide size 6"),
        ((4, 4), {"dim": 2}, IndexError, "dim=2"),
        (
            (8,),
            {"mask": torch.ones(4, dtype=torch.bool)},
            ValueError,
            r"mask of shape \(4,\) for a tensor of shape \(8,\)",
        ),
    ],
)
def test_bad_arguments(shape, options, error, message):
    with pytest.raises(error, match=message):
        nmf.soft_threshold_nm(torch.ones(shape), "2:4", **options)
