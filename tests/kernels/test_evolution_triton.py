"""BAME's passes by Triton against torch: in Triton's interpreter, compiled without a GPU, and on one.

`make interpreter` runs all but the last.
"""

import inspect
import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_nm.functional.evolution import SCALE, BlockGrid
from lightning_nm.kernels.cpu import evolution as cpu_passes
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.methods.bame.exchange import passes_for
from tests.support.bame import OPTIMIZERS, trained
from tests.support.evolution import DTYPES, case, compare_bame, same
from tests.support.triton_kernels import (
    compiled,  # noqa: F401  a fixture
    interpreted,
    needs_compiler,
    needs_interpreter,
)

kernels = None if triton_use.unavailable() else triton_use.kernels("evolution_triton")

pytestmark = [
    # The interpreter's numpy: 1 / 0, infinity - infinity, and results beyond float16.
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@st.composite
def cases(draw):
    """Weights of all layouts with ragged shapes, ties, and entries that are not finite."""
    m = draw(st.integers(2, 32))
    taps = draw(st.sampled_from([(), (), (3,), (2, 3)]))
    return case(
        draw(st.integers(1, 9)),
        draw(st.integers(1, 5)),
        m,
        taps,
        kept=draw(st.integers(1, m - 1)),
        dtype=draw(st.sampled_from(DTYPES)),
        transposed=not taps and draw(st.booleans()),
        ties=draw(st.booleans()),
        odd=draw(st.sampled_from([0, 2, 20])),
        share=draw(st.sampled_from([0, 0.1, 0.5, 1.0])),
        seed=draw(st.integers(0, 2**20)),
    )


def gather_a_step(bits, grad, value, square, own_ratio):
    one = torch.tensor(1.0)
    numbers = {"limit": one, "correction": one, "size": one}
    return kernels.gather_evidence(bits, grad, value, square, own_ratio=own_ratio, **numbers)


@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(cases())
def test_interpreted_passes(c):
    compare_bame(c, kernels, interpreted)


def rounded(x):
    """A float64 result as float32 has it: products, quotients and roots of float32 are rounded but once by this."""
    return x.float().double()


@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    own_ratio=st.floats(0.01, 100),
    correction=st.floats(1e-3, 1),
    seed=st.integers(0, 2**20),
)
def test_every_operation_is_rounded_on_its_own(dtype, own_ratio, correction, seed):
    """Bit for bit by float64, in which every operation on float32 is exact or so close that it rounds the same."""
    c = case(7, 3, 8, kept=3, dtype=dtype, odd=20, seed=seed)
    numbers = {"own_ratio": own_ratio, "correction": correction, "size": 0.3, "limit": 2.0}
    numbers = {name: torch.tensor(number) for name, number in numbers.items()}
    decay, epsilon = 0.999, 1e-12
    step = {**numbers, "own_ratio": own_ratio}
    old_value = c.value / (SCALE / 2)
    value, square = kernels.gather_evidence(c.bits, c.grad.clone(), old_value, c.square, **step)

    own_ratio, correction, size, limit = (number.double() for number in numbers.values())
    g, v = c.grad.double(), c.square.double()
    u = torch.where(c.mask, 0, SCALE * old_value.double())
    u = torch.where(u.abs() > limit, 0, u)
    v = torch.where(c.mask, rounded(v * own_ratio), v)
    taken = rounded(rounded(g * g) * torch.tensor(1 - decay).double())
    v = rounded(rounded(v * torch.tensor(decay).double()) + taken)
    root = rounded(rounded(v / correction).sqrt())
    root = rounded(1 / rounded(1 / root))
    direction = rounded(1 / rounded(root + torch.tensor(epsilon).double()))
    u = u - rounded(rounded(direction * g) * size)
    assert same(square, v.float())
    assert same(value, torch.where(c.mask, 0, u).float())


@needs_interpreter
@pytest.mark.parametrize("n", [1, 2])
def test_blocks_without_a_choice(n):
    """All or no entries are kept: nothing can be exchanged, and the entries that are named lie in the block."""
    weight, value = torch.ones(5, 6), torch.full((5, 6), 9.0)
    bits = torch.full((5, 6), n - 1, dtype=torch.uint8)
    pruned, regrown, gain = kernels.best(BlockGrid.of(weight, 3), bits, weight, value)
    assert not gain.any()
    assert int(torch.stack([pruned, regrown]).max()) < 3
    assert torch.equal(weight, bits.float())


@needs_interpreter
def test_the_first_of_equal_entries():
    weight = torch.tensor([[1.0, -1.0, 1.0, 5.0, 0.0, 0.0]])
    value = torch.tensor([[0.0, 0.0, 0.0, 7.0, -7.0, 7.0]])
    bits = torch.tensor([[1, 1, 1, 0, 0, 0]], dtype=torch.uint8)
    pruned, regrown, gain = kernels.best(BlockGrid.of(weight, 6), bits, weight, value)
    assert (pruned.tolist(), regrown.tolist(), gain.tolist()) == ([0], [3], [6.0])


