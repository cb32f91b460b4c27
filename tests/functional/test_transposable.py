from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog

from lightning_nm.functional import is_nm, magnitude_mask, transposable, transposable_mask
from lightning_nm.pattern import NMPattern

SMALL = ["1:2", "1:3", "2:3", "1:4", "2:4", "3:4"]
LARGE = ["3:5", "2:8", "4:8", "1:8", "7:8", "1:16", "8:16", "16:32"]
DTYPES = [
    torch.float32,
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


# The plain twins: every mask for M <= 4, the linear program beyond ----------------------------------------------------


def optimum(tile: np.ndarray, n: int) -> float:
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


def greedy(tile: np.ndarray, n: int) -> float:
    """What is kept by taking entries from the largest down, and repairing rows and columns that are left short."""
    m = len(tile)
    mask = np.zeros((m, m), dtype=bool)
    for cell in np.argsort(-tile, axis=None, kind="stable"):
        i, j = divmod(int(cell), m)
        mask[i, j] = mask[i].sum() < n and mask[:, j].sum() < n
    while mask.sum() < n * m:
        i, j = int(mask.sum(1).argmin()), int(mask.sum(0).argmin())
        if not mask[i, j]:
            mask[i, j] = True
            continue
        # (p, q) makes room for (i, q) and (p, j)
        gain = np.where(
            mask & ~mask[i] & ~mask[:, j : j + 1], tile[i] + tile[:, j : j + 1] - tile, -np.inf
        )
        p, q = divmod(int(gain.argmax()), m)
        mask[p, q], mask[i, q], mask[p, j] = False, True, True
    assert (mask.sum(0) == n).all()
    assert (mask.sum(1) == n).all()
    return float(tile[mask].sum())


def tiles_of(x: torch.Tensor, m: int) -> torch.Tensor:
    """[out, in, *taps] as [tiles, m, m]."""
    x = x.reshape(x.shape[0] // m, m, x.shape[1] // m, m, -1)
    return x.permute(0, 2, 4, 1, 3).reshape(-1, m, m)


def full_tiles(mask: torch.Tensor, pattern: str) -> bool:
    parsed = NMPattern.parse(pattern)
    tiles = tiles_of(mask, parsed.m)
    return bool(tiles.sum(1).eq(parsed.n).all() and tiles.sum(2).eq(parsed.n).all())


def kept(weight: torch.Tensor, mask: torch.Tensor, m: int) -> np.ndarray:
    """The magnitude that every tile keeps."""
    return tiles_of(weight.double().abs() * mask, m).sum((1, 2)).numpy()


def optima(weight: torch.Tensor, pattern: str) -> np.ndarray:
    parsed = NMPattern.parse(pattern)
    return np.array(
        [optimum(tile, parsed.n) for tile in tiles_of(weight.double().abs(), parsed.m).numpy()]
    )


# Optimality -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data(), pattern=st.sampled_from(SMALL))
def test_small_tiles_are_optimal(data, pattern):
    m = NMPattern.parse(pattern).m
    numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 3.0]) | st.floats(-9, 9, width=32)
    weight = torch.tensor(data.draw(st.lists(numbers, min_size=m * m, max_size=m * m))).view(m, m)
    mask = transposable_mask(weight, pattern)
    assert full_tiles(mask, pattern)
    np.testing.assert_allclose(kept(weight, mask, m), optima(weight, pattern), rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), m=st.integers(5, 7))
