"""What operands are brought to: by torch operations, by Triton in its interpreter, compiled without a GPU, and on one.

`make interpreter` runs all but the last. Whether kernels are interpreted is settled when Triton is imported, so the
environment decides which of these tests run.
"""

import os
import random
import re
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_nm import MVUE
from lightning_nm.functional import fold_seed, is_nm, mvue
from lightning_nm.functional import random as philox_random
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.kernels.operands import (
    masked_operand,
    mvue_transposed,
    permuted_columns,
    triton_kernels,
)
from lightning_nm.pattern import NMPattern
from tests.support.triton_kernels import assembly, interpreted, needs_compiler, needs_interpreter

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PATTERNS = ["2:4", "1:2", "1:4", "3:4", "2:8", "3:8", "2:16"]
SEED = fold_seed(0)

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
    def draw_blocks(x, uniform, result, BLOCKS: tl.constexpr):
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


def raw(x):
    """The bits of numbers."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same(found, expected):
    """The same bits, contiguous and without a history; any NaN is the same as any other."""
    assert found.is_contiguous()
    assert not found.requires_grad
    assert found.dtype == expected.dtype
    found, expected = (
        torch.where(x.isnan(), torch.nan, x.detach().cpu()) for x in (found, expected)
    )
    assert torch.equal(raw(found), raw(expected.contiguous()))


def values(generator, dtype, *shape):
    """Gaussian numbers over all magnitudes, with zeros, equal ones, and a few that are not finite."""
    x = torch.randn(shape, generator=generator)
    x = x * 10 ** (4 * torch.randn(shape, generator=generator))
    rare = torch.tensor([0.0, 0.0, 0.0, -0.0, 2.0, 3e38])
    kind = torch.randint(12, shape, generator=generator)
    x = torch.where(kind < 6, rare[kind % 6], x)
    rarer = torch.tensor([torch.inf, torch.nan])
    kind = torch.randint(40, shape, generator=generator)
    return torch.where(kind < 2, rarer[kind % 2], x).to(dtype)


def size(draw):
    return draw.randint(0, draw.choice([3, 40, 140]))


def check_masked(draw, generator, dtype, device, cast):
    out, columns, bit = size(draw), size(draw), draw.choice([1, 2])
    weight = values(generator, torch.float32, out, columns).nan_to_num(1.0).to(dtype)
    marks = torch.randint(4, (out, columns), generator=generator, dtype=torch.uint8)
    permutation = torch.randperm(out, generator=generator) if draw.random() < 0.5 else None
    target, transposed = draw.choice(DTYPES), draw.random() < 0.5
    expected = torch.where(marks & bit != 0, weight, 0)
    expected = expected if dtype == target else cast(expected.float(), target)
    expected = expected if permutation is None else expected[permutation]
    given = weight.to(device), marks.to(device)
    if draw.random() < 0.5:
        given = [x.t().contiguous().t() for x in given]
    given[0].requires_grad_()
    order = None if permutation is None else permutation.to(device)
    found = masked_operand(*given, target, bit, order, transposed=transposed)
    assert_same(found, expected.t() if transposed else expected)


def check_estimate(draw, generator, dtype, device, cast):
    tokens, out, pattern = size(draw), size(draw), draw.choice(PATTERNS)
    grad, seed = values(generator, dtype, tokens, out), fold_seed(draw.randrange(1000))
    gather = torch.randperm(out, generator=generator).to(device) if draw.random() < 0.5 else None
    given = grad.to(device).requires_grad_()
    found, columns = mvue_transposed(given, seed.to(device), pattern, gather=gather)
    wide = torch.promote_types(dtype, torch.float32)
    # Not by pad(), which takes no matrix without columns in torch 2.6.
    padded = torch.cat([grad.to(wide), grad.new_zeros(-tokens % 16, out, dtype=wide)])
    expected = MVUE(pattern).estimate(None, padded, seed).t()
    assert_same(found, expected if dtype == wide else cast(expected, dtype))
    assert is_nm(found, pattern, -1)
    if gather is not None:
        assert_same(columns, grad[:, gather.cpu()])


def check_columns(draw, generator, dtype, device, cast):
    """All bits are copied: those of a number's sign, and those that tell NaNs apart."""
    tokens, out = size(draw), size(draw)
    integer = raw(torch.empty(0, dtype=dtype)).dtype
    limits = torch.iinfo(integer)
    bits = torch.randint(limits.min, limits.max, (tokens, out), generator=generator).to(integer)
    permutation = torch.randperm(out, generator=generator)
    given = bits.view(dtype).to(device).requires_grad_()
    found = permuted_columns(given, permutation.to(device))
    assert found.is_contiguous()
    assert not found.requires_grad
    assert torch.equal(raw(found).cpu(), bits[:, permutation])


