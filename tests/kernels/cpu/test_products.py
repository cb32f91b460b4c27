import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.functional import nm_mask
from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.kernels import GemmKey, KernelRegistry
from lightning_nm.kernels.api import MaskedMatrix
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel, library
from tests.support.cpu_products import (
    KERNELS,
    LEVELS,
    REASON,
    STORAGES,
    at_level,
    case,
    compare,
    has_kernel,
    needs_library,
)

pytestmark = needs_library

DTYPES = (torch.float32, torch.bfloat16)
CELLS = [(kernel, level) for kernel in KERNELS for level in LEVELS if has_kernel(kernel, level)]
per_cell = pytest.mark.parametrize(
    ("kernel", "level"), CELLS, ids=[f"{k.name}-{level}" for k, level in CELLS]
)
of_each_kernel = pytest.mark.parametrize("kernel", [*dict(CELLS)], ids=lambda kernel: kernel.name)

dense_sizes = {
    "rows": st.integers(1, 70),
    "depth": st.integers(1, 90),
    "tokens": st.one_of(st.integers(1, 20), st.integers(1, 150)),
    "dtype": st.sampled_from(DTYPES),
    "weight_dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    "storage": st.sampled_from(STORAGES),
    "bias": st.booleans(),
    "bit": st.sampled_from([1, 2, 4, 128]),
    "seed": st.integers(0, 1000),
}


@st.composite
def patterns(draw, sizes):
    m = draw(st.sampled_from(sizes))
    return f"{draw(st.integers(1, m - 1))}:{m}"


@per_cell
@settings(max_examples=60)
@given(
    arguments=st.fixed_dictionaries(dense_sizes),
    pattern=patterns([2, 4, 8, 16, 32]),
    permuted=st.booleans(),
)
def test_products_of_n_m_matrices(kernel, level, arguments, pattern, permuted):
    with at_level(level):
        compare(kernel, case(**arguments, pattern=pattern, permuted=permuted and kernel.ordered))


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60)
@given(
    arguments=st.fixed_dictionaries(dense_sizes),
    pattern=st.one_of(st.none(), patterns([3, 5, 6, 7, 12, 24])),
)
def test_csr_products_of_any_mask(level, arguments, pattern):
    with at_level(level):
        compare(CpuCsrKernel(), case(**arguments, pattern=pattern))


@pytest.mark.slow
@per_cell
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (511, 1025, 130), (256, 4096, 64), (33, 8, 1000), (2050, 24, 3)]
)
def test_products_of_larger_matrices(kernel, level, dtype, sizes):
    with at_level(level):
        compare(kernel, case(*sizes, pattern="1:8", dtype=dtype))
        compare(kernel, case(*sizes, pattern="2:4", dtype=dtype, storage="columns"))


@per_cell
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15)
@given(
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 70), st.integers(1, 300)),
    pattern=patterns([4, 8, 16]),
)
def test_results_have_the_same_bits_for_every_number_of_threads(
    kernel, level, dtype, sizes, pattern
):
    products = []
    with at_level(level):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            products.append(compare(kernel, case(*sizes, pattern=pattern, dtype=dtype)))
    for other in products[1:]:
        assert all(torch.equal(a, b) for a, b in zip(products[0], other, strict=True))


@per_cell
def test_bfloat16_results_are_rounded_to_nearest_even(kernel, level):
    # One product for each output, exact in float32: (1 + k / 128) 1.5 is halfway between two values for odd k.
    weight = torch.full((40, 8), 1.5).bfloat16()
    mask = torch.zeros(40, 8, dtype=torch.bool)
    mask[:, 3] = True
    x = (
        torch.cat([1 + torch.arange(128) / 128, -1 - torch.arange(128) / 128])[:, None]
        .repeat(1, 8)
        .bfloat16()
    )
    matrix = MaskedMatrix(
        weight, mask.view(torch.uint8), 1, NMPattern(1, 8), torch.bfloat16, None, lambda: weight
    )
    expected = (1.5 * x[:, 0].double()).bfloat16()[:, None].repeat(1, 40)
    with at_level(level):
        layout = kernel.layout(matrix)
        packed = kernel.pack_masked(matrix, layout)
        assert torch.equal(kernel.linear(packed, x), expected)
        if kernel.name == "cpu-csr":
            assert torch.equal(kernel.matmul(packed, x.t().contiguous()), expected.t())
        for token in range(0, 256, 17):  # as the only one
            grad = torch.full((1, 40), 1.5).bfloat16()
            sampled = kernel.sampled(layout, grad, x[token : token + 1])
            assert torch.equal(sampled[:, 3], expected[token])


