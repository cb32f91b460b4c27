"""Packed modules of registered adapters: their forward runs its products on packed weights."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_nm import load_packed, pack, packed_summary, save_packed, unpacked_state_dict
from lightning_nm.functional import nm_prune
from lightning_nm.nn import NMLinear, register_adapter
from lightning_nm.nn.adapters import base
from tests.support.kinds import TwoWeights


def two_weights(*names):
    model = TwoWeights().eval()
    for name in names or ("up", "down"):
        weight = getattr(model, name)
        weight.data = nm_prune(weight.data, "1:16", 1 if name == "up" else 0)
    return model


@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
@pytest.mark.parametrize("names", [("up", "down"), ("up",), ("down",)], ids="-".join)
def test_products_are_those_of_the_dense_module(kernels, names):
    dense = two_weights(*names)
    x = torch.randn(3, 5, 32)
    expected = dense(x)
    model = pack(copy.deepcopy(dense), kernels=kernels)
    assert [each.name for each in packed_summary(model).weights] == list(names)
    torch.testing.assert_close(model(x), expected)
    state = unpacked_state_dict(model)
    assert set(state) == set(dense.state_dict())
    assert all(torch.equal(state[key], value) for key, value in dense.state_dict().items())


def test_copies_files_and_pickles(tmp_path):
    dense = two_weights()
    x = torch.randn(4, 32)
    expected = dense(x)
    model = pack(copy.deepcopy(dense), kernels="reference")
    save_packed(model, tmp_path / "model.safetensors")
    loaded = load_packed(TwoWeights(), tmp_path / "model.safetensors", kernels="reference")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        loaded,
    ]
    for other in again:
        torch.testing.assert_close(other(x), expected)
        assert [str(each.pattern) for each in packed_summary(other).weights] == ["1:16", "1:16"]
    other = pack(two_weights(), kernels="reference")
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), expected)
    torch.testing.assert_close(
        copy.deepcopy(model).double()(x.double()), dense.double()(x.double())
    )


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class NMScaled(NMLinear):
    handles = Scaled

    def forward(self, input):
        return 2 * super().forward(input)


def test_an_adapter_that_extends_one_of_the_package(monkeypatch):
    monkeypatch.setattr(base, "_ADAPTERS", list(base._ADAPTERS))
    monkeypatch.setattr(base, "_CLASSES", {})
    dense = nn.Sequential(Scaled(64, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    for layer in dense[::2]:
        layer.weight.data = nm_prune(layer.weight.data, "2:4")
    x = torch.randn(5, 64)
    model = pack(copy.deepcopy(dense), kernels="reference")
    assert dict(packed_summary(model).not_packed) == {
        "0": f"{__name__}.Scaled has a forward of its own"
    }
    register_adapter(NMScaled)
    model = pack(copy.deepcopy(dense), kernels="reference")
    assert [each.name for each in packed_summary(model).weights] == ["0.weight", "2.weight"]
    torch.testing.assert_close(model(x), dense(x))
