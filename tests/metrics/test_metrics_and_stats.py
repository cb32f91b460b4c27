"""The metrics say of a model in training what the sparsifier's own statistics say."""

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.metrics import MaskFlipRate
from lightning_nm.training.statistics import mean_flip_rate


@pytest.mark.parametrize("method", ["ste", "bi-mask"])
def test_flip_rates_of_steps_and_of_a_training(method):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8)
    )
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    optimizer, layers = torch.optim.SGD(model.parameters(), 0.3), sparsifier.layers
    sparsifier.register(optimizer)
    metric = MaskFlipRate()
    metric({name: layer.forward_mask for name, layer in layers.items()})
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(32, 16)).square().sum(1).sub(1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        found = metric({name: layer.forward_mask for name, layer in layers.items()})
        assert found.item() == pytest.approx(sparsifier.stats()["flip_rate"])
    assert metric.compute().item() == pytest.approx(mean_flip_rate(layers.values())) != 0
