"""Values of layouts from kept entries alone: those that the dense weight gives, in memory as kernels read them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional.pattern import NMPattern
from lightning_nm.kernels.api import KeptEntries
from tests.support.cpu_products import KERNELS, LEVELS, at_level, case, has_kernel, needs_library

pytestmark = needs_library

PATTERNS = ["1:2", "2:4", "1:4", "3:8", "4:6", "1:16", "1:32", "1:64"]


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    kernel=st.sampled_from(KERNELS),
    pattern=st.sampled_from(PATTERNS),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    weight_dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_kept_entries_give_the_values(
    level, kernel, pattern, rows, blocks, dtype, weight_dtype, seed
):
    if not has_kernel(kernel, level):
        return
    found = NMPattern.parse(pattern)
    with at_level(level):
        drawn = case(
            rows,
            blocks * found.m,
            2,
            pattern,
            dtype=dtype,
            weight_dtype=weight_dtype,
            seed=seed,
        )
        layout = kernel.layout(drawn.matrix)
        kept = drawn.matrix.values[drawn.mask].view(rows, -1, found.n)
        packed = kernel.pack_kept(
            KeptEntries(kept, found, dtype), kernel.layout_of_kept(drawn.matrix)
        )
        expected = kernel.pack_masked(drawn.matrix, layout)
        if packed is None:
            # Blocks that do not fit the registers: the dense weight is packed.
            assert kernel.name == "cpu-permute"
            assert layout.block % found.m
            return
        assert packed.values.is_contiguous()
        assert torch.equal(packed.values, expected.values)
        y = kernel.linear(packed, drawn.x, drawn.bias)
        assert torch.equal(y, kernel.linear(expected, drawn.x, drawn.bias))


@pytest.mark.parametrize("threads", [1, 3])
def test_layouts_made_on_several_threads_keep_the_order_of_kept_entries(threads):
    """Of a transposed mask, each thread lays out some rows by itself."""
    csr = next(kernel for kernel in KERNELS if kernel.name == "cpu-csr")
    drawn = case(32, 1024, 2, "1:16")
    found = NMPattern.parse("1:16")
    kept = KeptEntries(drawn.matrix.values[drawn.mask].view(32, -1, 1), found, torch.float32)
    matrix = drawn.matrix
    transposed = matrix._replace(values=matrix.values.t(), bits=matrix.bits.t())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        packed = csr.pack_kept(kept, csr.layout_of_kept(transposed))
        expected = csr.pack_masked(transposed, csr.layout(transposed))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(packed.values, expected.values)


def test_entries_of_another_mask_are_refused_or_packed_densely():
    drawn = case(8, 16, 2, "2:4")
    kept = KeptEntries(torch.randn(8, 2, 2), NMPattern.parse("2:4"), torch.float32)
    for kernel in KERNELS:
        assert kernel.pack_kept(kept, kernel.layout(drawn.matrix)) is None


def test_a_layout_for_kept_entries_refuses_a_dense_weight():
    drawn = case(8, 16, 2, "2:4")
    csr = next(kernel for kernel in KERNELS if kernel.name == "cpu-csr")
    layout = csr.layout_of_kept(drawn.matrix)
    assert not len(layout.source)
    with pytest.raises(ValueError, match="does not know where its entries are"):
        csr.pack_masked(drawn.matrix, layout)
