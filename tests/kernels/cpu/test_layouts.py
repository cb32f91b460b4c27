"""Which values layouts of a mask hold, and what is no layout; what kernels make of them is in test_products."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.functional import quantise_weight
from lightning_nm.functional.int8 import MOST_TERMS
from lightning_nm.kernels.api import MaskedMatrix
from lightning_nm.kernels.cpu import CpuPermuteKernel, CsrLayout, Int8Layout, PermuteLayout
from lightning_nm.kernels.cpu.int8_kernel import int8_matrix, packed_int8
from lightning_nm.kernels.cpu.kernels import dense_matrix
from lightning_nm.kernels.cpu.library import PANEL
from tests.support.cpu_int8 import int8_case
from tests.support.cpu_products import DTYPES, LEVELS, at_level, case, compare, needs_library

pytestmark = needs_library

WIDE = [level for level in LEVELS if level != "baseline"]


def layouts_of(matrix):
    yield CsrLayout.of(matrix)
    for level in WIDE:
        with at_level(level):
            layout = PermuteLayout.of(matrix)
            assert layout.lanes == (8 if level == "avx2" else 16)
            assert layout.paired == (level == "avx512-bf16" and matrix.dtype == torch.bfloat16)
            yield layout


def dense(layout, matrix):
    """The matrix that a layout and its values are, in float32."""
    tensors = [layout.values(matrix), *layout.tensors]
    return dense_matrix(tensors, layout.rows, layout.depth, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_the_weight_at_the_time(dtype):
    made = case(39, 50, 1, "2:4", dtype)
    for layout in layouts_of(made.matrix):
        made.matrix.values.mul_(-3)
        expected = torch.where(made.mask, made.matrix.values.to(dtype), 0).float()
        assert torch.equal(dense(layout, made.matrix), expected)


def test_values_are_rounded_to_bfloat16_as_a_cast_rounds():
    bits = torch.arange(0, 2**32, 65537 // 3, dtype=torch.int64)[:196608]
    patterns = [bits, bits // 2**16 * 2**16 + 2**15]  # and ties
    weight = torch.cat(patterns).to(torch.int32).view(torch.float32)[: 256 * 1024].reshape(256, -1)
    mask = torch.ones(weight.shape, dtype=torch.bool)
    mask[:, 31::32] = False
    matrix = MaskedMatrix.of(weight, mask, NMPattern(31, 32))._replace(dtype=torch.bfloat16)
    expected = torch.where(mask, weight.bfloat16().float(), 0)
    for layout in layouts_of(matrix):
        found = dense(layout, matrix)
        assert torch.equal(found.isnan(), expected.isnan())
        kept = mask & ~expected.isnan()
        assert torch.equal(found[kept].view(torch.int32), expected[kept].view(torch.int32))


@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 40),
    pattern=st.sampled_from(["1:2", "2:4", "3:8", "1:16", "5:32", "63:64"]),
    seed=st.integers(0, 1000),
)
def test_an_int8_layout_gives_its_matrix_back(rows, blocks, pattern, seed):
    made = int8_case(rows, blocks, 1, pattern, seed=seed)
    (layout, values), depth = packed_int8(made.weight, made.pattern), made.weight.shape[1]
    integers, scale = quantise_weight(made.weight)
    found = int8_matrix(values, layout.positions, rows, depth, made.pattern)
    assert torch.equal(found, integers)
    assert torch.equal(layout.scale, scale)
    tensors = (values, layout.positions, layout.scale, layout.offset)
    assert layout.nbytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("pattern", "most"), [("2:4", 0.3125), ("1:4", 0.15625), ("1:16", 0.046875)]
)
def test_bytes_of_an_int8_layout_for_each_byte_of_bfloat16(pattern, most):
    made = int8_case(64, 256 // int(pattern[2:]), 1, pattern, torch.bfloat16)
    layout = packed_int8(made.weight, made.pattern).layout
    # A scale and an offset for each row besides.
    assert layout.nbytes == most * 2 * 64 * 256 + 64 * 8


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("level", WIDE)
@pytest.mark.parametrize("storage", ["rows", "columns"])
def test_a_mask_that_is_not_of_the_pattern_is_refused(level, storage):
    made = case(40, 64, 1, "2:8", storage=storage)
    made.matrix.bits[17, 32:40] |= 1
    with at_level(level), pytest.raises(ValueError, match="is not 2:8 along its last axis"):
        PermuteLayout.of(made.matrix)


@pytest.mark.parametrize("wrong", [-1, 15, 16, 31, 32, 127, 129, 255])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", WIDE)
def test_a_permute_layout_with_a_wrong_index_is_refused(level, dtype, wrong):
    with at_level(level):
        layout = PermuteLayout.of(case(40, 40, 1, "1:8", dtype).matrix)
        layout.inputs.view(-1)[-3] = wrong % 256
        if 0 <= wrong < layout.block:
            replace(layout)
        else:
            with pytest.raises(ValueError, match="make it from a mask"):
                replace(layout)


@pytest.mark.parametrize(
    ("name", "place", "number"),
    [
        ("offset", 4, -PANEL),
        ("offset", 4, 30 * PANEL),
        ("offset", 4, 1),
        ("start", 0, 1),
        ("start", 7, 0),
        ("start", -1, 0),
    ],
)
def test_a_csr_layout_with_a_wrong_entry_is_refused(name, place, number):
    layout = CsrLayout.of(case(20, 30, 1, "1:5").matrix)
    replace(layout)
    getattr(layout, name)[place] = number
    with pytest.raises(ValueError, match="make it from a mask"):
        replace(layout)


def test_what_a_layout_cannot_be_of_is_refused():
    made, moved = case(24, 16, 1, "2:4").matrix, case(24, 16, 1, "2:4", permuted=True).matrix
    both = torch.zeros(48, 32, dtype=torch.uint8)[::2, ::2]
    permute = CpuPermuteKernel()
    refused = [
        (CsrLayout.of, made._replace(bits=both), "no contiguous axis"),
        (permute.layout, made._replace(pattern=None), "takes a mask of a pattern"),
        *(
            (CsrLayout.of, made._replace(bits=torch.empty(shape, device="meta")), "32-bit offsets")
            for shape in ((2**16, 2**15), (1, 2**26))
        ),
        *(
            (layout.values, case(24, 20, 1, "2:4").matrix, "not one of a matrix of 24 x 20")
            for layout in layouts_of(made)
        ),
        *(
            (permute.layout, moved._replace(order=order), "the order of a depth of 16")
            for order in (
                torch.arange(15),
                torch.arange(16, dtype=torch.int32),
                torch.arange(32)[::2],
            )
            if WIDE
        ),
    ]
    for call, matrix, message in refused:
        with pytest.raises(ValueError, match=message):
            call(matrix)


def test_int8_layouts_that_do_not_exist():
    values = torch.ones(2, 4, 1, dtype=torch.int8)
    positions, scale = torch.zeros(2, 4, 1, dtype=torch.uint8), torch.ones(2)
    for arguments, m, message in (
        ((values, positions, scale), 3, "blocks of 3 do not fit"),
        ((values, positions, scale), 128, "blocks of 128 do not fit"),
        ((values, positions + 8, scale), 8, "not below 8"),
        ((values * -128, positions, scale), 8, "is -128"),
        ((values, positions, scale * 0), 8, "a scale is not between"),
    ):
        with pytest.raises(ValueError, match=message):
            Int8Layout.of(*arguments, NMPattern(1, m))
    assert "may exceed 32 bits" in Int8Layout.reason_against(2 * MOST_TERMS + 2, NMPattern(1, 2))
    assert "no whole blocks" in Int8Layout.reason_against(10, NMPattern(1, 4))


@pytest.mark.skipif(
    "avx512-bf16" not in LEVELS, reason="needs a CPU that multiplies pairs, or a model of one"
)
def test_a_paired_layout_is_of_bfloat16_alone():
    made, kernel = case(40, 48, 5, "1:8", torch.bfloat16), CpuPermuteKernel()
    in_float = made.matrix._replace(dtype=torch.float32)
    with at_level("avx512-bf16"):
        layout = kernel.layout(made.matrix)
        packed = kernel.pack_masked(made.matrix, layout)
        assert packed.values.dtype == torch.bfloat16
        for call, arguments, message in (
            (kernel.pack_masked, (in_float, layout), "has bfloat16 values"),
            (kernel.linear, (packed, made.x.float()), "a paired layout takes"),
            (kernel.sampled, (layout, made.grad.float(), made.x.float()), "a paired layout takes"),
        ):
            with pytest.raises(ValueError, match=message):
                call(*arguments)
        single = kernel.layout(in_float)  # its bfloat16 operands are widened
        found = kernel.linear(kernel.pack_masked(made.matrix, single), made.x)
        exact = made.x.double() @ made.exact.t()
        torch.testing.assert_close(found.double(), exact, rtol=2.0**-7, atol=1e-4)
        # 48 divides neither 32 nor is it a multiple
        other = case(40, 96, 5, "5:48", torch.bfloat16)
        assert not kernel.layout(other.matrix).paired
        compare(kernel, other)
    with at_level("avx512"), pytest.raises(RuntimeError, match="has no such kernel"):
        kernel.linear(packed, made.x)
