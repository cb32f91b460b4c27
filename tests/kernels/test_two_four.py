"""The rules of 2:4 hardware, and the kernels that keep them: the one that is simulated, and cusparselt in software."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.simulated import SimulatedSparseKernel, expand
from lightning_nm import NMPattern
from lightning_nm.kernels import GemmKey, two_four_reason
from lightning_nm.kernels.gpu.two_four import packed_width, two_four_violation
from tests.support.trapping_cslt import KernelOnCpu, assert_product, normal, two_four

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32, torch.float64]
SIMULATED = SimulatedSparseKernel()


def worst_group(pattern, depth):
    """The most nonzeros that an N:M row of this depth can put into an aligned group of four."""
    groups = (range(start, start + 4) for start in range(0, depth, 4))
    counts = ([entry // pattern.m for entry in group] for group in groups)
    return max(
        sum(min(pattern.n, blocks.count(block)) for block in set(blocks)) for blocks in counts
    )


def test_a_pattern_fits_if_no_group_can_hold_three():
    for pattern in (NMPattern(n, m) for m in range(2, 20) for n in range(1, m)):
        fits = worst_group(pattern, depth=4 * pattern.m) <= 2
        assert (not two_four_reason(pattern)) == fits, pattern


def test_the_reason_names_the_pattern_and_the_way_out():
    assert "4:8" in two_four_reason("4:8")
    assert "2:M with 4 dividing M" in two_four_reason("2:6")
    assert "an axis of 30" in two_four_reason("1:2", depth=30)
    assert two_four_reason("1:2", depth=32) == ""


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), min_size=1, max_size=6))
def test_violations_are_counted_and_the_first_is_named(rows):
    entries = [[code >> entry & 1 for code in row for entry in range(4)] for row in rows]
    crowded = [(row, g) for row in range(len(rows)) for g in (0, 1) if rows[row][g].bit_count() > 2]
    text = two_four_violation(torch.tensor(entries).bool())
    if crowded:
        row, group = crowded[0]
        assert text.startswith(f"{len(crowded)} of {2 * len(rows)} groups")
        assert text.endswith(f"row {row}, columns {4 * group} to {4 * group + 3}")
    else:
        assert text == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [16, 48, 512])
def test_packed_values_come_back(dtype, depth):
    """All groups of up to two nonzeros, numbers or not; -0 is none of them."""
    entries = [(0.0, -0.0, 0.0, 0.0)]
    for pair in itertools.combinations(range(4), 2):
        for values in itertools.product((-0.0, 2.5, torch.nan, -torch.inf), repeat=2):
            entries.append([dict(zip(pair, values, strict=True)).get(i, 0.0) for i in range(4)])
    groups = torch.tensor(entries, dtype=dtype)
    matrix = groups[torch.randint(len(groups), (64, depth // 4))].flatten(1)
    packed = SIMULATED.pack(matrix)
    bits = 8 * dtype.itemsize * depth // 2 + depth  # 4 for each group
    width = -(-bits // (8 * dtype.itemsize))
    assert packed.shape == (64, packed_width(depth, dtype)) == (64, width)
    found, expected = expand(packed, depth), torch.where(matrix == 0, 0, matrix)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert not torch.signbit(found[found == 0]).any()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from(["2:4", "1:2", "1:8"]),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_products(rows, depth, tokens, bias, pattern, dtype, seed):
    matrix = two_four(16 * rows, 16 * depth, dtype, seed, pattern)
    x = normal(tokens, 16 * depth, dtype=dtype, seed=seed + 1)
    bias = normal(16 * rows, dtype=dtype, seed=seed + 2) if bias else None
    # The tokens of a wgrad need not fill the depth: A is padded with zeros, and so are B's rows.
    gradient = two_four(16 * rows, 4 * tokens, dtype, seed)
    other = normal(4 * tokens, 8 * depth, dtype=dtype, seed=seed + 1)
    for kernel in [SIMULATED, KernelOnCpu()] if dtype in HALVES else [SIMULATED]:
        y = kernel.linear(kernel.pack(matrix), x, bias)
        assert_product(y.t(), matrix, x.t(), bias)
        assert y.dtype == dtype
        assert_product(kernel.matmul(kernel.pack(gradient), other), gradient, other)


def test_a_matrix_that_is_not_pruned_is_refused_and_named():
    matrix = two_four(16, 32)
    matrix[5, 8:11] = 1
    with pytest.raises(ValueError, match=r"1 of 128 groups .* row 5, columns 8 to 11: prune it"):
        SIMULATED.pack(matrix)


def reason(gemm="forward", rows=32, depth=64, columns=24, dtype=torch.bfloat16, pattern="2:4"):
    key = GemmKey(gemm, rows, depth, columns, dtype, NMPattern.parse(pattern), "cpu")
    return SIMULATED.supports(key)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gemm": "wgrad", "depth": 50, "pattern": "1:2"}, ""),  # tokens are padded
        ({"rows": 40}, "rows=40 is not a multiple of 16"),
        ({"depth": 72}, "depth=72 is not a multiple of 16"),
        ({"gemm": "wgrad", "columns": 20}, "columns=20 is not a multiple of 8"),
        ({"pattern": "4:8"}, "4:8 may put more than two"),
        ({"dtype": torch.int8}, "torch.int8 is not one of its dtypes"),
        ({"columns": 0}, "is empty"),
        ({"gemm": "wgrad", "depth": 0}, "is empty"),
    ],
)
def test_the_reason_names_what_does_not_fit(changes, words):
    assert words in reason(**changes)
    assert bool(reason(**changes)) == bool(words)


@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
def test_what_is_supported_runs_and_nothing_else(gemm):
    for rows, depth, columns in itertools.product([8, 16, 40], [4, 16, 36, 64], [1, 8, 12]):
        matrix = two_four(rows, depth)
        shape = (depth, columns) if gemm == "wgrad" else (columns, depth)

        def product(matrix=matrix, shape=shape):
            multiply = SIMULATED.matmul if gemm == "wgrad" else SIMULATED.linear
            return multiply(SIMULATED.pack(matrix), normal(*shape))

        if reason(gemm, rows, depth, columns):
            with pytest.raises(ValueError, match="simulated: "):
                product()
        else:
            expected = (rows, columns) if gemm == "wgrad" else (columns, rows)
            assert product().shape == expected


def test_a_full_batch_is_not_copied(monkeypatch):
    copies = []
    monkeypatch.setattr(
        "lightning_nm.kernels.gpu.two_four.pad", lambda *arguments: copies.append(arguments)
    )
    packed = SIMULATED.pack(two_four(16, 32))
    SIMULATED.linear(packed, normal(8, 32))
    SIMULATED.matmul(packed, normal(32, 8))
    assert not copies
