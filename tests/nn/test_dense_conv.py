"""Convolutions without kernels: their backward pass makes as few calls as autograd's own."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_nm import NMSparsifier
from lightning_nm.nn import products as ops


class Calls(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def masked(module, method="bi-mask", estimator=None, **options):
    options = {"skip_first_last": False, "grad_snr_every": 0, **options}
    NMSparsifier(module, "2:4", method, estimator, **options).attach()
    return module


@pytest.mark.parametrize("method", ["dense", "asp", "bi-mask"])
@pytest.mark.parametrize(("estimator", "calls"), [(None, 1), ("mvue", 2)])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_one_call_makes_both_gradients_if_dy_is_not_estimated(kind, method, estimator, calls):
    """Which they are is in the contract."""
    module = masked(kind(16, 16, 3, stride=2), method, estimator)
    x = torch.randn(2, 16, *[7] * (module.weight.dim() - 2), requires_grad=True)
    y = module(x)
    with Calls() as made:
        y.sum().backward()
    assert made.names.count("convolution_backward") == calls


@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_lie_in_memory_as_what_they_are_of(memory_format, estimator, monkeypatch):
    strides, conv_gradients = [], ops.conv_gradients

    def noted(grad, *args):
        strides.append(grad.stride())
        return conv_gradients(grad, *args)

    monkeypatch.setattr(ops, "conv_gradients", noted)
    module = masked(
        nn.Conv2d(16, 32, 3, padding=1).to(memory_format=memory_format), "bi-mask", estimator
    )
    x = torch.randn(2, 16, 6, 6).to(memory_format=memory_format).requires_grad_()
    y = module(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert set(strides) <= {grad.stride()}
    assert strides or estimator is None
    assert x.grad.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_what_needs_no_gradient_gets_none(frozen):
    module = masked(nn.Conv2d(16, 16, 3), frozen="mask")
    module.weight.requires_grad_(frozen != "weight")
    x = torch.randn(2, 16, 6, 6, requires_grad=frozen != "input")
    module(x).sum().backward()
    assert (x.grad is None) == (frozen == "input")
    assert (module.weight.grad is None) == (frozen == "weight")
