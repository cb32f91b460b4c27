"""Packed models that hold one module, or one weight, under several names."""

import copy

import pytest
import torch
from torch import nn

from lightning_nm import load_packed, pack, packed_summary, save_packed, unpacked_state_dict
from lightning_nm.export.packed_file import PackedFile, write_packed
from lightning_nm.packed import kernel_choice
from lightning_nm.packed.module import PackedWeight
from tests.support.packed_models import assert_equal_states, header_of, prune

WIDTH = 64


@pytest.fixture(autouse=True)
def _decisions(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_choice, "DECISIONS", str(tmp_path / "packed.json"))
    kernel_choice._tuner.cache_clear()


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.b = self.a

    def forward(self, x):
        x = x.unsqueeze(0)
        y, _ = self.a(x, x, x)
        return self.b(y, x, x)[0]


class OneWeight(nn.Module):
    """Two layers that share their weight, beside one that can be packed."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def repeated():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
    return nn.Sequential(*[block] * 2)


def repeated_convolution():
    convolution = nn.Conv1d(WIDTH, WIDTH, 1)
    return nn.Sequential(nn.Unflatten(1, (WIDTH, 1)), *[convolution] * 2)


MODELS = [TwoNames, repeated, repeated_convolution, Attention, OneWeight]


def dense_of(make):
    torch.manual_seed(0)
    model = prune(make(), "1:16")
    if make is OneWeight:  # no packed layer takes it, so the helper does not prune it either
        model.a.weight.data.zero_()[:, ::16] = 1
    return model


def built_on(device, make):
    with torch.device(device):
        return make()


@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
@pytest.mark.parametrize("make", MODELS)
def test_saved_and_loaded(make, kernels, tmp_path):
    dense, x = dense_of(make), torch.randn(5, WIDTH)
    expected = dense(x).detach()
    model = pack(copy.deepcopy(dense), kernels=kernels)
    assert_equal_states(unpacked_state_dict(model), dense.state_dict())
    file = tmp_path / "packed.safetensors"
    save_packed(model, file)
    for device in ("cpu", "meta"):
        loaded = load_packed(built_on(device, make), file, kernels=kernels)
        assert torch.allclose(loaded(x), expected, atol=1e-5)
        assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
        assert_equal_states(unpacked_state_dict(loaded), dense.state_dict())
        packed = [module for module in loaded.modules() if isinstance(module, PackedWeight)]
        assert len(packed) == len(packed_summary(model).weights)
    other = pack(copy.deepcopy(dense), kernels=kernels)
    other.load_state_dict(model.state_dict())
    assert_equal_states(unpacked_state_dict(other), dense.state_dict())


def test_keys_of_one_module_have_one_tensor(tmp_path):
    model = pack(dense_of(repeated), kernels="sparse")
    dense = unpacked_state_dict(model)
    assert dense["0.0.weight"] is dense["1.0.weight"]
    save_packed(model, tmp_path / "packed.safetensors")
    header, _ = header_of(tmp_path / "packed.safetensors")
    assert sorted(key for key in header if key.endswith(".values")) == [
        "0.0.weight.values",
        "0.2.weight.values",
    ]
    assert PackedFile(tmp_path / "packed.safetensors").aliases["1.0.weight"] == "0.0.weight"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_file_without_the_first_name(device, tmp_path):
    """Writers of other tools keep one key of a shared tensor, and not always the first."""
    dense, x = dense_of(repeated), torch.randn(5, WIDTH)
    save_packed(pack(copy.deepcopy(dense), kernels="reference"), tmp_path / "both")
    file = PackedFile(tmp_path / "both")
    write_packed(
        tmp_path / "one", {key: file.read(key) for key in file.names() if key.startswith("1.")}
    )
    loaded = load_packed(built_on(device, repeated), tmp_path / "one", kernels="reference")
    assert torch.allclose(loaded(x), dense(x), atol=1e-5)
    assert {each.form for each in packed_summary(loaded).weights} == {"packed"}


def test_a_file_of_a_model_that_shares_less(tmp_path):
    """Equal tensors become one; different ones are refused before anything is changed."""
    dense, x = dense_of(TwoNames), torch.randn(5, WIDTH)
    apart = nn.ModuleDict({"a": copy.deepcopy(dense.a), "b": copy.deepcopy(dense.a)})
    save_packed(pack(apart, kernels="reference"), tmp_path / "equal")
    assert torch.allclose(load_packed(TwoNames(), tmp_path / "equal")(x), dense(x), atol=1e-5)
    apart = nn.ModuleDict({"a": copy.deepcopy(dense.a), "b": copy.deepcopy(dense.a)})
    apart.b.weight.data.neg_()
    save_packed(pack(apart, kernels="reference"), tmp_path / "different")
    model = TwoNames()
    before = model.a.weight.clone()
    with pytest.raises(
        ValueError,
        match=r"'a.weight' and 'b.weight' are one tensor in the model, and different ones",
    ):
        load_packed(model, tmp_path / "different")
    assert torch.equal(model.a.weight, before)


def test_a_file_of_a_model_that_shares_more(tmp_path):
    dense, x = dense_of(TwoNames), torch.randn(5, WIDTH)
    save_packed(pack(copy.deepcopy(dense), kernels="reference"), tmp_path / "packed")
    apart = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
    loaded = load_packed(apart, tmp_path / "packed")
    assert torch.allclose(loaded["b"](loaded["a"](x)), dense(x), atol=1e-5)
