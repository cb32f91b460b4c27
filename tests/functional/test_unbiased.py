"""Unbiased estimators against the closed form: probabilities, expectation and variance without Monte Carlo."""

import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_nm.functional import unbiased as module
from lightning_nm.functional.masks import is_nm
from lightning_nm.functional.unbiased import approx_mvue, mvue, mvue_probabilities
from lightning_nm.pattern import NMPattern

PATTERNS = ["1:2", "2:4", "1:4", "2:8", "4:8", "1:16", "3:4", "3:5", "7:9"]


def least_variance(x, n):
    """The probabilities of least variance, ``min(c |x|, 1)`` with the c at which they sum up to N, by bisection."""
    a = x.abs()
    low, high = torch.zeros(len(a), 1).double(), n / a.where(a > 0, torch.inf).amin(-1, True)
    for _ in range(200):
        middle = (low + high) / 2
        short = (middle * a).clamp(max=1).sum(-1, keepdim=True) < n
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    few = (a > 0).sum(-1, keepdim=True) <= n
    return torch.where(few, (a > 0).double(), (low * a).clamp(max=1))


def variance(x, p):
    return torch.where(p > 0, x**2 * (1 / p - 1), 0).sum(-1)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def spread(blocks, m, seed=0):
    """Blocks of float64 from nearly equal to very unequal entries, some with zeros, signs mixed."""
    generator = seeded(seed)
    x = torch.randn(blocks, m, generator=generator, dtype=torch.float64)
    power = torch.rand(blocks, 1, generator=generator, dtype=torch.float64) * 6
    x = x.sign() * x.abs() ** power
    return torch.where(torch.rand(blocks, m, generator=generator) < 0.1, 0, x)


def outcomes(x, p, pattern):
    """All samples of blocks [B, M] and their chances: a sample is constant between the breakpoints of its number."""
    ends = torch.zeros(len(x), 1).double()
    points = torch.where(p < 1, p, 0).cumsum(-1) % 1
    edges = torch.cat([ends, points, ends + 1], -1).sort(-1).values
    uniform = (edges[:, 1:] + edges[:, :-1]) / 2
    copies = x.unsqueeze(1).expand(-1, uniform.shape[1], -1)
    samples = mvue(copies, pattern, uniform=uniform[..., None])
    return samples, edges.diff(dim=-1).unsqueeze(-1)


def pair_outcomes(x):
    """All samples of approx_mvue of blocks [B, 4] and their chances, by enumerating both draws."""
    samples, chances = [], []
    for i in range(4):
        for j in set(range(4)) - {i}:
            others = x.abs()
            others[:, i] = 0
            uniforms, chance = [], 1.0
            for weights, pick in ((x.abs(), i), (others, j)):
                share = weights / weights.sum(-1, keepdim=True)
                uniforms.append(share.cumsum(-1)[:, pick] - share[:, pick] / 2)
                chance = chance * share[:, pick]
            samples.append(approx_mvue(x, uniform=torch.stack(uniforms).unsqueeze(-1)))
            chances.append(chance)
    return torch.stack(samples, 1), torch.stack(chances, 1).unsqueeze(-1)


def assert_unbiased(x, samples, chance):
    """The expectation of each block is the block; returns the variance, both over the block's sum squared."""
    scale = x.abs().sum(-1, keepdim=True).clamp(min=1e-100)
    torch.testing.assert_close((samples * chance).sum(1) / scale, x / scale, rtol=0, atol=1e-13)
    error = ((samples - x.unsqueeze(1)) ** 2 * chance).sum((1, 2))
    return error / scale[:, 0] ** 2, scale[:, 0] ** 2


@pytest.mark.parametrize("text", PATTERNS)
def test_unbiased_with_least_variance(text):
    pattern = NMPattern.parse(text)
    x = spread(200, pattern.m)
    p = least_variance(x, pattern.n)
    torch.testing.assert_close(mvue_probabilities(x, pattern), p, rtol=1e-9, atol=1e-12)
    samples, chance = outcomes(x, p, pattern)
    error, square = assert_unbiased(x, samples, chance)
    torch.testing.assert_close(error, variance(x, p) / square, rtol=1e-7, atol=1e-12)
    survivors = (x != 0).sum(-1, keepdim=True).clamp(max=pattern.n)
    assert ((samples != 0).sum(-1) == survivors).all()


