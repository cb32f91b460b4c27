"""Transposable masks against the optimum: every mask of a tile up to M = 4, the linear program beyond."""

from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from lightning_nm.functional import is_nm, transposable_mask, transposable_masks
from lightning_nm.pattern import NMPattern

PATTERNS = ["1:2", "2:3", "1:4", "2:4", "3:4", "3:5", "2:8", "4:8", "7:8", "1:16", "8:16", "16:32"]
DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def optimum(tile, n):
    """The most magnitude that N entries in every row and column can have."""
    m = len(tile)
    if m <= 4:
        rows = list(combinations(range(m), n))
        return max(
            sum(tile[i, j] for i, row in enumerate(choice) for j in row)
            for choice in product(rows, repeat=m)
            if all(sum(j in row for row in choice) == n for j in range(m))
        )
    line = np.ones((1, m))
    sums = np.vstack([np.kron(np.eye(m), line), np.kron(line, np.eye(m))])
    return -linprog(-tile.ravel(), A_eq=sums, b_eq=np.full(2 * m, n), bounds=(0, 1)).fun


def tiles_of(x, m):
    """[out, in, *taps] as [tiles, m, m]."""
    x = x.reshape(x.shape[0] // m, m, x.shape[1] // m, m, -1)
    return x.permute(0, 2, 4, 1, 3).reshape(-1, m, m)


def full_tiles(mask, pattern):
    pattern = NMPattern.parse(pattern)
    tiles = tiles_of(mask, pattern.m)
    return bool((tiles.sum(1) == pattern.n).all() and (tiles.sum(2) == pattern.n).all())


def assert_optimal(weight, pattern, *masks, rtol=1e-6):
    """The masks are full, and every tile keeps the most magnitude."""
    n, m = NMPattern.parse(pattern).n, NMPattern.parse(pattern).m
    tiles = tiles_of(weight.double().abs(), m)
    most = [optimum(tile, n) for tile in tiles.numpy()]
    for mask in masks:
        assert full_tiles(mask, pattern)
        kept = (tiles * tiles_of(mask, m)).sum((1, 2))
        np.testing.assert_allclose(kept.numpy(), most, rtol=rtol, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), m=st.integers(2, 7))
def test_any_tile(data, m):
    pattern = f"{data.draw(st.integers(1, m - 1))}:{m}"
    numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 3.0]) | st.floats(-9, 9, width=32)
    weight = torch.tensor(data.draw(st.lists(numbers, min_size=m * m, max_size=m * m))).view(m, m)
    assert_optimal(weight, pattern, transposable_mask(weight, pattern))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("numbers", ["normal", "heavy", "ties", "half zero", "rank one"])
def test_nothing_keeps_more(monkeypatch, pattern, numbers):
    """With a table, with few paths, with many, and with paths alone."""
    m = NMPattern.parse(pattern).m
    shape = (m, 2 * m if m > 8 else 16 * m)
    weight = {
        "normal": torch.randn(shape),
        "heavy": torch.randn(shape).mul(4).exp(),
        "ties": torch.randn(shape).mul(2).round(),
        "half zero": torch.randn(shape).relu(),
        "rank one": torch.randn(m, 1) * torch.randn(1, shape[1]),
    }[numbers]
    found = [transposable_mask(weight, pattern)]
    monkeypatch.setattr(transposable_masks, "_MAX_TABLE_M", 0)
    for rounds in (1, 0):
        monkeypatch.setattr(transposable_masks, "_PRICE_ROUNDS", rounds)
        found.append(transposable_mask(weight, pattern))
    assert_optimal(weight, pattern, *found)
    if numbers == "normal":  # one mask alone is the best
        assert all(torch.equal(mask, found[0]) for mask in found)


@pytest.mark.parametrize("pattern", ["3:5", "4:8", "1:16"])
def test_prices_balance_tiles_whose_rows_are_equal(monkeypatch, pattern):
    monkeypatch.setattr(transposable_masks, "_augment", None)  # no path is searched
    m = NMPattern.parse(pattern).m
    for weight in (torch.zeros(m, 1), torch.randn(1, 2 * m), torch.randn(m, 1)):
        mask = transposable_mask(weight.expand(m, 2 * m), pattern)
        assert full_tiles(mask, pattern)


@pytest.mark.parametrize(("pattern", "most"), [("4:8", 0.1), ("1:16", 0.8), ("8:16", 0.8)])
def test_prices_leave_few_paths(pattern, most):
    """Surplus entries per tile of normal weights: 4.4, 5.7 and 12.6 without prices; 0.03, 0.4 and 0.4 with them."""
    parsed = NMPattern.parse(pattern)
    values = torch.randn(parsed.m, parsed.m, 300).abs().mul(2**20).int()
    rows = transposable_masks._rows_alone(
        values - transposable_masks._prices(values, parsed), parsed
    )
    assert (rows.sum(0) - parsed.n).relu().sum(0).float().mean() <= most


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "3:5", "4:8", "1:16"])
@pytest.mark.parametrize("taps", [(), (3, 2)])
def test_both_axes_are_nm(pattern, taps):
    m = NMPattern.parse(pattern).m
    weight = torch.randn(2 * m, 3 * m, *taps)
    mask = transposable_mask(weight, pattern)
    assert mask.dtype == torch.bool
    assert mask.is_contiguous()
    assert is_nm(mask, pattern, dim=1)
    assert is_nm(mask, pattern, dim=0)
    each = [transposable_mask(tap, pattern) for tap in weight.view(2 * m, 3 * m, -1).unbind(2)]
    assert torch.equal(mask, torch.stack(each, 2).view(weight.shape))


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_groups_and_strides_change_nothing(pattern):
    weight = torch.nn.Parameter(torch.randn(48, 16, 3, 3))
    before = weight.detach().clone()
    parts = [transposable_mask(part, pattern) for part in weight.chunk(3)]
    assert torch.equal(transposable_mask(weight, pattern, groups=3), torch.cat(parts))
    expected = transposable_mask(weight, pattern)
    assert not expected.requires_grad
    assert torch.equal(weight, before)
    for other in (
        -before,
        before.to(memory_format=torch.channels_last),
        before.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
        torch.stack([before, before], -1)[..., 1],
    ):
        assert torch.equal(transposable_mask(other, pattern), expected)
    column = torch.randn(16, 1)
    assert torch.equal(
        transposable_mask(column.expand(16, 8), pattern),
        transposable_mask(column.repeat(1, 8), pattern),
    )


