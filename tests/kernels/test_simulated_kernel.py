import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.simulated import SimulatedSparseKernel, compress, expand
from lightning_nm import NMPattern
from lightning_nm.kernels import GemmKernel, GemmKey
from lightning_nm.kernels.gpu.two_four import packed_width
from tests.support.trapping_cslt import assert_product, normal, two_four

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KERNEL = SimulatedSparseKernel()


def key(
    gemm="forward", rows=32, depth=64, columns=24, dtype=torch.bfloat16, pattern="2:4", device="cpu"
):
    return GemmKey(gemm, rows, depth, columns, dtype, NMPattern.parse(pattern), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_groups_of_up_to_two_nonzeros_come_back(dtype):
    rows = [
        [float(entry + 1) if code >> entry & 1 else 0.0 for entry in range(4)]
        for code in range(16)
        if code.bit_count() <= 2
    ]
    pairs = [first + second for first, second in itertools.product(rows, rows)]
    matrix = torch.tensor(pairs, dtype=dtype).repeat(1, 4)
    assert torch.equal(expand(compress(matrix), 32), matrix)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [16, 32, 48, 512])
def test_the_packed_form_has_the_size_of_the_hardware_s(dtype, depth):
    packed = KERNEL.pack(two_four(16, depth, dtype))
    assert packed.shape == (16, packed_width(depth, dtype))
    assert packed.dtype == dtype
    bits = 8 * dtype.itemsize * depth // 2 + 4 * depth // 4
    assert packed.shape[1] == -(-bits // (8 * dtype.itemsize))
    if dtype.itemsize == 2:
        assert packed.shape[1] * 16 == depth * 9


def test_the_layout_is_the_documented_one():
    matrix = two_four(16, 64)
    packed = compress(matrix)
    codes = packed[:, 32:].contiguous().view(torch.uint8).tolist()
    for row in range(16):
        for group in range(16):
            code = codes[row][group // 2] >> 4 * (group % 2) & 15
            first, second = code % 4, code // 4
            assert first < second
            for slot, position in enumerate((first, second)):
                assert packed[row, 2 * group + slot] == matrix[row, 4 * group + position]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 4),
    depth=st.integers(1, 5),
    tokens=st.integers(1, 40),
    bias=st.booleans(),
    pattern=st.sampled_from(["2:4", "1:2", "1:8"]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_pruned_matrix(dtype, rows, depth, tokens, bias, pattern, seed):
    matrix = two_four(16 * rows, 16 * depth, dtype, seed, pattern)
    x = normal(tokens, 16 * depth, dtype=dtype, seed=seed + 1)
    bias = normal(16 * rows, dtype=dtype, seed=seed + 2) if bias else None
    y = KERNEL.linear(KERNEL.pack(matrix), x, bias)
    assert_product(y.t(), matrix, x.t(), bias)
    assert y.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 5), st.integers(0, 99))
def test_the_tokens_of_wgrad_need_not_fill_the_depth(dtype, rows, tokens, columns, seed):
    """A's depth is padded with zeros, and B's rows likewise."""
    tokens *= 4
    matrix = two_four(16 * rows, tokens, dtype, seed)
    other = normal(tokens, 8 * columns, dtype=dtype, seed=seed + 1)
    assert_product(KERNEL.matmul(KERNEL.pack(matrix), other), matrix, other)


def test_a_matrix_that_is_not_pruned_is_refused_and_named():
    matrix = two_four(16, 32)
    matrix[5, 8:11] = 1
    with pytest.raises(ValueError, match=r"1 of 128 groups .* row 5, columns 8 to 11: prune it"):
        KERNEL.pack(matrix)


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_zero_is_zero(dtype):
    dense = normal(32, 64, dtype=dtype)
    mask = two_four(32, 64, dtype, seed=1, pattern="1:4") != 0
    product = dense * mask
    assert bool((torch.signbit(product) & (product == 0)).any())
    packed = KERNEL.pack(product)
    assert torch.equal(
        packed.view(torch.uint8), KERNEL.pack(torch.where(mask, dense, 0)).view(torch.uint8)
    )
    assert not bool(torch.signbit(expand(packed, 64)[~mask]).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_survives(dtype):
    matrix = two_four(16, 32, dtype)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    matrix[3, 4:8] = torch.where(torch.tensor([True, False, True, False]), special, 0)
    matrix[9, 12:16] = torch.where(torch.tensor([False, True, False, True]), special, 0)
    torch.testing.assert_close(
        expand(KERNEL.pack(matrix), 32), matrix, rtol=0, atol=0, equal_nan=True
    )
    x = normal(8, 32, dtype=dtype)
    y = KERNEL.linear(KERNEL.pack(matrix), x)
    assert bool(y[:, [3, 9]].isnan().all())
    assert bool(y[:, [0, 1, 2, 4]].isfinite().all())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"gemm": "dgrad"}, ""),
        ({"columns": 13}, ""),  # tokens are padded
        ({"gemm": "wgrad", "depth": 50, "pattern": "1:2"}, ""),
        ({"rows": 40}, "rows=40 is not a multiple of 16"),
        ({"depth": 72}, "depth=72 is not a multiple of 16"),
        ({"gemm": "wgrad", "columns": 20}, "columns=20 is not a multiple of 8"),
        ({"pattern": "4:8"}, "4:8 may put more than two"),
        ({"dtype": torch.int8}, "torch.int8 is not one of its dtypes"),
        ({"columns": 0}, "is empty"),
        ({"gemm": "wgrad", "depth": 0}, "is empty"),
    ],
)
def test_supports_names_what_does_not_fit(changes, reason):
    answer = KERNEL.supports(key(**changes))
    assert reason in answer
    assert bool(answer) == bool(reason)


@settings(max_examples=60, deadline=None)
@given(
    gemm=st.sampled_from(["forward", "dgrad", "wgrad"]),
    rows=st.sampled_from([8, 16, 40, 48]),
    depth=st.sampled_from([4, 16, 36, 64]),
    columns=st.sampled_from([1, 8, 12, 40]),
)
def test_what_is_supported_runs_and_nothing_else(gemm, rows, depth, columns):
    matrix = two_four(rows, depth)

    def product():
        if gemm == "wgrad":
            return KERNEL.matmul(KERNEL.pack(matrix), normal(depth, columns))
        return KERNEL.linear(KERNEL.pack(matrix), normal(columns, depth))

    if KERNEL.supports(key(gemm, rows, depth, columns)):
        with pytest.raises(ValueError, match="simulated: "):
            product()
    else:
        assert product().shape == ((rows, columns) if gemm == "wgrad" else (columns, rows))


def test_a_full_batch_is_not_copied(monkeypatch):
    copies = []
    monkeypatch.setattr(
        "lightning_nm.kernels.gpu.two_four.pad", lambda *arguments: copies.append(arguments)
    )
    packed = KERNEL.pack(two_four(16, 32))
    KERNEL.linear(packed, normal(8, 32))
    KERNEL.matmul(packed, normal(32, 8))
    assert not copies


def test_the_reference_agrees():
    matrix, x, other, bias = two_four(32, 64), normal(24, 64), normal(64, 40), normal(32)
    reference = GemmKernel()
    torch.testing.assert_close(
        KERNEL.linear(KERNEL.pack(matrix), x, bias), reference.linear(matrix, x, bias)
    )
    torch.testing.assert_close(
        KERNEL.matmul(KERNEL.pack(matrix), other), reference.matmul(matrix, other)
    )
    assert (
        reference.probe(torch.device("cpu"))
        == reference.supports(key())
        == reference.remark(torch.device("cpu"))
    )