def test_approx_is_unbiased_within_twice_the_least_variance():
    x = spread(400, 4, seed=7)
    ends = [[1.0, 1e-4, -1e-4, 1e-4], [1.0, 1.0, 1.0, 1.0]]
    x = torch.cat([x[(x != 0).all(-1)], torch.tensor(ends, dtype=torch.float64)])
    samples, chance = pair_outcomes(x)
    assert ((samples != 0).sum(-1) == 2).all()
    error, square = assert_unbiased(x, samples, chance)
    ratio = error * square / variance(x, mvue_probabilities(x, "2:4"))
    assert (ratio >= 1 - 1e-9).all()
    assert (ratio < 2).all()
    assert ratio[-2].item() == pytest.approx(1.9995, abs=1e-3)
    assert ratio[-1].item() == pytest.approx(1, abs=1e-12)


def test_approx_in_float32_where_one_entry_is_nearly_all():
    """p of the large entry is a sum without cancellation, and its value stays its own to rounding."""
    x = torch.tensor(
        [[1.0, 1e-6, 1e-6, 1e-6], [1e30, 1e-20, 3e-20, 2e-20], [1e4, 1e-40, 3e-40, 2e-40]]
    )
    y = approx_mvue(x, uniform=torch.full((2, 3, 1), 0.5))
    torch.testing.assert_close(y[:, 0], x[:, 0], rtol=1e-6, atol=0)
    # Each of the small ones survives in proportion to its size, as about the sum of the three.
    torch.testing.assert_close(y[:, 1:].sum(-1), x[:, 1:].sum(-1), rtol=1e-5, atol=0)


magnitudes = st.sampled_from(
    [0.0, 1.0, 1.0, 2.0, 3.0, 0.9999999, 1.0000001, 1e-7, 3e-8, 1e-45, 3e-45, 1e-40, 1e38, 3e38]
)
entries = st.tuples(
    magnitudes | st.floats(0, 2.0**127, width=32), st.sampled_from([-1.0, 1.0])
).map(math.prod)
draws = st.sampled_from([0.0, 2**-24, 0.5, 0.49999997, 1 - 2**-24]) | st.floats(
    0, 1 - 2**-24, width=32
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), m=st.integers(2, 9))
def test_any_block(data, m):
    """Exactly N survivors, few nonzeros untouched, and values that belong to the probabilities."""
    n = data.draw(st.integers(1, m - 1))
    x = torch.tensor(data.draw(st.lists(entries, min_size=m, max_size=m)))
    y = mvue(x, NMPattern(n, m), uniform=torch.tensor([data.draw(draws)]))
    p = mvue_probabilities(x, NMPattern(n, m))
    survivors = min(n, int((x != 0).sum()))
    assert int((y != 0).sum()) == survivors
    assert not y.isnan().any()
    assert not y[y == 0].signbit().any()
    if survivors < n or int((x != 0).sum()) == n:
        assert torch.equal(y, x)
    assert ((p >= 0) & (p <= 1)).all()
    assert float(p.double().sum()) == pytest.approx(survivors, abs=1e-5)
    kept = (y != 0) & (p > 1e-30)
    assert torch.equal(y.sign()[kept], x.sign()[kept])
    sizes = x.double().abs().sort(descending=True).values.tolist()
    for rank, size in enumerate(sizes[: n - 1]):
        if (n - 1 - rank) * size > (1 + 1e-5) * sum(
            sizes[rank + 1 :]
        ):  # p = 1 by more than rounding
            assert (y == x)[x.double().abs() == size].all()
    normal = kept & (x.abs() > 1e-35)
    expected = (x.double() / p.double())[normal].float()
    torch.testing.assert_close(y[normal], expected, rtol=2e-6, atol=0)


@settings(max_examples=150, deadline=None)
@given(block=st.lists(entries, min_size=4, max_size=4), u=st.tuples(draws, draws))
def test_any_block_approx(block, u):
    x = torch.tensor(block)
    y = approx_mvue(x, uniform=torch.tensor(u).unsqueeze(-1))
    nonzeros = int((x != 0).sum())
    assert not y.isnan().any()
    assert int((y != 0).sum()) <= min(2, nonzeros)
    if nonzeros <= 2:
        assert torch.equal(y, x)
    kept = y != 0
    assert torch.equal(y.sign()[kept], x.sign()[kept])


@pytest.mark.parametrize("text", PATTERNS)
def test_nearly_saturated_blocks_keep_n(text):
    """Entries within rounding of p = 1, between zeros and tiny ones, at random numbers near 0 and 1."""
    pattern = NMPattern.parse(text)
    generator = seeded()
    x = 1 + torch.randint(-2, 3, (4000, pattern.m), generator=generator) * 2**-23
    kind = torch.rand(x.shape, generator=generator)
    x = torch.where(kind < 0.3, 0, torch.where(kind < 0.5, 2**-23 * kind, x))
    u = 2 ** -(25 * torch.rand(4000, 1, generator=generator))
    u[::2] = (1 - u[::2]).clamp(max=1 - 2**-24)
    y = mvue(x, pattern, uniform=u.clamp(max=1 - 2**-24))
    assert ((y != 0).sum(-1) == (x != 0).sum(-1).clamp(max=pattern.n)).all()


