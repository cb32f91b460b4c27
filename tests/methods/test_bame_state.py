"""What BAME keeps and what it needs meanwhile: memory, checkpoints, memory formats."""

import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_nm import BAME
from lightning_nm import functional as nmf
from tests.support.bame import OPTIMIZERS, loop
from tests.support.method_loop import Loop


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


def square(size):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size, bias=False))


@pytest.mark.parametrize("pattern", ["1:16", "2:4", "8:16"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_adaptation_needs_few_temporary_copies_of_the_weight(pattern, name):
    method = BAME(stop=100, every=1, evidence_rate=0.5)
    run = Loop(method, pattern, OPTIMIZERS[name], square(1024), (12, 1024))
    run.train(2).backward()
    layer, weight = run.layer, run.layer.weight
    states = [s for s in run.state.values() if isinstance(s, torch.Tensor)]
    known = [weight, weight.grad, layer.masks.bits, *layer.buffers.values(), *states]
    gc.collect()
    with PeakMemory(*known) as found:
        run.sparsifier.before_step(run.optimizer)
    with PeakMemory(*known) as applied:  # the exchanges, as they follow the optimizer's step
        method.after_step(layer, run.optimizer)
    assert float(layer.buffers["adaptation"][0]) > 0.1 * weight.numel() / layer.pattern.m
    copies = max(found.peak, applied.peak) / (4 * weight.numel())
    assert 0.5 < copies <= 6.5


def test_a_checkpoint_holds_two_bits_a_weight_and_a_byte_a_block():
    adamw = lambda p: torch.optim.AdamW(p, 0.1)  # noqa: E731
    run = Loop(BAME(stop=50), "1:16", adamw, square(512), (12, 512)).train(3)
    buffer = io.BytesIO()
    torch.save(run.sparsifier.state_dict(), buffer)
    weights = 512 * 512
    assert len(buffer.getvalue()) < weights / 4 + weights / 16 + 6000


def test_weights_loaded_while_training_have_no_latent_values_either():
    run = loop(BAME(stop=20, every=2)).train(3)
    run.model.load_state_dict({"0.weight": torch.randn(8, 16, dtype=torch.float64)})
    assert torch.equal(run.model.state_dict()["0.weight"], run.layer.forward_weight())
    assert nmf.is_nm(run.layer.forward_weight(), "2:4")
    run.train(1)
    assert not run.layer.weight[~run.layer.forward_mask].any()
    run.layer.weight.data.add_(1)  # as averaging does, behind our back
    assert run.sparsifier.state_dict()["layers"]["0"]["latent"] is None


def test_the_flat_layout_evolves_alike_in_every_memory_format():
    def train(memory_format):
        torch.manual_seed(0)
        conv = nn.Conv2d(16, 8, 3).double().to(memory_format=memory_format)
        # No entry is so small that it is exchanged after the first gradient, when |U| is the same everywhere.
        conv.weight.data.add_(conv.weight.sign())
        method = BAME(stop=20, every=2, budget=1.0, evidence_rate=0.2)
        adamw = lambda p: torch.optim.AdamW(p, 0.05)  # noqa: E731
        model, shape = nn.Sequential(conv), (4, 16, 5, 5)
        run = Loop(method, make=adamw, model=model, shape=shape, conv_layout="flat").train(12)
        return conv.weight.detach().contiguous(), int(run.layer.masks.total_flips)

    plain, channels_last = train(torch.contiguous_format), train(torch.channels_last)
    torch.testing.assert_close(plain[0], channels_last[0])
    assert plain[1] == channels_last[1] > 0
