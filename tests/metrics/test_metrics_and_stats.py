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
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8)
    )
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    sparsifier.register(optimizer)
    flip_rate, oscillation = MaskFlipRate(), MaskOscillation()
    flip_rate.update(
        masks := {name: layer.forward_mask for name, layer in sparsifier.layers.items()}
    )
    oscillation.update(masks)
    masks_move_each_step = isinstance(method, str)
    for _ in range(6):
        model(torch.randn(32, 16)).square().sum(1).sub(1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        sparsifier.step()
        stats, layers = sparsifier.stats(), sparsifier.layers
        masks = {name: layer.forward_mask for name, layer in layers.items()}
        assert MaskDensity()(masks).item() == pytest.approx(stats["density"])
        assert MaskViolations("2:4", dim=1)(masks) == sparsifier.violations() == 0
        flips = flip_rate(masks).item()
        if masks_move_each_step:  # else stats() tells of the last adaptation
            assert flips == pytest.approx(stats["flip_rate"])
        oscillation.update(masks)
        weights = {name: layer.weight for name, layer in layers.items()}
        assert KeptMagnitude()(weights, masks).item() == pytest.approx(stats["kept_magnitude"])
        backward = {
            name: masks[name] if layer.masks.backward is None else layer.masks.backward
            for name, layer in layers.items()
        }
        assert MaskOverlap()(masks, backward).item() == pytest.approx(stats["overlap"])
    assert flip_rate.compute().item() == pytest.approx(mean_flip_rate(sparsifier.layers.values()))
    assert flip_rate.compute() > 0
    assert oscillation.compute() <= flip_rate.compute()
    if method == "ste":
        assert oscillation.compute() > 0
