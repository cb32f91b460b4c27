"""BAME's passes by Triton against torch: in Triton's interpreter, compiled without a GPU, and on one.

`make interpreter` runs all but the last.
"""

import inspect
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_nm.functional.evolution import SCALE, BlockGrid
from lightning_nm.kernels.cpu import mask_passes as cpu_passes
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.methods.bame.exchange import passes_for
from tests.support.bame import OPTIMIZERS, trained
from tests.support.evolution import DTYPES, case, compare_bame, random_case, same
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


@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_interpreted_passes(seed):
    compare_bame(random_case(random.Random(seed), most=(2, 9, 40)), kernels, interpreted)


def rounded(x):
    """A float64 result as float32 has it: products, quotients and roots of float32 are rounded but once by this."""
    return x.float().double()


@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    own_ratio=st.floats(0.01, 100),
    fraction=st.floats(0, 1),
    correction=st.floats(1e-3, 1),
    seed=st.integers(0, 2**20),
)
def test_every_operation_is_rounded_on_its_own(dtype, own_ratio, fraction, correction, seed):
    """Bit for bit by float64, in which every operation on float32 is exact or so close that it rounds the same."""
    c = case(7, 3, 8, kept=3, dtype=dtype, odd=20, seed=seed)
    numbers = {"own_ratio": own_ratio, "correction": correction, "size": 0.3, "limit": 2.0}
    numbers = {name: torch.tensor(number) for name, number in numbers.items()}
    decay, epsilon = 0.999, 1e-12
    step = {**numbers, "own_ratio": own_ratio, "fraction": fraction}
    old_value = c.value / (SCALE / 2)
    value, square = kernels.gather_evidence(c.bits, c.grad.clone(), old_value, c.square, **step)

    own_ratio, correction, size, limit = (number.double() for number in numbers.values())
    g, v = c.grad.double(), c.square.double()
    unit = torch.tensor(SCALE * fraction).double()  # float32 before
    u = torch.where(c.mask, 0, rounded(unit * old_value.double()))
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
@pytest.mark.parametrize(
    ("weight", "value", "bits", "swap"),
    [
        (
            [1.0, -1.0, 1.0, 5.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 7.0, -7.0, 7.0],
            [1, 1, 1, 0, 0, 0],
            (0, 3),
        ),
        ([1.0] * 6, [9.0] * 6, [0] * 6, None),
        ([1.0] * 6, [9.0] * 6, [1] * 6, None),
    ],
    ids=["ties", "none kept", "all kept"],
)
def test_the_first_of_equal_entries_and_blocks_without_a_choice(weight, value, bits, swap):
    weight, value = torch.tensor([weight]), torch.tensor([value])
    bits = torch.tensor([bits], dtype=torch.uint8)
    pruned, regrown, gain = kernels.best(BlockGrid.of(weight, 6), bits, weight, value)
    assert torch.equal(weight, bits * weight)
    if swap is not None:
        assert (pruned.item(), regrown.item(), gain.item()) == (*swap, 6.0)
    else:  # the entries that are named lie in the block
        assert not gain.any()
        assert int(torch.stack([pruned, regrown]).max()) < 6


def gather_a_step(c):
    one = torch.tensor(1.0)
    numbers = {"limit": one, "correction": one, "size": one}
    return kernels.gather_evidence(
        c.bits, c.grad, c.value, c.square, own_ratio=0.5, fraction=0.5, **numbers
    )


def exchange_all(c, bits, grad, states, are_squares):
    return kernels.exchange(
        BlockGrid.of(c.rows, c.m),
        bits,
        c.weight,
        grad,
        c.value,
        c.square,
        c.oscillation,
        torch.zeros(c.weight.numel(), dtype=torch.uint8),
        states,
        are_squares,
        len(c.oscillation),
        torch.tensor(1.0),
        1.0,
    )[0]


@needs_interpreter
def test_torch_notices_what_kernels_wrote():
    c = case(4, 2, 4)
    bits, state = c.bits, c.square.clone()
    written = c.weight, c.grad, c.value, bits, state
    versions = [tensor._version for tensor in written]
    gather_a_step(c)
    assert exchange_all(c, bits, c.grad, [state], [True])
    for tensor, version in zip(written, versions, strict=True):
        assert tensor._version > version


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
def runs(monkeypatch):
    """Says which passes run for tensors, if Triton were installed and its interpreter asked for."""
    triton = SimpleNamespace()

    def run(*tensors, installed=True, by_cpu=False, **environment):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.delenv(triton_use.SWITCH, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(triton_use, "is_installed", lambda: installed)
        monkeypatch.setattr(triton_use, "kernels", lambda name: triton)
        monkeypatch.setattr(cpu_passes, "runs", lambda *tensors: by_cpu)
        found = passes_for(*tensors)
        return "triton" if found is triton else "cpu" if found is cpu_passes else found

    return run


def test_triton_takes_plain_tensors_and_leaves_others_to_torch(runs):
    plain = torch.zeros(4)
    half, byte = torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(4, 4, dtype=torch.uint8)
    assert runs(half, byte, None, plain) == runs(nn.Parameter(plain)) == "triton"
    for other in (
        torch.zeros(4, 4, dtype=torch.float64),
        torch.zeros(4, 8).t(),
        torch.zeros(0, 4),
        torch.zeros(4, 4, device="meta"),
        torch.zeros(4, 4, dtype=torch.complex64).imag,
    ):
        assert runs(other) is None
        assert runs(plain, other) is None


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({triton_use.SWITCH: "0"}, "switched off by LIGHTNING_NM_TRITON=0"),
        ({triton_use.SWITCH: "off"}, "LIGHTNING_NM_TRITON='off' is neither 0"),
        ({"installed": False}, "Triton is not installed"),
        ({"TRITON_INTERPRET": "0"}, ""),
    ],
)
def test_where_triton_does_not_run_the_others_serve(runs, setting, reason):
    assert runs(torch.zeros(4), **setting) is None
    assert runs(torch.zeros(4), by_cpu=True, **setting) == "cpu"
    assert triton_use.unavailable().startswith(reason)
    assert triton_use.runs_on(torch.device("cuda")) == (not reason)


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
    gather_a_step(c)
    kernels.best(BlockGrid.of(c.rows, m), c.bits, c.weight, c.value)
    tensors = c.value, c.square, c.value, c.square
    kernels.keep_evidence(c.bits, *tensors, whole_value=False, whole_square=True)
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
    places = torch.zeros(128, dtype=torch.uint8)
    # Nothing runs, so that no kernel finds these.
    monkeypatch.setattr(kernels, "best", lambda *args: (places, places + 1, torch.ones(128)))
    tensors = [c.square, c.grad.clone(), c.square, c.grad.clone()][:states]
    are_squares = [True, False, True, False][:states]
    assert exchange_all(c, c.bits, c.grad if has_grad else None, tensors, are_squares) == 128
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
def test_on_a_gpu():
    names = ("gather_evidence", "keep_evidence", "best", "exchange")
    passes = SimpleNamespace(**{name: on_gpu(getattr(kernels, name)) for name in names})
    for seed in range(200):
        compare_bame(random_case(random.Random(seed), most=(9, 130, 1000)), passes)


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
