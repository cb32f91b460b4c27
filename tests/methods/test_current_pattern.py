"""A method whose N changes while it trains."""

import torch
from torch import nn

from lightning_nm import NMPattern, NMSparsifier
from lightning_nm.functional import is_nm, magnitude_mask
from lightning_nm.methods import MaskMethod


class DecayingN(MaskMethod):
    """3:4 for the first two steps, then the layer's 2:4."""

    def current_pattern(self, layer):
        return NMPattern(3, 4) if layer.step < 2 else layer.pattern

    def init_masks(self, layer):
        pattern = self.current_pattern(layer)
        layer.set_masks(layer.view.by_rows(lambda rows: magnitude_mask(rows, pattern, dim=1)))

    def update(self, layer):
        self.init_masks(layer)


def test_a_wider_pattern_is_no_violation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    sparsifier = NMSparsifier(model, "2:4", DecayingN()).attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.register(optimizer)
    layer = sparsifier.layers["0"]
    densities = []
    for _ in range(3):
        densities.append(layer.forward_mask.float().mean().item())
        assert sparsifier.violations() == 0
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert densities == [0.75, 0.75, 0.5]
    assert is_nm(layer.forward_weight(), "2:4")
    layer.set_masks(None if layer.forward_mask is None else torch.ones_like(layer.forward_mask))
    assert sparsifier.violations() == layer.weight.numel() // 4
