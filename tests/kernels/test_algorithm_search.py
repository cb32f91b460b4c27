"""The library's search of an algorithm: what it finds is checked, measured next to the default, and remembered."""

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.kernels import GemmKey, KernelRegistry, Router, routing
from lightning_nm.kernels.tuner import Decisions, Tuner, environment_of
from lightning_nm.pattern import NMPattern
from tests.support.trapping_cslt import KernelOnCpu, TrappingOps

BF16 = torch.bfloat16
HERE = environment_of(torch.device("cpu"))


def key_of(gemm="forward", dtype=BF16, tokens=40):
    sizes = (32, tokens, 64) if gemm == "wgrad" else (32, 64, tokens)
    return GemmKey(gemm, *sizes, dtype, NMPattern(2, 4), "cpu")


class ByAlgorithm:
    """A timer that reads which algorithm a call runs."""

    def __init__(self, ops, **milliseconds):
        times = {"dense": 1.0, "algorithm0": 1.2, "algorithm17": 0.8}
        self.ops, self.milliseconds = ops, times | milliseconds

    def time(self, function, device):
        before = len(self.ops.calls)
        function()
        made = self.ops.calls[before:]
        if not made:
            return self.milliseconds["dense"]
        if made[-1][0] == "compress":
            return 0.0
        return self.milliseconds[f"algorithm{made[-1][5]}"]


def tuner(ops=None, mode="auto", kernels=None, **milliseconds):
    """A tuner of a kernel over these operators, or of some, of which the times of these operators are known."""
    ops = TrappingOps(found=17) if ops is None else ops
    registry = KernelRegistry([KernelOnCpu(ops)] if kernels is None else kernels)
    return Tuner(mode, registry, Decisions(HERE), ByAlgorithm(ops, **milliseconds))


class WithoutBias(TrappingOps):
    """The algorithm that is found leaves the bias out."""

    def _cslt_sparse_mm(self, packed, dense, bias=None, alg_id=0, **arguments):
        bias = None if alg_id == 17 else bias
        return super()._cslt_sparse_mm(packed, dense, bias, alg_id=alg_id, **arguments)


class Fails(TrappingOps):
    def mm_search(self, *arguments):
        raise RuntimeError("internal error")


@pytest.mark.parametrize(
    ("gemms", "ops", "milliseconds", "kernel", "words"),
    [
        (("forward", "dgrad", "wgrad"), TrappingOps(found=17), times, kernel, "measured")
        for times, kernel in (
            ({}, "cusparselt:17"),
            ({"algorithm0": 0.5}, "cusparselt"),
            ({"algorithm17": 0.99}, "reference"),
        )
    ]
    + [
        (("forward",), ops, {"algorithm0": 0.5, "algorithm17": 0.1}, "cusparselt", words)
        for ops, words in (
            (TrappingOps(found=0), "measured"),
            (TrappingOps((17,), 17), "cusparselt:17: wrong by"),
            (WithoutBias(found=17), "cusparselt:17: wrong by"),
            (Fails(), "its search failed, RuntimeError: internal error"),
        )
    ],
)
def test_the_faster_of_default_and_found(gemms, ops, milliseconds, kernel, words):
    for gemm in gemms:
        decision = tuner(ops, **milliseconds).decide(key_of(gemm))
        assert decision.kernel == kernel
        assert words in decision.reason


@pytest.mark.parametrize(
    ("gemm", "operands"),
    [
        # Tokens are padded to a multiple of 8, the depth of a wgrad to that of the sparse matrix, here 16.
        ("forward", ((32, 36), (64, 40), False, None, None, None, True)),
        ("wgrad", ((32, 27), (48, 64), True, None, None, None, False)),
    ],
)
def test_the_operands_of_the_search_are_those_of_the_product(gemm, operands):
    choice, searched = tuner(), []

    def search(packed, dense, *arguments):
        searched.append((packed.shape, dense.shape, dense.is_contiguous(), *arguments))
        return 17, 1, -1, 21

    choice.timer.ops.mm_search = search
    choice.decide(key_of(gemm, tokens=40))
    assert searched == [operands]


@pytest.mark.parametrize(
    ("mode", "dtype", "source"),
    [
        # There the real search ends in an illegal instruction, which no except catches.
        ("auto", torch.float16, "measured"),
        # A search may answer differently, and nothing is timed there.
        ("sparse", BF16, "forced"),
    ],
)
def test_what_is_never_searched(mode, dtype, source):
    choice = tuner(mode=mode, algorithm0=0.5)
    choice.timer.ops.mm_search = None  # would be a TypeError in the reason
    decision = choice.decide(key_of(dtype=dtype))
    assert (decision.kernel, decision.source) == ("cusparselt", source)
    assert "search" not in decision.reason


