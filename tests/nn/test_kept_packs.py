"""Packs of weights that micro-batches share: never older than the weight, never in a graph."""

import gc

import pytest
import torch

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm.kernels import Router, routing
from tests.support.fake_kernels import FakeKernel, FakeTimer
from tests.support.kinds import make
from tests.support.routed import assert_equal, attach, gradients, ran, simulated

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


class Counting(SimulatedSparseKernel):
    def __init__(self):
        self.packs = 0

    def pack(self, matrix):
        self.packs += 1
        return super().pack(matrix)


def capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def micro_batches(module, x, router, count):
    for _ in range(count):
        with routing(router):
            module(x).square().sum().backward()


@pytest.mark.parametrize("reuse", [1, 2])
def test_micro_batches_share_packs_of_weights_and_steps_do_not(reuse):
    module, x = make("linear")
    x.requires_grad_()
    sparsifier = attach(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    sparsifier.register(optimizer)
    kernel = Counting()
    router = Router("sparse", [kernel], reuse=reuse)
    micro_batches(module, x, router, 1)  # the trial of each product packs, too
    for step in range(4):
        kernel.packs = 0
        micro_batches(module, x, router, 2)
        assert kernel.packs == 2 * (2 if reuse == 1 else min(1, step))
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


CHANGES = {
    "in place": lambda module, sparsifier: module.weight.mul_(1.5),
    "through data, in a step": lambda module, sparsifier: step(module, sparsifier),
    "other weights": lambda module, sparsifier: module.load_state_dict(
        {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    ),
    "masks": lambda module, sparsifier: [
        layer.set_masks(layer.forward_mask.roll(1, 0), layer.masks.backward.roll(1, 1))
        for layer in sparsifier.layers.values()
    ],
    "baked": lambda module, sparsifier: sparsifier.bake(),
    "float32": lambda module, sparsifier: module.float(),
}


class ThroughData(torch.optim.SGD):
    """Writes where no version is counted."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()
                parameter.data.mul_(0.5)


def step(module, sparsifier):
    optimizer = ThroughData(module.parameters(), 0.1)
    sparsifier.register(optimizer)
    sparsifier.before_step(optimizer)
    optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
def test_no_pack_is_older_than_its_weight(change):
    module, x = make("linear")
    sparsifier = attach(module)
    router = simulated(reuse=2)
    for _ in range(2):
        gradients(module, x, router)
    with torch.no_grad():
        CHANGES[change](module, sparsifier)
    x = x.to(module.weight.dtype)
    assert_equal(gradients(module, x, router), gradients(module, x, None))


def test_captures_of_graphs_neither_use_nor_keep_packs_nor_measure(monkeypatch):
    module, x = make("linear")
    attach(module)
    kernel = Counting()
    router = Router("sparse", [kernel], reuse=2)
    gradients(module, x, router)
    kernel.packs = 0
    gradients(module, x, router)
    assert kernel.packs == 0
    capture(monkeypatch)
    gradients(module, x, router)
    gradients(module, x, router)
    assert kernel.packs == 4

    fast = FakeKernel()
    timer = FakeTimer([fast], dense=9.0, fast=(1.0, 0.0))
    auto = Router("auto", [fast], timer=timer)
    auto.tune()
    gradients(module, x, auto)
    assert not timer.timed
    assert {kernel for _, kernel in ran(auto)} == {"reference"}
    monkeypatch.undo()
    gradients(module, x, auto)
    assert timer.timed
    assert ("forward", "fast") in ran(auto)


def test_packs_are_of_training_passes_alone():
    """Averages are swapped in for validation through .data, which no version tells."""
    module, x = make("linear")
    attach(module)
    router = simulated(reuse=2)
    expected = gradients(module, x, router)
    kept = module.weight.detach().clone()
    module.weight.data.mul_(2)
    with routing(router), torch.no_grad():
        found = module(x)
    with torch.no_grad():
        # The router's product is of 8 tokens, 2 of them zeros: some CPUs add it up in another order than that of 6.
        torch.testing.assert_close(found, module(x), rtol=1e-12, atol=1e-12)
    module.weight.data.copy_(kept)
    assert_equal(gradients(module, x, router), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["auto", "sparse"])
def test_captures_try_nothing(mode, monkeypatch):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    router = Router(mode, [fast], timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
    capture(monkeypatch)
    gradients(module, x, router)
    assert not fast.calls
    assert {kernel for _, kernel in ran(router)} == {"reference"}


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