@per_cell
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan, 3.38e38])
@pytest.mark.parametrize("pattern", ["2:8", "3:8"])
def test_nan_infinity_and_overflow_pass_at_kept_entries(kernel, level, dtype, odd, pattern):
    made = case(37, 24, 19, pattern, dtype, bias=False)
    with at_level(level):
        layout = kernel.layout(made.matrix)
        packed = kernel.pack_masked(made.matrix, layout)
        for token, column in ((0, 0), (7, 11), (18, 23)):
            x = made.x.clone()
            x[token, column] = odd
            kept = made.mask[:, column]
            found = kernel.linear(packed, x)
            expected = x.double() @ torch.where(made.mask, made.exact, 0).t()
            assert torch.equal(found[token, kept].isnan(), expected[token, kept].float().isnan())
            whole = odd != 3.38e38
            if whole:
                assert torch.equal(
                    found[token, kept].nan_to_num(7), expected[token, kept].to(dtype).nan_to_num(7)
                )
            others = torch.arange(19) != token
            torch.testing.assert_close(
                found[others].double(), expected[others], rtol=2e-2, atol=2e-2
            )
            sampled = kernel.sampled(layout, made.grad, x)
            assert not sampled[~made.mask].any()
            if whole:
                assert not sampled[kept, column].isfinite().any()
            finite = torch.arange(24) != column
            assert sampled[:, finite].isfinite().all()


@per_cell
def test_a_nan_of_the_weight_stays_in_its_row(kernel, level):
    made = case(37, 24, 19, "2:8", torch.bfloat16, bias=False)
    row, column = made.mask.nonzero()[9].tolist()
    made.matrix.values[row, column] = torch.nan
    with at_level(level):
        found = kernel.linear(kernel.pack_masked(made.matrix, kernel.layout(made.matrix)), made.x)
    assert torch.equal(found.isnan().all(0), torch.arange(37) == row)
    assert not found[:, torch.arange(37) != row].isnan().any()


@pytest.mark.parametrize("level", LEVELS)
def test_csr_packs_matrices_with_empty_rows(level):
    kernel = CpuCsrKernel()
    with at_level(level):
        for matrix in (torch.zeros(20, 30), torch.diag_embed(torch.tensor([1.0, 0, 0, 2, 0] * 7))):
            x = torch.randn(9, matrix.shape[1])
            torch.testing.assert_close(kernel.linear(kernel.pack(matrix), x), x @ matrix.t())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matmul_takes_fewer_rows_than_the_depth_whose_padding_is_zero(level, dtype):
    kernel, matrix = CpuCsrKernel(), torch.randn(21, 48).to(dtype)
    matrix[:, 41:] = 0
    right = torch.randn(41, 70).to(dtype)
    with at_level(level):
        packed = kernel.pack(matrix)
        found = kernel.matmul(packed, right)
        with pytest.raises(ValueError, match="49 rows does not fit 48"):
            kernel.matmul(packed, torch.randn(49, 3))
    exact = matrix[:, :41].double() @ right.double()
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_a_matmul_refuses_entries_beyond_its_matrix(level):
    kernel = CpuCsrKernel()
    with at_level(level), pytest.raises(ValueError, match="beyond"):
        kernel.matmul(kernel.pack(torch.ones(3, 48)), torch.ones(40, 5))


