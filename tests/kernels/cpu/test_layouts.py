from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.kernels.api import MaskedMatrix
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel, CsrLayout, PermuteLayout
from lightning_nm.kernels.cpu.library import EMPTY, PANEL
from tests.support.cpu_products import LEVELS, STORAGES, at_level, case, compare, needs_library

pytestmark = needs_library

WIDE = [level for level in LEVELS if level != "baseline"]
sizes = {
    "rows": st.integers(1, 80),
    "depth": st.integers(1, 80),
    "tokens": st.just(1),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "storage": st.sampled_from(STORAGES),
    "bit": st.sampled_from([1, 2, 64, 128]),
    "seed": st.integers(0, 1000),
}


def by_slot(layout, tensor):
    """[tiles, blocks, slots, rows of a tile], also of pairs."""
    return tensor.movedim(4, 3).flatten(2, 3) if layout.paired else tensor


def mask_of_permute(layout):
    """The mask of a layout, with a check that no entry is there twice and none outside of the matrix."""
    block, inputs = layout.block, by_slot(layout, layout.inputs)
    tiles, blocks, slots, tile = inputs.shape
    assert (slots, tile) == (layout.slots, 2 * layout.lanes)
    count = torch.zeros(tiles * tile, blocks * block, dtype=torch.int64)
    for t in range(tiles):
        for b in range(blocks):
            for s in range(slots):
                for r, place in enumerate(inputs[t, b, s].tolist()):
                    if place != EMPTY:
                        count[t * tile + r, b * block + place] += 1
    assert count.max() <= 1
    assert count.sum() == count[: layout.rows, : layout.depth].sum()
    return count[: layout.rows, : layout.depth].bool()


