"""Convolutions without kernels: their backward pass makes as few calls as autograd's own."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_nm import NMSparsifier
from lightning_nm.nn import products as ops
from lightning_nm.nn.products import conv_gradients


class Calls(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


KINDS = {
    "1d": (nn.Conv1d, (2, 16, 9), {"kernel_size": 3, "stride": 2}),
    "2d": (nn.Conv2d, (2, 16, 6, 7), {"kernel_size": 3, "padding": 1}),
    "2d-groups": (
        nn.Conv2d,
        (2, 16, 6, 7),
        {"kernel_size": 3, "padding": 2, "dilation": 2, "groups": 2},
    ),
    "3d": (nn.Conv3d, (2, 16, 3, 4, 5), {"kernel_size": 2}),
}


@pytest.mark.parametrize("method", ["dense", "asp", "bi-mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_makes_both_gradients(kind, method):
    convolution, shape, options = KINDS[kind]
    torch.manual_seed(0)
    module = convolution(16, 16, **options).double()
    sparsifier = NMSparsifier(module, "2:4", method, skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = module(x)
    grad = torch.randn_like(y)
    with Calls() as calls:
        y.backward(grad)
    assert calls.names.count("convolution_backward") == 1

    found = module.weight.grad
    weight = layer.backward_weight().requires_grad_()
    x_only = x.detach().requires_grad_()
    geometry = (module.stride, module.padding, module.dilation, module.groups)
    plain = {3: nn.functional.conv1d, 4: nn.functional.conv2d, 5: nn.functional.conv3d}[x.dim()]
    plain(x_only, weight, None, *geometry).backward(grad)
    torch.testing.assert_close(x.grad, x_only.grad)
    mask = layer.forward_mask if method == "asp" else torch.ones_like(weight, dtype=torch.bool)
    torch.testing.assert_close(found, weight.grad.where(mask, 0))


@pytest.mark.parametrize("method", ["dense", "bi-mask"])
def test_an_estimator_leaves_a_call_for_each_gradient(method):
    module = nn.Conv2d(16, 16, 3)
    NMSparsifier(module, "2:4", method, "mvue", skip_first_last=False, grad_snr_every=0).attach()
    y = module(torch.randn(2, 16, 6, 6, requires_grad=True))
    with Calls() as calls:
        y.sum().backward()
    assert calls.names.count("convolution_backward") == 2


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_estimate_lies_in_memory_as_the_gradient(memory_format, monkeypatch):
    strides = []

    def noted(grad, *args):
        strides.append(grad.stride())
        return conv_gradients(grad, *args)

    monkeypatch.setattr(ops, "conv_gradients", noted)
    module = nn.Conv2d(16, 32, 3, padding=1).to(memory_format=memory_format)
    NMSparsifier(module, "2:4", "bi-mask", "mvue", skip_first_last=False, grad_snr_every=0).attach()
    y = module(torch.randn(2, 16, 6, 6).to(memory_format=memory_format))
    grad = torch.randn_like(y)
    y.backward(grad)
    assert strides == [grad.stride()]


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_what_needs_no_gradient_gets_none(frozen):
    module = nn.Conv2d(16, 16, 3)
    NMSparsifier(module, "2:4", "bi-mask", skip_first_last=False, frozen="mask").attach()
    module.weight.requires_grad_(frozen != "weight")
    x = torch.randn(2, 16, 6, 6, requires_grad=frozen != "input")
    module(x).sum().backward()
    assert (x.grad is None) == (frozen == "input")
    assert (module.weight.grad is None) == (frozen == "weight")


@pytest.mark.parametrize("method", ["dense", "bi-mask"])
@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_the_input_gradient_has_the_memory_format_of_the_input(method, estimator):
    module = nn.Conv2d(16, 16, 3, padding=1).to(memory_format=torch.channels_last)
    NMSparsifier(module, "2:4", method, estimator, skip_first_last=False).attach()
    leaf = torch.randn(2, 16, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    (leaf_grad,) = torch.autograd.grad(module(leaf).square().sum(), leaf)
    assert leaf_grad.is_contiguous(memory_format=torch.channels_last)