def test_tiles_without_a_table_are_optimal(data, m):
    pattern = f"{data.draw(st.integers(1, m - 1))}:{m}"
    numbers = st.sampled_from([0.0, 1.0, -1.0, 2.0, 3.0]) | st.floats(-9, 9, width=32)
    weight = torch.tensor(data.draw(st.lists(numbers, min_size=m * m, max_size=m * m))).view(m, m)
    mask = transposable_mask(weight, pattern)
    assert full_tiles(mask, pattern)
    np.testing.assert_allclose(kept(weight, mask, m), optima(weight, pattern), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pattern", [*SMALL, *LARGE])
@pytest.mark.parametrize("numbers", ["normal", "heavy", "ties", "half zero", "rank one"])
def test_nothing_keeps_more(monkeypatch, pattern, numbers):
    n, m = (parsed := NMPattern.parse(pattern)).n, parsed.m
    shape = (m, 2 * m if m > 8 else 4 * m)
    weight = {
        "normal": torch.randn(shape),
        "heavy": torch.randn(shape).mul(4).exp(),
        "ties": torch.randn(shape).mul(2).round(),
        "half zero": torch.randn(shape).relu(),
        "rank one": torch.randn(m, 1) * torch.randn(1, shape[1]),
    }[numbers]
    most = optima(weight, pattern)
    simple = np.array([greedy(tile, n) for tile in tiles_of(weight.double().abs(), m).numpy()])
    for rounds in (transposable._PRICE_ROUNDS, 0):  # few paths, and many
        monkeypatch.setattr(transposable, "_PRICE_ROUNDS", rounds)
        found = kept(weight, transposable_mask(weight, pattern), m)
        np.testing.assert_allclose(found, most, rtol=1e-6)
        assert (found >= simple * (1 - 1e-6)).all()


@pytest.mark.parametrize("m", [4, 8, 16, 33])
def test_one_entry_per_row_is_an_assignment(m):
    weight = torch.randn(m, 3 * m)
    mask = transposable_mask(weight, f"1:{m}")
    expected = [
        tile[linear_sum_assignment(-tile)].sum()
        for tile in tiles_of(weight.double().abs(), m).numpy()
    ]
    np.testing.assert_allclose(kept(weight, mask, m), expected, rtol=1e-6)


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "3:4"])
def test_both_solvers_agree(monkeypatch, pattern):
    weight = torch.randn(32, 64)
    m = NMPattern.parse(pattern).m
    by_table = transposable_mask(weight, pattern)
    monkeypatch.setattr(transposable, "_MAX_TABLE_M", 0)
    monkeypatch.setattr(transposable, "_PRICE_ROUNDS", 0)  # and paths alone are enough
    assert torch.equal(transposable_mask(weight, pattern), by_table)
    ties = weight.mul(2).round()
    np.testing.assert_array_equal(
        kept(ties, transposable_mask(ties, pattern), m), optima(ties, pattern)
    )


@pytest.mark.parametrize("pattern", ["3:5", "4:8", "1:8"])
def test_prices_only_save_time(monkeypatch, pattern):
    weight = torch.randn(40, 80)
    expected = transposable_mask(weight, pattern)
    for rounds in (0, 1, 3):
        monkeypatch.setattr(transposable, "_PRICE_ROUNDS", rounds)
        assert torch.equal(transposable_mask(weight, pattern), expected)


@pytest.mark.parametrize("pattern", ["3:5", "4:8", "1:16"])
def test_ties_of_whole_rows_need_no_paths(monkeypatch, pattern):
    def never(*args):
        raise AssertionError("a path was searched")

    monkeypatch.setattr(transposable, "_augment", never)
    m = NMPattern.parse(pattern).m
    for weight in (
        torch.zeros(m, 2 * m),
        torch.randn(1, 2 * m).expand(m, -1),
        torch.randn(m, 1).expand(-1, 2 * m),
    ):
        assert full_tiles(transposable_mask(weight, pattern), pattern)
    monkeypatch.setattr(transposable, "_PRICE_ROUNDS", 0)
    with pytest.raises(AssertionError, match="searched"):
        transposable_mask(torch.randn(m, 20 * m), pattern)


@pytest.mark.parametrize(
    ("pattern", "without", "most"), [("4:8", 3.5, 0.1), ("1:16", 4.5, 0.8), ("8:16", 10, 0.8)]
)
def test_prices_leave_few_paths(pattern, without, most):
    """Surplus entries per tile of normal weights: 4.4, 5.7 and 12.6 without prices; 0.03, 0.4 and 0.4 with them."""
    parsed = NMPattern.parse(pattern)
    values = torch.randn(parsed.m, parsed.m, 300).abs().mul(2**20).int()
    for prices, low, high in (
        (0, without, np.inf),
        (transposable._prices(values, parsed), 0, most),
    ):
        counts = transposable._rows_alone(values - prices, parsed).sum(0)
        assert low <= float((counts - parsed.n).relu().sum(0).float().mean()) <= high


def test_tables_hold_every_mask():
    for pattern, count in [("1:2", 2), ("2:3", 6), ("1:4", 24), ("2:4", 90), ("3:4", 24)]:
        table = transposable._masks_of_a_tile(NMPattern.parse(pattern))
        assert len(table) == len(table.unique(dim=0)) == count


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "3:5", "4:8", "1:16"])
@pytest.mark.parametrize("taps", [(), (3,), (3, 2), (1, 2, 2)])
def test_both_axes_are_nm(pattern, taps):
    m = NMPattern.parse(pattern).m
    weight = torch.randn(2 * m, 3 * m, *taps)
    mask = transposable_mask(weight, pattern)
    assert mask.dtype == torch.bool
    assert mask.shape == weight.shape
    assert mask.is_contiguous()
    assert full_tiles(mask, pattern)
    assert is_nm(mask, pattern, dim=1)
    assert is_nm(mask, pattern, dim=0)
    assert is_nm(mask.transpose(0, 1), pattern, dim=1)
    each = [transposable_mask(tap, pattern) for tap in weight.view(2 * m, 3 * m, -1).unbind(2)]
    assert torch.equal(mask.view(2 * m, 3 * m, -1), torch.stack(each, 2))


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_groups_are_layers_of_their_own(pattern):
    weight = torch.randn(48, 16, 3, 3)
    mask = transposable_mask(weight, pattern, groups=3)
    assert torch.equal(
        mask, torch.cat([transposable_mask(part, pattern) for part in weight.chunk(3)])
    )


