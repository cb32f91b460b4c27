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


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    """Small tensors would all take `where`."""
    monkeypatch.setattr(select, "_FEW", 0)


def tensors(dtype, rows, columns, seed, transposed):
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, rows) if transposed else (rows, columns)
    x, y = (
        SPECIAL[torch.randint(len(SPECIAL), shape, generator=generator)].to(dtype) for _ in range(2)
    )
    mask = torch.rand(shape, generator=generator) < 0.5
    return (each.t() if transposed else each for each in (x, y, mask))


def same_bits(a, b):
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(word), b.view(word))


@given(
    st.sampled_from(DTYPES),
    st.integers(0, 9),
    st.integers(0, 40),
    st.integers(0, 99),
    st.booleans(),
)
def test_bits_are_those_of_where(dtype, rows, columns, seed, transposed):
    x, y, mask = tensors(dtype, rows, columns, seed, transposed)
    assert same_bits(masked(x, mask), torch.where(mask, x, 0))
    assert same_bits(merged(mask, x, y), torch.where(mask, x, y))
    kept = x.clone()
    assert mask_(kept, mask) is kept
    assert same_bits(kept, x.masked_fill(~mask, 0))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 3, 2)])
def test_a_mask_of_another_memory_order(order):
    """As that of a weight whose gradient is in the order of channels last."""
    x, mask = torch.randn(4, 3, 5, 2), torch.rand(4, 3, 5, 2) < 0.5
    inverse = [order.index(k) for k in range(4)]
    other = x.permute(order).contiguous().permute(inverse)
    y = torch.randn_like(x)
    assert torch.equal(masked(other, mask), torch.where(mask, x, 0))
    assert torch.equal(merged(mask, other, y), torch.where(mask, x, y))
    assert mask_(other, mask).stride() == other.stride()
    assert torch.equal(other, x.masked_fill(~mask, 0))


@pytest.mark.parametrize("size", [10, 5000])
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
    strided = torch.ones(4, 3).t()
    assert torch.equal(masked(strided, mask), mask.float())


def test_an_in_place_change_is_seen_by_autograd():
    x = torch.ones(2, 2, requires_grad=True)
    y = x * 2
    (y * y).sum()
    result = (y.square()).sum()
    with torch.no_grad():
        mask_(y.detach(), torch.zeros(2, 2, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_one_graph_when_compiled():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(lambda x, mask: masked(x, mask), backend=counter, fullgraph=True)
    x, mask = torch.randn(3, 4), torch.rand(3, 4) < 0.5
    assert torch.equal(compiled(x, mask), torch.where(mask, x, 0))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # that jvp calls
def test_derivatives_and_transforms_pass():
    x, mask = torch.randn(3, 4), torch.rand(3, 4) < 0.5
    _, tangent = torch.func.jvp(lambda x: masked(x, mask), (x,), (torch.ones(3, 4),))
    assert torch.equal(tangent, mask.float())
    stack = torch.randn(2, 3, 4)
    assert torch.equal(
        torch.func.vmap(lambda x: masked(x, mask))(stack), torch.where(mask, stack, 0)
    )
    negative = torch.conj(torch.randn(3, 4, dtype=torch.complex64)).imag
    assert torch.equal(masked(negative, mask), torch.where(mask, negative, 0))
    with torch.inference_mode():
        mask_(x, mask)
    assert x._version == 1