CHECKS = [check_masked, check_estimate, check_columns]


def run(check, way, seed, device="cpu", cast=Tensor.to):
    draw = random.Random(seed)
    dtype = draw.choice([*DTYPES, torch.float64] if way == "torch" else DTYPES)
    switch = {triton_use.SWITCH: "0" if way == "torch" else "1"}
    with mock.patch.dict(os.environ, switch):
        check(draw, torch.Generator().manual_seed(seed), dtype, device, cast)


@pytest.mark.parametrize("way", ["torch", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("check", CHECKS)
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_operand(check, way, seed):
    run(check, way, seed, cast=Tensor.to if way == "torch" else interpreted)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("check", CHECKS)
def test_any_operand_on_a_gpu(check, way):
    for seed in range(200):
        run(check, way, seed, "cuda")


def test_a_single_row_may_be_strided_as_it_likes():
    weight, marks = torch.randn(1, 4), torch.full((4, 1), 3, dtype=torch.uint8).t()
    assert weight.stride() != marks.stride()
    assert torch.equal(masked_operand(weight, marks, torch.float32), weight)


def test_without_triton_the_torch_operations_serve(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_use.is_installed.cache_clear()
    assert triton_kernels() is None
    run(check_estimate, "without", 0)
    triton_use.is_installed.cache_clear()


WEIGHT = {
    "weight": torch.zeros(4, 8),
    "marks": torch.zeros(4, 8, dtype=torch.uint8),
    "dtype": torch.float32,
}
GRAD, ESTIMATED = {"grad": torch.zeros(4, 8)}, {"seed": SEED}
COLUMNS = {"permutation": torch.arange(8)}


@pytest.mark.parametrize(
    ("function", "arguments", "error", "match"),
    [
        (masked_operand, WEIGHT | change, error, match)
        for change, error, match in (
            ({"weight": torch.zeros(4, 8).int()}, TypeError, "weight must be of a floating"),
            (
                {"weight": torch.zeros(8, 4).t()},
                ValueError,
                r"marks.*strides \(1, 4\).*strides \(8, 1\): transpose",
            ),
            ({"weight": torch.zeros(4, 2, 4)}, ValueError, "weight must be a matrix"),
            ({"dtype": torch.int8}, TypeError, "int8 cannot hold"),
            ({"marks": torch.zeros(4, 8).bool()}, TypeError, "bytes of two bits; got torch.bool"),
            ({"marks": torch.zeros(8, 4).byte()}, ValueError, r"\(4, 8\) on cpu.*got \(8, 4\)"),
            (
                {"marks": torch.zeros(8, 4).byte().t()},
                ValueError,
                r"marks must have.*got.*strides \(1, 4\)",
            ),
            ({"permutation": torch.zeros(4)}, TypeError, "must be int64; got torch.float32"),
            ({"permutation": torch.arange(8)}, ValueError, r"4 indices on cpu; got \(8,\)"),
            ({"permutation": torch.arange(8)[::2]}, ValueError, "strides"),
        )
    ]
    + [
        (function, GRAD | own | change, error, match)
        for function, own, order in (
            (mvue_transposed, ESTIMATED, "gather"),
            (permuted_columns, COLUMNS, "permutation"),
        )
        for change, error, match in (
            ({"grad": torch.zeros(4, 8).long()}, TypeError, "grad must be of a floating"),
            ({"grad": torch.zeros(8, 4).t()}, ValueError, r"grad must be contiguous.*\.contiguous"),
            ({order: torch.arange(4)}, ValueError, f"{order} must .* 8 indices"),
            ({order: torch.arange(8).int()}, TypeError, f"{order} must be int64; got torch.int32"),
        )
    ]
    + [
        (mvue_transposed, GRAD | ESTIMATED | change, ValueError, match)
        for change, match in (
            ({"seed": torch.zeros(3, dtype=torch.int64)}, "four words"),
            ({"seed": torch.zeros(4)}, "float32"),
            ({"pattern": "2:3"}, "multiple of 16, which blocks of 2:3"),
        )
    ],
)
def test_operands_that_are_refused(function, arguments, error, match):
    with pytest.raises(error, match=match):
        function(**arguments)


# ------------------------------------------------------------------------------------------------------ interpreted


@needs_interpreter
@pytest.mark.parametrize(("columns", "fits"), [(64, True), (65, False)])
def test_rows_too_long_to_gather(columns, fits, monkeypatch):
    monkeypatch.setattr(kernels, "ROW_BYTES", 256)
    grad = torch.randn(20, columns, generator=torch.Generator().manual_seed(0))
    assert kernels._gatherable(grad) == fits
    gather = torch.arange(columns - 1, -1, -1)
    estimate, permuted = mvue_transposed(grad, SEED, gather=gather)
    assert torch.equal(estimate, mvue_transposed(grad, SEED)[0])
    for found in (permuted, permuted_columns(grad, gather)):
        assert torch.equal(found, grad.flip(1))


@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_estimate_of_gaussians(dtype):
    """The random numbers decide in every block; the seed is neither reduced nor contiguous."""
    grad = torch.randn(512, 132, generator=torch.Generator().manual_seed(0)).to(dtype)
    seed = (fold_seed(3) + 5 * 0x9E3779B1).repeat_interleave(2)[::2]
    exact = MVUE("2:4").estimate(None, grad.float(), seed).t()
    assert_same(mvue_transposed(grad, seed)[0], interpreted(exact, dtype))


@needs_interpreter
def test_interpreted_random_words():
    """Counters of more than 32 bits, which only tensors too large for a test have."""
    index = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 5 * 2**32 + 7, 2**61])
    seed, result = fold_seed(1), torch.empty(4, 8, dtype=torch.int64)
    words[(1,)](seed, index, result)
    expected = philox_random._philox(
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
    draw_blocks[(1,)](x, uniform, result, BLOCKS=2**16)
    assert torch.equal(result, mvue(x, "2:4", uniform=uniform.unsqueeze(-1)))


# ------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("backward", "permuted"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("source", "target"), [("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "fp16"), ("fp16", "bf16")]
)
def test_masks_compile(source, target, backward, permuted, transposed):
    types = {"weight": f"*{source}", "marks": "*u8", "result": f"*{target}"}
    types |= {"out": "i32", "columns": "i32"} | ({"permutation": "*i64"} if permuted else {})
    # The stride along which the entries lie is 1, which Triton takes as a constant.
    strides = ["row_stride", "column_stride"]
    types[strides.pop(int(transposed))] = "i32"
    constants = {"BIT": 2, "TRANSPOSED": backward, "TILE": kernels.TILE, strides[0]: 1}
    ptx = assembly(kernels._masked, types, constants | ({} if permuted else {"permutation": None}))
    assert source == target or "cvt.rn." in ptx  # to nearest, ties to even


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("width", [1, 16, 4096, 2**15])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_gather_compiles(width, dtype):
    """Rows are read and written through wide instructions; only shared memory is accessed entry by entry."""
    width = min(width, kernels.ROW_BYTES // (4 if dtype == "fp32" else 2))
    types = {"grad": f"*{dtype}", "order": "*i64", "result": f"*{dtype}"}
    types |= {"tokens": "i32", "out": "i32"}
    constants, warps = {"ROWS": kernels.ROWS, "WIDTH": width}, kernels._warps(width, 4)
    ptx = assembly(kernels._permuted_columns, types, constants, aligned=True, num_warps=warps)
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
    parsed, width, options = NMPattern.parse(pattern), 2**14, dict(kernels.SAMPLING)
    types = {"grad": f"*{dtype}", "seed": "*i64", "result": f"*{dtype}"}
    types |= dict.fromkeys(("tokens", "out", "padded"), "i32")
    constants = {"N": parsed.n, "M": parsed.m, "TILE": kernels.TILE, "SHARED": shared}
    constants["ROWS"] = kernels.ROWS
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
def test_more_than_2_31_entries_on_a_gpu():
    rows, columns = 2**16 + 16, 2**15
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-2:] = torch.arange(columns, device="cuda") % 256 + 1
    marks = torch.full(x.shape, 3, dtype=torch.uint8, device="cuda")
    flipped = torch.arange(columns - 1, -1, -1, device="cuda")
    for make, expected in (
        # Blocks of two nonzeros come back as they are.
        (lambda: mvue_transposed(x, SEED)[0].t(), x[-2:]),
        (lambda: mvue_transposed(x, SEED, gather=flipped)[1], x[-2:].flip(1)),
        (lambda: masked_operand(x, marks, x.dtype), x[-2:]),
        (lambda: masked_operand(x, marks, x.dtype, 2, transposed=True).t(), x[-2:]),
    ):
        found = make()
        assert torch.equal(found[-2:], expected)
        assert int(found.count_nonzero()) == 2 * columns
        del found
