"""Weights of which kept entries alone are stored, on every kind of layer: values, masks, products, copies, loads."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import BAME, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.kernels.cpu import library
from lightning_nm.nn.layer.storage import pack_layer, unpack_layer, unpackable
from tests.support.kinds import KINDS, make

PATTERNS = ["2:4", "1:16", "3:8"]
PACKABLE = [kind for kind in KINDS if not kind.startswith("experts")]


def attached(kind, pattern="2:4", method="asp", dtype=torch.float32, **options):
    module, x = make(kind, dtype)
    sparsifier = NMSparsifier(module, pattern, method, skip_first_last=False, **options).attach()
    return module, sparsifier, x


def masked(sparsifier):
    return [layer for layer in sparsifier.layers.values() if not layer.spec.forward_reason]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", PACKABLE)
def test_a_packed_layer_is_the_dense_one(kind, pattern):
    module, sparsifier, x = attached(kind, pattern, dtype=torch.float64)
    expected = module(x)
    expected.square().sum().backward()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    masks = {layer.name: layer.forward_mask.clone() for layer in masked(sparsifier)}
    shapes = {layer.name: layer.param.shape for layer in masked(sparsifier)}
    strides = {layer.name: layer.param.stride() for layer in masked(sparsifier)}
    gradients = {layer.name: layer.param.grad.clone() for layer in masked(sparsifier)}
    for layer in masked(sparsifier):
        assert not unpackable(layer)
        storage = pack_layer(layer)
        n, m = layer.pattern.n, layer.pattern.m
        assert layer.param.numel() * m == masks[layer.name].numel() * n
        assert layer.view.shape == shapes[layer.name]
        assert torch.equal(layer.forward_mask, masks[layer.name])
        assert torch.equal(layer.forward_weight(), layer.backward_weight())
        assert nmf.is_nm(layer.view.rows(storage.dense()), layer.pattern, dim=1)
    y = module(x)
    y.square().sum().backward()
    assert torch.equal(y, expected)
    assert_equal_states(module.state_dict(), state)
    for layer in masked(sparsifier):
        assert torch.equal(layer.param.grad, layer.storage.pack(gradients[layer.name]))
        unpack_layer(layer)
        assert layer.param.shape == shapes[layer.name]
        assert layer.param.stride() == strides[layer.name]
        assert torch.equal(layer.forward_mask, masks[layer.name])
    assert torch.equal(module(x), expected)
    assert_equal_states(module.state_dict(), state)


def assert_equal_states(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


@settings(max_examples=40, deadline=None)
@given(
    out=st.integers(1, 40),
    blocks=st.integers(1, 20),
    m=st.integers(2, 32),
    data=st.data(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_kept_entries_go_and_come_back(out, blocks, m, data, dtype, seed):
    n = data.draw(st.integers(1, m - 1))
    torch.manual_seed(seed)
    module = nn.Linear(blocks * m, out, bias=False).to(dtype)
    sparsifier = NMSparsifier(module, f"{n}:{m}", "asp", skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    layer.view.zero_pruned(layer.param)
    weight = layer.param.detach().clone()
    mask = layer.forward_mask
    by_torch = copy.deepcopy(layer)
    storage = pack_layer(layer)
    assert torch.equal(storage.dense(), weight)
    assert torch.equal(storage.pack(weight).flatten(), weight[mask])
    assert torch.equal(storage.unpack(storage.pack(weight)), weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "unavailable", lambda: "for the test")
        twin = pack_layer(by_torch)
        assert torch.equal(twin.positions, storage.positions)
        assert torch.equal(twin.parameter, storage.parameter)
        assert torch.equal(twin.dense(), weight)


@settings(max_examples=30, deadline=None)
@given(m=st.integers(2, 16), blocks=st.integers(1, 12), data=st.data(), seed=st.integers(0, 99))
def test_an_exchange_is_that_of_the_dense_weight(m, blocks, data, seed):
    n = data.draw(st.integers(1, m - 1))
    torch.manual_seed(seed)
    module = nn.Linear(blocks * m, 3, bias=False)
    sparsifier = NMSparsifier(module, f"{n}:{m}", "asp", skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    mask = layer.forward_mask.view(-1, m).clone()
    storage = pack_layer(layer)
    dense, state = storage.dense().view(-1, m), torch.randn_like(storage.parameter)
    dense_state = storage.unpack(state).view(-1, m)
    chosen = torch.randperm(len(mask))[: data.draw(st.integers(1, len(mask)))]
    pruned = torch.multinomial(mask[chosen].float(), 1).squeeze(1)
    regrown = torch.multinomial((~mask[chosen]).float(), 1).squeeze(1)
    start = torch.randn(len(chosen))
    storage.exchange(chosen, pruned, regrown, [(storage.parameter, start), (state, 0.0)])
    for full in (dense, dense_state, mask):
        full[chosen, pruned] = 0
    dense[chosen, regrown] = start
    dense_state[chosen, regrown] = 0
    mask[chosen, regrown] = True
    assert torch.equal(layer.forward_mask.view(-1, m), mask)
    assert torch.equal(storage.dense().view(-1, m), dense)
    assert torch.equal(storage.unpack(state).view(-1, m), dense_state)
    assert (storage.positions.long().diff(dim=-1) > 0).all()


@pytest.mark.parametrize("kind", ["linear", "hugging-face-conv1d"])
def test_rows_are_those_of_the_whole(kind):
    _, sparsifier, _ = attached(kind)
    (layer,) = masked(sparsifier)
    mask = layer.view.rows(layer.forward_mask)
    storage = pack_layer(layer)
    weight = layer.view.rows(storage.dense())
    assert torch.equal(storage.unpack_rows(storage.parameter, 3, 7), weight[3:7])
    assert torch.equal(storage.bits_of_rows(3, 7).bool(), mask[3:7])


def test_odd_values_move_as_bits():
    _, sparsifier, _ = attached("linear")
    (layer,) = sparsifier.layers.values()
    storage = pack_layer(layer)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-42])
    values = odd[torch.arange(storage.parameter.numel()) % len(odd)].view(storage.parameter.shape)
    back = storage.pack(storage.unpack(values))
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))


def test_writes_within_full_reach_the_kept_entries():
    _, sparsifier, _ = attached("linear")
    (layer,) = sparsifier.layers.values()
    storage = pack_layer(layer)
    before = storage.dense()
    with layer.full(), torch.no_grad():
        assert layer.weight is layer.weight
        layer.weight.mul_(2)
    assert torch.equal(storage.dense(), 2 * before)
    with torch.no_grad():
        layer.weight.mul_(2)  # of a copy
    assert torch.equal(storage.dense(), 2 * before)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", ["linear", "conv2d", "attention", "two-weights"])
def test_a_copy_is_an_ordinary_dense_module(kind, way):
    module, sparsifier, x = attached(kind)
    module.requires_grad_(requires_grad=True)
    expected = module(x)
    for layer in masked(sparsifier):
        pack_layer(layer)
    copied = way(module)
    assert torch.equal(copied(x), expected)
    state = module.state_dict()
    assert all(value.shape == state[key].shape for key, value in copied.named_parameters())
    assert all(parameter.requires_grad for parameter in copied.parameters())
    assert torch.equal(module(x), expected)


def test_casts_and_moves_reach_the_kept_entries():
    module, sparsifier, x = attached("linear")
    (layer,) = sparsifier.layers.values()
    pack_layer(layer)
    expected = module(x)
    module.double()
    assert layer.param.dtype == torch.float64
    # The tolerance is that of float32, in which `expected` was computed.
    torch.testing.assert_close(module(x.double()).float(), expected)
    assert layer.storage.positions.dtype == torch.uint8
    unpack_layer(layer)
    assert module.weight.dtype == torch.float64


def test_masks_of_a_packed_weight_stand_still():
    _, sparsifier, _ = attached("linear")
    (layer,) = sparsifier.layers.values()
    mask = layer.forward_mask.clone()
    pack_layer(layer)
    with pytest.raises(RuntimeError, match="does not move"):
        layer.set_masks(~mask, None)
    with pytest.raises(RuntimeError, match="does not move"):
        layer.masks.bits = mask.to(torch.uint8)
    assert torch.equal(layer.forward_mask, mask)


@pytest.mark.parametrize(
    ("module", "method", "reason"),
    [
        (nn.Linear(32, 32), "sr-ste", "not known to come to rest"),
        (nn.Linear(32, 32), BAME(evidence="batch", every=2), "may still move"),
        (nn.Linear(32, 32), BAME(dgrad="bi-mask"), "may still move"),
        (nn.Conv2d(32, 32, 3), "bame", "may still move"),
        (make("experts", torch.float32)[0], "asp", "several experts"),
    ],
)
def test_layers_that_stay_dense_say_why(module, method, reason):
    sparsifier = NMSparsifier(
        module, "1:16", method, skip_first_last=False, planned_steps=10
    ).attach()
    (layer, *_) = sparsifier.layers.values()
    assert reason in unpackable(layer)
