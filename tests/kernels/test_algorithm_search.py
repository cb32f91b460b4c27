"""The library's search of an algorithm: what it finds is checked, measured beside the default, and remembered."""

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.kernels import GemmKey, KernelRegistry, Router, routing
from lightning_nm.kernels.tuner import Decisions, Tuner, environment_of
from lightning_nm.pattern import NMPattern
from tests.support.trapping_cslt import KernelOnCpu, TrappingOps

BF16 = torch.bfloat16


def key_of(gemm="forward", dtype=BF16, tokens=40):
    sizes = (32, tokens, 64) if gemm == "wgrad" else (32, 64, tokens)
    return GemmKey(gemm, *sizes, dtype, NMPattern(2, 4), "cpu")


class ByAlgorithm:
    """A timer that reads which algorithm a call runs."""

    def __init__(self, ops, **milliseconds):
        self.ops, self.milliseconds = ops, milliseconds

    def time(self, function, device):
        before = len(self.ops.calls)
        function()
        made = self.ops.calls[before:]
        if not made:
            return self.milliseconds["dense"]
        if made[-1][0] == "compress":
            return 0.0
        return self.milliseconds[f"algorithm{made[-1][5]}"]


def tuner(found=17, mode="auto", wrong=(), **milliseconds):
    ops = TrappingOps(wrong, found)
    times = {"dense": 1.0, "algorithm0": 1.2, "algorithm17": 0.8, **milliseconds}
    registry = KernelRegistry([KernelOnCpu(ops)])
    return Tuner(
        mode, registry, Decisions(environment_of(torch.device("cpu"))), ByAlgorithm(ops, **times)
    )


@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
def test_the_faster_of_default_and_found(gemm):
    assert tuner().decide(key_of(gemm)).kernel == "cusparselt:17"
    assert tuner(algorithm0=0.5).decide(key_of(gemm)).kernel == "cusparselt"
    assert tuner(algorithm17=0.99).decide(key_of(gemm)).kernel == "reference"
    assert tuner(found=0, algorithm0=0.5).decide(key_of(gemm)).kernel == "cusparselt"


@pytest.mark.parametrize("gemm", ["forward", "wgrad"])
def test_the_operands_of_the_search_are_those_of_the_product(gemm):
    choice = tuner()
    (kernel,) = choice.registry.backends
    searched = []

    def search(packed, dense, *arguments):
        searched.append((packed.shape, dense.shape, dense.is_contiguous(), *arguments))
        return 17, 1, -1, 21

    kernel.ops.mm_search = search
    choice.decide(key_of(gemm, tokens=40))
    if gemm == "forward":  # tokens are padded to a multiple of 8
        assert searched == [((32, 36), (64, 40), False, None, None, None, True)]
    else:  # the depth to that of the sparse matrix, here 16
        assert searched == [((32, 27), (48, 64), True, None, None, None, False)]


def test_a_found_algorithm_that_is_wrong_is_passed_over():
    decision = tuner(wrong=(17,), algorithm0=0.5).decide(key_of())
    assert decision.kernel == "cusparselt"
    assert "cusparselt:17: wrong by" in decision.reason


def test_a_search_that_fails_leaves_the_default():
    choice = tuner(algorithm0=0.5)
    (kernel,) = choice.registry.backends

    def fails(*arguments):
        raise RuntimeError("internal error")

    kernel.ops.mm_search = fails
    decision = choice.decide(key_of())
    assert decision.kernel == "cusparselt"
    assert "its search failed, RuntimeError: internal error" in decision.reason


def test_float16_is_never_searched():
    """There the real search ends in an illegal instruction, which no except catches."""
    choice = tuner(algorithm0=0.5)
    (kernel,) = choice.registry.backends
    kernel.ops.mm_search = None  # would be a TypeError in the reason
    decision = choice.decide(key_of(dtype=torch.float16))
    assert (decision.kernel, "search" in decision.reason) == ("cusparselt", False)


def test_forced_sparse_is_the_same_in_every_run():
    """A search may answer differently, and nothing is timed there."""
    choice = tuner(mode="sparse")
    choice.registry.backends[0].ops.mm_search = None
    decision = choice.decide(key_of())
    assert (decision.kernel, decision.source) == ("cusparselt", "forced")


def test_lengths_of_a_bucket_are_searched_once():
    choice = tuner()
    (kernel,) = choice.registry.backends
    count = []
    kernel.ops.mm_search = lambda *arguments: count.append(1) or (17, 1, -1, 21)
    for tokens in (1000, 1008, 1024):
        choice.registry.searched(kernel, key_of(tokens=tokens))
    assert len(count) == 1


@pytest.mark.parametrize("algorithm", [0, 5])
def test_an_algorithm_that_the_user_names_is_kept(algorithm):
    kernel = KernelOnCpu(TrappingOps(found=17), algorithm=algorithm)
    assert KernelRegistry([kernel]).searched(kernel, key_of()) == [kernel]


