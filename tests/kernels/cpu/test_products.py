"""What the CPU library computes, at every instruction set, against float64, integers and torch."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.functional import quantise_weight
from lightning_nm.functional.int8 import MOST_TERMS
from lightning_nm.kernels import GemmKey, KernelRegistry
from lightning_nm.kernels.api import Convolution, MaskedMatrix
from lightning_nm.kernels.cpu import CpuInt8Kernel, CpuPermuteKernel, library
from lightning_nm.kernels.cpu.int8_kernel import MOST_DEPTH, packed_int8, rows_linear
from tests.support import evolution
from tests.support.cpu_cases import CELLS, CSR, PERMUTE, check, check_random
from tests.support.cpu_int8 import Int8Case, RowsCase, compare_int8, compare_rows, int8_case
from tests.support.cpu_products import (
    DTYPES,
    KERNELS,
    LEVELS,
    at_level,
    case,
    conv_case,
    has_kernel,
    misread,
    needs_library,
)

pytestmark = needs_library

CPU = torch.device("cpu")
INT8 = CpuInt8Kernel()
at_each_level = pytest.mark.parametrize("level", LEVELS)
per_kernel = pytest.mark.parametrize(
    ("kernel", "level"),
    [each for each in product(KERNELS, LEVELS) if has_kernel(*each)],
    ids=lambda value: getattr(value, "name", value),
)


@pytest.mark.parametrize(("kind", "level"), CELLS)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_random_cases(kind, level, seed):
    check_random(kind, level, seed)


def of_conv(*arguments, images=2):
    return "convolution", lambda dtype: conv_case(Convolution(*arguments), images, 1 / 16, dtype)


def of_matrix(kind, *sizes, **options):
    return kind, lambda dtype: case(*sizes, pattern="1:8", dtype=dtype, **options)


LARGE = {
    "convolution, rows in chunks": of_conv(48, 40, (70, 50), (3, 3), (1, 1), (1, 1)),
    "convolution, small images": of_conv(16, 24, (4, 4), (3, 3), (1, 1), (1, 1), images=40),
    "convolution, strides": of_conv(32, 20, (57, 61), (7, 5), (2, 3), (3, 2), images=3),
    "convolution, one tap": of_conv(20, 30, (33, 29), (1, 1), (2, 2), images=3),
    "convolution, one dimension": of_conv(12, 16, (1, 3000), (1, 9), (1, 2), (0, 4)),
    "convolution, a kernel as large as its input": of_conv(3, 5, (9, 300), (9, 300)),
    "convolution, a narrow image": of_conv(5, 6, (500, 1), (3, 1), (1, 1), (1, 0)),
    **{
        f"{kind}, {name}": of_matrix(kind, *sizes, **options)
        for kind in ("permute", "csr")
        for name, sizes, options in (
            ("one entry", (1, 1, 1), {}),
            ("odd sizes", (511, 1025, 130), {"storage": "columns"}),
            ("deep", (256, 4096, 64), {}),
            ("many tokens", (33, 8, 1000), {}),
            ("many rows", (2050, 24, 3), {"storage": "columns"}),
        )
    },
    **{
        f"int8, {pattern}": ("int8", lambda dtype, p=pattern: int8_case(511, 64, 130, p, dtype))
        for pattern in ("1:64", "2:4", "5:16")
    },
    **{
        f"bame, m = {m}": (
            "passes of bame",
            lambda dtype, m=m: evolution.case(301, 20, m, dtype=dtype, odd=50, share=0.1),
        )
        for m in (4, 8, 16)
    },
}


@at_each_level
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", LARGE)
def test_large_cases(name, dtype, level):
    kind, make = LARGE[name]
    if (kind, level) in CELLS:
        check(kind, level, make(dtype), (1, 2) if level == LEVELS[-1] else (1,))


# ------------------------------------------------------------------------------------------------- special values


def products_of(kernel, made, x=None):
    """linear() and sampled() of a case, with another input."""
    layout, x = kernel.layout(made.matrix), made.x if x is None else x
    packed = kernel.pack_masked(made.matrix, layout)
    return kernel.linear(packed, x, made.bias), kernel.sampled(layout, made.grad, x)


@per_kernel
def test_bfloat16_results_are_rounded_to_nearest_even(kernel, level):
    # One product for each output, exact in float32: (1 + k / 128) 1.5 is halfway between two values for odd k.
    weight, mask = torch.full((40, 8), 1.5).bfloat16(), torch.zeros(40, 8, dtype=torch.bool)
    mask[:, 3] = True
    above = 1 + torch.arange(128) / 128
    x = torch.cat([above, -above])[:, None].repeat(1, 8).bfloat16()
    matrix = MaskedMatrix.of(weight, mask, NMPattern(1, 8))
    expected = (1.5 * x[:, :1].double()).bfloat16().repeat(1, 40)
    with at_level(level):
        layout = kernel.layout(matrix)
        packed = kernel.pack_masked(matrix, layout)
        assert torch.equal(kernel.linear(packed, x), expected)
        if kernel is CSR:
            assert torch.equal(kernel.matmul(packed, x.t().contiguous()), expected.t())
        for token in range(0, 256, 17):  # as the only one
            grad = torch.full((1, 40), 1.5).bfloat16()
            sampled = kernel.sampled(layout, grad, x[token : token + 1])
            assert torch.equal(sampled[:, 3], expected[token])


@per_kernel
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan, 3.38e38])
def test_what_is_not_finite_passes_at_kept_entries(kernel, level, odd):
    for dtype, pattern, column in product(DTYPES, ["2:8", "3:8"], [0, 11, 23]):
        made, token = case(37, 24, 19, pattern, dtype, bias=False), column % 19
        x = made.x.clone()
        x[token, column] = odd
        with at_level(level):
            found, sampled = products_of(kernel, made, x)
        kept, others = made.mask[:, column], torch.arange(19) != token
        # Of kept entries alone: 0 times infinity is NaN.
        expected = torch.where(made.mask, made.exact * x[:, None].double(), 0).sum(2).float()
        assert torch.equal(found[token, kept].isnan(), expected[token, kept].isnan())
        torch.testing.assert_close(found[others].float(), expected[others], rtol=2e-2, atol=2e-2)
        assert not sampled[~made.mask].any()
        assert sampled[:, torch.arange(24) != column].isfinite().all()
        if odd != 3.38e38:  # whose sums may overflow
            result = expected[token, kept].to(dtype)
            assert torch.equal(found[token, kept].nan_to_num(7), result.nan_to_num(7))
            assert not sampled[kept, column].isfinite().any()


@per_kernel
def test_a_nan_of_the_weight_stays_in_its_row(kernel, level):
    made = case(37, 24, 19, "2:8", torch.bfloat16, bias=False)
    row, column = made.mask.nonzero()[9].tolist()
    made.matrix.values[row, column] = torch.nan
    with at_level(level):
        found, _ = products_of(kernel, made)
    assert torch.equal(found.isnan(), (torch.arange(37) == row).expand(19, 37))


@at_each_level
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_has_no_result_in_int8_and_the_others_have(level, dtype, odd):
    made = int8_case(40, 12, 11, "2:8", dtype)
    made.x[4, 7] = odd
    packed = packed_int8(made.weight, made.pattern)
    scale = torch.ones(40)
    with at_level(level):
        compare_int8(made)  # whose twin has the same NaN
        for found in (
            INT8.linear(packed, made.x, made.bias),
            rows_linear(torch.ones(40, 96, dtype=torch.int8), scale, made.x),
        ):
            assert torch.equal(found.isnan(), (torch.arange(11) == 4)[:, None].expand(11, 40))


@at_each_level
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_sums_of_int8_fit(level, dtype):
    """Every value and input is the largest: sums of pairs would saturate 16 bits, and reach the limit of 32."""
    depth = MOST_TERMS * 2 // 64 * 64
    weight = torch.zeros(3, depth)
    weight[:, ::2] = torch.tensor([[127.0], [-127.0], [127.0]])
    weight[2, ::4] = -127
    x = torch.tensor([[127.0], [-127.0]]).repeat(1, depth)
    integers, scale = quantise_weight(weight)
    assert scale.tolist() == [1, 1, 1]
    sums = x.long() @ integers.long().t()
    assert int(sums.abs().max()) > 2**31 - 2**20
    values = torch.full((1, MOST_DEPTH), -127, dtype=torch.int8)
    with at_level(level):
        made = Int8Case(weight.to(dtype), NMPattern(1, 2), x.to(dtype), None)
        assert torch.equal(compare_int8(made)[0], sums.float().to(dtype))
        ones = torch.ones(2, MOST_DEPTH) * torch.tensor([[1.0], [-1.0]])
        compare_rows(RowsCase(values, torch.ones(1), ones.to(dtype), None))


@at_each_level
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matmul_takes_fewer_rows_than_the_depth_whose_padding_is_zero(level, dtype):
    matrix = torch.randn(21, 48).to(dtype)
    matrix[:, 41:] = 0
    right = torch.randn(41, 70).to(dtype)
    with at_level(level):
        packed = CSR.pack(matrix)
        found = CSR.matmul(packed, right)
        with pytest.raises(ValueError, match="49 rows does not fit 48"):
            CSR.matmul(packed, torch.randn(49, 3))
        with pytest.raises(ValueError, match="beyond"):
            CSR.matmul(CSR.pack(torch.ones(3, 48)), torch.ones(40, 5))
    exact = matrix[:, :41].double() @ right.double()
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-7, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kernel", [PERMUTE, CSR, INT8], ids=lambda kernel: kernel.name)
def test_operands_that_would_be_misread_are_refused(kernel):
    made = case(24, 16, 10, "2:4")
    layout = kernel.layout(made.matrix)
    packed = kernel.pack_masked(made.matrix, layout)
    calls = [(kernel.linear, (packed, made.x, made.bias))]
    if kernel is not INT8:
        calls.append((kernel.sampled, (layout, made.grad, made.x)))
    for call, arguments in calls:
        call(*arguments)
        for place in (1, 2):
            for wrong in misread(arguments[place]):
                given = *arguments[:place], wrong, *arguments[place + 1 :]
                with pytest.raises(ValueError, match="operand"):
                    call(*given)
    for other in {PERMUTE, CSR, INT8} - {kernel}:
        foreign = other.pack_masked(made.matrix, other.layout(made.matrix))
        names = kernel.layouts.__name__, other.layouts.__name__
        match = f"{kernel.name} takes a layout of class {names[0]}, not {names[1]}"
        with pytest.raises(ValueError, match=match):
            kernel.linear(foreign, made.x)
        if kernel is not INT8:
            with pytest.raises(ValueError, match=match):
                kernel.sampled(foreign.layout, made.grad, made.x)


def test_operands_of_a_matmul_and_of_convolutions_that_would_be_misread_are_refused():
    made, other = conv_case(Convolution(4, 6, (9, 9), (3, 3)), 2), case(24, 16, 10, "2:4")
    layout, conv = CSR.layout(made.matrix), made.conv
    packed, matrix = CSR.pack_masked(made.matrix, layout), CSR.pack(other.matrix.dense())
    for wrong in (other.right.double(), other.right.t().contiguous().t(), torch.randn(16)):
        with pytest.raises(ValueError, match="operand"):
            CSR.matmul(matrix, wrong)
    for call, arguments, reason in (
        *((CSR.conv, (packed, wrong, conv), "operand") for wrong in misread(made.x)),
        (CSR.conv, (packed, made.x.to(memory_format=torch.channels_last), conv), "be contiguous"),
        (CSR.conv, (packed, made.x, conv._replace(kernel=(3, 2))), "not one of the convolution"),
        (CSR.conv, (packed, made.x, conv._replace(dilation=(5, 5))), "does not exist"),
        (CSR.conv_sampled, (layout, made.grad[:1], made.x, conv), "an operand of shape"),
        (CSR.conv_input, (packed, made.x, conv), "an operand of shape"),
    ):
        with pytest.raises(ValueError, match=reason):
            call(*arguments)
    values = torch.zeros(1, MOST_DEPTH + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="not a dense matrix in int8"):
        rows_linear(values, torch.ones(1), torch.ones(1, MOST_DEPTH + 1))


def key(gemm="forward", rows=32, columns=16, dtype=torch.float32, pattern="2:4", **options):
    pattern = NMPattern.parse(pattern)
    return GemmKey(gemm, rows, options.pop("depth", 64), columns, dtype, pattern, "cpu", **options)


REASONS = [
    ({}, "", "", ""),
    ({"dtype": torch.float64}, *["float64 is not one of its dtypes"] * 3),
    ({"dtype": torch.float16}, *["float16 is not one of its dtypes"] * 3),
    *(({size: 0}, *["is empty"] * 3) for size in ("rows", "depth", "columns")),
    ({"pattern": "3:7"}, "do not fit registers", "", "do not fit registers"),
    ({"gemm": "wgrad"}, "permutes inputs of a token", "", "it is for inference"),
    ({"gemm": "dgrad"}, "", "", "it is for inference"),
    ({"gemm": "dgrad", "sparsity": "masked"}, *["must be N:M along", "", "must be N:M along"]),
]
"""What differs in a key, and the reasons of each kernel."""


@pytest.mark.parametrize(("changes", "permute", "csr", "int8"), REASONS)
def test_keys_that_it_cannot_run_have_a_reason(changes, permute, csr, int8):
    registry = KernelRegistry([PERMUTE, CSR, INT8])
    for kernel, expected in ((PERMUTE, permute), (CSR, csr), (INT8, int8)):
        reason = registry.reason(kernel, key(**changes))
        assert expected in reason
        assert bool(reason) == bool(expected)


def test_training_takes_what_the_package_s_kernels_for_weights_in_float_compute():
    registry = KernelRegistry()
    assert INT8.name not in registry.kernels
    assert registry.unavailable_reason("cpu") == ""
    assert {"masked", "outputs", "n:m"} == registry.takes("cpu")


def test_the_baseline_has_no_permutation():
    with at_level("baseline"):
        assert "no permutation" in CpuPermuteKernel().probe(CPU)


@at_each_level
@pytest.mark.parametrize("kernel", [PERMUTE, CSR, INT8], ids=lambda kernel: kernel.name)
def test_the_self_check_passes_and_names_what_is_wrong(kernel, level, monkeypatch):
    if kernel is PERMUTE and not has_kernel(kernel, level):
        return
    linear = type(kernel).linear
    with at_level(level):
        assert kernel.probe(CPU) == ""
        assert "for CPUs" in kernel.probe(torch.device("cuda"))
        monkeypatch.setattr(type(kernel), "linear", lambda *operands: linear(*operands) + 1)
        assert "its linear GEMM in " in kernel.probe(CPU)


@at_each_level
def test_int8_takes_the_instructions_of_its_level(level):
    with at_level(level):
        found = library.call("nm_int8_level", library.level())
    number = LEVELS.index(level)
    assert found == number if number < 2 else found in (1, 2)