@pytest.mark.parametrize("pattern", ["2:4", "3:5", "4:8", "1:8", "8:16"])
def test_the_transpose_keeps_as_much(pattern):
    m = NMPattern.parse(pattern).m
    weight = torch.randn(2 * m, 3 * m)
    straight = kept(weight, transposable_mask(weight, pattern), m)
    turned = kept(weight, transposable_mask(weight.t(), pattern).t(), m)
    np.testing.assert_allclose(turned, straight, rtol=1e-6)


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_any_strides(pattern):
    weight = torch.randn(16, 24, 3, 3)
    expected = transposable_mask(weight, pattern)
    assert torch.equal(
        transposable_mask(weight.to(memory_format=torch.channels_last), pattern), expected
    )
    assert torch.equal(
        transposable_mask(weight.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0), pattern),
        expected,
    )
    assert torch.equal(
        transposable_mask(torch.stack([weight, weight], -1)[..., 1], pattern), expected
    )
    column = torch.randn(16, 1)
    assert torch.equal(
        transposable_mask(column.expand(16, 8), pattern),
        transposable_mask(column.repeat(1, 8), pattern),
    )


@pytest.mark.parametrize("pattern", ["2:4", "3:5", "4:8", "1:8"])
@pytest.mark.parametrize("chunk", [1, 700, 5000])
def test_chunks_change_nothing(monkeypatch, pattern, chunk):
    weight = torch.randn(40, 80, 3)
    ties = weight.mul(2).round()
    expected = [transposable_mask(x, pattern) for x in (weight, ties)]
    monkeypatch.setattr(transposable, "_CHUNK", chunk)
    pieces = []
    integers = transposable._integers
    monkeypatch.setattr(
        transposable,
        "_integers",
        lambda x, pattern: pieces.append(x.numel()) or integers(x, pattern),
    )
    for x, mask in zip((weight, ties), expected, strict=True):
        assert torch.equal(transposable_mask(x, pattern), mask)
    at_least = 3 * NMPattern.parse(pattern).m ** 2  # one tile of every tap
    assert max(pieces) <= max(chunk * torch.get_num_threads(), at_least)
    assert sum(pieces) == 2 * weight.numel()


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0, 3), (8, 8, 0)])
@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_empty(shape, pattern):
    assert transposable_mask(torch.zeros(shape), pattern).shape == shape


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:8"])
def test_dtypes(dtype, pattern):
    weight = torch.randn(16, 32).mul(9).to(dtype)
    mask = transposable_mask(weight, pattern)
    assert torch.equal(mask, transposable_mask(weight.double(), pattern))
    m = NMPattern.parse(pattern).m
    np.testing.assert_allclose(kept(weight, mask, m), optima(weight, pattern), rtol=1e-6)


def test_the_smallest_of_integers_has_the_largest_magnitude():
    weight = torch.ones(8, 8, dtype=torch.int8)
    weight.fill_diagonal_(-128)
    assert transposable_mask(weight, "1:8").equal(torch.eye(8, dtype=torch.bool))