def auto(kernels, ops, **milliseconds):
    """A tuner of some kernels, of which the times of one's operators are known."""
    decisions = Decisions(environment_of(torch.device("cpu")))
    return Tuner("auto", KernelRegistry(kernels), decisions, ByAlgorithm(ops, **milliseconds))


def test_a_found_algorithm_that_leaves_out_the_bias_is_passed_over():
    class WithoutBias(TrappingOps):
        def _cslt_sparse_mm(self, packed, dense, bias=None, alg_id=0, **arguments):
            bias = None if alg_id == 17 else bias
            return super()._cslt_sparse_mm(packed, dense, bias, alg_id=alg_id, **arguments)

    ops = WithoutBias(found=17)
    choice = auto([KernelOnCpu(ops)], ops, dense=1.0, algorithm0=0.5, algorithm17=0.1)
    decision = choice.decide(key_of())
    assert decision.kernel == "cusparselt"
    assert "cusparselt:17: wrong by" in decision.reason


def test_a_renamed_kernel_finds_its_own_variants():
    ops = TrappingOps(found=17)
    kernel = KernelOnCpu(ops)
    kernel.name = "my:second"
    other = KernelOnCpu(TrappingOps(wrong_algorithms=(0, 17)))
    choice = auto([other, kernel], ops, dense=1.0, algorithm0=1.2, algorithm17=0.5)
    assert choice.decide(key_of()).kernel == "my:second:17"
    found = choice.registry.find("my:second:17")
    assert found.name == "my:second:17"
    assert found.ops is ops


def test_a_decision_without_a_search_is_made_again():
    first = tuner(algorithm17=0.5)
    first.registry.backends[0].searched = ()
    assert first.decide(key_of()).kernel == "reference"
    later = tuner(algorithm17=0.5)
    later.decisions = first.decisions
    assert later.decide(key_of()).kernel == "cusparselt:17"


def test_algorithms_share_the_packs_of_a_weight():
    """Two sizes of batches, each with an algorithm of its own, in one accumulation window."""
    module = nn.Linear(64, 32).to(BF16)
    NMSparsifier(module, "2:4", "ste", skip_first_last=False).attach()
    ops = TrappingOps()
    ops.mm_search = lambda packed, dense, *arguments: (17 if dense.shape[1] > 100 else 3, 1, -1, 9)
    times = ByAlgorithm(ops, dense=1.0, algorithm0=1.2, algorithm17=0.5, algorithm3=0.5)
    router = Router("auto", [KernelOnCpu(ops)], reuse=4, timer=times)

    def window():
        with routing(router):
            for tokens in (48, 200):
                module(torch.randn(tokens, 64, dtype=BF16)).sum().backward()
        with torch.no_grad():
            module.weight.mul_(2)

    window()
    window()
    ops.calls.clear()
    window()
    assert {call[5] for call in ops.calls if call[0] == "mm"} == {3, 17}
    assert [call[0] for call in ops.calls].count("compress") == 1


def test_a_kept_decision_runs_in_another_process_without_a_search(tmp_path):
    choice = tuner()
    choice.decide(key_of())
    choice.decisions.save(tmp_path / "kernels.json")
    environment = environment_of(torch.device("cpu"))
    later = tuner()
    later.decisions = Decisions.load(tmp_path / "kernels.json", environment)
    later.registry.backends[0].ops.mm_search = None
    assert later.decide(key_of()).kernel == "cusparselt:17"
    variant = later.registry.find("cusparselt:17")
    assert (variant.algorithm, variant.searched) == (17, ())
    assert variant.device_probe is later.registry.backends[0].device_probe


NAMES = ("cusparselt:x", "cusparselt:", "cusparselt:0", "cusparselt:017", "cusparselt:\u0664")


@pytest.mark.parametrize(
    "name", [*NAMES, "cusparselt:" + "9" * 30, "other:17", "reference:1", "other"]
)
def test_names_that_no_kernel_has(name):
    registry = KernelRegistry([KernelOnCpu()])
    assert registry.reason_against(name, key_of()) == "not among the kernels"


def test_a_training_runs_by_what_was_found():
    module = nn.Linear(64, 32).to(BF16)
    sparsifier = NMSparsifier(module, "2:4", "bi-mask", skip_first_last=False).attach()
    ops = TrappingOps(found=17)
    times = ByAlgorithm(ops, dense=1.0, algorithm0=1.2, algorithm17=0.5)
    router = Router("auto", [KernelOnCpu(ops)], timer=times)
    for _ in range(2):  # in the first batch the forward is dense, and recorded
        with routing(router):
            module(torch.randn(48, 64, dtype=BF16, requires_grad=True)).sum().backward()
    used = {use.product.key.gemm: use.kernel for use in router.used()}
    assert used == {"forward": "cusparselt:17", "dgrad": "cusparselt:17", "wgrad": "reference"}
    assert {call[5] for call in ops.calls[-3:] if call[0] == "mm"} == {17}
    assert sparsifier.layers
