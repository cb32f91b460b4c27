"""Masks against a stable sort of every block, by every path that computes them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_nm.functional import masks
from lightning_nm.functional.masks import (
    count_violations,
    is_nm,
    magnitude_mask,
    nm_mask,
    nm_prune,
    sorted_mask,
    unrolled_mask,
)
from lightning_nm.pattern import NMPattern

PATTERNS = ["1:2", "2:4", "1:4", "3:4", "3:5", "2:8", "4:8", "1:16", "8:16", "16:32", "5:70"]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]


def expected_mask(scores, pattern, dim=-1):
    """By numpy, whose sort is stable and puts NaN last."""
    pattern = NMPattern.parse(pattern)
    rows = scores.double().movedim(dim, -1)
    order = np.argsort(-rows.unflatten(-1, (-1, pattern.m)).numpy(), axis=-1, kind="stable")
    mask = np.zeros(order.shape, dtype=bool)
    np.put_along_axis(mask, order[..., : pattern.n], True, axis=-1)
    return torch.from_numpy(mask).view(rows.shape).movedim(-1, dim)


def awkward(shape, dtype):
    """Ties, both zeros, NaNs and infinities, whole blocks of them included."""
    generator = torch.Generator().manual_seed(0)
    if dtype not in FLOATS:
        most = 2 if dtype == torch.bool else 5
        return torch.randint(0, most, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator).mul(2).round()
    draw = torch.rand(shape, generator=generator)
    for below, value in ((0.30, -0.0), (0.20, -torch.inf), (0.15, torch.inf), (0.10, torch.nan)):
        values[draw < below] = value
    for row, value in enumerate((torch.nan, 0.0, -torch.inf)):
        values[row] = value
    if dtype == torch.float8_e4m3fn:  # has no infinity
        values = values.nan_to_num(nan=torch.nan, posinf=8.0, neginf=-8.0)
    return values.to(dtype)


@pytest.fixture(autouse=True, scope="module", params=["library", "torch"])
def _without_library(request):
    """Each test also as on a CPU without the library, and on other devices."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(masks, "by_library", None)
        yield


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("text", PATTERNS)
def test_every_path_and_dtype(text, dtype):
    pattern = NMPattern.parse(text)
    scores = awkward((4, pattern.m, 2 * pattern.m), dtype)
    for dim in (1, -1):
        expected = expected_mask(scores, text, dim)
        assert torch.equal(nm_mask(scores, text, dim), expected)
        comparable = masks._comparable(scores)
        assert torch.equal(sorted_mask(comparable, pattern, dim % 3), expected)
        if pattern.m <= masks._MAX_COMPILED_M:
            assert torch.equal(unrolled_mask(comparable, pattern, dim % 3), expected)
        if dtype in FLOATS[:4]:
            assert torch.equal(
                magnitude_mask(scores, text, dim), expected_mask(scores.abs(), text, dim)
            )


entries = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, torch.inf, -torch.inf, torch.nan])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), m=st.integers(2, 9), dtype=st.sampled_from(FLOATS[:4]))
def test_any_block(data, m, dtype):
    pattern = NMPattern(data.draw(st.integers(1, m - 1)), m)
    size = m * data.draw(st.integers(1, 4))
    values = data.draw(st.lists(entries | st.floats(width=32), min_size=size, max_size=size))
    scores = torch.tensor(values, dtype=torch.float64).to(dtype)
    mask = nm_mask(scores, pattern)
    assert torch.equal(mask, expected_mask(scores, pattern))
    assert mask.view(-1, m).sum(1).eq(pattern.n).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), m=st.integers(2, 6))
def test_any_axis_and_strides(data, m):
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    axis = data.draw(st.integers(0, len(shape)))
    shape.insert(axis, m * data.draw(st.integers(0, 3)))
    dim = axis - data.draw(st.sampled_from([0, len(shape)]))
    memory = data.draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.randn([shape[i] for i in memory], generator=generator).round()
    scores = scores.permute([memory.index(i) for i in range(len(shape))])
    how = data.draw(st.sampled_from(["dense", "every second", "expanded"]))
    if how == "every second":
        scores = torch.stack([scores, scores], -1)[..., 1]
    elif how == "expanded":
        scores = scores[:1].expand(shape)
    pattern = NMPattern(data.draw(st.integers(1, m - 1)), m)
    assert torch.equal(nm_mask(scores, pattern, dim), expected_mask(scores, pattern, dim))
    pruned = nm_prune(scores, pattern, dim)
    assert pruned.shape == scores.shape
    assert is_nm(pruned, pattern, dim)


