"""Unbiased estimators: dtypes, strides, values that are not finite, and errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import unbiased as module
from lightning_nm.functional.masks import is_nm
from lightning_nm.functional.unbiased import approx_mvue, mvue, mvue_probabilities
from lightning_nm.pattern import NMPattern
from tests.functional.test_unbiased import bits


def test_huge_blocks_overflow_openly():
    x = torch.full((1, 4), 3e38)
    assert mvue(x, "2:4", uniform=torch.full((1, 1), 0.5)).tolist() == [[0, math.inf, 0, math.inf]]
    spike = torch.tensor([[3e38, 1e38, -1e38, 1e-45]])
    y = mvue(spike, "2:4", uniform=torch.full((1, 1), 0.7))
    torch.testing.assert_close(y, torch.tensor([[3e38, 0, -2e38, 0]]))
    subnormal = torch.tensor([[3e38, 1e-45, 1e-45, 1e-45]])
    y = mvue(subnormal.expand(3, 4), "2:4", uniform=torch.tensor([[0.1], [0.5], [0.9]]))
    q = subnormal[0, 1]
    assert torch.equal(
        y, torch.cat([subnormal[:, :1].expand(3, 1), torch.diag((3 * q).expand(3))], 1)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_dtypes_are_computed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator).to(dtype)
    u, v = torch.rand(64, 4, generator=generator), torch.rand(2, 64, 4, generator=generator)
    assert torch.equal(mvue(x, "2:4", uniform=u), mvue(x.float(), "2:4", uniform=u).to(dtype))
    assert torch.equal(approx_mvue(x, uniform=v), approx_mvue(x.float(), uniform=v).to(dtype))
    assert mvue_probabilities(x, "2:4").dtype == torch.float32
    if dtype == torch.float16:
        assert mvue(torch.full((4,), 6e4).half(), "2:4").isinf().sum() == 2


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("text", ["1:2", "2:4", "3:5"])
def test_what_is_not_finite_stays_visible(text, bad):
    pattern = NMPattern.parse(text)
    clean = torch.randn(6, 3 * pattern.m, generator=torch.Generator().manual_seed(0))
    u = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))
    x = clean.clone()
    x[2, pattern.m] = bad
    x[5, :] = bad
    x[4, : pattern.m] = 0
    x[4, 1] = bad
    y, expected = mvue(x, pattern, uniform=u), mvue(clean, pattern, uniform=u)
    broken = ~x.unflatten(1, (-1, pattern.m)).isfinite().all(-1)
    blocks = y.unflatten(1, (-1, pattern.m))
    assert (blocks[broken].isnan().sum(-1) == pattern.n).all()
    assert is_nm(y, pattern)
    untouched = ~broken
    untouched[4, 0] = False
    assert torch.equal(blocks[untouched], expected.unflatten(1, (-1, pattern.m))[untouched])
    p = mvue_probabilities(x, pattern).unflatten(1, (-1, pattern.m))
    assert p[broken].isnan().all()
    assert p[~broken].isfinite().all()
    if text == "2:4":
        z = approx_mvue(x, uniform=torch.stack([u, u])).unflatten(1, (-1, 4))
        assert (z[broken].isnan().sum(-1) == 2).all()
        assert z[~broken].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    text=st.sampled_from(["1:2", "2:4", "3:5"]),
    dtype=st.sampled_from([torch.float32, torch.half]),
)
def test_any_axis_and_strides(data, text, dtype):
    m = NMPattern.parse(text).m
    shape = [data.draw(st.integers(0, 3)) for _ in range(data.draw(st.integers(0, 2)))]
    axis = data.draw(st.integers(0, len(shape)))
    shape.insert(axis, m * data.draw(st.integers(0, 3)))
    dim = axis - data.draw(st.sampled_from([0, len(shape)]))
    memory = data.draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn([shape[i] for i in memory], generator=generator).permute(
        [memory.index(i) for i in range(len(shape))]
    )
    x = torch.stack([x, x], -1)[..., 0] if data.draw(st.booleans()) else x
    x = x.to(dtype)
    blocks = list(shape)
    blocks[axis] //= m
    u = torch.rand(blocks, generator=generator)
    plain, numbers = x.movedim(dim, -1).contiguous(), u.movedim(dim, -1).contiguous()
    assert torch.equal(
        mvue(x, text, dim, uniform=u), mvue(plain, text, uniform=numbers).movedim(-1, dim)
    )
    expected = mvue_probabilities(plain, text).movedim(-1, dim)
    assert torch.equal(mvue_probabilities(x, text, dim), expected)


@pytest.mark.parametrize("text", ["1:2", "2:4", "4:8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_meet(monkeypatch, text, dim):
    x = torch.randn(48, 80, generator=torch.Generator().manual_seed(0))
    x[3, 5] = math.nan  # in one chunk only
    shape = [48, 80]
    shape[dim] //= NMPattern.parse(text).m
    u = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    expected = bits(mvue(x, text, dim, uniform=u))
    for chunk in (1, 7 * 8, 1000):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        assert torch.equal(bits(mvue(x, text, dim, uniform=u)), expected)


def test_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert mvue(torch.empty(4, 8, device="meta"), "2:4", 0).shape == (4, 8)
    assert approx_mvue(torch.empty(4, 8, device="meta")).shape == (4, 8)
    with FakeTensorMode():
        assert mvue(torch.randn(4, 8), "2:4").shape == (4, 8)
        assert mvue_probabilities(torch.randn(4, 8), "2:4").shape == (4, 8)


def test_a_generator_gives_the_numbers():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    u = torch.rand(2, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        mvue(x, "2:4", 0, generator=torch.Generator().manual_seed(1)), mvue(x, "2:4", 0, uniform=u)
    )
    v = torch.rand(2, 8, 2, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        approx_mvue(x, generator=torch.Generator().manual_seed(1)), approx_mvue(x, uniform=v)
    )
    torch.manual_seed(1)
    assert torch.equal(mvue(x, "2:4", 0), mvue(x, "2:4", 0, uniform=u))


def test_x_is_untouched_and_there_is_no_history():
    x = torch.nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    before = x.detach().clone()
    for y in (mvue(x, "2:4"), approx_mvue(x), mvue_probabilities(x, "2:4")):
        assert not y.requires_grad
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (0, 0, 4)])
def test_empty(shape):
    x = torch.zeros(shape)
    assert (
        mvue(x, "2:4").shape == approx_mvue(x).shape == mvue_probabilities(x, "2:4").shape == shape
    )


def test_errors():
    for function in (mvue, approx_mvue, mvue_probabilities):
        with pytest.raises(ValueError, match=r"\(4, 6\).*M=4"):
            function(torch.zeros(4, 6), "2:4")
        with pytest.raises(IndexError, match="dim=2"):
            function(torch.zeros(4, 4), "2:4", 2)
        with pytest.raises(ValueError, match="without axes"):
            function(torch.tensor(1.0), "2:4")
        with pytest.raises(TypeError, match="int64"):
            function(torch.zeros(4, dtype=torch.int64), "2:4")
    with pytest.raises(ValueError, match=r"\(4, 2\).*dim=1 need \(4, 1\)"):
        mvue(torch.zeros(4, 4), "2:4", uniform=torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"\(4, 1\).*need \(2, 4, 1\)"):
        approx_mvue(torch.zeros(4, 4), uniform=torch.zeros(4, 1))
    with pytest.raises(ValueError, match="pass one"):
        mvue(torch.zeros(4), "2:4", uniform=torch.zeros(1), generator=torch.Generator())
    with pytest.raises(ValueError, match="defined for 2:4, not for 1:2"):
        approx_mvue(torch.zeros(4), "1:2")
