"""Packed experts: each expert's products run on its own packed weight, and files hold the weight as a whole."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_nm import (
    load_packed,
    pack,
    packed_summary,
    save_packed,
    unpacked_state_dict,
    warm_up,
)
from lightning_nm.functional import is_nm, nm_prune
from lightning_nm.kernels.cpu import library
from lightning_nm.packed.module import packed_weights
from tests.support.cpu_products import REASON
from tests.support.experts import WIDTH, Experts, LinearExperts, TransposedExperts

TOKENS = 11


def sparse(kind, pattern="1:16"):
    torch.manual_seed(0)
    model = kind().eval()
    for name in ("up", "down"):
        weight = getattr(model, name)
        weight.data = nm_prune(weight.data, pattern, 1 if model.transposed else 2)
    return model


def tokens(number=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, WIDTH, generator=generator), torch.randint(
        0, number, (TOKENS,), generator=generator
    )


@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_products_are_those_of_the_dense_experts(kind, kernels):
    dense = sparse(kind)
    x, experts = tokens()
    with torch.no_grad():
        expected = dense(x, experts)
        model = pack(copy.deepcopy(dense), kernels=kernels)
        torch.testing.assert_close(model(x, experts), expected)
        # Some experts get no token.
        few = experts.clamp(max=1)
        torch.testing.assert_close(model(x, few), dense(x, few))
        torch.testing.assert_close(model(x[:0], experts[:0]), dense(x[:0], experts[:0]))
    summary = packed_summary(model)
    assert [(each.name, each.pattern) for each in summary.weights] == [
        ("up", "1:16"),
        ("down", "1:16"),
    ]
    assert summary.not_packed == ()


@pytest.mark.skipif(
    bool(REASON) or not library.level(), reason="this CPU has no cpu-permute kernel"
)
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_each_expert_is_held_in_the_layout_of_a_kernel(kind):
    model = pack(sparse(kind), kernels="sparse")
    for _, weight in packed_weights(model):
        assert [part.form for part in weight.parts] == ["cpu-permute"] * 4
        assert weight.nbytes < 0.5 * weight.dense_nbytes
    warm_up(pack(sparse(kind)), tokens=[4])


@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_copies_files_and_pickles(tmp_path, kind):
    dense = sparse(kind)
    x, experts = tokens()
    model = pack(copy.deepcopy(dense), kernels="reference")
    state = unpacked_state_dict(model)
    assert set(state) == {"up", "down"}
    assert all(torch.equal(state[key], value) for key, value in dense.state_dict().items())
    save_packed(model, tmp_path / "model.safetensors")
    assert set(
        load_packed(kind(), tmp_path / "model.safetensors", kernels="reference").state_dict()
    ) == {f"{name}.{part}" for name in ("up", "down") for part in ("values", "positions")}
    other = pack(sparse(kind), kernels="reference")
    other.load_state_dict(model.state_dict())
    models = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other]
    models.append(load_packed(kind(), tmp_path / "model.safetensors", kernels="auto"))
    with torch.device("meta"):
        empty = kind()
    models.append(load_packed(empty, tmp_path / "model.safetensors", kernels="sparse"))
    with torch.no_grad():
        expected = dense(x, experts)
        for each in models:
            torch.testing.assert_close(each(x, experts), expected)
            assert is_nm(unpacked_state_dict(each)["up"], "1:16", 1 if kind.transposed else 2)
        double = copy.deepcopy(model).double()
        torch.testing.assert_close(double(x.double(), experts), dense.double()(x.double(), experts))


def test_gradients_of_inputs_and_no_training():
    dense = sparse(Experts)
    x, experts = tokens()
    model = pack(copy.deepcopy(dense), kernels="auto")
    x.requires_grad_()
    (expected,) = torch.autograd.grad(dense(x, experts).square().sum(), x)
    (found,) = torch.autograd.grad(model(x, experts).square().sum(), x)
    torch.testing.assert_close(found, expected)
    model.train()
    with pytest.raises(RuntimeError, match=r"'up\[0\]' is packed and cannot be trained"):
        model(x, experts)


def test_modules_of_experts_within_a_model():
    model = nn.ModuleDict({"experts": LinearExperts(), "head": nn.Linear(64, 32)}).eval()
    for weight in (model["experts"].weight, model["head"].weight):
        weight.data = nm_prune(weight.data, "2:4", weight.dim() - 1)
    dense = copy.deepcopy(model)
    pack(model, kernels="reference")
    names = [each.name for each in packed_summary(model).weights]
    assert names == ["experts.weight", "head.weight"]
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(model["experts"](x), dense["experts"](x))
