import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional.mask_storage import pack_mask, unpack_mask

shapes = st.lists(st.integers(0, 9), max_size=4)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**16), transposed=st.booleans())
def test_packs_like_numpy_and_comes_back(shape, seed, transposed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    if transposed and mask.dim() > 1:
        mask = mask.transpose(0, -1)
    packed = pack_mask(mask)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == np.packbits(mask.numpy().reshape(-1), bitorder="little").tolist()
    assert torch.equal(unpack_mask(packed, mask.shape), mask)


def test_a_bit_an_entry():
    assert pack_mask(torch.ones(64, 64, dtype=torch.bool)).shape == (512,)


def test_errors():
    with pytest.raises(TypeError, match=r"bool tensor, not torch.float32"):
        pack_mask(torch.ones(8))
    with pytest.raises(TypeError, match=r"uint8 tensor, not torch.int64"):
        unpack_mask(torch.zeros(1, dtype=torch.int64), (8,))
    for shape, wrong in [((3, 3), (1,)), ((3, 3), (3,)), ((8,), (1, 1)), ((), (0,)), ((0,), (1,))]:
        with pytest.raises(ValueError, match="bytes along one axis"):
            unpack_mask(torch.zeros(wrong, dtype=torch.uint8), shape)