@of_each_kernel
def test_operands_that_would_be_misread_are_refused(kernel):
    made = case(24, 16, 10, "2:4")
    layout = kernel.layout(made.matrix)
    packed = kernel.pack_masked(made.matrix, layout)
    refused = pytest.raises(ValueError, match="operand")
    for x in (
        made.x.double(),
        made.x.half(),
        made.x[:, :8],
        made.x.t(),
        made.x.repeat(1, 2)[:, ::2],
        made.x[0],
        made.x.to("meta"),
        torch.randn(10, 17),
    ):
        with refused:
            kernel.linear(packed, x)
        with refused:
            kernel.sampled(layout, made.grad, x)
    for bias in (made.bias.double(), made.bias.bfloat16(), made.bias[:7], torch.randn(48)[::2]):
        with refused:
            kernel.linear(packed, made.x, bias)
    for grad in (made.grad.bfloat16(), made.grad[:5], made.grad.t(), torch.randn(10, 48)[:, ::2]):
        with refused:
            kernel.sampled(layout, grad, made.x)
    if kernel.name == "cpu-csr":
        for right in (made.right.double(), torch.randn(10, 16).t(), torch.randn(16)):
            with refused:
                kernel.matmul(packed, right)


@per_cell
def test_operands_without_tokens_give_empty_or_zero_results(kernel, level):
    made = case(24, 16, 0, "2:4")
    with at_level(level):
        layout = kernel.layout(made.matrix)
        packed = kernel.pack_masked(made.matrix, layout)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert kernel.linear(packed, made.x, made.bias).shape == (0, 24)
            assert torch.equal(kernel.sampled(layout, made.grad, made.x), torch.zeros(24, 16))
            if kernel.name == "cpu-csr":
                assert kernel.matmul(packed, made.right).shape == (24, 0)


@of_each_kernel
def test_keys_that_it_cannot_run_have_a_reason(kernel):
    registry = KernelRegistry([kernel])
    kernel = registry.backends[0]

    def reason(
        gemm="forward", rows=32, depth=64, columns=16, dtype=torch.float32, pattern="2:4", **options
    ):
        return registry.reason(
            kernel,
            GemmKey(gemm, rows, depth, columns, dtype, NMPattern.parse(pattern), "cpu", **options),
        )

    assert reason() == ""
    assert "float64 is not one of its dtypes" in reason(dtype=torch.float64)
    assert "float16 is not one of its dtypes" in reason(dtype=torch.float16)
    for empty in ("rows", "depth", "columns"):
        assert "is empty" in reason(**{empty: 0})
    if kernel.name == "cpu-permute":
        assert "do not fit registers" in reason(pattern="3:7")
        assert "permutes inputs of a token" in reason("wgrad")
        assert "must be N:M along" in reason("dgrad", sparsity="masked")
    else:
        assert reason(pattern="3:7") == reason("wgrad") == reason("dgrad", sparsity="masked") == ""


def test_the_baseline_has_no_permutation():
    with at_level("baseline"):
        assert "no permutation" in CpuPermuteKernel().probe(torch.device("cpu"))
        assert CpuCsrKernel().probe(torch.device("cpu")) == ""


@per_cell
def test_the_self_check_passes_and_names_what_is_wrong(kernel, level, monkeypatch):
    with at_level(level):
        assert kernel.probe(torch.device("cpu")) == ""
        assert "for CPUs" in kernel.probe(torch.device("cuda"))
        monkeypatch.setattr(
            type(kernel), "linear", lambda self, packed, x, bias=None: x.new_ones(len(x), 40)
        )
        assert "its linear product in torch.float32 is wrong" in kernel.probe(torch.device("cpu"))


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_layout_of_a_tensor_with_an_offset(monkeypatch):
    base = torch.randn(3, 20, 24)
    weight = base[1]
    mask = nm_mask(weight.abs(), "2:8")
    bits = torch.zeros(5, 20, 24, dtype=torch.uint8)
    bits[3] = mask
    matrix = MaskedMatrix(
        weight, bits[3], FORWARD_BIT, NMPattern(2, 8), torch.float32, None, lambda: weight
    )
    x = torch.randn(7, 5, 24)[2]
    for kernel in (kernel for kernel in KERNELS if has_kernel(kernel, LEVELS[library.level()])):
        found = kernel.linear(kernel.pack_masked(matrix, kernel.layout(matrix)), x)
        torch.testing.assert_close(found, x @ torch.where(mask, weight, 0).t())