@pytest.mark.parametrize("estimate", [mvue, approx_mvue])
def test_scaling_by_a_power_of_two_is_exact(estimate):
    generator = seeded()
    x = torch.randn(64, 8, generator=generator).clamp(-3.9, 3.9)
    u = torch.rand((64, 2) if estimate is mvue else (2, 64, 2), generator=generator)
    y = estimate(x, "2:4", uniform=u)
    for exponent in (-90, -10, 10, 100, 122, 123):
        assert torch.equal(estimate(x * 2.0**exponent, "2:4", uniform=u), y * 2.0**exponent)
    whole = (x * 2**10).round()  # in subnormals, only the level is rounded to their grid
    tiny = estimate(whole * 2.0**-149, "2:4", uniform=u)
    exact = estimate(whole, "2:4", uniform=u)
    assert ((tiny.double() * 2.0**149 - exact).abs() <= 0.5 + 1e-3).all()


def test_huge_blocks_overflow_openly():
    x = torch.full((1, 4), 3e38)
    assert mvue(x, "2:4", uniform=torch.full((1, 1), 0.5)).tolist() == [[0, math.inf, 0, math.inf]]
    spike = torch.tensor([[3e38, 1e38, -1e38, 1e-45]])
    y = mvue(spike, "2:4", uniform=torch.full((1, 1), 0.7))
    torch.testing.assert_close(y, torch.tensor([[3e38, 0, -2e38, 0]]))
    least = torch.tensor(1e-45)
    block = torch.tensor([3e38, least, least, least])
    y = mvue(block.expand(3, 4), "2:4", uniform=torch.tensor([[0.1], [0.5], [0.9]]))
    assert torch.equal(y[:, 0], block[:1].expand(3))
    assert torch.equal(y[:, 1:], torch.diag((3 * least).expand(3)))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("text", ["1:2", "2:4", "3:5"])
def test_what_is_not_finite_stays_visible(text, bad):
    pattern = NMPattern.parse(text)
    clean = torch.randn(6, 3 * pattern.m, generator=seeded())
    u = torch.rand(6, 3, generator=seeded(1))
    x = clean.clone()
    x[2, pattern.m] = bad
    x[5] = bad
    x[4, : pattern.m] = 0
    x[4, 1] = bad

    def blocks(y):
        return y.unflatten(1, (-1, pattern.m))

    broken = ~blocks(x).isfinite().all(-1)
    y = mvue(x, pattern, uniform=u)
    assert (blocks(y)[broken].isnan().sum(-1) == pattern.n).all()
    assert is_nm(y, pattern)
    assert torch.equal(blocks(y)[~broken], blocks(mvue(clean, pattern, uniform=u))[~broken])
    p = blocks(mvue_probabilities(x, pattern))
    assert p[broken].isnan().all()
    assert p[~broken].isfinite().all()
    if text == "2:4":
        z = blocks(approx_mvue(x, uniform=torch.stack([u, u])))
        assert (z[broken].isnan().sum(-1) == 2).all()
        assert z[~broken].isfinite().all()


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.itemsize])


def awkward_blocks(text):
    """Two blocks in each of 64 rows, and the numbers of :func:`mvue`, followed by those of another draw."""
    m = NMPattern.parse(text).m
    x = spread(64, 2 * m, seed=8).float()
    x[0, 1] = math.nan
    x[1, 0] = -math.inf
    x[2] = 3e38
    x[3] *= 1e-42
    x[4] = -0.0
    x[5, m:] = torch.tensor([3e38] + [1e-45] * (m - 1))
    x[6, :m] = torch.tensor([1.0, -1.0] + [0.0] * (m - 2))
    return x, torch.rand(2, 64, 2, generator=seeded())


inductor = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
        pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # raised inside torch
    ],
)