@pytest.mark.parametrize("pattern", ["2:4", "3:5", "4:8"])
@pytest.mark.parametrize("chunk", [1, 700])
def test_chunks_change_nothing(monkeypatch, pattern, chunk):
    weight = torch.randn(40, 80, 3).mul(2).round()
    expected = transposable_mask(weight, pattern)
    pieces, integers = [], transposable_masks._integers
    monkeypatch.setattr(transposable_masks, "_CHUNK", chunk)
    monkeypatch.setattr(
        transposable_masks,
        "_integers",
        lambda x, *args: pieces.append(x.numel()) or integers(x, *args),
    )
    assert torch.equal(transposable_mask(weight, pattern), expected)
    at_least = 3 * NMPattern.parse(pattern).m ** 2  # one tile of every tap
    assert max(pieces) <= max(chunk, at_least)
    assert sum(pieces) == weight.numel()


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (8, 8, 0)])
def test_empty(shape):
    assert transposable_mask(torch.zeros(shape), "2:4").shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
def test_dtypes(dtype, pattern):
    weight = torch.randn(16, 32).mul(9).to(dtype)
    assert_optimal(weight, pattern, transposable_mask(weight, pattern))


def test_the_smallest_of_integers_has_the_largest_magnitude():
    weight = torch.ones(8, 8, dtype=torch.int8).fill_diagonal_(-128)
    assert torch.equal(transposable_mask(weight, "1:8"), weight < 0)


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "7:8"])
@pytest.mark.parametrize("number", [0.0, 1e-40, 3e38, -torch.inf, torch.nan])
def test_tiles_of_one_number(pattern, number):
    mask = transposable_mask(torch.full((16, 24), number), pattern)
    assert full_tiles(mask, pattern)
    m = NMPattern.parse(pattern).m
    assert (tiles_of(mask, m) == mask[:m, :m]).all(), "equal tiles have equal masks"


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales(pattern, dtype):
    """Powers of two change nothing, from the smallest numbers that are not denormal to almost the largest."""
    weight = torch.randn(16, 16).to(dtype)
    expected = transposable_mask(weight, pattern)
    limits = torch.finfo(dtype)
    for exponent in (-60, int(np.log2(limits.tiny)) + 20, int(np.log2(limits.max)) - 8):
        assert torch.equal(transposable_mask(weight * 2.0**exponent, pattern), expected)
    denormal = torch.zeros(8, 8, dtype=dtype)
    denormal[torch.arange(8), torch.randperm(8)] = limits.smallest_normal * limits.eps
    assert torch.equal(transposable_mask(denormal, "1:8"), denormal != 0)


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "2:8", "8:16"])
def test_infinities_first_then_the_rest(pattern):
    m = NMPattern.parse(pattern).m
    weight = torch.randn(2 * m, 4 * m)
    infinite = torch.rand(weight.shape) < 0.3
    spiked = torch.where(infinite, weight.sign() * torch.inf, weight * 2.0**-40)
    mask = transposable_mask(spiked, pattern)
    assert_optimal(torch.where(infinite, 1000.0, weight), pattern, mask)


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:8"])
def test_nan_is_less_than_zero(pattern):
    n, m = NMPattern.parse(pattern).n, NMPattern.parse(pattern).m
    square = torch.arange(m)
    allowed = (square - square[:, None]) % m < n  # one way without a NaN is there
    weight = torch.zeros(m, m).masked_fill(~allowed, torch.nan)
    assert torch.equal(transposable_mask(weight, pattern), allowed)
    spotted = torch.randn(4 * m, 4 * m)
    spotted[torch.rand(spotted.shape) < 0.2] = torch.nan
    assert_optimal(spotted.nan_to_num(), pattern, transposable_mask(spotted, pattern), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "pattern", "groups", "message"),
    [
        ((8, 6), "2:4", 1, r"\(8, 6\).*2:4.*M=4.*size 6 of dim=1;.*exclude"),
        ((6, 8), "2:4", 1, r"6 output rows in 1 group.*M=4:.*exclude"),
        ((8, 8), "4:8", 2, r"8 output rows in 2 group\(s\) are 4 rows each, not a multiple of M=8"),
        ((8, 8), "2:4", 3, "groups=3 does not split 8"),
        ((8, 8), "2:4", 0, "groups=0"),
        ((8,), "2:4", 1, r"\(8,\) has no input axis"),
    ],
)
def test_errors_name_the_way_out(shape, pattern, groups, message):
    with pytest.raises(ValueError, match=message):
        transposable_mask(torch.zeros(shape), pattern, groups)
