import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional.unbiased import approx_mvue, mvue, mvue_probabilities
from lightning_nm.pattern import NMPattern

PATTERNS = ["1:2", "2:4", "1:4", "2:8", "4:8", "1:16", "3:4", "3:5", "7:9"]


def reference(block, n):
    """The probabilities by the closed form, after a sort: floats of Python, one block."""
    order = sorted(range(len(block)), key=lambda i: -abs(block[i]))
    a = [abs(block[i]) for i in order]
    if sum(value > 0 for value in a) <= n:
        return [float(value != 0) for value in block]
    k = next(k for k in range(n) if (n - k) * a[k] <= math.fsum(a[k:]))
    p = [0.0] * len(block)
    for rank, i in enumerate(order):
        p[i] = 1.0 if rank < k else (n - k) * a[rank] / math.fsum(a[k:])
    return p


def reference_sample(block, n, u):
    """Entries with p = 1, and those whose part of the line the numbers u + j hit."""
    p = reference(block, n)
    sample, line = [], 0.0
    for value, chance in zip(block, p, strict=True):
        end = line + (chance if chance < 1 else 0)
        hit = chance == 1 or any(line <= u + j < end for j in range(n))
        sample.append(value / chance if hit else 0.0)
        line = end
    return sample


def water_filling(a, n):
    """The probabilities by bisection on c, without a sort or a closed form: a [blocks, M], all nonzero."""
    low, high = torch.zeros(len(a), 1, dtype=a.dtype), n / a.amin(-1, keepdim=True)
    for _ in range(200):
        middle = (low + high) / 2
        short = (middle * a).clamp(max=1).sum(-1, keepdim=True) < n
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return (low * a).clamp(max=1)


def variance(x, p):
    return torch.where(p > 0, x**2 * (1 / p - 1), 0).sum(-1)