@pytest.mark.parametrize("backend", ["eager", inductor])
@pytest.mark.parametrize(
    ("estimate", "text"), [(mvue, "1:2"), (mvue, "2:4"), (mvue, "3:5"), (approx_mvue, "2:4")]
)
def test_every_path_gives_the_same_bits(estimate, text, backend, monkeypatch):
    """With products in finite chunks, with selects elsewhere, of any chunks and strides, and in a compiled graph."""
    torch._dynamo.reset()
    x, u = awkward_blocks(text)
    u = u[0] if estimate is mvue else u
    rows = [estimate(row, text, uniform=u[..., i, :]) for i, row in enumerate(x)]
    expected = bits(torch.stack(rows))
    across = x.t(), text, 0
    assert torch.equal(bits(estimate(x, text, uniform=u)), expected)
    assert torch.equal(bits(estimate(*across, uniform=u.mT)), expected.t())
    compiled = torch.compile(estimate, fullgraph=True, backend=backend)
    assert torch.equal(bits(compiled(*across, uniform=u.mT)), expected.t())
    for chunk in (1, 7 * 8, 1000):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        assert torch.equal(bits(estimate(x, text, uniform=u)), expected)
        assert torch.equal(bits(estimate(*across, uniform=u.mT)), expected.t())


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    case=st.sampled_from([(mvue, "1:2"), (mvue, "3:5"), (approx_mvue, "2:4")]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.half]),
)
def test_any_axis_strides_and_dtype(data, case, dtype):
    """Half precision is computed in float32."""
    estimate, text = case
    m = NMPattern.parse(text).m
    shape = data.draw(st.lists(st.integers(0, 3), max_size=2))
    axis = data.draw(st.integers(0, len(shape)))
    blocks = data.draw(st.integers(0, 3))
    shape.insert(axis, m * blocks)
    dim = axis - data.draw(st.sampled_from([0, len(shape)]))
    memory = data.draw(st.permutations(range(len(shape))))
    generator = seeded(data.draw(st.integers(0, 99)))
    x = torch.randn([shape[i] for i in memory], generator=generator).to(dtype)
    x = x.permute([memory.index(i) for i in range(len(shape))])
    if data.draw(st.booleans()):
        x = torch.stack([x, x], -1)[..., 0]
    u = torch.rand(2, *shape[:axis], blocks, *shape[axis + 1 :], generator=generator)
    u = u[0] if estimate is mvue else u
    plain, numbers = x.float().movedim(dim, -1), u.movedim(axis - len(shape), -1)
    expected = estimate(plain.contiguous(), text, uniform=numbers.contiguous())
    assert torch.equal(estimate(x, text, dim, uniform=u), expected.movedim(-1, dim).to(dtype))
    p = mvue_probabilities(x, text, dim)
    assert p.dtype == torch.float32
    assert torch.equal(p, mvue_probabilities(plain.contiguous(), text).movedim(-1, dim))


def test_without_values():
    def shapes(x):
        return {mvue(x, "2:4").shape, approx_mvue(x).shape, mvue_probabilities(x, "2:4").shape}

    assert shapes(torch.empty(4, 8, device="meta")) == {(4, 8)}
    with FakeTensorMode():
        assert shapes(torch.randn(4, 8)) == {(4, 8)}


def test_a_generator_gives_the_numbers_and_x_stays():
    x = torch.nn.Parameter(torch.randn(8, 8, generator=seeded()))
    before = x.detach().clone()
    u, v = torch.rand(2, 8, generator=seeded(1)), torch.rand(2, 8, 2, generator=seeded(1))
    expected = mvue(x, "2:4", 0, uniform=u)
    assert torch.equal(mvue(x, "2:4", 0, generator=seeded(1)), expected)
    assert torch.equal(approx_mvue(x, generator=seeded(1)), approx_mvue(x, uniform=v))
    torch.manual_seed(1)
    assert torch.equal(mvue(x, "2:4", 0), expected)
    assert torch.equal(x, before)
    for y in (expected, approx_mvue(x), mvue_probabilities(x, "2:4")):
        assert not y.requires_grad


@pytest.mark.parametrize("function", [mvue, approx_mvue, mvue_probabilities])
@pytest.mark.parametrize(
    ("x", "dim", "error", "message"),
    [
        (torch.zeros(4, 6), -1, ValueError, r"\(4, 6\).*M=4"),
        (torch.zeros(4, 4), 2, IndexError, "dim=2"),
        (torch.tensor(1.0), -1, ValueError, "without axes"),
        (torch.zeros(4, dtype=torch.int64), -1, TypeError, "int64"),
    ],
)
def test_tensors_that_are_refused(function, x, dim, error, message):
    with pytest.raises(error, match=message):
        function(x, "2:4", dim)


@pytest.mark.parametrize(
    ("function", "pattern", "options", "message"),
    [
        (mvue, "2:4", {"uniform": torch.zeros(4, 2)}, r"\(4, 2\).*dim=1 need \(4, 1\)"),
        (approx_mvue, "2:4", {"uniform": torch.zeros(4, 1)}, r"\(4, 1\).*need \(2, 4, 1\)"),
        (mvue, "2:4", {"uniform": torch.zeros(4, 1), "generator": seeded()}, "pass one"),
        (approx_mvue, "1:2", {}, "defined for 2:4, not for 1:2"),
    ],
)
def test_options_that_are_refused(function, pattern, options, message):
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(4, 4), pattern, **options)
