"""Selections by bits against those of torch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.functional import select
from lightning_nm.functional.select import mask_, masked, merged

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -3.0])
FEW = select._FEW


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    """Small tensors would all take `where`."""
    monkeypatch.setattr(select, "_FEW", 0)


def same_bits(a, b):
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(word), b.view(word))


@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_bits_are_those_of_where(dtype, sizes, seed, data):
    """In any memory order, of which the mask's may be another one, as of a gradient in the order of channels last."""
    generator = torch.Generator().manual_seed(seed)
    orders = st.permutations(range(len(sizes)))

    def laid_out(tensor, order):
        inverse = [order.index(axis) for axis in range(len(order))]
        return tensor.permute(order).contiguous().permute(inverse)

    x, y = (
        laid_out(SPECIAL[torch.randint(len(SPECIAL), sizes, generator=generator)].to(dtype), order)
        for order in [data.draw(orders)] * 2
    )
    mask = laid_out(torch.rand(sizes, generator=generator) < 0.5, data.draw(orders))
    assert same_bits(masked(x, mask), torch.where(mask, x, 0))
    assert same_bits(merged(mask, x, y), torch.where(mask, x, y))
    kept = laid_out(x.clone(), data.draw(orders))
    strides = kept.stride()
    assert mask_(kept, mask) is kept
    assert kept.stride() == strides
    assert same_bits(kept, torch.where(mask, x, 0))


@pytest.mark.parametrize("size", [10, FEW + 1])
def test_few_entries_take_where(size, monkeypatch):
    monkeypatch.undo()
    x, mask = torch.randn(size), torch.rand(size) < 0.5
    assert torch.equal(masked(x, mask), torch.where(mask, x, 0))
    assert torch.equal(merged(mask, x, -x), torch.where(mask, x, -x))
    assert torch.equal(mask_(x.clone(), mask), x.masked_fill(~mask, 0))


def test_gradients_broadcasts_and_other_types_take_where():
    x = torch.randn(3, 4, requires_grad=True)
    mask = torch.rand(3, 4) < 0.5
    masked(x, mask).sum().backward()
    assert torch.equal(x.grad, mask.float())
    assert torch.equal(masked(torch.ones(3, 4), mask[:1]), mask[:1].float().expand(3, 4))
    assert torch.equal(masked(torch.ones(3, 4, dtype=torch.int64), mask), mask.long())
    negative = torch.conj(torch.randn(3, 4, dtype=torch.complex64)).imag
    assert torch.equal(masked(negative, mask), torch.where(mask, negative, 0))


def test_an_in_place_change_is_seen_by_autograd():
    y = torch.ones(2, 2, requires_grad=True) * 2
    result = y.square().sum()
    with torch.no_grad():
        mask_(y.detach(), torch.zeros(2, 2, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    x = torch.ones(2, 2)
    with torch.inference_mode():
        mask_(x, x.bool())
    assert x._version == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # that jvp calls
def test_transforms_pass():
    x, mask = torch.randn(3, 4), torch.rand(3, 4) < 0.5
    compiled = torch.compile(masked, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, mask), torch.where(mask, x, 0))
    _, tangent = torch.func.jvp(lambda x: masked(x, mask), (x,), (torch.ones(3, 4),))
    assert torch.equal(tangent, mask.float())
    stack = torch.randn(2, 3, 4)
    found = torch.func.vmap(lambda x: masked(x, mask))(stack)
    assert torch.equal(found, torch.where(mask, stack, 0))
