"""Muon under every method: each step is Muon's, forward weights stay N:M, and runs resume exactly."""

import copy
import io

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import BAME, NMSparsifier, NMSparsityCallback
from lightning_nm import functional as nmf
from tests.support.contract import METHODS, OPTIONS, OWNERS, refusal
from tests.support.lightning_models import make_trainer
from tests.support.muon import muon

# Some methods use the state of SGD or Adam; others own parameters that are no matrices, which Muon does not train.
REFUSED = [name for name in METHODS if refusal(name, "muon") is not None or name in OWNERS]
TAKEN = [name for name in METHODS if name not in REFUSED]


def some_fast(methods, *fast):
    """Marks the others slow."""
    slow = pytest.mark.slow
    return [name if name in fast else pytest.param(name, marks=slow) for name in methods]


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)
    )


def optimizers_of(model):
    """Muon for the matrices and AdamW for the rest, as Muon's documentation says."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return muon(matrices, 0.02, weight_decay=0.1), torch.optim.AdamW(rest, 1e-2)


class Run:
    def __init__(self, method, seed=0):
        self.model = mlp(seed)
        options = {"skip_first_last": False, "seed": seed, **OPTIONS.get(method, {})}
        self.sparsifier = NMSparsifier(self.model, "2:4", METHODS[method](), **options).attach()
        self.optimizers = optimizers_of(self.model)
        for optimizer in self.optimizers:
            self.sparsifier.register(optimizer)

    @property
    def parts(self):
        return (self.model, self.sparsifier, *self.optimizers)

    def train(self, steps, first=0, between=lambda: None):
        for step in range(first, first + steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            for optimizer in self.optimizers:
                self.sparsifier.before_step(optimizer)
            between()
            for optimizer in self.optimizers:
                optimizer.step()
            for layer in self.sparsifier.layers.values():
                check_nm(layer)
            self.sparsifier.step()


def check_nm(layer):
    if layer.masks.has_forward:
        rows = layer.view.rows(layer.forward_weight())
        pattern = layer.spec.method.current_pattern(layer)
        assert pattern is None or nmf.is_nm(rows, pattern, dim=1)


@pytest.mark.parametrize("method", TAKEN)
def test_each_step_is_that_of_muon(method):
    """Of a stock Muon that gets the same gradients; a method without latent weights then zeroes pruned entries."""
    run = Run(method)
    layers = list(run.sparsifier.layers.values())
    twins = [nn.Parameter(layer.weight.detach().clone()) for layer in layers]
    stock = muon(twins, 0.02, weight_decay=0.1)
    masks = []

    def step_twins():
        masks.append([layer.forward_mask for layer in layers])
        for twin, layer in zip(twins, layers, strict=True):
            twin.data.copy_(layer.weight.detach())
            twin.grad = layer.weight.grad.clone()
        stock.step()

    for step in range(3):
        # The masks move at the end of a batch: what is compared is the weight, which they do not change.
        run.train(1, step, step_twins)
        for twin, layer, mask in zip(twins, layers, masks[-1], strict=True):
            expected = twin.detach()
            if not layer.spec.method.latent and mask is not None:
                expected = torch.where(mask, expected, 0)
            if not layer.spec.method.latent and mask is None and layer.masks.has_forward:
                # Pruned just now, with the momentum of before.
                expected = torch.where(layer.forward_mask, expected, 0)
                for state in stock.state[twin].values():
                    if torch.is_tensor(state) and state.shape == twin.shape:
                        state.masked_fill_(~layer.forward_mask, 0)
            torch.testing.assert_close(layer.weight.detach(), expected)
    # Masks that still come block by block hold to no pattern.
    if all(layer.spec.method.current_pattern(layer) is not None for layer in layers):
        assert run.sparsifier.violations() == 0
    assert layers[0].step == 3


@pytest.mark.parametrize("method", some_fast(TAKEN, "sr-ste", "asp", "bi-mask"))
def test_a_run_resumes_bit_for_bit(method):
    whole = Run(method)
    whole.train(3)
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in whole.parts], buffer)
    whole.train(3, 3)
    resumed = Run(method, seed=1)
    buffer.seek(0)
    states = torch.load(buffer, weights_only=True)
    for part, state in zip(resumed.parts, states, strict=True):
        part.load_state_dict(state)
    resumed.train(3, 3)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_need_other_optimizers_refuse_it_before_any_step(method):
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    options = {"skip_first_last": False, **OPTIONS.get(method, {})}
    sparsifier = NMSparsifier(model, "2:4", METHODS[method](), **options).attach()
    words = f"{refusal(method, 'muon')}.*layer '0'.*use .* or a.* method"
    if method in OWNERS:
        words = "Muon trains matrices only.*layer '0': use another optimizer"
    first, _ = optimizers_of(model)
    with pytest.raises(ValueError, match=words):
        sparsifier.register(first)
    sparsifier.detach()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_bame_trains_layers_that_muon_does_not():
    model = mlp()
    sparsifier = NMSparsifier(
        model, "2:4", BAME(stop=100, budget=1.0), include="2", skip_first_last=False
    ).attach()
    bame_weight = model[2].weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not bame_weight]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizers = muon(matrices, 0.02), torch.optim.AdamW([bame_weight, *rest], 1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    for optimizer in optimizers:
        sparsifier.register(optimizer)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        for optimizer in optimizers:
            sparsifier.before_step(optimizer)
            optimizer.step()
        sparsifier.step()
    assert nmf.is_nm(bame_weight, "2:4", dim=1)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_supar_refuses_muon_by_name():
    """Its step does not depend on the size of a gradient, and its own rule scales it by the shape of the weight."""
    model = mlp()
    sparsifier = NMSparsifier(model, "1:4", "asp", scale="supar", skip_first_last=False).attach()
    first, _ = optimizers_of(model)
    with pytest.raises(
        ValueError, match=r"layer '0'.*not for Muon: use one of them, .*or use scale=None"
    ):
        sparsifier.register(first)


class ManualModule(pl.LightningModule):
    """Two optimizers, which Lightning leaves to manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = mlp()

    def configure_optimizers(self):
        return list(optimizers_of(self.net))

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


@pytest.mark.parametrize("method", some_fast(["sr-ste", "asp", "bi-mask"], "bi-mask"))
def test_a_trainer_with_both_optimizers_resumes_bit_for_bit(tmp_path, method):
    def fit(epochs, checkpoint=None):
        callback = NMSparsityCallback(
            "2:4", method, skip_first_last=False, show_tables=False, monitor=False
        )
        trainer = make_trainer(tmp_path, [callback], max_epochs=epochs)
        model = ManualModule()
        trainer.fit(model, ckpt_path=checkpoint)
        return model, trainer

    whole, _ = fit(2)
    _, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(2, tmp_path / "half.ckpt")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    for linear in whole.net[::2]:
        assert nmf.is_nm(linear.weight, "2:4", dim=1)
