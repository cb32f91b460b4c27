"""Triton kernels against the torch operations: in Triton's interpreter, compiled without a GPU, and on one.

`make interpreter` runs all but the last. Whether kernels are interpreted is settled when Triton is imported, so the
environment decides which of these tests run.
"""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import fold_seed, mvue, random
from lightning_nm.kernels.operands import (
    masked_operand,
    masked_reference,
    mvue_transposed,
    mvue_transposed_reference,
    permuted_columns,
    triton_kernels,
)
from lightning_nm.pattern import NMPattern
from tests.support.triton_kernels import (
    assembly,
    interpreted,
    masked_backward,
    needs_compiler,
    needs_interpreter,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PATTERNS = ["2:4", "1:2", "1:4", "3:4", "2:8", "2:16"]
SIZES = st.integers(1, 140)

kernels = triton_kernels()
if kernels is not None:
    import triton
    import triton.language as tl

    philox, sample = kernels._philox, kernels._sample

    @triton.jit
    def words(seed, index, result):
        lane = tl.arange(0, 8)
        found = philox(seed, tl.load(index + lane))
        for i in tl.static_range(4):
            tl.store(result + 8 * i + lane, found[i].to(tl.int64))

    @triton.jit
    def draw(x, uniform, result, BLOCKS: tl.constexpr):
        lane = tl.arange(0, BLOCKS)
        at = x + 4 * lane
        found = sample(
            (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)),
            tl.load(uniform + lane),
            2,
            4,
        )
        for i in tl.static_range(4):
            tl.store(result + 4 * lane + i, found[i])


pytestmark = [
    # The interpreter's numpy: 0 / 0 in blocks of zeros, and results beyond float16.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def bits(x):
    """The bits of numbers, with one pattern for all NaNs."""
    return raw(torch.where(x.isnan(), torch.nan, x))


def raw(x):
    """The bits of numbers, NaNs as they are."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def values(generator, dtype, *shape):
    """Gaussian numbers over all magnitudes, with zeros, equal ones, and a few that are not finite."""
    x = torch.randn(shape, generator=generator) * 10 ** (
        4 * torch.randn(shape, generator=generator)
    )
    kind = torch.randint(12, shape, generator=generator)
    x = torch.where(kind < 3, torch.tensor(0.0), x)
    x = torch.where(kind == 3, torch.tensor(-0.0), x)
    x = torch.where(kind == 4, torch.tensor(2.0), x)
    x = torch.where(kind == 5, torch.tensor(3e38), x)
    rare = torch.randint(40, shape, generator=generator)
    x = torch.where(rare == 0, torch.tensor(torch.inf), x)
    return torch.where(rare == 1, torch.tensor(torch.nan), x).to(dtype)


def order(generator, size, permuted, device="cpu"):
    return torch.randperm(size, generator=generator).to(device) if permuted else None


def pair_reference(weight, marks, dtype, bit, permutation):
    return (
        masked_reference(weight, marks, dtype, 1, None, transposed=False),
        masked_reference(weight, marks, dtype, bit, permutation, transposed=True),
    )


@needs_interpreter
@settings(max_examples=30, deadline=None)
@given(
    out=SIZES,
    columns=SIZES,
    source=st.sampled_from(DTYPES),
    target=st.sampled_from(DTYPES),
    own_backward=st.booleans(),
    permuted=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_interpreted_pair(out, columns, source, target, own_backward, permuted, transposed, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = values(generator, torch.float32, out, columns).nan_to_num(1.0).to(source)
    marks = torch.randint(4, (out, columns), generator=generator, dtype=torch.uint8)
    permutation = order(generator, out, permuted)
    if transposed:
        weight, marks = weight.t().contiguous().t(), marks.t().contiguous().t()
    forward = masked_operand(weight, marks, target)
    backward = masked_backward(weight, marks, target, permutation, own_backward=own_backward)
    exact = pair_reference(weight.float(), marks, torch.float32, 1 + own_backward, permutation)
    for found, expected in zip((forward, backward), exact, strict=True):
        assert found.is_contiguous()
        assert torch.equal(
            bits(found),
            bits(expected.to(target) if source == target else interpreted(expected, target)),
        )


@needs_interpreter
@settings(max_examples=80, deadline=None)
@given(
    tokens=SIZES,
    out=SIZES,
    dtype=st.sampled_from(DTYPES),
    pattern=st.sampled_from(PATTERNS),
    gathered=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_interpreted_estimate(tokens, out, dtype, pattern, gathered, seed):
    generator = torch.Generator().manual_seed(seed)
    grad = values(generator, dtype, tokens, out)
    gather = order(generator, out, gathered)
    result, columns = mvue_transposed(grad, fold_seed(seed), pattern, gather=gather)
    if gather is not None:
        assert columns.is_contiguous()
        assert torch.equal(raw(columns), raw(grad[:, gather]))
    exact, _ = mvue_transposed_reference(grad.float(), fold_seed(seed), NMPattern.parse(pattern))
    assert result.is_contiguous()
    assert result.dtype == dtype
    assert torch.equal(bits(result), bits(interpreted(exact, dtype)))


@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(tokens=SIZES, out=SIZES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**20))
def test_interpreted_columns(tokens, out, dtype, seed):
    """All bits are copied: those of a number's sign, and those that tell NaNs apart."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    integer = {2: torch.int16, 4: torch.int32}[size]
    grad = torch.randint(
        -(1 << 8 * size - 1), 1 << 8 * size - 1, (tokens, out), generator=generator
    ).to(integer)
    permutation = order(generator, out, True)
    result = permuted_columns(grad.view(dtype), permutation)
    assert result.is_contiguous()
    assert torch.equal(raw(result), grad[:, permutation])


@needs_interpreter
@pytest.mark.parametrize(("columns", "fits"), [(64, True), (65, False)])
def test_rows_too_long_to_gather(columns, fits, monkeypatch):
    monkeypatch.setattr(kernels, "ROW_BYTES", 256)
    grad, seed = torch.randn(20, columns, generator=torch.Generator().manual_seed(0)), fold_seed(0)
    assert kernels._gatherable(grad) == fits
    gather = torch.arange(columns - 1, -1, -1)
    estimate, permuted = mvue_transposed(grad, seed, gather=gather)
    assert torch.equal(estimate, mvue_transposed(grad, seed)[0])
    for found in (permuted, permuted_columns(grad, gather)):
        assert torch.equal(found, grad.flip(1))


@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_estimate_of_gaussians(dtype):
    """The random numbers decide in every block; the seed is neither reduced nor contiguous."""
    grad = torch.randn(512, 132, generator=torch.Generator().manual_seed(0)).to(dtype)
    seed = (fold_seed(3) + 5 * 0x9E3779B1).repeat_interleave(2)[::2]
    exact, _ = mvue_transposed_reference(grad.float(), seed, NMPattern(2, 4))
    assert torch.equal(bits(mvue_transposed(grad, seed)[0]), bits(interpreted(exact, dtype)))


@needs_interpreter
def test_interpreted_random_words():
    """Counters of more than 32 bits, which only tensors too large for a test have."""
    index = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 5 * 2**32 + 7, 2**61])
    seed, result = fold_seed(1), torch.empty(4, 8, dtype=torch.int64)
    words[(1,)](seed, index, result)
    expected = random._philox(
        (index & 2**32 - 1, index >> 32, seed[2], seed[3]), (seed[0], seed[1])
    )
    assert torch.equal(result, torch.stack(expected))