@pytest.mark.parametrize("shape", [(48, 80), (3, 160, 7), (3, 16, 65), (3, 16, 200), (1000, 16)])
@pytest.mark.parametrize("text", ["2:4", "1:4", "1:16", "4:8"])
def test_rows_of_blocks_that_are_ranked_side_by_side_end(text, shape):
    """Within a row, in several rows, and at the end; on two threads, too."""
    scores = awkward(shape, torch.float32)
    for count in (1, 2):
        torch.set_num_threads(count)
        assert torch.equal(nm_mask(scores, text, 1), expected_mask(scores, text, 1))


def test_the_mask_has_the_memory_order_of_the_scores_and_no_history():
    weight = torch.nn.Parameter(torch.randn(8, 16, 3, 3).to(memory_format=torch.channels_last))
    before = weight.detach().clone()
    for mask in (
        nm_mask(weight, "2:4", 1),
        nm_mask(weight, "1:8", 1),
        magnitude_mask(weight, "2:4", 1),
    ):
        assert mask.stride() == weight.stride()
        assert not mask.requires_grad
    assert torch.equal(weight, before)


@pytest.mark.parametrize("text", ["2:4", pytest.param("5:70", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [nm_mask, magnitude_mask, nm_prune])
def test_inside_a_compiled_graph(function, text):
    torch._dynamo.reset()
    scores = awkward((4, 2, 3 * NMPattern.parse(text).m), torch.float32)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(scores, text), function(scores, text), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("text", ["2:4", "8:16", "5:70"])
def test_without_values(text):
    """Shapes alone are enough: no path reads a value of a tensor that has none."""
    shape = (4, 3 * NMPattern.parse(text).m)
    assert nm_mask(torch.empty(shape, device="meta"), text).shape == shape
    with FakeTensorMode():
        assert nm_mask(torch.randn(shape), text).shape == shape


def test_prune_selects():
    x = torch.tensor([-1.0, -5.0, torch.nan, 3.0, -0.0, -0.0, -0.0, -0.0], requires_grad=True)
    y = nm_prune(x, "2:4")
    assert y.tolist() == [0, -5, 0, 3, 0, 0, 0, 0]
    assert not y[[0, 6, 7]].signbit().any()
    y.sum().backward()
    assert x.grad.tolist() == [0, 1, 0, 1, 1, 1, 0, 0]
    for dtype in (torch.bfloat16, torch.float64, torch.int32):
        assert nm_prune(torch.ones(8).to(dtype), "2:4").dtype == dtype


def test_violations_count_blocks():
    x = torch.zeros(3, 8)
    assert is_nm(x, "1:4")
    x[0, :2] = 1
    assert is_nm(x, "2:4")
    assert not is_nm(x, "1:4")
    x[1] = torch.nan
    x[2, 4:7] = -0.0
    for tensor, pattern, dim in (
        (x, "2:4", -1),
        (x != 0, "2:4", 1),
        (x.t(), "2:4", 0),
        (x, "1:3", 0),
    ):
        assert int(count_violations(tensor, pattern, dim)) == 2
    assert int(count_violations(torch.zeros(0, 8), "2:4")) == 0


@pytest.mark.parametrize("function", [nm_mask, nm_prune, is_nm, count_violations])
@pytest.mark.parametrize(
    ("shape", "pattern", "dim", "error", "message"),
    [
        ((4, 6), "2:4", -1, ValueError, r"\(4, 6\).*2:4.*M=4.*6 of dim=-1.*exclude.*pad"),
        ((6, 4), "2:4", 0, ValueError, r"\(6, 4\).*dim=0"),
        ((4, 4), "2:4", 2, IndexError, "dim=2 is not an axis"),
        ((), "2:4", -1, ValueError, "without axes"),
        ((4,), "2-4", -1, ValueError, "cannot read"),
    ],
)
def test_errors_name_the_way_out(function, shape, pattern, dim, error, message):
    with pytest.raises(error, match=message):
        function(torch.zeros(shape), pattern, dim)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace.* is deprecated", "ignore::torch.jit.TracerWarning"
)
def test_tensors_without_memory_and_traces_are_masked_by_torch():
    zeros = torch._efficientzerotensor((8, 16))
    assert torch.equal(nm_mask(zeros, "2:4"), nm_mask(torch.zeros(8, 16), "2:4"))
    first, second = torch.randn(2, 8, 16)
    traced = torch.jit.trace(lambda x: nm_prune(x, "2:4"), (first,), check_trace=False)
    assert torch.equal(traced(second), nm_prune(second, "2:4"))