def mask_of_csr(layout):
    mask = torch.zeros(layout.rows, layout.depth, dtype=torch.bool)
    for row in range(layout.rows):
        offsets = layout.offset[layout.start[row] : layout.start[row + 1]].tolist()
        assert offsets == sorted(set(offsets))
        mask[row, [offset // PANEL for offset in offsets]] = True
    return mask


@pytest.mark.parametrize("level", WIDE)
@settings(max_examples=40)
@given(
    arguments=st.fixed_dictionaries(sizes),
    pattern=st.sampled_from(["1:2", "2:4", "3:4", "1:8", "5:8", "2:16", "1:32", "31:32"]),
    permuted=st.booleans(),
)
def test_a_permute_layout_is_the_mask(level, arguments, pattern, permuted):
    made = case(**arguments, pattern=pattern, permuted=permuted)
    with at_level(level):
        layout = PermuteLayout.of(made.matrix)
        replace(layout)
        assert torch.equal(mask_of_permute(layout), made.mask)
        assert layout.lanes == (8 if level == "avx2" else 16)
        assert layout.paired == (level == "avx512-bf16" and arguments["dtype"] == torch.bfloat16)


@settings(max_examples=60)
@given(
    arguments=st.fixed_dictionaries(sizes),
    pattern=st.sampled_from([None, "1:3", "2:4", "1:7", "1:32"]),
)
def test_a_csr_layout_is_the_mask(arguments, pattern):
    made = case(**arguments, pattern=pattern)
    layout = CsrLayout.of(made.matrix)
    replace(layout)
    assert torch.equal(mask_of_csr(layout), made.mask)
    assert torch.equal(layout.slot.sort().values, torch.arange(len(layout.slot), dtype=torch.int32))
    assert layout.used_depth() == int((made.mask.any(0) * torch.arange(1, layout.depth + 1)).max())


def layouts_of(made):
    yield CsrLayout.of(made.matrix)
    if WIDE:
        with at_level(WIDE[-1]):
            yield PermuteLayout.of(made.matrix)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "weight_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_weight_at_the_time(storage, weight_dtype, dtype):
    made = case(39, 50, 1, "2:4", dtype, weight_dtype, storage)
    for layout in layouts_of(made):
        for scale in (1, -3):
            made.matrix.values.mul_(scale)
            values, expected = (
                layout.values(made.matrix),
                torch.where(made.mask, made.matrix.values.to(dtype), 0),
            )
            paired = isinstance(layout, PermuteLayout) and layout.paired
            assert values.dtype == (torch.bfloat16 if paired else torch.float32)
            entries = (
                mask_of_csr(layout) if isinstance(layout, CsrLayout) else mask_of_permute(layout)
            )
            assert torch.equal(entries, made.mask)
            found = torch.zeros(39, 50)
            if isinstance(layout, CsrLayout):
                for row in range(39):
                    these = slice(layout.start[row], layout.start[row + 1])
                    found[row, (layout.offset[these] // PANEL).long()] = values[these]
            else:
                assert not values[layout.inputs == EMPTY].any()
                inputs, values = by_slot(layout, layout.inputs), by_slot(layout, values)
                for t, b, s, r in (inputs != EMPTY).nonzero().tolist():
                    place = t * 2 * layout.lanes + r, b * layout.block + int(inputs[t, b, s, r])
                    found[place] = values[t, b, s, r]
            assert torch.equal(found, expected.float())


def test_values_are_rounded_to_bfloat16_as_a_cast_rounds():
    bits = torch.arange(0, 2**32, 65537 // 3, dtype=torch.int64)[:196608]
    patterns = [bits, bits // 2**16 * 2**16 + 2**15]  # and ties
    weight = torch.cat(patterns).to(torch.int32).view(torch.float32)[: 256 * 1024].reshape(256, -1)
    mask = torch.ones(weight.shape, dtype=torch.uint8)
    matrix = MaskedMatrix(weight, mask, 1, None, torch.bfloat16, None, lambda: weight)
    values, expected = (
        [CsrLayout.of(matrix).values(matrix).view_as(weight)],
        weight.bfloat16().float(),
    )
    if WIDE:
        mask[:, 31::32] = 0  # of the depth in its order all slots but these have an entry
        with at_level(WIDE[-1]):
            layout = PermuteLayout.of(matrix._replace(pattern=NMPattern(31, 32)))
        found = by_slot(layout, layout.values(matrix)).permute(0, 3, 1, 2).reshape(256, -1).float()
        assert not found[:, 31::32].any()
        values.append(torch.where(mask.bool(), found, expected))
    for found in values:
        assert torch.equal(found.isnan(), expected.isnan())
        kept = ~expected.isnan()
        assert torch.equal(found[kept].view(torch.int32), expected[kept].view(torch.int32))


@pytest.mark.parametrize("level", WIDE)
@pytest.mark.parametrize("storage", ["rows", "columns"])
def test_a_mask_that_is_not_of_the_pattern_is_refused(level, storage):
    made = case(40, 64, 1, "2:8", storage=storage)
    row, start = 17, 32
    made.matrix.bits[row, start : start + 8] |= 1
    with at_level(level), pytest.raises(ValueError, match="is not 2:8 along its last axis"):
        PermuteLayout.of(made.matrix)
    with pytest.raises(ValueError, match="takes a mask of a pattern"):
        CpuPermuteKernel().layout(made.matrix._replace(pattern=None))


@pytest.mark.parametrize("wrong", [-1, 15, 16, 31, 32, 127, 129, 255])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", WIDE)
def test_a_permute_layout_with_a_wrong_index_is_refused(level, dtype, wrong):
    made = case(40, 40, 1, "1:8", dtype)
    with at_level(level):
        layout = PermuteLayout.of(made.matrix)
        replace(layout)
        layout.inputs.view(-1)[-3] = wrong % 256
        if 0 <= wrong < layout.block:
            replace(layout)
        else:
            with pytest.raises(ValueError, match="make it from a mask"):
                replace(layout)


@pytest.mark.parametrize(
    "change", ["negative", "beyond", "crooked", "count", "first", "descending"]
)
def test_a_csr_layout_with_a_wrong_entry_is_refused(change):
    layout = CsrLayout.of(case(20, 30, 1, "1:5").matrix)
    replace(layout)
    if change == "negative":
        layout.offset[4] = -PANEL
    elif change == "beyond":
        layout.offset[4] = 30 * PANEL
    elif change == "crooked":
        layout.offset[4] += 1
    elif change == "count":
        with pytest.raises(ValueError, match="make it from a mask"):
            replace(layout, offset=layout.offset[:-1])
        return
    elif change == "first":
        layout.start[0] = 1
    else:
        layout.start[7] = 0
    with pytest.raises(ValueError, match="make it from a mask"):
        replace(layout)


def test_what_a_layout_cannot_be_of_is_refused():
    made = case(24, 16, 1, "2:4")
    both = torch.zeros(48, 32, dtype=torch.uint8)[::2, ::2]
    with pytest.raises(ValueError, match="no contiguous axis"):
        CsrLayout.of(made.matrix._replace(bits=both))
    moved = case(24, 16, 1, "2:4", permuted=True).matrix
    for order in (torch.arange(15), torch.arange(16, dtype=torch.int32), torch.arange(32)[::2]):
        for level in WIDE:
            with at_level(level), pytest.raises(ValueError, match="the order of a depth of 16"):
                PermuteLayout.of(moved._replace(order=order))
    other = case(24, 20, 1, "2:4").matrix
    for layout in layouts_of(made):
        with pytest.raises(ValueError, match="not one of a matrix of 24 x 20"):
            layout.values(other)


def test_matrices_too_large_for_32_bit_offsets_are_refused():
    for shape in ((2**16, 2**15), (1, 2**26)):
        matrix = MaskedMatrix(
            torch.empty(shape, device="meta"),
            torch.empty(shape, device="meta", dtype=torch.uint8),
            1,
            None,
            torch.float32,
            None,
            lambda: None,
        )
        with pytest.raises(ValueError, match="too large for 32-bit offsets"):
            CsrLayout.of(matrix)


def test_a_kernel_refuses_a_layout_that_is_broken_or_of_another_kernel():
    made, permute, csr = case(24, 16, 3, "2:4"), CpuPermuteKernel(), CpuCsrKernel()
    for own, other in ((permute, csr), (csr, permute)):
        packed = own.pack_masked(made.matrix, own.layout(made.matrix))
        with pytest.raises(ValueError, match=f"{other.name} takes a"):
            other.linear(packed, made.x)
        with pytest.raises(ValueError, match=f"{other.name} takes a"):
            other.sampled(packed.layout, made.grad, made.x)
    layout = permute.layout(made.matrix)
    with pytest.raises(ValueError, match="make it from a mask"):
        replace(layout, inputs=layout.inputs + 64)


@pytest.mark.skipif(
    "avx512-bf16" not in LEVELS, reason="needs a CPU that multiplies pairs, or a model of one"
)
def test_a_paired_layout_is_of_bfloat16_alone():
    made, kernel = case(40, 48, 5, "1:8", torch.bfloat16), CpuPermuteKernel()
    with at_level("avx512-bf16"):
        layout = kernel.layout(made.matrix)
        packed = kernel.pack_masked(made.matrix, layout)
        assert layout.paired
        assert packed.values.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="has bfloat16 values"):
            kernel.pack_masked(made.matrix._replace(dtype=torch.float32), layout)
        with pytest.raises(ValueError, match="a paired layout takes"):
            kernel.linear(packed, made.x.float())
        with pytest.raises(ValueError, match="a paired layout takes"):
            kernel.sampled(layout, made.grad.float(), made.x.float())
        single = kernel.layout(
            made.matrix._replace(dtype=torch.float32)
        )  # its bfloat16 operands are widened
        assert not single.paired
        found = kernel.linear(kernel.pack_masked(made.matrix, single), made.x)
        torch.testing.assert_close(
            found.double(), made.x.double() @ made.exact.t(), rtol=2.0**-7, atol=1e-4
        )
        other = case(
            40, 96, 5, "5:48", torch.bfloat16
        )  # 48 divides neither 32 nor is it a multiple
        assert not kernel.layout(other.matrix).paired
        compare(kernel, other)
    with at_level("avx512"), pytest.raises(RuntimeError, match="has no such kernel"):
        kernel.linear(packed, made.x)