def spread(blocks, m, seed=0):
    """Blocks of float64 from nearly equal to very unequal entries, some with zeros, signs mixed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, m, generator=generator, dtype=torch.float64)
    power = torch.rand(blocks, 1, generator=generator, dtype=torch.float64) * 6
    x = x.sign() * x.abs() ** power
    return torch.where(torch.rand(blocks, m, generator=generator) < 0.1, 0, x)


def outcomes(x, n):
    """All samples of blocks [B, M] and their chances: a sample is constant between the breakpoints of its number."""
    p = torch.tensor([reference(block, n) for block in x.tolist()], dtype=torch.float64)
    points = torch.where(p < 1, p, 0).cumsum(-1) % 1
    edges = (
        torch.cat([torch.zeros(len(x), 1), points, torch.ones(len(x), 1)], -1)
        .double()
        .sort(-1)
        .values
    )
    chance = edges.diff(dim=-1)
    uniform = (edges[:, 1:] + edges[:, :-1]) / 2
    samples = mvue(
        x.unsqueeze(1).expand(-1, uniform.shape[1], -1),
        NMPattern(n, x.shape[1]),
        uniform=uniform[..., None],
    )
    return samples, chance.unsqueeze(-1)


def pair_outcomes(x):
    """All samples of approx_mvue of blocks [B, 4], their chances, by enumerating both draws."""
    a = x.abs()
    samples, chances = [], []
    for i in range(4):
        for j in range(4):
            if i != j:
                others = a.clone()
                others[:, i] = 0
                uniforms, chance = [], 1.0
                for weights, pick in ((a, i), (others, j)):
                    share = weights / weights.sum(-1, keepdim=True)
                    end = share.cumsum(-1)[:, pick]
                    uniforms.append(end - share[:, pick] / 2)
                    chance = chance * share[:, pick]
                samples.append(approx_mvue(x, uniform=torch.stack(uniforms).unsqueeze(-1)))
                chances.append(chance)
    return torch.stack(samples, 1), torch.stack(chances, 1).unsqueeze(-1)


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


@pytest.mark.parametrize("text", PATTERNS)
def test_probabilities_are_the_closed_form_and_the_optimum(text):
    pattern = NMPattern.parse(text)
    x = spread(200, pattern.m)
    p = mvue_probabilities(x, pattern)
    assert p.dtype == torch.float64
    torch.testing.assert_close(
        p, torch.tensor([reference(b, pattern.n) for b in x.tolist()], dtype=x.dtype)
    )
    torch.testing.assert_close(p.sum(-1), (x != 0).sum(-1).clamp(max=pattern.n).double())
    full = x[(x != 0).all(-1)]
    best = water_filling(full.abs(), pattern.n)
    torch.testing.assert_close(mvue_probabilities(full, pattern), best, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        variance(full, mvue_probabilities(full, pattern)), variance(full, best)
    )


@pytest.mark.parametrize("text", ["1:2", "2:4", "3:5"])
def test_no_other_probabilities_have_less_variance(text):
    """Against moves of probability between any two entries that keep 0 < p <= 1 and the sum."""
    pattern = NMPattern.parse(text)
    x = spread(300, pattern.m, seed=1)
    x = x[(x != 0).all(-1)]
    p = mvue_probabilities(x, pattern)
    least = variance(x, p)
    for i in range(pattern.m):
        for j in range(pattern.m):
            if i != j:
                step = torch.minimum(p[:, i], 1 - p[:, j]).clamp(min=0) * 0.1
                moved = p.clone()
                moved[:, i] -= step
                moved[:, j] += step
                assert (variance(x, moved) >= least - 1e-13 * x.abs().sum(-1) ** 2).all()


@pytest.mark.parametrize("text", PATTERNS)
def test_unbiased_with_least_variance(text):
    """The expectation and the variance over the random number, exactly: no Monte Carlo."""
    pattern = NMPattern.parse(text)
    x = spread(200, pattern.m, seed=2)
    samples, chance = outcomes(x, pattern.n)
    scale = x.abs().sum(-1, keepdim=True).clamp(min=1e-100)
    torch.testing.assert_close((samples * chance).sum(1) / scale, x / scale, rtol=0, atol=1e-13)
    error = ((samples - x.unsqueeze(1)) ** 2 * chance).sum((1, 2))
    least = variance(x, mvue_probabilities(x, pattern))
    torch.testing.assert_close(
        error / scale[:, 0] ** 2, least / scale[:, 0] ** 2, rtol=1e-9, atol=1e-13
    )
    assert ((samples != 0).sum(-1) == (x != 0).sum(-1, keepdim=True).clamp(max=pattern.n)).all()


@pytest.mark.parametrize("text", PATTERNS)
def test_samples_are_the_reference(text):
    pattern = NMPattern.parse(text)
    x = spread(300, pattern.m, seed=3)
    u = torch.rand(300, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [
        reference_sample(b, pattern.n, v)
        for b, v in zip(x.tolist(), u.flatten().tolist(), strict=True)
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(mvue(x, pattern, uniform=u), expected, rtol=1e-12, atol=0)
    # In float32 a number close to a breakpoint may fall on its other side.
    single = mvue(x.float(), pattern, uniform=u.float()).double()
    same = ((single != 0) == (expected != 0)).all(-1)
    assert same.double().mean() > 0.99
    torch.testing.assert_close(single[same], expected[same], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("text", ["1:2", "2:4", "4:8", "3:5"])
def test_float32_is_unbiased_to_its_resolution(text):
    pattern = NMPattern.parse(text)
    x = spread(50, pattern.m, seed=4).float()
    grid = 4096
    u = ((torch.arange(grid) + 0.5) / grid).expand(50, -1).unsqueeze(-1)
    mean = mvue(x.unsqueeze(1).expand(-1, grid, -1), pattern, uniform=u).double().mean(1)
    # The share of grid points in a part of the line is off by less than 1 / grid for each number u + j.
    level = x.abs().sum(-1, keepdim=True).double()
    assert ((mean - x).abs() <= 1.01 * pattern.n * level / grid).all()


def test_closed_form_variances():
    a = spread(500, 2, seed=5).abs()
    torch.testing.assert_close(variance(a, mvue_probabilities(a, "1:2")), 2 * a[:, 0] * a[:, 1])
    a = spread(500, 4, seed=6).abs().sort(-1).values
    a1, a2, a3, a4 = a.unbind(-1)
    spiked = a4 > a1 + a2 + a3
    assert spiked.any()
    assert not spiked.all()
    expected = torch.where(
        spiked, 2 * (a1 * a2 + a1 * a3 + a2 * a3), a.sum(-1) ** 2 / 2 - (a**2).sum(-1)
    )
    torch.testing.assert_close(
        variance(a, mvue_probabilities(a, "2:4")), expected, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(("text", "expected"), [("1:2", 0.637), ("2:4", 0.474), ("4:8", 0.394)])
def test_gaussian_variance(text, expected):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**18, generator=generator)
    y = mvue(x, text, generator=generator)
    assert abs(float((y - x).square().sum() / x.square().sum()) - expected) < 0.01
    assert abs(float((y - x).mean())) < 5 * (expected / 2**18) ** 0.5


def test_approx_is_unbiased_within_twice_the_least_variance():
    x = spread(400, 4, seed=7)
    x = torch.cat(
        [
            x[(x != 0).all(-1)],
            torch.tensor([[1.0, 1e-4, -1e-4, 1e-4], [1, 1, 1, 1]], dtype=torch.float64),
        ]
    )
    samples, chance = pair_outcomes(x)
    torch.testing.assert_close(chance.sum((1, 2)), torch.ones(len(x), dtype=torch.float64))
    assert ((samples != 0).sum(-1) == 2).all()
    scale = x.abs().sum(-1, keepdim=True)
    torch.testing.assert_close((samples * chance).sum(1) / scale, x / scale, rtol=0, atol=1e-13)
    error = ((samples - x.unsqueeze(1)) ** 2 * chance).sum((1, 2))
    ratio = error / variance(x, mvue_probabilities(x, "2:4"))
    assert (ratio >= 1 - 1e-9).all()
    assert (ratio < 2).all()
    assert abs(float(ratio[-2]) - 1.9995) < 1e-3
    assert abs(float(ratio[-1]) - 1) < 1e-12


def test_approx_in_float32_where_one_entry_is_nearly_all():
    """p of the large entry is a sum without cancellation, and its value stays its own to rounding."""
    x = torch.tensor(
        [[1.0, 1e-6, 1e-6, 1e-6], [1e30, 1e-20, 3e-20, 2e-20], [1e4, 1e-40, 3e-40, 2e-40]]
    )
    samples, chance = pair_outcomes(x.double())
    exact = (samples * chance).sum(1)
    y = approx_mvue(x, uniform=torch.full((2, 3, 1), 0.5))
    torch.testing.assert_close(y[:, 0], x[:, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(exact.float(), x, rtol=1e-6, atol=1e-45)
    survivor = y[:, 1:].sum(
        -1
    )  # about the sum of the three small ones: each survives in proportion to its size
    torch.testing.assert_close(survivor, x[:, 1:].sum(-1), rtol=1e-5, atol=0)


def test_approx_gaussian_variance():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**18, generator=generator)
    y = approx_mvue(x, generator=generator)
    assert abs(float((y - x).square().sum() / x.square().sum()) - 0.5026) < 0.005


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
    u = torch.tensor([data.draw(draws)])
    y = mvue(x, NMPattern(n, m), uniform=u)
    p = mvue_probabilities(x, NMPattern(n, m))
    nonzeros = int((x != 0).sum())
    assert int((y != 0).sum()) == min(n, nonzeros)
    assert not y.isnan().any()
    assert not (y[y == 0]).signbit().any()
    if nonzeros <= n:
        assert torch.equal(y, x)
    assert ((p >= 0) & (p <= 1)).all()
    assert abs(float(p.double().sum()) - min(n, nonzeros)) < 1e-5
    kept = (y != 0) & (p > 1e-30)
    assert torch.equal(y.sign()[kept], x.sign()[kept])
    order = sorted(range(m), key=lambda i: -abs(float(x[i])))
    for rank, i in enumerate(order[: n - 1]):
        if (n - 1 - rank) * abs(float(x[i])) > (1 + 1e-5) * float(
            x[order[rank + 1 :]].double().abs().sum()
        ):
            assert y[i] == x[i]  # p = 1 by more than rounding
    normal = kept & (x.abs() > 1e-35)
    torch.testing.assert_close(
        y[normal].double(),
        (x.double() / p.double())[normal].float().double(),
        rtol=2e-6,
        atol=1e-44,
    )


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
    """Entries within rounding of p = 1, between zeros and tiny ones, at many random numbers."""
    pattern = NMPattern.parse(text)
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(4000, pattern.m)
    x += torch.randint(-2, 3, x.shape, generator=generator) * 2**-23
    kind = torch.rand(x.shape, generator=generator)
    x = torch.where(kind < 0.3, 0, torch.where(kind < 0.5, 2**-23 * kind, x))
    u = (
        torch.rand(4000, 1, generator=generator)
        * 2 ** -torch.randint(0, 25, (4000, 1), generator=generator).float()
    )
    u = torch.where(torch.rand(4000, 1, generator=generator) < 0.5, u, 1 - u).clamp(max=1 - 2**-24)
    y = mvue(x, pattern, uniform=u)
    assert ((y != 0).sum(-1) == (x != 0).sum(-1).clamp(max=pattern.n)).all()


@pytest.mark.parametrize("estimate", [mvue, approx_mvue])
def test_scaling_by_a_power_of_two_is_exact(estimate):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator).clamp(-3.9, 3.9)
    rows = (64, 2) if estimate is mvue else (2, 64, 2)
    u = torch.rand(rows, generator=generator)
    y = estimate(x, "2:4", uniform=u)
    for exponent in (-90, -10, 10, 100, 122, 123):
        assert torch.equal(estimate(x * 2.0**exponent, "2:4", uniform=u), y * 2.0**exponent)
    whole = (x * 2**10).round()  # in subnormals, only the level is rounded to their grid
    tiny = estimate(whole * 2.0**-149, "2:4", uniform=u)
    exact = estimate(whole, "2:4", uniform=u)
    assert ((tiny.double() * 2.0**149 - exact).abs() <= 0.5 + 1e-3).all()


def awkward_blocks(text):
    m = NMPattern.parse(text).m
    x = spread(64, 2 * m, seed=8).float()
    x[0, 1] = math.nan
    x[1, 0] = -math.inf
    x[2] = 3e38
    x[3] *= 1e-42
    x[4] = -0.0
    x[5, m:] = torch.tensor([3e38] + [1e-45] * (m - 1))
    x[6, :m] = torch.tensor([1.0, -1.0] + [0.0] * (m - 2))
    return x


@pytest.mark.parametrize(
    ("text", "backend"), [("1:2", "eager"), ("2:4", "aot_eager"), ("3:5", "eager")]
)
def test_every_path_gives_the_same_bits(text, backend):
    """With products in finite chunks, with selects elsewhere, and in a compiled graph."""
    torch._dynamo.reset()
    x = awkward_blocks(text)
    u = torch.rand(64, 2, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([mvue(row, text, uniform=v) for row, v in zip(x, u, strict=True)])
    assert torch.equal(bits(mvue(x, text, uniform=u)), bits(expected))
    assert torch.equal(bits(mvue(x.t(), text, 0, uniform=u.t())), bits(expected.t()))
    compiled = torch.compile(mvue, fullgraph=True, backend=backend)
    assert torch.equal(bits(compiled(x.t(), text, 0, uniform=u.t())), bits(expected.t()))


def test_approx_gives_the_same_bits_on_every_path():
    torch._dynamo.reset()
    x, u = awkward_blocks("2:4"), torch.rand(2, 64, 2, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([approx_mvue(row, uniform=u[:, i]) for i, row in enumerate(x)])
    assert torch.equal(bits(approx_mvue(x, uniform=u)), bits(expected))
    compiled = torch.compile(approx_mvue, fullgraph=True, backend="aot_eager")
    assert torch.equal(bits(compiled(x, uniform=u)), bits(expected))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised inside torch
@pytest.mark.parametrize(("text", "dim"), [("1:2", 1), ("2:4", 0), ("3:5", 1)])
def test_inductor_gives_the_same_bits(text, dim):
    torch._dynamo.reset()
    x, u = awkward_blocks(text), torch.rand(64, 2, generator=torch.Generator().manual_seed(0))
    x, u = (x, u) if dim == 1 else (x.t(), u.t())
    compiled = torch.compile(mvue, fullgraph=True)
    assert torch.equal(bits(compiled(x, text, dim, uniform=u)), bits(mvue(x, text, dim, uniform=u)))
