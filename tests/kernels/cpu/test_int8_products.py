"""The int8 products of every instruction set against integers, and against each other bit for bit."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.functional import quantise_tokens, quantise_weight
from lightning_nm.functional.int8 import MOST_TERMS
from lightning_nm.kernels import GemmKey, KernelRegistry
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuInt8Kernel, Int8Layout, build, library
from lightning_nm.kernels.cpu.int8 import MOST_DEPTH, int8_matrix, packed_int8, rows_linear
from tests.support.cpu_int8 import compare_int8, int8_case
from tests.support.cpu_products import FAST, LEVELS, at_level, case, needs_library

pytestmark = needs_library

KERNEL = CpuInt8Kernel()
DTYPES = (torch.float32, torch.bfloat16)


@st.composite
def patterns(draw):
    m = draw(st.sampled_from([2, 4, 8, 16, 32, 64]))
    return f"{draw(st.integers(1, m - 1))}:{m}"


cases = {
    "rows": st.integers(1, 70),
    "blocks": st.integers(1, 40),
    "tokens": st.one_of(st.integers(1, 20), st.integers(1, 150)),
    "pattern": patterns(),
    "dtype": st.sampled_from(DTYPES),
    "bias": st.booleans(),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=80)
@given(st.fixed_dictionaries(cases))
def test_sums_are_exact_and_equal_at_every_level(arguments):
    compare_int8(int8_case(**arguments), LEVELS)


@settings(max_examples=30)
@given(st.fixed_dictionaries(cases), st.sampled_from([1e-3, 1.0, 1e4]))
def test_levels_and_threads_give_the_same_bits(arguments, size):
    made = int8_case(**arguments)
    generator = torch.Generator().manual_seed(arguments["seed"])
    x = size * torch.randn(made.x.shape, generator=generator)
    packed = packed_int8(made.weight, made.pattern)
    products = []
    for level in LEVELS:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with at_level(level):
                products.append(KERNEL.linear(packed, x.to(made.x.dtype), made.bias))
    for other in products[1:]:
        assert torch.equal(products[0], other)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["2:4", "1:16", "3:8"])
def test_products_are_as_near_as_the_steps_allow(level, dtype, pattern):
    generator = torch.Generator().manual_seed(0)
    made = int8_case(50, 24, 37, pattern, dtype, bias=True, seed=1)
    weight, bias = made.weight.double(), made.bias.double()
    x = torch.randn(made.x.shape, generator=generator).to(dtype)
    with at_level(level):
        found = KERNEL.linear(packed_int8(made.weight, made.pattern), x, made.bias).double()
    exact = x.double() @ weight.t() + bias
    half_x = 0.5001 * quantise_tokens(x)[1].double()[:, None]
    half_w = 0.5001 * quantise_weight(made.weight)[1].double()
    kept_x = x.double().abs() @ (weight != 0).double().t()  # of the entries that a row keeps
    terms = (weight != 0).sum(1)
    bound = half_x * weight.abs().sum(1) + half_w * kept_x + terms * half_x * half_w
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    assert bool(((found - exact).abs() <= bound + rounding * (exact.abs() + bound + 1e-3)).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_sums_fit(level, dtype):
    """Every value and input is the largest: sums of pairs would saturate 16 bits, and reach the limit of 32."""
    depth = MOST_TERMS * 2 // 64 * 64
    weight = torch.zeros(3, depth)
    weight[:, ::2] = torch.tensor([[127.0], [-127.0], [127.0]])
    weight[2, ::4] = -127
    x = torch.full((2, depth), 127.0)
    x[1] = -127
    integers, scale = quantise_weight(weight)
    assert scale.tolist() == [1, 1, 1]
    sums = x.long() @ integers.long().t()
    assert int(sums.abs().max()) > 2**31 - 2**20
    with at_level(level):
        found = KERNEL.linear(packed_int8(weight, NMPattern(1, 2)), x.to(dtype))
    assert torch.equal(found, sums.float().to(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_has_no_result_and_the_others_have(level, dtype, odd):
    made = int8_case(40, 12, 11, "2:8", dtype, bias=True, seed=0)
    packed = packed_int8(made.weight, made.pattern)
    x = made.x.clone()
    x[4, 7] = odd
    with at_level(level):
        found, expected = (
            KERNEL.linear(packed, x, made.bias),
            KERNEL.linear(packed, made.x, made.bias),
        )
    assert found[4].isnan().all()
    others = torch.arange(11) != 4
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("level", LEVELS)
def test_tokens_that_are_zero_or_tiny_give_the_bias(level):
    made = int8_case(40, 12, 3, "2:8", torch.float32, bias=True, seed=0)
    x = torch.zeros_like(made.x)
    x[1] = 1e-40
    x[2] = 1e-38
    with at_level(level):
        found = KERNEL.linear(packed_int8(made.weight, made.pattern), x, made.bias)
    torch.testing.assert_close(found, made.bias.expand(3, 40), rtol=0, atol=1e-30)


@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 40),
    pattern=patterns(),
    seed=st.integers(0, 1000),
)
def test_a_layout_gives_its_matrix_back(rows, blocks, pattern, seed):
    made = int8_case(rows, blocks, 1, pattern, torch.float32, bias=False, seed=seed)
    packed = packed_int8(made.weight, made.pattern)
    layout, values = packed.layout, packed.values
    integers, scale = quantise_weight(made.weight)
    found = int8_matrix(values, layout.positions, rows, made.weight.shape[1], made.pattern)
    assert torch.equal(found, integers)
    assert torch.equal(layout.scale, scale)
    assert layout.nbytes == sum(t.nbytes for t in (values, layout.positions, layout.scale)) + (
        layout.offset.nbytes
    )


@pytest.mark.parametrize(
    ("pattern", "most"), [("2:4", 0.3125), ("1:4", 0.15625), ("1:16", 0.046875)]
)
def test_bytes_of_a_layout_for_each_byte_of_bfloat16(pattern, most):
    made = int8_case(64, 256 // int(pattern[2:]), 1, pattern, torch.bfloat16, bias=False, seed=0)
    layout = packed_int8(made.weight, made.pattern).layout
    # A scale and an offset for each row besides.
    assert layout.nbytes == most * 2 * 64 * 256 + 64 * 8


def test_layouts_that_do_not_exist():
    values = torch.ones(2, 4, 1, dtype=torch.int8)
    positions = torch.zeros(2, 4, 1, dtype=torch.uint8)
    scale = torch.ones(2)

    def refused(message, values=values, positions=positions, scale=scale, m=8):
        with pytest.raises(ValueError, match=message):
            Int8Layout.of(values, positions, scale, NMPattern(1, m))

    refused("blocks of 3 do not fit", m=3)
    refused("blocks of 128 do not fit", m=128)
    refused("not below 8", positions=positions + 8)
    refused("is -128", values=values * -128)
    refused("a scale is not between", scale=scale * 0)
    assert "may exceed 32 bits" in Int8Layout.reason_against(2 * MOST_TERMS + 2, NMPattern(1, 2))
    assert "no whole blocks" in Int8Layout.reason_against(10, NMPattern(1, 4))


def test_operands_that_would_be_misread_are_refused():
    made = int8_case(24, 4, 10, "2:4", torch.float32, bias=True, seed=0)
    packed = packed_int8(made.weight, made.pattern)
    x, bias = made.x, made.bias
    for wrong in (x.double(), x[:, :8], x.repeat(1, 2)[:, ::2], x[0], x.to("meta")):
        with pytest.raises(ValueError, match="operand"):
            KERNEL.linear(packed, wrong)
    for wrong in (bias.double(), bias.bfloat16(), bias[:7], torch.randn(48)[::2]):
        with pytest.raises(ValueError, match="operand"):
            KERNEL.linear(packed, x, wrong)
    other = case(24, 16, 10, "2:4")
    csr = CpuCsrKernel()
    foreign = csr.pack_masked(other.matrix, csr.layout(other.matrix))
    with pytest.raises(
        ValueError, match="cpu-int8 takes a layout of class Int8Layout, not CsrLayout"
    ):
        KERNEL.linear(foreign, other.x)
    with pytest.raises(
        ValueError, match="cpu-csr takes a layout of class CsrLayout, not Int8Layout"
    ):
        csr.linear(packed, x)


def test_no_tokens_give_no_outputs():
    made = int8_case(24, 4, 3, "2:4", torch.float32, bias=True, seed=0)
    assert KERNEL.linear(packed_int8(made.weight, made.pattern), made.x[:0]).shape == (0, 24)


@pytest.mark.parametrize("level", LEVELS)
def test_the_self_check_passes_and_names_what_is_wrong(level, monkeypatch):
    cpu = torch.device("cpu")
    with at_level(level):
        assert CpuInt8Kernel().probe(cpu) == ""
        assert "for CPUs" in KERNEL.probe(torch.device("cuda"))
        linear = CpuInt8Kernel.linear
        monkeypatch.setattr(
            CpuInt8Kernel, "linear", lambda self, packed, x: linear(self, packed, x) + 1
        )
        assert "its linear product in 2:4 is wrong" in KERNEL.probe(cpu)


def test_levels_take_the_instructions_that_they_name():
    for level in LEVELS:
        with at_level(level):
            found = library.call("nm_int8_level", library.level())
        if level in ("baseline", "avx2"):
            assert found == library.LEVELS.index(level)
        else:
            assert found in (1, 2)


def test_keys_that_it_cannot_run_have_a_reason():
    registry = KernelRegistry([KERNEL])

    def reason(gemm="forward", dtype=torch.float32, pattern="2:4", rows=32):
        key = GemmKey(gemm, rows, 64, 16, dtype, NMPattern.parse(pattern), "cpu")
        return registry.reason(KERNEL, key)

    assert reason() == ""
    assert "float16 is not one of its dtypes" in reason(dtype=torch.float16)
    assert "it is for inference" in reason("dgrad")
    assert "is empty" in reason(rows=0)
    assert "do not fit registers" in reason(pattern="1:3")
    assert CpuInt8Kernel.name not in KernelRegistry().kernels  # training takes it for no product


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1), (511, 33, 130), (256, 64, 64), (17, 128, 1000)])
@pytest.mark.parametrize("pattern", ["1:64", "2:4", "5:16"])
def test_products_of_larger_matrices(sizes, pattern):
    for dtype in DTYPES:
        compare_int8(int8_case(*sizes, pattern, dtype, bias=True, seed=0), LEVELS)


@pytest.mark.slow
def test_a_compiler_that_does_not_know_the_instructions_leaves_them_out(tmp_path, monkeypatch):
    compiler = tmp_path / "old-cc"
    command = " ".join(build.compiler())
    script = f'#!/bin/sh\ncase "$*" in *-mavx512vnni*) exit 1;; esac\nexec {command} "$@"\n'
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    target = tmp_path / "without.so"
    assert build.compile_library(target, FAST) == ""
    without = ctypes.CDLL(str(target))
    # At every level from AVX2 on, these products are then those of AVX2.
    levels = range(len(LEVELS))
    assert [without.nm_int8_level(level) for level in levels] == [min(level, 1) for level in levels]


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    depth=st.integers(1, 300),
    tokens=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    size=st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_dense_rows(rows, depth, tokens, dtype, bias, size, seed):
    """The same bits at every level and number of threads: sums of 16-bit tokens, and as near as half a step of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (rows, depth), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, generator=generator) + 0.01
    x = (size * torch.randn(tokens, depth, generator=generator)).to(dtype)
    own_bias = torch.randn(rows, generator=generator).to(dtype) if bias else None
    largest = x.float().abs().amax(1)
    inverse = (torch.full_like(largest, 32767) / largest).clamp(max=torch.finfo(torch.float32).max)
    integers = (x.float() * inverse[:, None]).round()
    sums = integers.long() @ values.long().t()
    y = sums.float() * (scale * (largest / 32767)[:, None])
    twin = (y if own_bias is None else y + own_bias.float()).to(dtype)
    for level in LEVELS:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with at_level(level):
                assert torch.equal(rows_linear(values, scale, x, own_bias), twin), level
    exact = x.double() @ (values.double() * scale.double()[:, None]).t()
    if own_bias is not None:
        exact = exact + own_bias.double()
    half_step = largest.double()[:, None] / 32767 * 0.501
    bound = half_step * (values.double().abs().sum(1) * scale.double())
    rest = torch.finfo(dtype).eps * exact.abs() + 1e-6 * bound * 32767 + 1e-37 * depth
    assert ((twin.double() - exact).abs() <= bound + rest).all()


def test_dense_rows_at_the_largest_depth():
    """The largest sums fit 32 bits."""
    values = torch.full((1, MOST_DEPTH), -127, dtype=torch.int8)
    x = torch.full((1, MOST_DEPTH), 1.0)
    for level in LEVELS:
        for sign in (1, -1):
            with at_level(level):
                found = rows_linear(values, torch.ones(1), sign * x)
            assert torch.allclose(found, -127.0 * sign * x.sum(1, keepdim=True)), level
    with pytest.raises(ValueError, match="not a dense matrix in int8"):
        rows_linear(torch.zeros(1, MOST_DEPTH + 1, dtype=torch.int8), torch.ones(1), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_dense_rows_of_a_broken_token(dtype, broken):
    x = torch.ones(3, 70, dtype=dtype)
    x[1, 69] = broken
    for level in LEVELS:
        with at_level(level):
            found = rows_linear(torch.ones(5, 70, dtype=torch.int8), torch.ones(5), x)
        assert found.isnan().tolist() == [[False] * 5, [True] * 5, [False] * 5], level