@needs_interpreter
def test_torch_notices_what_kernels_wrote():
    c = case(4, 2, 4)
    tensors = (c.weight, c.grad, c.value)
    versions = [tensor._version for tensor in tensors]
    bits, states = c.bits, [c.square.clone()]
    one = torch.tensor(1.0)
    gather_a_step(bits, c.grad, c.value, c.square, own_ratio=1.0)
    changed, _ = kernels.exchange(
        BlockGrid.of(c.weight, 4),
        bits,
        c.weight,
        c.grad,
        c.value,
        c.square,
        torch.zeros(8, dtype=torch.uint8),
        torch.zeros(4, dtype=torch.uint8),
        states,
        [True],
        8,
        one,
        1.0,
    )
    assert changed
    for tensor, version in zip(tensors, versions, strict=True):
        assert tensor._version > version
    assert bits._version
    assert states[0]._version


def by_torch(monkeypatch, function, *args):
    """Its result by torch operations alone."""
    with monkeypatch.context() as patched:
        patched.setenv(triton_use.SWITCH, "0")
        patched.setattr(cpu_passes, "runs", lambda *tensors: False)
        return function(*args)


@needs_interpreter
@pytest.mark.parametrize("name", [*OPTIMIZERS, "plain sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(16, 12, bias=False), lambda: nn.Conv2d(8, 6, 3, bias=False)],
    ids=["linear", "conv"],
)
def test_interpreted_training_is_that_of_torch(name, dtype, make, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "plain sgd", lambda p: torch.optim.SGD(p, 0.05))
    steps = 7  # the last has a dense gradient, and an exchange
    found = trained(name, dtype, make, steps)
    expected = by_torch(monkeypatch, trained, name, dtype, make, steps)
    assert found["flips"] == expected["flips"] > 0
    assert not found["gradient"][found["bits"] == 0].any()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=tolerance, atol=tolerance / 100)


# Which passes run.


@pytest.mark.skipif(not triton_use.is_installed(), reason="Triton is not installed")
def test_both_modules_take_the_same_arguments():
    of_gpu = triton_use.kernels("evolution_triton")
    for name in ("gather_evidence", "exchange", "keep_evidence"):
        found = inspect.signature(getattr(of_gpu, name))
        assert found == inspect.signature(getattr(cpu_passes, name)), name


