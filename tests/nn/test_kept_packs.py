"""Packs of weights that micro-batches share: never older than the weight, never in a graph."""

import gc

import pytest
import torch

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm.kernels import Router, routing
from tests.support.fake_kernels import FakeKernel
from tests.support.kinds import make
from tests.support.routed import attach, compare, gradients, masked, ran, simulated, timed


class Counting(SimulatedSparseKernel):
    packs = 0

    def pack(self, matrix):
        self.packs += 1
        return super().pack(matrix)


def capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.mark.parametrize("reuse", [1, 2])
def test_micro_batches_share_packs_of_weights_and_steps_do_not(reuse):
    module, x = make("linear")
    sparsifier = attach(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    sparsifier.register(optimizer)
    kernel = Counting()
    router = Router("sparse", [kernel], reuse=reuse)
    gradients(module, x, router)  # the trial of each GEMM packs, too
    for step in range(4):
        kernel.packs = 0
        for _ in range(2):
            gradients(module, x, router)
        assert kernel.packs == 2 * (2 if reuse == 1 else min(1, step))
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


def test_captures_of_graphs_neither_use_nor_keep_packs(monkeypatch):
    module, x = masked()
    kernel = Counting()
    router = Router("sparse", [kernel], reuse=2)
    gradients(module, x, router)
    kernel.packs = 0
    gradients(module, x, router)
    assert kernel.packs == 0
    capture(monkeypatch)
    for _ in range(2):
        gradients(module, x, router)
    assert kernel.packs == 4


@pytest.mark.parametrize("mode", ["auto", "sparse"])
def test_captures_neither_try_nor_measure(mode, monkeypatch):
    module, x = masked()
    fast = FakeKernel()
    router = timed(fast) if mode == "auto" else Router(mode, [fast])
    with monkeypatch.context() as patch:
        capture(patch)
        router.tune()
        gradients(module, x, router)
        assert not fast.calls
        assert {kernel for _, kernel in ran(router)} == {"reference"}
    gradients(module, x, router)
    assert ("forward", "fast") in ran(router)


def test_packs_are_of_training_passes_alone():
    """Averages are swapped in for validation through .data, which no version tells."""
    module, x = masked()
    router = simulated(reuse=2)
    gradients(module, x, router)
    kept = module.weight.detach().clone()
    module.weight.data.mul_(2)
    with routing(router), torch.no_grad():
        found = module(x)
    with torch.no_grad():
        # The router's GEMM is of 8 tokens, 2 of them zeros: some CPUs add it up in another order than that of 6.
        torch.testing.assert_close(found, module(x), rtol=1e-12, atol=1e-12)
    module.weight.data.copy_(kept)
    compare(module, x, router)


def test_packs_go_with_their_layer_and_with_the_router():
    module, x = make("linear")
    sparsifier = attach(module)
    router = simulated(reuse=2)
    gradients(module, x, router)
    assert len(router._packs) == 1
    router.release()
    assert not router._packs
    gradients(module, x, router)
    sparsifier.detach()
    del module, sparsifier
    gc.collect()
    assert not router._packs
