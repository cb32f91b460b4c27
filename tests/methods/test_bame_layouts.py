"""BAME on every layout of a weight, and its backward mask."""

import pytest
import torch
from torch import nn

from lightning_nm import BAME, NMSparsifier
from lightning_nm import functional as nmf
from tests.support.bame import linear, run


@pytest.mark.parametrize("layout", ["linear", "conv", "conv-flat", "conv-groups", "channels-last"])
def test_convolutions_evolve_along_their_own_blocks(layout):
    torch.manual_seed(0)
    conv = (
        nn.Linear(16, 8)
        if layout == "linear"
        else nn.Conv2d(16, 8, 3, groups=2 if "groups" in layout else 1)
    )
    if layout == "channels-last":
        conv = conv.to(memory_format=torch.channels_last)
    module = nn.Sequential(conv)
    sparsifier = NMSparsifier(
        module,
        "2:4",
        BAME(stop=20, every=2, budget=1.0, dgrad="bi-mask"),
        skip_first_last=False,
        conv_layout="flat" if layout == "conv-flat" else "channels",
    ).attach()
    optimizer = torch.optim.SGD(module.parameters(), 0.3, momentum=0.9)
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    x = torch.randn(4, 16) if layout == "linear" else torch.randn(4, 16, 5, 5)
    start = layer.forward_mask
    for _ in range(8):
        optimizer.zero_grad()
        (module(x) - 1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        rows = layer.view.rows(layer.forward_mask)
        assert (rows.movedim(1, -1).unflatten(-1, (-1, 4)).sum(-1) == 2).all()
        assert not layer.weight[~layer.forward_mask].any()
        assert not (layer.masks.backward & ~layer.forward_mask).any()
        for group in layer.view.rows(layer.masks.backward)[layer.masks.permutation].chunk(
            layer.spec.groups
        ):
            assert nmf.is_nm(group, "2:4", dim=0)
    assert (layer.forward_mask ^ start).any()


def test_dgrad_bi_mask_follows_the_weights_between_adaptations():
    method = BAME(stop=10, every=100, dgrad="bi-mask")
    with pytest.warns(UserWarning, match="adapts once"):
        module, sparsifier, optimizer, layer = linear(method)
    method._bi_mask.permute_every = 4
    marks = []
    run(
        module,
        sparsifier,
        optimizer,
        9,
        look=lambda step: marks.append((layer.masks.backward, layer.masks.flips)),
    )
    moved = [step for step in range(8) if not torch.equal(marks[step][0], marks[step + 1][0])]
    assert set(moved) <= {3, 7}
    assert moved, "the weights moved, so the mask should have"
    assert len({int(flips) for _, flips in marks}) == 1, (
        "the flips stay those of the last adaptation"
    )


def test_the_flat_layout_evolves_alike_in_every_memory_format():
    def train(memory_format):
        torch.manual_seed(0)
        conv = nn.Conv2d(16, 8, 3).double().to(memory_format=memory_format)
        module = nn.Sequential(conv)
        with torch.no_grad():
            # No entry is so small that it is exchanged after the first gradient, when |U| is the same everywhere.
            conv.weight.add_(conv.weight.sign())
        method = BAME(stop=20, every=2, budget=1.0, evidence_rate=0.2)
        sparsifier = NMSparsifier(
            module, "2:4", method, skip_first_last=False, conv_layout="flat"
        ).attach()
        optimizer = torch.optim.AdamW(module.parameters(), 0.05)
        sparsifier.register(optimizer)
        (layer,) = sparsifier.layers.values()
        x = torch.randn(4, 16, 5, 5, dtype=torch.float64)
        for _ in range(12):
            optimizer.zero_grad()
            (module(x) - 1).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            pruned = ~layer.forward_mask
            assert not layer.weight[pruned].any()
            sparsifier.step()
        return conv.weight.detach().contiguous(), int(layer.masks.total_flips)

    plain, channels_last = train(torch.contiguous_format), train(torch.channels_last)
    torch.testing.assert_close(plain[0], channels_last[0])
    assert plain[1] == channels_last[1] > 0


def test_the_transposed_layout_evolves_as_the_plain_one():
    from tests.support.kinds import hugging_face_conv1d

    torch.manual_seed(0)
    plain = nn.Linear(32, 64).double()
    transposed = hugging_face_conv1d()(64, 32).double()
    with torch.no_grad():
        transposed.weight.copy_(plain.weight.t())
        transposed.bias.copy_(plain.bias)
    weights = []
    for module in (plain, transposed):
        torch.manual_seed(1)
        sparsifier = NMSparsifier(
            nn.Sequential(module), "2:4", BAME(stop=9, every=2, budget=1.0), skip_first_last=False
        ).attach()
        optimizer = torch.optim.SGD(module.parameters(), 1.0, momentum=0.9)
        sparsifier.register(optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            (module(torch.randn(8, 32, dtype=torch.float64)) - 1).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        (layer,) = sparsifier.layers.values()
        assert layer.masks.total_flips > 0
        weights.append(layer.view.rows(layer.weight.detach()))
    torch.testing.assert_close(*weights)


def test_a_permutation_that_is_due_with_an_adaptation_is_searched_once(monkeypatch):
    from lightning_nm.methods import bi_mask

    searched = []
    search = bi_mask.search_permutation
    monkeypatch.setattr(
        bi_mask, "search_permutation", lambda *a, **k: searched.append(1) or search(*a, **k)
    )
    method = BAME(stop=20, every=1, dgrad="bi-mask")
    method._bi_mask.permute_every = 4
    module, sparsifier, optimizer, _ = linear(method)
    run(module, sparsifier, optimizer, 9)
    assert len(searched) == 3, "at the start and after steps 4 and 8"