@pytest.fixture
def interpreter(monkeypatch):
    """As if Triton were installed and its interpreter asked for: passes are named, not run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv(triton_use.SWITCH, raising=False)
    monkeypatch.setattr(triton_use, "is_installed", lambda: True)
    named = SimpleNamespace(name="triton")
    monkeypatch.setattr(triton_use, "kernels", lambda name: named)
    monkeypatch.setattr(cpu_passes, "runs", lambda *tensors: False)
    return named


def test_triton_takes_plain_tensors(interpreter):
    half, byte = torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(4, 4, dtype=torch.uint8)
    assert passes_for(half, byte, None, torch.zeros(4)) is interpreter
    assert passes_for(nn.Parameter(torch.zeros(4))) is interpreter


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4, dtype=torch.float64),
        torch.zeros(4, 8).t(),
        torch.zeros(0, 4),
        torch.zeros(4, 4, device="meta"),
        torch.zeros(4, 4, dtype=torch.complex64).imag,
    ],
    ids=["float64", "another order", "empty", "another device", "a view of a part"],
)
def test_other_tensors_are_left_to_torch(tensor, interpreter):
    assert passes_for(tensor) is None
    assert passes_for(torch.zeros(4), tensor) is None


def test_the_switch_leaves_all_to_the_others(interpreter, monkeypatch):
    monkeypatch.setenv(triton_use.SWITCH, "0")
    assert passes_for(torch.zeros(4)) is None
    assert triton_use.unavailable() == "switched off by LIGHTNING_NM_TRITON=0"
    assert not triton_use.runs_on(torch.device("cuda"))
    monkeypatch.setattr(cpu_passes, "runs", lambda *tensors: True)
    assert passes_for(torch.zeros(4)) is cpu_passes


def test_a_mistyped_switch_is_named(interpreter, monkeypatch):
    monkeypatch.setenv(triton_use.SWITCH, "off")
    assert passes_for(torch.zeros(4)) is None
    assert "LIGHTNING_NM_TRITON='off' is neither 0" in triton_use.unavailable()


def test_without_triton_torch_serves(interpreter, monkeypatch):
    monkeypatch.setattr(triton_use, "is_installed", lambda: False)
    assert passes_for(torch.zeros(4)) is None
    assert triton_use.unavailable() == "Triton is not installed"


def test_a_cpu_without_the_interpreter_has_its_own_passes(interpreter, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(cpu_passes, "runs", lambda *tensors: True)
    assert passes_for(torch.zeros(4)) is cpu_passes
    assert triton_use.runs_on(torch.device("cuda"))


# Compiled for an H100, as they are launched.


def assert_rounded(ptx):
    """No instruction that is fused, approximated or flushed: each rounds as torch's operation does."""
    assert not re.findall(
        r"\b(?:fma|div\.full|div\.approx|rcp|sqrt\.approx|rsqrt|[\w.]*\.ftz)[\w.]*", ptx
    )


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [2, 4, 5, 32])
@pytest.mark.parametrize("taps", [(), (3, 3)], ids=str)
def test_passes_compile(dtype, m, taps, compiled):  # noqa: F811
    c = case(32, 4, m, taps, dtype=dtype)
    gather_a_step(c.bits, c.grad, c.value, c.square, own_ratio=0.5)
    kernels.best(BlockGrid.of(c.rows, m), c.bits, c.weight, c.value)
    kernels.keep_evidence(
        c.bits,
        c.value,
        c.square,
        c.value,
        c.square,
        whole_value=False,
        whole_square=True,
    )
    assert set(compiled) == {"_gather", "_best", "_keep"}
    for ptx in compiled.values():
        assert_rounded(ptx)
    assert {"sqrt.rn.f32", "div.rn.f32"} <= set(re.findall(r"[\w.]+", compiled["_gather"]))
    # Entries that follow each other are written in wide accesses.
    in_line = m in (4, 32) and not taps
    for name in ("_gather", "_keep", "_best") if in_line else ("_gather", "_keep"):
        assert re.search(r"st\.global\.v[24]\.b32", compiled[name]), name


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("states", [0, 1, 4])
@pytest.mark.parametrize("has_grad", [False, True])
def test_exchanges_compile(dtype, states, has_grad, compiled, monkeypatch):  # noqa: F811
    c = case(32, 4, 4, dtype=dtype, share=1.0)
    gain = torch.ones(128)
    places = torch.zeros(128, dtype=torch.uint8)
    # Nothing runs, so that no kernel finds these.
    monkeypatch.setattr(kernels, "best", lambda *args: (places, places + 1, gain))
    changed, _ = kernels.exchange(
        BlockGrid.of(c.rows, 4),
        c.bits,
        c.weight,
        c.grad if has_grad else None,
        c.value,
        c.square,
        c.oscillation,
        torch.zeros(64, dtype=torch.uint8),
        [c.square, c.grad.clone(), c.square, c.grad.clone()][:states],
        [True, False, True, False][:states],
        128,
        torch.tensor(1.0),
        1.0,
    )
    assert changed == 128
    assert_rounded(compiled["_exchange"])
    # U goes to half types to nearest, ties to even.
    cast = {torch.float32: "", torch.float16: "cvt.rn.f16", torch.bfloat16: "cvt.rn.bf16"}
    assert cast[dtype] in compiled["_exchange"]


# On a GPU.


def moved(value, device):
    """Tensors on a device, also those in tuples and lists; all else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    return value


def written_back(argument, there):
    if isinstance(argument, Tensor):
        argument.copy_(there)
    elif isinstance(argument, (tuple, list)):
        for item, other in zip(argument, there, strict=True):
            written_back(item, other)


def on_gpu(function):
    """A pass that takes tensors of the CPU, and runs on the GPU."""

    def run(*args, **options):
        there = moved(args, "cuda")
        there_by_name = {name: moved(value, "cuda") for name, value in options.items()}
        result = function(*there, **there_by_name)
        written_back(args, there)
        for name, value in options.items():
            written_back(value, there_by_name[name])
        return moved(result, "cpu")

    return run


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("taps", [(), (3,)], ids=str)
def test_on_a_gpu(dtype, m, taps):
    names = ("gather_evidence", "keep_evidence", "best", "exchange")
    passes = SimpleNamespace(**{name: on_gpu(getattr(kernels, name)) for name in names})
    for transposed in (False, True) if not taps else (False,):
        for seed in range(3):
            c = case(
                67,
                9,
                m,
                taps,
                dtype=dtype,
                transposed=transposed,
                ties=seed == 0,
                odd=50,
                seed=seed,
            )
            compare_bame(c, passes)


@pytest.mark.gpu
@needs_compiler
def test_more_than_2_31_entries_on_a_gpu():
    rows, columns = 2**16 + 16, 2**15
    weight = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    value = torch.zeros(rows, columns, device="cuda")
    bits = torch.zeros(rows, columns, dtype=torch.uint8, device="cuda")
    bits[:, ::4] = 1
    weight[-1] = 1
    value[-1, 3::4] = 5
    pruned, regrown, gain = kernels.best(BlockGrid.of(weight, 4), bits, weight, value)
    last = columns // 4
    assert torch.equal(gain[-last:], torch.full_like(gain[-last:], 4))
    assert not gain[:-last].any()
    assert set(regrown[-last:].tolist()) == {3}
    assert not pruned.any()
    assert int(weight.count_nonzero()) == last
    assert math.prod(weight.shape) > 2**31