@needs_interpreter
def test_interpreted_draws_at_the_edges():
    """Random numbers within a rounding of where the choice changes, in blocks close to saturation."""
    generator = torch.Generator().manual_seed(0)
    step = 2.0**-24
    sizes = torch.tensor(
        [1, 1 - step, 1 - 2 * step, 1 + 2 * step, 0.5, step, step / 2, 3 * step, 0, 1 / 3]
    )
    x = sizes[torch.randint(len(sizes), (2**16, 4), generator=generator)]
    edges = torch.tensor([0, step, 2 * step, 0.5, 1 - 2 * step, 1 - step])
    uniform = edges[torch.randint(len(edges), (2**16,), generator=generator)]
    result = torch.empty_like(x)
    draw[(1,)](x, uniform, result, BLOCKS=2**16)
    assert torch.equal(result, mvue(x, "2:4", uniform=uniform.unsqueeze(-1)))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("backward", "permuted"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("source", "target"), [("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "fp16"), ("fp16", "bf16")]
)
def test_masks_compile(source, target, backward, permuted, transposed):
    types = {
        "weight": f"*{source}",
        "marks": "*u8",
        "result": f"*{target}",
        "out": "i32",
        "columns": "i32",
    }
    constants = {"BIT": 2, "TRANSPOSED": backward, "TILE": kernels.TILE}
    if permuted:
        types["permutation"] = "*i64"
    else:
        constants["permutation"] = None
    across, along = (
        ("column_stride", "row_stride") if transposed else ("row_stride", "column_stride")
    )
    types[across], constants[along] = "i32", 1  # as Triton takes an argument that is 1
    ptx = assembly(kernels._masked, types, constants)
    assert source == target or "cvt.rn." in ptx  # to nearest, ties to even


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("width", [1, 16, 4096, 2**15])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_gather_compiles(width, dtype):
    """Rows are read and written through wide instructions; only shared memory is accessed entry by entry."""
    size = 4 if dtype == "fp32" else 2
    width = min(width, kernels.ROW_BYTES // size)
    types = {
        "grad": f"*{dtype}",
        "order": "*i64",
        "result": f"*{dtype}",
        "tokens": "i32",
        "out": "i32",
    }
    constants = {"ROWS": kernels.ROWS, "WIDTH": width}
    ptx = assembly(
        kernels._permuted_columns,
        types,
        constants,
        aligned=True,
        num_warps=kernels._warps(width, 4),
    )
    if width >= 4096:  # a few entries are exchanged within a warp
        assert "ld.shared" in ptx
        assert set(re.findall(r"st\.global[.\w]*", ptx)) == {"st.global.v4.b32"}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("shared", "gathered"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [*((pattern, "bf16") for pattern in PATTERNS), ("2:4", "fp32"), ("2:4", "fp16")],
)
def test_the_estimate_compiles(pattern, dtype, shared, gathered):
    """Divisions are rounded to nearest, and nothing is fused, approximated or flushed: what torch's operations do."""
    parsed, width = NMPattern.parse(pattern), 2**14
    types = {
        "grad": f"*{dtype}",
        "seed": "*i64",
        "result": f"*{dtype}",
        "tokens": "i32",
        "out": "i32",
        "padded": "i32",
    }
    constants = {
        "N": parsed.n,
        "M": parsed.m,
        "TILE": kernels.TILE,
        "SHARED": shared,
        "ROWS": kernels.ROWS,
    }
    options = dict(kernels.SAMPLING)
    if gathered:
        types |= {"gather": "*i64", "gathered": f"*{dtype}"}
        constants["WIDTH"] = width
        options["num_warps"] = kernels._warps(width, options["num_warps"])
    else:
        constants |= {"gather": None, "gathered": None, "WIDTH": None}
    ptx = assembly(kernels._mvue_transposed, types, constants, **options)
    assert "div.rn.f32" in ptx
    assert "max.NaN.f32" in ptx  # the interpreter's maximum always keeps NaNs
    # A floor may flush: the floor of the numbers that it would lose is zero anyway.
    assert not re.findall(
        r"\b(?:fma|div\.full|div\.approx|rcp|(?:add|sub|mul|div|max|setp)[\w.]*\.ftz)[\w.]*", ptx
    )


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(512, 256), (131, 75), (1, 1)])
@pytest.mark.parametrize("permuted", [False, True])
def test_on_a_gpu(rows, columns, dtype, permuted):
    """Bit for bit what the torch operations give, on the GPU and on the CPU."""
    generator = torch.Generator().manual_seed(0)
    for pattern in PATTERNS:
        grad = values(generator, dtype, rows, columns)
        gather = torch.randperm(columns, generator=generator).cuda()
        result, _ = mvue_transposed(grad.cuda(), fold_seed(1).cuda(), pattern)
        both = mvue_transposed(grad.cuda(), fold_seed(1).cuda(), pattern, gather=gather)
        assert torch.equal(raw(both[0]), raw(result))
        for found in (both[1], permuted_columns(grad.cuda(), gather)):
            assert torch.equal(raw(found.cpu()), raw(grad[:, gather.cpu()]))
        for device in ("cuda", "cpu"):
            expected, _ = mvue_transposed_reference(
                grad.to(device), fold_seed(1), NMPattern.parse(pattern)
            )
            assert torch.equal(bits(result.cpu()), bits(expected.cpu()))
    weight, permutation = (
        values(generator, dtype, rows, columns),
        order(generator, rows, permuted, "cuda"),
    )
    marks = torch.randint(4, (rows, columns), generator=generator, dtype=torch.uint8)
    moved = None if permutation is None else permutation.cpu()
    for target in DTYPES:
        expected = pair_reference(weight, marks, target, 2, moved)
        for lie in (lambda x: x.cuda(), lambda x: x.cuda().t().contiguous().t()):
            forward = masked_operand(lie(weight), lie(marks), target)
            backward = masked_backward(
                lie(weight), lie(marks), target, permutation, own_backward=True
            )
            for found, wanted in zip((forward, backward), expected, strict=True):
                assert torch.equal(bits(found.cpu()), bits(wanted))


@pytest.mark.gpu
@needs_compiler
def test_more_than_2_31_entries_on_a_gpu():
    rows, columns = 2**16 + 16, 2**15
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-2:] = torch.arange(columns, device="cuda") % 256 + 1
    estimate, _ = mvue_transposed(x, fold_seed(0))  # blocks of two nonzeros come back as they are
    assert torch.equal(estimate[:, -2:], x[-2:].t())
    assert int(estimate.count_nonzero()) == 2 * columns
    del estimate
    gathered = mvue_transposed(
        x, fold_seed(0), gather=torch.arange(columns - 1, -1, -1, device="cuda")
    )[1]
    assert torch.equal(gathered[-2:], x[-2:].flip(1))
    assert int(gathered.count_nonzero()) == 2 * columns
    del gathered
    marks = torch.full(x.shape, 3, dtype=torch.uint8, device="cuda")
    forward = masked_operand(x, marks, torch.bfloat16)
    backward = masked_backward(x, marks, torch.bfloat16, own_backward=True)
    assert torch.equal(forward[-2:], x[-2:])
    assert torch.equal(backward[:, -2:], x[-2:].t())
    assert int(backward.count_nonzero()) == 2 * columns