def test_lengths_of_a_bucket_are_searched_once():
    choice, count = tuner(), []
    (kernel,) = choice.registry.backends
    kernel.ops.mm_search = lambda *arguments: count.append(1) or (17, 1, -1, 21)
    for tokens in (1000, 1008, 1024):
        choice.registry.searched(kernel, key_of(tokens=tokens))
    assert len(count) == 1


@pytest.mark.parametrize("algorithm", [0, 5])
def test_an_algorithm_that_the_user_names_is_kept(algorithm):
    kernel = KernelOnCpu(TrappingOps(found=17), algorithm=algorithm)
    assert KernelRegistry([kernel]).searched(kernel, key_of()) == [kernel]


def test_a_renamed_kernel_finds_its_own_variants():
    ops = TrappingOps(found=17)
    kernel, other = KernelOnCpu(ops), KernelOnCpu(TrappingOps(wrong_algorithms=(0, 17)))
    kernel.name = "my:second"
    choice = tuner(ops, kernels=[other, kernel])
    assert choice.decide(key_of()).kernel == "my:second:17"
    found = choice.registry.find("my:second:17")
    assert found.name == "my:second:17"
    assert found.ops is ops


def test_a_decision_without_a_search_is_made_again():
    first, later = tuner(), tuner()
    first.registry.backends[0].searched = ()
    assert first.decide(key_of()).kernel == "reference"
    later.decisions = first.decisions
    assert later.decide(key_of()).kernel == "cusparselt:17"


def test_a_kept_decision_runs_in_another_process_without_a_search(tmp_path):
    choice, later = tuner(), tuner()
    choice.decide(key_of())
    choice.decisions.save(tmp_path / "kernels.json")
    later.decisions = Decisions.load(tmp_path / "kernels.json", HERE)
    later.timer.ops.mm_search = None
    assert later.decide(key_of()).kernel == "cusparselt:17"
    variant = later.registry.find("cusparselt:17")
    assert (variant.algorithm, variant.searched) == (17, ())
    assert variant.device_probe is later.registry.backends[0].device_probe


@pytest.mark.parametrize(
    "name",
    [f"cusparselt:{end}" for end in ("x", "", "0", "017", "\u0664", "9" * 30)]
    + ["other:17", "reference:1", "other"],
)
def test_names_that_no_kernel_has(name):
    registry = KernelRegistry([KernelOnCpu()])
    assert registry.reason_against(name, key_of()) == "not among the kernels"


def routed(ops, method, **options):
    """A layer, and a router whose operators' times are known."""
    module = nn.Linear(64, 32).to(BF16)
    NMSparsifier(module, "2:4", method, skip_first_last=False).attach()
    times = ByAlgorithm(ops, algorithm17=0.5, algorithm3=0.5)
    router = Router("auto", [KernelOnCpu(ops)], timer=times, **options)

    def window(*sizes):
        with routing(router):
            for tokens in sizes:
                x = torch.randn(tokens, 64, dtype=BF16, requires_grad=True)
                module(x).sum().backward()
        with torch.no_grad():
            module.weight.mul_(2)

    return router, window


def test_algorithms_share_the_packs_of_a_weight():
    """Two sizes of batches, each with an algorithm of its own, in one accumulation window."""
    ops = TrappingOps()
    ops.mm_search = lambda packed, dense, *arguments: (17 if dense.shape[1] > 100 else 3, 1, -1, 9)
    _, window = routed(ops, "ste", reuse=4)
    window(48, 200)
    window(48, 200)
    ops.calls.clear()
    window(48, 200)
    assert {call[5] for call in ops.calls if call[0] == "mm"} == {3, 17}
    assert [call[0] for call in ops.calls].count("compress") == 1


def test_a_training_runs_by_what_was_found():
    ops = TrappingOps(found=17)
    router, window = routed(ops, "bi-mask")
    window(48)  # the forward is dense, and recorded
    window(48)
    used = {use.product.key.gemm: use.kernel for use in router.used()}
    assert used == {"forward": "cusparselt:17", "dgrad": "cusparselt:17", "wgrad": "reference"}
    assert {call[5] for call in ops.calls[-3:] if call[0] == "mm"} == {17}
