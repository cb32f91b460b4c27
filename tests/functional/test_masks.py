import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import masks
from lightning_nm.functional.masks import (
    count_violations,
    is_nm,
    nm_mask,
    nm_prune,
    sorted_mask,
    unrolled_mask,
)
from lightning_nm.pattern import NMPattern

PATTERNS = [
    "1:2",
    "2:4",
    "1:4",
    "3:4",
    "3:5",
    "2:8",
    "4:8",
    "1:16",
    "2:16",
    "8:16",
    "16:32",
    "5:70",
]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]


def brute_force(scores: torch.Tensor, n: int, m: int, dim: int) -> torch.Tensor:
    """Python's sort, one block at a time."""
    rows = scores.movedim(dim, -1)
    mask: list[bool] = []
    if not rows.numel():
        return torch.empty(scores.shape, dtype=torch.bool)
    for row in rows.reshape(-1, rows.shape[-1]).tolist():
        for start in range(0, len(row), m):
            block = row[start : start + m]
            order = sorted(
                range(m),
                key=lambda j: (math.isnan(block[j]), 0 if math.isnan(block[j]) else -block[j], j),
            )
            mask.extend(j in order[:n] for j in range(m))
    return torch.tensor(mask, dtype=torch.bool).reshape(rows.shape).movedim(-1, dim)


def _nm_mask_reference(scores, pattern, dim=-1):
    """By one stable sort."""
    return sorted_mask(masks._comparable(scores), NMPattern.parse(pattern), dim % scores.dim())


def awkward(shape, dtype, seed=0):
    """Ties, both zeros, NaNs and infinities, whole blocks of them included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype not in FLOATS:
        return torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator).to(
            dtype
        )
    values = torch.randn(shape, generator=generator).mul(2).round()
    draw = torch.rand(shape, generator=generator)
    values[draw < 0.30] = -0.0
    values[draw < 0.20] = -torch.inf
    values[draw < 0.15] = torch.inf
    values[draw < 0.10] = torch.nan
    values[0] = torch.nan
    values[1] = 0.0
    values[2] = -torch.inf
    if dtype == torch.float8_e4m3fn:  # has no infinity
        values = values.nan_to_num(nan=torch.nan, posinf=8.0, neginf=-8.0)
    return values.to(dtype)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module", params=["library", "torch"])
def _without_library(request):
    """Each test also as on a CPU without the library, and on other devices."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(masks, "by_library", None)
        yield


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("text", PATTERNS)
def test_every_path_gives_the_reference(text, dtype):
    pattern = NMPattern.parse(text)
    scores = awkward((4, pattern.m, 2 * pattern.m), dtype)
    for dim in (1, -1):
        expected = _nm_mask_reference(scores, text, dim)
        assert torch.equal(nm_mask(scores, text, dim), expected)
        if pattern.m <= masks._MAX_COMPILED_M:
            unrolled = unrolled_mask(masks._comparable(scores), pattern, dim % 3)
            assert torch.equal(unrolled, expected)
        assert expected.movedim(dim, -1).unflatten(-1, (-1, pattern.m)).sum(-1).eq(pattern.n).all()


@pytest.mark.parametrize("text", PATTERNS)
def test_the_reference_gives_the_brute_force(text):
    pattern = NMPattern.parse(text)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        scores = awkward((4, pattern.m, 2 * pattern.m), dtype, seed=1)
        assert torch.equal(
            _nm_mask_reference(scores, text, 1), brute_force(scores, pattern.n, pattern.m, 1)
        )
        assert torch.equal(
            _nm_mask_reference(scores, text), brute_force(scores, pattern.n, pattern.m, -1)
        )


