"""Muon under every method: each step is Muon's, and runs resume exactly. tests/test_contract.py has what refuses it."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import BAME, NMSparsityCallback
from lightning_nm import functional as nmf
from tests.support.contract import METHODS, OPTIONS, OWNERS, refusal
from tests.support.lightning_models import make_trainer
from tests.support.loop import Loop, adamw, mlp, same
from tests.support.muon import muon

TAKEN = [name for name in METHODS if refusal(name, "muon") is None and name not in OWNERS]


def of_matrices(parameters):
    return muon([p for p in parameters if p.dim() == 2], 0.02, weight_decay=0.1)


@pytest.mark.parametrize("method", TAKEN)
def test_each_step_is_that_of_muon(method):
    """Of a stock Muon that gets the same gradients; a method without latent weights then zeroes pruned entries."""
    options = {"optimizer": of_matrices, **OPTIONS.get(method, {})}
    loop = Loop(mlp(16, 32, 8), METHODS[method](), **options)
    layers = list(loop.layers.values())
    twins = [nn.Parameter(layer.weight.detach().clone()) for layer in layers]
    stock = of_matrices(twins)
    for number in range(3):
        loop.backward(number)
        loop.sparsifier.before_step(loop.optimizer)
        masks = [layer.forward_mask for layer in layers]
        for twin, layer in zip(twins, layers, strict=True):
            twin.data.copy_(layer.weight.detach())
            twin.grad = layer.weight.grad.clone()
        stock.step()
        loop.optimizer.step()
        for twin, layer, mask in zip(twins, layers, masks, strict=True):
            is_pruned = mask is not None and not layer.spec.method.latent
            expected = torch.where(mask, twin, 0) if is_pruned else twin
            torch.testing.assert_close(layer.weight, expected, check_dtype=False)
        loop.sparsifier.step()
        for twin, layer, mask in zip(twins, layers, masks, strict=True):
            if mask is None and layer.masks.has_forward and not layer.spec.method.latent:
                # Pruned just now, with the momentum of before.
                stock.state[twin]["momentum_buffer"].masked_fill_(~layer.forward_mask, 0)
    assert layers[0].step == 3


def test_bame_trains_layers_that_muon_does_not():
    model = mlp(16, 32, 32, 8)
    own = model[2].weight
    rest = [p for p in model.parameters() if p is own or p.dim() == 1]
    method = BAME(stop=100, budget=1.0)
    loop = Loop(model, method, optimizer=lambda _: adamw(rest), include="2")
    other = of_matrices([model[0].weight, model[4].weight])
    loop.sparsifier.register(other)
    before = loop.weights()
    for number in range(4):
        loop.backward(number)
        loop.sparsifier.before_step(other)
        other.step()
        loop.step()
    assert nmf.is_nm(own, "2:4", dim=1)
    assert not any(map(torch.equal, before, loop.weights()))


class ManualModule(pl.LightningModule):
    """Muon for the matrices and AdamW for the rest, which Lightning leaves to manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = mlp(16, 32, 32, 8)

    def configure_optimizers(self):
        rest = [p for p in self.net.parameters() if p.dim() != 2]
        return [of_matrices(self.net.parameters()), adamw(rest)]

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = self.net(x).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def train_dataloader(self):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), batch_size=8)


@pytest.mark.parametrize("method", ["sr-ste", "asp", "bi-mask"])
def test_a_trainer_with_both_optimizers_resumes_bit_for_bit(tmp_path, method):
    def fit(epochs, checkpoint=None):
        nm = NMSparsityCallback("2:4", method, skip_first_last=False, show_tables=False)
        trainer, model = make_trainer(tmp_path, [nm], max_epochs=epochs), ManualModule()
        trainer.fit(model, ckpt_path=checkpoint)
        return trainer, list(model.parameters())

    _, whole = fit(2)
    trainer, _ = fit(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = fit(2, tmp_path / "half.ckpt")
    assert same(whole, resumed)
    assert all(nmf.is_nm(p, "2:4", dim=1) for p in whole if p.dim() == 2)
