"""What BAME keeps and what it needs meanwhile: checkpoints, memory."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_nm import BAME, NMSparsifier
from lightning_nm import functional as nmf
from tests.support.bame import OPTIMIZERS, linear, run


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made meanwhile held at a time."""

    def __init__(self, *known):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        key = storage._cdata
        if key not in self.seen and storage.nbytes():
            self.seen.add(key)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize(
    "pattern", ["1:16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("2:4", "1:2", "8:16"))]
)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_adaptation_needs_few_temporary_copies_of_the_weight(pattern, name):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2048, 2048, bias=False))
    method = BAME(stop=100, every=1, evidence_rate=0.5)
    sparsifier = NMSparsifier(module, pattern, method, skip_first_last=False).attach()
    optimizer = OPTIMIZERS[name](module.parameters())
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    for step in range(3):
        weight = layer.weight
        weight.grad = torch.randn(2048, 2048)
        states = [s for s in optimizer.state[weight].values() if isinstance(s, torch.Tensor)]
        known = [weight, weight.grad, layer.masks.bits, *layer.buffers.values(), *states]
        gc.collect()
        with PeakMemory(*known) as found:
            sparsifier.before_step(optimizer)
        if step < 2:
            optimizer.step()
            sparsifier.step()
    with PeakMemory(
        *known
    ) as applied:  # the exchanges themselves, as they follow the optimizer's step
        layer.spec.method.after_step(layer, optimizer)
    adapted_blocks = float(layer.buffers["adaptation"][0])
    assert adapted_blocks > 0.1 * weight.numel() / layer.pattern.m
    copies = max(found.peak, applied.peak) / (4 * weight.numel())
    assert 0.5 < copies <= 6.5


def test_a_checkpoint_holds_two_bits_a_weight_and_a_byte_a_block():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(512, 512, bias=False))
    sparsifier = NMSparsifier(module, "1:16", BAME(stop=50), skip_first_last=False).attach()
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)  # its state holds the evidence
    sparsifier.register(optimizer)
    for _ in range(3):
        module[0].weight.grad = torch.randn(512, 512)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    buffer = io.BytesIO()
    torch.save(sparsifier.state_dict(), buffer)
    weights = 512 * 512
    assert len(buffer.getvalue()) < weights / 4 + weights / 16 + 6000


@pytest.mark.parametrize("dgrad", ["masked", "bi-mask"])
def test_a_state_restores_the_middle_of_the_evolution(dgrad):
    def make(seed):
        adam = lambda p: torch.optim.Adam(p, 0.1)  # noqa: E731
        return linear(BAME(stop=30, every=3, budget=0.5, dgrad=dgrad), "1:4", adam, seed=seed)

    module, sparsifier, optimizer, layer = make(0)
    run(module, sparsifier, optimizer, 9)
    states = copy.deepcopy((module.state_dict(), sparsifier.state_dict(), optimizer.state_dict()))
    statistics = sparsifier.stats()
    assert layer.progress.dense_gradient, "the next window adapts"
    assert states[1]["layers"]["0"]["latent"] is None, "there is nothing beside the sparse weight"
    run(module, sparsifier, optimizer, 9, start=9)

    other, other_sparsifier, other_optimizer, other_layer = make(1)
    for thing, state in zip((other, other_sparsifier, other_optimizer), states, strict=True):
        thing.load_state_dict(state)
    assert other_sparsifier.stats() == statistics
    assert statistics["flip_rate"] > 0
    run(other, other_sparsifier, other_optimizer, 9, start=9)
    assert torch.equal(layer.weight, other_layer.weight)
    assert sparsifier.stats() == other_sparsifier.stats()
    for name, tensor in layer.buffers.items():
        assert torch.equal(tensor, other_layer.buffers[name]), name


def test_weights_loaded_while_training_have_no_latent_values_either():
    module, sparsifier, optimizer, layer = linear(BAME(stop=20, every=2))
    run(module, sparsifier, optimizer, 3)
    module.load_state_dict({"0.weight": torch.randn(8, 16, dtype=torch.float64)})
    assert torch.equal(module.state_dict()["0.weight"], layer.forward_weight())
    assert nmf.is_nm(layer.forward_weight(), "2:4")
    run(module, sparsifier, optimizer, 1)
    assert not layer.weight[~layer.forward_mask].any()
    layer.weight.data.add_(1)  # as averaging does, behind our back
    assert sparsifier.state_dict()["layers"]["0"]["latent"] is None
