"""Adapters of module classes from outside the package."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.nn import Adapter, WeightSpec, nm_linear, register_adapter
from lightning_nm.nn.adapters import base


class Gated(nn.Module):
    """A user's layer: its own parameter names and its own forward."""

    def __init__(self, width=16):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(width, width) * 0.2)
        self.gate = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.linear(x, self.kernel) * self.gate.sigmoid()


class NMGated(Adapter):
    handles = Gated

    @classmethod
    def specs(cls, module, conv_layout):
        yield WeightSpec("kernel")

    @classmethod
    def macs(cls, module, parameter, args, kwargs, output):
        return output.numel() * module.kernel.shape[1]

    def forward(self, x):
        return nm_linear(x, self.kernel, None, self.nm_layers["kernel"]) * self.gate.sigmoid()


@pytest.fixture
def registered(monkeypatch):
    """The adapter is known within a test alone."""
    monkeypatch.setattr(base, "_ADAPTERS", list(base._ADAPTERS))
    monkeypatch.setattr(base, "_CLASSES", {})
    return register_adapter(NMGated)


def test_a_module_class_is_skipped_without_an_adapter():
    with pytest.raises(ValueError, match="no adapter for Gated"):
        NMSparsifier(Gated(), "2:4").attach()


def test_an_adapter_from_outside(registered):
    torch.manual_seed(0)
    module = Gated()
    keys, kernel = list(module.state_dict()), module.kernel
    model = nn.Sequential(module, nn.Linear(16, 4))
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    assert list(sparsifier.layers) == ["0.kernel"]  # the last linear layer stays dense
    layer = sparsifier.layers["0.kernel"]
    assert isinstance(module, Gated)
    assert isinstance(module, NMGated)
    assert list(module.state_dict()) == keys
    x = torch.randn(8, 16)
    torch.testing.assert_close(
        module(x), F.linear(x, module.state_dict()["kernel"]) * module.gate.sigmoid()
    )

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sparsifier.register(optimizer)
    before = kernel.detach().clone()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        losses.append(loss.item())
        assert sparsifier.violations() == 0
    assert losses[-1] < losses[0] / 2
    assert layer.step == 20
    assert module.kernel is kernel
    assert not torch.equal(kernel, before)

    output = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other[0], NMGated)
        assert other[0].nm_layers["kernel"] is not layer
        assert torch.equal(other(x), output)
    state = sparsifier.state_dict()
    assert set(state["layers"]) == {"0.kernel"}

    masked = module.state_dict()["kernel"]
    assert masked.count_nonzero() == masked.numel() // 2
    sparsifier.bake()
    sparsifier.detach()
    assert type(module) is Gated
    assert "nm_layers" not in vars(module)
    assert list(module.state_dict()) == keys


@pytest.mark.parametrize("wrong", [nn.Linear, Gated(), "linear", None])
def test_what_is_no_adapter_is_refused(wrong):
    with pytest.raises(TypeError, match=r"takes a subclass of lightning_nm\.nn\.Adapter, not"):
        register_adapter(wrong)


def test_an_adapter_must_handle_a_class():
    class Nothing(Adapter):
        pass

    with pytest.raises(TypeError, match="Nothing handles no class: set `handles`"):
        register_adapter(Nothing)
