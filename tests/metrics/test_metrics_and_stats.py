"""The metrics say of a model in training what the sparsifier's own statistics say."""

import pytest
import torch
from torch import nn

from lightning_nm import BAME, NMSparsifier
from lightning_nm.metrics import (
    KeptMagnitude,
    MaskDensity,
    MaskFlipRate,
    MaskOscillation,
    MaskOverlap,
    MaskViolations,
)
from lightning_nm.training.statistics import mean_flip_rate


@pytest.mark.parametrize(
    "method", ["ste", "bi-mask", BAME(every=1, stop=5)], ids=["ste", "bi-mask", "bame"]
)
def test_metrics_agree_with_the_statistics(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.Linear(24, 8))
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    optimizer, layers = torch.optim.SGD(model.parameters(), 0.3), sparsifier.layers
    sparsifier.register(optimizer)

    def of_layers(read):
        return {name: read(layer) for name, layer in layers.items()}

    flip_rate, oscillation = MaskFlipRate(), MaskOscillation()
    for metric in (flip_rate, oscillation):
        metric.update(of_layers(lambda layer: layer.forward_mask))
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(32, 16)).square().sum(1).sub(1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        stats, masks = sparsifier.stats(), of_layers(lambda layer: layer.forward_mask)
        weights = of_layers(lambda layer: layer.weight)
        backward = of_layers(
            lambda layer: (
                layer.forward_mask if layer.masks.backward is None else layer.masks.backward
            )
        )
        assert MaskViolations("2:4", dim=1)(masks) == sparsifier.violations() == 0
        found = {
            "density": MaskDensity()(masks),
            "flip_rate": flip_rate(masks),
            "kept_magnitude": KeptMagnitude()(weights, masks),
            "overlap": MaskOverlap()(masks, backward),
        }
        if isinstance(method, BAME):  # stats() tells of the last adaptation
            del found["flip_rate"]
        for name, value in found.items():
            assert value.item() == pytest.approx(stats[name]), name
        oscillation.update(masks)
    assert flip_rate.compute().item() == pytest.approx(mean_flip_rate(layers.values())) != 0
    assert oscillation.compute() <= flip_rate.compute()
    assert method != "ste" or oscillation.compute() > 0
