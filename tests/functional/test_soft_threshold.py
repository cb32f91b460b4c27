"""The soft threshold against a loop over blocks, and what makes it more than a mask: it is continuous."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import functional as nmf

PATTERNS = ["2:4", "1:2", "1:4", "3:4", "2:8", "1:16"]
# Few values, so that blocks have ties, zeros and both signs.
VALUES = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5, -3.0])


def by_sorting(block, pattern):
    """The definition for one block of numbers."""
    n, m = map(int, pattern.split(":"))
    threshold = sorted(abs(value) for value in block)[m - n - 1]
    shrunk = []
    for value in block:
        size = max(abs(value) - threshold, 0.0)
        shrunk.append(size if value > 0 else -size if size else 0.0)
    return shrunk


@st.composite
def blocks(draw):
    pattern = draw(st.sampled_from(PATTERNS))
    m = int(pattern.split(":")[1])
    count = draw(st.integers(1, 4))
    return pattern, draw(st.lists(VALUES, min_size=count * m, max_size=count * m))


@settings(max_examples=60, deadline=None)
@given(blocks(), st.sampled_from([0, 1, 2]))
def test_it_is_the_definition(case, dim):
    pattern, values = case
    m = int(pattern.split(":")[1])
    expected = []
    for first in range(0, len(values), m):
        expected += by_sorting(values[first : first + m], pattern)
    shape = [1, 1, 1]
    shape[dim] = -1
    x = torch.tensor(values, dtype=torch.float64).view(shape).repeat_interleave(2, (dim + 1) % 3)
    found = nmf.soft_threshold_nm(x, pattern, dim)
    for part in found.unbind((dim + 1) % 3):
        assert part.flatten().tolist() == expected
    assert nmf.is_nm(found, pattern, dim)
    assert not torch.signbit(found[found == 0]).any(), "-0.0 breaks compressors"


@settings(max_examples=60, deadline=None)
@given(blocks(), st.integers(0, 2**31), st.floats(1e-9, 1e-1))
def test_it_is_continuous_across_ties(case, seed, distance):
    """Its entries move at most twice as far as the farthest entry of x; those of the hard threshold jump."""
    pattern, values = case
    x = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    step = torch.rand(len(x), generator=generator, dtype=torch.float64) * 2 - 1
    moved = x + distance * step
    change = nmf.soft_threshold_nm(x, pattern) - nmf.soft_threshold_nm(moved, pattern)
    assert change.abs().max() <= 2 * distance * step.abs().max() + 1e-12


def test_a_hard_threshold_jumps_where_this_does_not():
    before = torch.tensor([3.0, 2.0 + 1e-6, 2.0, 1.0])
    after = torch.tensor([3.0, 2.0 - 1e-6, 2.0, 1.0])
    jump = (nmf.nm_prune(before, "2:4") - nmf.nm_prune(after, "2:4")).abs().max()
    assert jump > 1.9
    shift = nmf.soft_threshold_nm(before, "2:4") - nmf.soft_threshold_nm(after, "2:4")
    assert shift.abs().max() < 1e-5


def test_with_a_mask_of_other_weights_it_stays_within_the_mask():
    x = torch.tensor([1.0, -4.0, 3.0, 2.0])
    mask = torch.tensor([True, True, False, False])
    # The threshold is 3: the first entry is allowed, and too small.
    assert nmf.soft_threshold_nm(x, "2:4", mask=mask).tolist() == [0.0, -1.0, 0.0, 0.0]
    own = nmf.magnitude_mask(x, "2:4")
    assert torch.equal(nmf.soft_threshold_nm(x, "2:4", mask=own), nmf.soft_threshold_nm(x, "2:4"))


def test_infinities_and_nan():
    infinite = torch.tensor([torch.inf, 1.0, -2.0, 0.5])
    assert nmf.soft_threshold_nm(infinite, "2:4").tolist() == [torch.inf, 0.0, -1.0, 0.0]
    with_nan = torch.tensor([torch.nan, 1.0, -3.0, 0.5])
    assert nmf.soft_threshold_nm(with_nan, "2:4").tolist() == [0.0, 0.5, -2.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_stays(dtype):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = nmf.soft_threshold_nm(x, "2:4")
    assert found.dtype == dtype
    assert nmf.is_nm(found, "2:4")


def test_bad_arguments():
    with pytest.raises(ValueError, match="M=4 does not divide size 6"):
        nmf.soft_threshold_nm(torch.ones(6), "2:4")
    with pytest.raises(IndexError, match="dim=2"):
        nmf.soft_threshold_nm(torch.ones(4, 4), "2:4", dim=2)
    with pytest.raises(ValueError, match=r"mask of shape \(4,\) for a tensor of shape \(8,\)"):
        nmf.soft_threshold_nm(torch.ones(8), "2:4", mask=torch.ones(4, dtype=torch.bool))
