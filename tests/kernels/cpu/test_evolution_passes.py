"""The passes of BAME and Bi-Mask by the library in training, against torch; random cases are in test_products."""

import pytest
import torch
from torch import nn

from lightning_nm import BAME, BiMask, NMSparsifier
from lightning_nm.functional.evolution import BlockGrid
from lightning_nm.kernels.cpu import mask_passes
from tests.support.bame import trained
from tests.support.cpu_products import needs_library
from tests.support.evolution import case
from tests.support.experts import LinearExperts

pytestmark = needs_library


def masked(module, pattern, method):
    """The sparsifier of a module's one layer, its optimizer and the layer."""
    sparsifier = NMSparsifier(
        nn.Sequential(module), pattern, method, skip_first_last=False
    ).attach()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    return sparsifier, optimizer, layer


def by_torch(monkeypatch, function, *arguments):
    """The result of a function without these passes."""
    with monkeypatch.context() as patched:
        patched.setattr(mask_passes, "runs", lambda *tensors: False)
        return function(*arguments)


def test_all_halves_are_read_and_written():
    # As V of a regrown entry: read_entry() of the gradient, write_entry() of the state.
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        every = every[~every.isnan()]
        # A kept 0 next to a U of this value: the exchange writes U to the weight.
        value = torch.stack([torch.zeros(len(every)), every.float()], 1)
        value = value + 1e-3 * value.abs() * torch.rand(value.shape).round()
        finite = value[:, 1].isfinite() & (value[:, 1] != 0)
        weight = torch.zeros(len(value), 2, dtype=dtype)
        bits = torch.tensor([1, 0], dtype=torch.uint8).expand(len(value), 2).contiguous()
        grid = BlockGrid.of(weight, 2)
        changed, _ = mask_passes.exchange(
            grid,
            bits,
            weight,
            None,
            value.clone(),
            torch.ones_like(value),
            torch.zeros(len(value), dtype=torch.uint8),
            torch.zeros(len(value) // 4 + 1, dtype=torch.uint8),
            [],
            [],
            len(value),
            torch.tensor(1.0),
            1.0,
        )
        assert changed == int(finite.sum())
        assert torch.equal(weight[finite, 1], value[finite, 1].to(dtype))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "radam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(64, 48, bias=False), lambda: nn.Conv2d(32, 24, 3, bias=False)],
    ids=["linear", "conv"],
)
def test_training_is_that_of_torch(name, dtype, make, monkeypatch):
    found = trained(name, dtype, make)
    expected = by_torch(monkeypatch, trained, name, dtype, make)
    assert found["flips"] == expected["flips"] > 0
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6)


def test_a_gradient_in_another_memory_order_is_masked():
    """As oneDNN returns those of convolutions: the pass reads a copy."""
    sparsifier, optimizer, layer = masked(nn.Conv2d(16, 8, 3, bias=False), "1:8", BAME(stop=5))
    grad = torch.randn(8, 16, 3, 3).contiguous(memory_format=torch.channels_last)
    layer.weight.grad = grad.clone()
    assert layer.weight.grad.stride() == grad.stride() != layer.weight.stride()
    sparsifier.before_step(optimizer)
    assert torch.equal(layer.weight.grad, torch.where(layer.masks.forward, grad, 0))


def test_torch_notices_what_the_library_wrote():
    c = case(80, 8, 16)
    versions = c.weight._version
    assert mask_passes.mask_(c.weight, c.bits)
    assert c.weight._version > versions


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(128, 64, dtype=torch.float64),
        torch.zeros(64, 128).t(),
        torch.zeros(128, 64, device="meta"),
    ],
    ids=["float64", "another order", "another device"],
)
def test_other_tensors_are_left_to_torch(tensor):
    assert not mask_passes.runs(tensor)
    assert not mask_passes.mask_(tensor, torch.ones(128, 64, dtype=torch.uint8))


def bi_masks(make):
    """The bits, the changes and the permutation of a layer after each of some steps, with searches among them."""
    torch.manual_seed(0)
    sparsifier, optimizer, layer = masked(make(), "2:4", BiMask(permute_every=3, candidates=10))
    found = []
    for _ in range(7):
        layer.weight.grad = torch.randn(layer.weight.shape)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        masks = layer.masks
        found.append((masks.bits.clone(), masks.flips.clone(), masks.permutation.clone()))
    return [torch.stack(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(64, 48, bias=False),
        lambda: nn.Conv2d(32, 24, 3, bias=False),
        lambda: nn.Conv2d(32, 32, 3, groups=2, bias=False),
        LinearExperts,
    ],
    ids=["linear", "conv", "grouped conv", "experts"],
)
def test_bi_masks_are_those_of_torch(make, monkeypatch):
    expected = by_torch(monkeypatch, bi_masks, make)
    assert expected[1].any()
    assert all(map(torch.equal, bi_masks(make), expected))


@pytest.mark.parametrize(
    "damaged",
    [
        lambda order: order[:4],
        lambda order: order.where(order != 0, order[0] if order[0] else 1),
        lambda order: order.where(order != 3, len(order) + 8),
        lambda order: order.where(order != 3, -1),
    ],
    ids=["too short", "a row twice", "beyond the rows", "negative"],
)
def test_a_damaged_permutation_is_refused(damaged):
    sparsifier, optimizer, layer = masked(nn.Linear(64, 32, bias=False), "2:4", BiMask())
    bits = layer.masks.bits.clone()
    # As from a state that another program wrote.
    layer.masks.permutation = damaged(layer.masks.permutation)
    layer.weight.grad = torch.randn(layer.weight.shape)
    sparsifier.before_step(optimizer)
    optimizer.step()
    with pytest.raises(ValueError, match="permutation"):
        sparsifier.step()
    assert torch.equal(layer.masks.bits, bits)