entries = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0, 1e-40, torch.inf, -torch.inf, torch.nan]
) | st.floats(width=32)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), m=st.integers(2, 9), dtype=st.sampled_from(FLOATS[:4]))
def test_any_block(data, m, dtype):
    n = data.draw(st.integers(1, m - 1))
    blocks = data.draw(st.integers(1, 4))
    values = data.draw(st.lists(entries, min_size=blocks * m, max_size=blocks * m))
    scores = torch.tensor(values, dtype=torch.float64).to(dtype)
    mask = nm_mask(scores, NMPattern(n, m))
    assert torch.equal(mask, brute_force(scores, n, m, -1))
    assert mask.view(-1, m).sum(1).eq(n).all()
    assert is_nm(mask, NMPattern(n, m))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), m=st.integers(2, 6))
def test_any_axis_and_strides(data, m):
    shape = [data.draw(st.integers(0, 3)) for _ in range(data.draw(st.integers(0, 3)))]
    axis = data.draw(st.integers(0, len(shape)))
    shape.insert(axis, m * data.draw(st.integers(0, 3)))
    dim = axis - data.draw(st.sampled_from([0, len(shape)]))
    memory = data.draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.randn([shape[i] for i in memory], generator=generator).round()
    scores = scores.permute([memory.index(i) for i in range(len(shape))])
    scores = (
        torch.stack([scores, scores], -1)[..., data.draw(st.integers(0, 1))]
        if data.draw(st.booleans())
        else scores
    )
    n = data.draw(st.integers(1, m - 1))
    mask = nm_mask(scores, NMPattern(n, m), dim)
    assert mask.shape == scores.shape
    assert torch.equal(mask, brute_force(scores, n, m, dim))


@pytest.mark.parametrize("shape", [(48, 80), (3, 160, 7), (3, 16, 65), (3, 16, 200), (1000, 16)])
@pytest.mark.parametrize("text", ["2:4", "1:4", "1:16", "4:8"])
def test_rows_of_blocks_that_are_ranked_side_by_side_end(text, shape):
    """Within a row, in several rows, and at the end; on two threads, too."""
    scores = awkward(shape, torch.float32)
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        assert torch.equal(nm_mask(scores, text, 1), _nm_mask_reference(scores, text, 1))
    torch.set_num_threads(threads)


def test_expanded_scores():
    scores = torch.randn(8, 1).expand(8, 6)
    assert torch.equal(nm_mask(scores, "2:4", 0), _nm_mask_reference(scores, "2:4", 0))
    assert torch.equal(nm_mask(scores, "1:2"), torch.tensor([True, False]).repeat(8, 3))


def test_channels_last_needs_no_copy_and_keeps_its_strides():
    weight = torch.randn(8, 16, 3, 3).to(memory_format=torch.channels_last)
    mask = nm_mask(weight.abs(), "2:4", dim=1)
    assert mask.stride() == weight.stride()
    assert torch.equal(mask, _nm_mask_reference(weight.abs().contiguous(), "2:4", 1))


def test_scores_are_untouched_and_leave_no_history():
    weight = torch.nn.Parameter(awkward((4, 8), torch.float32))
    before = weight.detach().clone()
    mask = nm_mask(weight, "2:4")
    assert mask.dtype == torch.bool
    assert not mask.requires_grad
    assert torch.equal(weight.detach().view(torch.int32), before.view(torch.int32))
    assert not nm_mask(weight.abs(), "1:8").requires_grad


@pytest.mark.parametrize(
    "text",
    ["2:4", *(pytest.param(text, marks=pytest.mark.slow) for text in ("1:4", "8:16", "5:70"))],
)
def test_inside_a_compiled_graph(text):
    scores = awkward((4, 2, 3 * NMPattern.parse(text).m), torch.float32)
    compiled = torch.compile(lambda x: nm_mask(x, text), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(scores), _nm_mask_reference(scores, text))
    pruned = torch.compile(lambda x: nm_prune(x, text), fullgraph=True, backend="eager")
    assert torch.equal(pruned(scores).nan_to_num(), nm_prune(scores, text).nan_to_num())