@pytest.mark.parametrize("pattern", ["2:4", "3:4", "4:8", "1:8", "7:8"])
@pytest.mark.parametrize("number", [0.0, 1.0, 1e-40, 3e38, torch.inf, -torch.inf, torch.nan])
def test_tiles_of_one_number(pattern, number):
    weight = torch.full((16, 24), number)
    mask = transposable_mask(weight, pattern)
    assert full_tiles(mask, pattern)
    m = NMPattern.parse(pattern).m
    assert (tiles_of(mask, m) == mask[:m, :m]).all()  # equal tiles, equal masks


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales(pattern, dtype):
    """Powers of two change nothing, from the smallest numbers that are not denormal to almost the largest."""
    weight = torch.randn(16, 16).to(dtype)
    expected = transposable_mask(weight, pattern)
    limits = torch.finfo(dtype)
    for exponent in (-60, int(np.log2(limits.tiny)) + 20, int(np.log2(limits.max)) - 8):
        assert torch.equal(transposable_mask(weight * 2.0**exponent, pattern), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_denormals_are_numbers(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    order = torch.randperm(8)
    weight = torch.zeros(8, 8, dtype=dtype)
    weight[torch.arange(8), order] = smallest
    assert transposable_mask(weight, "1:8").equal(weight != 0)


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "2:8", "8:16"])
def test_infinities_first_then_the_rest(pattern):
    n, m = (parsed := NMPattern.parse(pattern)).n, parsed.m
    weight = torch.randn(2 * m, 4 * m)
    infinite = torch.rand(weight.shape) < 0.3
    spiked = torch.where(infinite, weight.sign() * torch.inf, weight * 2.0**-40)
    mask = transposable_mask(spiked, pattern)
    assert full_tiles(mask, pattern)
    most = optima(infinite.double(), pattern)
    np.testing.assert_array_equal(tiles_of(mask & infinite, m).sum((1, 2)).numpy(), np.round(most))
    big = 1000.0 * n * m  # in place of infinity: what is left is decided by the finite entries
    stand_in = torch.where(infinite, big, weight)
    np.testing.assert_allclose(kept(stand_in, mask, m), optima(stand_in, pattern), rtol=1e-7)


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:8"])
def test_nan_is_less_than_zero(pattern):
    n, m = (parsed := NMPattern.parse(pattern)).n, parsed.m
    weight = torch.zeros(m, m)
    square = torch.arange(m)
    allowed = (square - square.unsqueeze(1)) % m < n  # one way without a NaN is there
    weight[~allowed] = torch.nan
    assert torch.equal(transposable_mask(weight, pattern), allowed)
    spotted = torch.where(torch.rand(4 * m, 4 * m) < 0.2, torch.nan, torch.randn(4 * m, 4 * m))
    mask = transposable_mask(spotted, pattern)
    assert full_tiles(mask, pattern)
    zeroed = spotted.nan_to_num(nan=0.0)
    np.testing.assert_allclose(kept(zeroed, mask, m), optima(zeroed, pattern), rtol=1e-5)


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_the_sign_is_ignored_and_the_weight_untouched(pattern):
    weight = torch.nn.Parameter(torch.randn(16, 16))
    before = weight.detach().clone()
    mask = transposable_mask(weight, pattern)
    assert not mask.requires_grad
    assert torch.equal(weight.detach(), before)
    assert torch.equal(transposable_mask(-before, pattern), mask)
    assert torch.equal(transposable_mask(before.abs(), pattern), mask)


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_equal_inputs_equal_masks_wherever_the_tile_is(pattern):
    m = NMPattern.parse(pattern).m
    tile = torch.randn(m, m).mul(2).round()
    alone = transposable_mask(tile, pattern)
    among = torch.randn(5 * m, 7 * m)
    among[3 * m : 4 * m, 5 * m : 6 * m] = tile
    assert torch.equal(transposable_mask(among, pattern)[3 * m : 4 * m, 5 * m : 6 * m], alone)


@pytest.mark.parametrize(("pattern", "low", "high"), [("2:4", 0.935, 0.953), ("4:8", 0.96, 0.974)])
def test_what_a_second_axis_costs(pattern, low, high):
    """Normal weights keep 0.944 (2:4) and 0.967 (4:8) of what a mask of the rows alone keeps."""
    weight = torch.randn(128, 256)
    both = (weight * transposable_mask(weight, pattern)).abs().sum()
    rows = (weight * magnitude_mask(weight, pattern)).abs().sum()
    assert low < float(both / rows) < high


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "pattern", "groups", "message"),
    [
        ((8, 6), "2:4", 1, r"\(8, 6\).*2:4.*M=4.*size 6 of dim=1;.*exclude"),
        ((6, 8), "2:4", 1, r"6 output rows in 1 group.*M=4:.*exclude"),
        ((8, 8), "4:8", 2, r"8 output rows in 2 group\(s\) are 4 rows each, not a multiple of M=8"),
        ((8, 8), "2:4", 3, "groups=3 does not split 8"),
        ((8, 8), "2:4", 0, "groups=0"),
        ((8,), "2:4", 1, r"\(8,\) has no input axis"),
        ((8, 8), "2-4", 1, "cannot read"),
    ],
)
def test_errors_name_the_way_out(shape, pattern, groups, message):
    with pytest.raises(ValueError, match=message):
        transposable_mask(torch.zeros(shape), pattern, groups)
