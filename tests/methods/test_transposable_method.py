"""The method of transposable masks; the masks themselves are tested with their function."""

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier, TransposableMask
from lightning_nm import functional as nmf


def attached(out=16, method=None, pattern="2:4", conv=False):
    torch.manual_seed(0)
    layer = nn.Conv2d(16, out, 3) if conv else nn.Linear(16, out)
    module = nn.Sequential(layer)
    method = method or TransposableMask(update_every=3)
    sparsifier = NMSparsifier(module, pattern, method, skip_first_last=False).attach()
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    sparsifier.register(optimizer)
    return module, sparsifier, optimizer, sparsifier.layers["0"]


def step(module, sparsifier, optimizer):
    optimizer.zero_grad()
    (module(torch.randn(8, 16)) - 1).square().mean().backward()
    sparsifier.before_step(optimizer)
    optimizer.step()
    sparsifier.step()


def test_the_mask_is_the_best_transposable_one_of_the_weights_when_it_was_selected():
    module, sparsifier, optimizer, layer = attached()
    masks = []
    for number in range(1, 8):
        step(module, sparsifier, optimizer)
        masks.append(layer.forward_mask)
        if number % 3 == 0:
            assert torch.equal(masks[-1], nmf.transposable_mask(layer.weight.detach(), "2:4"))
    moved = [
        number for number in range(2, 8) if not torch.equal(masks[number - 2], masks[number - 1])
    ]
    assert moved == [3, 6]


@pytest.mark.parametrize("conv", [False, True])
def test_dgrad_is_exact_and_counts_as_sparse(conv):
    _, sparsifier, _, layer = attached(conv=conv)
    assert torch.equal(layer.backward_weight(), layer.forward_weight())
    rows = layer.view.rows(layer.forward_mask)
    assert nmf.is_nm(rows, "2:4", dim=0)
    assert nmf.is_nm(rows, "2:4", dim=1)
    assert [gemm.label for gemm in layer.gemms()] == ["2:4", "2:4", "dense"]
    assert sparsifier.flops_ratios() == pytest.approx(
        {"arithmetic": 2 / 3, "paper": 2 / 3, "eligible": 2 / 3}
    )


def test_rows_that_are_no_blocks_get_the_mask_of_one_direction():
    _, sparsifier, _, layer = attached(out=10)
    assert torch.equal(layer.forward_mask, nmf.magnitude_mask(layer.weight.detach(), "2:4", dim=1))
    assert [gemm.label for gemm in layer.gemms()] == ["2:4", "masked", "dense"]
    assert "out 10 % 4" in layer.gemms().dgrad.reason
    assert sparsifier.flops_ratios()["eligible"] == pytest.approx((0.5 + 2) / 3)
    with pytest.raises(ValueError, match=r"in 6 % 4 != 0"):
        NMSparsifier(nn.Linear(6, 16), "2:4", "transposable", skip_first_last=False).attach()


def test_bad_settings():
    with pytest.raises(ValueError, match="update_every=0"):
        TransposableMask(update_every=0)
    with pytest.raises(ValueError, match=r"decay=-1"):
        TransposableMask(decay=-1)