@pytest.mark.parametrize("text", ["2:4", "1:4", "1:16", "8:16", "5:70"])
def test_without_values(text):
    """Shapes alone are enough: no path reads a value of a tensor that has none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape = (4, 3 * NMPattern.parse(text).m)
    assert nm_mask(torch.empty(shape, device="meta"), text).shape == shape
    with FakeTensorMode():
        assert nm_mask(torch.randn(shape), text).shape == shape


def test_prune_selects():
    x = torch.tensor([-1.0, -5.0, torch.nan, 3.0, -0.0, -0.0, -0.0, -0.0], requires_grad=True)
    y = nm_prune(x, "2:4")
    assert y.tolist() == [0, -5, 0, 3, 0, 0, 0, 0]
    assert not y[2:].signbit()[4:].any()
    assert not y[0].signbit()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_prune_keeps_the_dtype(dtype):
    x = torch.arange(-8, 8).to(dtype).view(2, 8)
    assert nm_prune(x, "2:4", 1).dtype == dtype
    assert is_nm(nm_prune(x, "1:2", 0), "1:2", 0)


def test_violations_count_blocks():
    x = torch.zeros(3, 8)
    assert is_nm(x, "1:4")
    x[0, :2] = 1
    assert is_nm(x, "2:4")
    assert not is_nm(x, "1:4")
    x[1] = torch.nan
    x[2, 4:7] = -0.0
    assert int(count_violations(x, "2:4")) == 2
    assert int(count_violations(x != 0, "2:4")) == 2
    assert int(count_violations(x.t(), "2:4", 0)) == 2
    assert int(count_violations(x, "1:3", 0)) == 2
    assert int(count_violations(torch.zeros(0, 8), "2:4")) == 0


@pytest.mark.parametrize("function", [nm_mask, nm_prune, is_nm, count_violations])
def test_errors_name_the_way_out(function):
    with pytest.raises(ValueError, match=r"\(4, 6\).*2:4.*M=4.*6 of dim=-1.*exclude.*pad"):
        function(torch.zeros(4, 6), "2:4")
    with pytest.raises(ValueError, match=r"\(6, 4\).*dim=0"):
        function(torch.zeros(6, 4), "2:4", 0)
    with pytest.raises(IndexError, match="dim=2 is not an axis"):
        function(torch.zeros(4, 4), "2:4", 2)
    with pytest.raises(ValueError, match="without axes"):
        function(torch.tensor(1.0), "2:4")
    with pytest.raises(ValueError, match="cannot read"):
        function(torch.zeros(4), "2-4")


@pytest.mark.parametrize("shape", [(0,), (0, 8), (4, 0), (0, 0, 4)])
def test_empty(shape):
    x = torch.zeros(shape)
    assert nm_mask(x, "2:4").shape == shape
    assert nm_prune(x, "2:4").shape == shape
    assert is_nm(x, "2:4")


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("text", ["2:4", "1:16", "3:8", "5:70"])
def test_the_mask_of_magnitudes_is_the_mask_of_the_absolute_values(text, dtype, dim):
    m = NMPattern.parse(text).m
    weight = awkward((2 * m, 2 * m, 2 * m) if m < 16 else (2 * m, 2 * m), dtype)
    assert torch.equal(masks.magnitude_mask(weight, text, dim), nm_mask(weight.abs(), text, dim))
    before = weight.clone()
    masks.magnitude_mask(weight, text, dim)
    assert torch.equal(weight.nan_to_num(), before.nan_to_num())


def test_the_mask_of_magnitudes_compiles():
    torch._dynamo.reset()
    weight = torch.randn(8, 16)
    compiled = torch.compile(masks.magnitude_mask, fullgraph=True, backend="eager")
    assert torch.equal(compiled(weight, "2:4"), nm_mask(weight.abs(), "2:4"))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace.* is deprecated", "ignore::torch.jit.TracerWarning"
)
def test_tensors_without_memory_and_traces_are_masked_by_torch():
    zeros = torch._efficientzerotensor((8, 16))
    assert torch.equal(nm_mask(zeros, "2:4"), nm_mask(torch.zeros(8, 16), "2:4"))
    first, second = torch.randn(2, 8, 16)
    traced = torch.jit.trace(lambda x: nm_prune(x, "2:4"), (first,), check_trace=False)
    assert torch.equal(traced(second), nm_prune(second, "2:4"))
