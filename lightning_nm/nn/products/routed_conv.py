"""The three products of a convolution on the kernels that a router chooses: two operators, as for linear layers.

W is the matrix ``[out, in / groups * taps]`` in all three products, so one layout and one packed form serve the forward
and, where the layer has no mask of its own for it, dgrad.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_nm.kernels.api import Convolution, GemmName
from lightning_nm.kernels.router.handles import lookup
from lightning_nm.kernels.router.router import Product, Router
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.products.dense_conv import conv_input_gradient, conv_weight_gradient
from lightning_nm.nn.products.operands import (
    conv_backward_operand,
    forward_operand,
    layout_of,
    pack_of,
)
from lightning_nm.nn.products.routed_ops import GEMMS, OPTIONS, plain, product_now, run_kernel


def _convolution(x: Tensor, weight: Tensor, geometry: Sequence[int]) -> Convolution:
    """The geometry for ``x [images, in, height, width]``."""
    stride, padding, dilation, groups = unflattened(geometry)
    kernel = (1, *weight.shape[2:])[-2:]
    height, width = x.shape[2:]
    return Convolution(
        x.shape[1], len(weight), (height, width), kernel, stride, padding, dilation, groups
    )


def flattened(
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> tuple[int, ...]:
    """The geometry as operators take it, that of one dimension with a height of 1."""
    return *(1, *stride)[-2:], *(0, *padding)[-2:], *(1, *dilation)[-2:], groups


def unflattened(
    geometry: Sequence[int],
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]:
    """Undo :func:`flattened`."""
    a, b, c, d, e, f, groups = geometry
    return (a, b), (c, d), (e, f), groups


def _form(x: Tensor) -> torch.memory_format:
    """Channels last if `x` is, else contiguous."""
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _product(
    layer: NMLayer, router: Router, gemm: GemmName, x: Tensor, conv: Convolution
) -> Product:
    out, width = conv.outputs, math.prod(conv.weight_shape[1:])
    return product_now(layer, router, gemm, x, out, width, conv, len(x) * math.prod(conv.positions))


@torch.library.custom_op("lightning_nm::forward_conv", **OPTIONS)
def forward_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tensors: Sequence[Tensor],
    trains: bool,
    geometry: Sequence[int],
    tag: Tensor,
    router: int,
) -> Tensor:
    """The convolution of `x` with W_F, in the dtype and the memory format of `x`.

    Args:
        x: ``[images, in, height, width]``.
        weight: The latent parameter, ``[out, in / groups, *kernel]``.
        bias: ``[out]`` of the dtype of `x`, or None.
        tensors: What the method keeps beside the weight; it is read through the layer.
        trains: Whether a backward pass will follow.
        geometry: See :func:`flattened`.
        tag: The layer's handle tensor.
        router: The router's handle.
    """
    nm, route, conv = lookup(tag.shape[0]), lookup(router), _convolution(x, weight, geometry)
    gemms = GEMMS if trains and not route.tuned else GEMMS[:1]
    product, *later = [_product(nm, route, gemm, x, conv) for gemm in gemms]
    route.record([product, *later])
    kernel = route.kernel(product)

    def dense() -> Tensor:
        matrix = nm.spec.method.forward_weight(nm, weight).to(x.dtype).view(conv.weight_shape)
        return F.conv2d(x, matrix, bias, *conv.arguments)

    def sparse() -> Tensor:
        packed = pack_of(
            nm, route, kernel, product, weight, forward_operand, keep=trains, side="conv"
        )
        return kernel.conv(packed, plain(x), conv, None if bias is None else plain(bias))

    return run_kernel(route, kernel, product, sparse, dense).contiguous(memory_format=_form(x))


@forward_conv.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    tensors: Any,
    trains: bool,
    geometry: Sequence[int],
    *rest: Any,
) -> Tensor:
    conv = _convolution(x, weight, geometry)
    return torch.empty(
        (x.shape[0], conv.outputs, *conv.positions),
        dtype=x.dtype,
        device=x.device,
        memory_format=_form(x),
    )


@register_flop_formula(torch.ops.lightning_nm.forward_conv)
def _forward_flops(
    x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """``2 positions out in / groups taps``: as the dense product, whatever kernel makes it."""
    return int(2 * math.prod(out_shape) * math.prod(weight_shape[1:]))


@torch.library.custom_op("lightning_nm::backward_convs", **OPTIONS)
def backward_convs(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    tensors: Sequence[Tensor],
    needs_input: bool,
    needs_weight: bool,
    geometry: Sequence[int],
    tag: Tensor,
    router: int,
) -> tuple[Tensor, Tensor]:
    """DX with W_B, in the memory format of `x`, and dW; an empty tensor for what is not needed.

    Args:
        grad: ``dY [images, out, height, width]``.
        x: ``[images, in, height, width]``.
        weight: The latent parameter, ``[out, in / groups, *kernel]``.
        tensors: What the method keeps beside the weight; it is read through the layer.
        needs_input: Whether dX is needed.
        needs_weight: Whether dW is needed from this `grad`.
        geometry: See :func:`flattened`.
        tag: The layer's handle tensor.
        router: The router's handle.

    Returns:
        dX and ``dW [out, in / groups * taps]``.
    """
    nm, route, conv = lookup(tag.shape[0]), lookup(router), _convolution(x, weight, geometry)
    dgrad = _product(nm, route, "dgrad", x, conv) if needs_input else None
    wgrad = _product(nm, route, "wgrad", x, conv) if needs_weight else None
    route.tune_if_single()
    return (
        grad.new_empty(0) if dgrad is None else _dgrad(nm, route, dgrad, conv, grad, weight, x),
        grad.new_empty(0) if wgrad is None else _wgrad(nm, route, wgrad, conv, grad, weight, x),
    )


@backward_convs.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    tensors: Any,
    needs_input: bool,
    needs_weight: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    width = weight.numel() // weight.shape[0]
    return (
        torch.empty(x.shape, dtype=grad.dtype, device=grad.device, memory_format=_form(x))
        if needs_input
        else grad.new_empty(0),
        grad.new_empty(weight.shape[0], width) if needs_weight else grad.new_empty(0),
    )


@register_flop_formula(torch.ops.lightning_nm.backward_convs)
def _backward_flops(
    grad_shape: Any,
    x_shape: Any,
    weight_shape: Any,
    tensors: Any,
    needs_input: bool,
    needs_weight: bool,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """As :func:`_forward_flops` for each product."""
    return int(
        2 * math.prod(grad_shape) * math.prod(weight_shape[1:]) * (needs_input + needs_weight)
    )


def _dgrad(
    layer: NMLayer,
    router: Router,
    product: Product,
    conv: Convolution,
    grad: Tensor,
    weight: Tensor,
    x: Tensor,
) -> Tensor:
    kernel = router.kernel(product)

    def dense() -> Tensor:
        matrix = (
            layer.spec.method.backward_weight(layer, weight).to(grad.dtype).view(conv.weight_shape)
        )
        return conv_input_gradient(grad, x, matrix, conv.arguments)

    def sparse() -> Tensor:
        if layer.masks.has_backward or not layer.spec.method.selects_entries:
            packed = pack_of(
                layer, router, kernel, product, weight, conv_backward_operand, side="conv dgrad"
            )
        else:
            packed = pack_of(layer, router, kernel, product, weight, forward_operand, side="conv")
        return kernel.conv_input(packed, plain(grad), conv)

    return run_kernel(router, kernel, product, sparse, dense).contiguous(memory_format=_form(x))


def _wgrad(
    layer: NMLayer,
    router: Router,
    product: Product,
    conv: Convolution,
    grad: Tensor,
    weight: Tensor,
    x: Tensor,
) -> Tensor:
    kernel = router.kernel(product)

    def dense() -> Tensor:
        shape = torch.Size(conv.weight_shape)
        return (
            conv_weight_gradient(grad, x, shape, conv.arguments).contiguous().view(len(weight), -1)
        )

    def sparse() -> Tensor:
        layout = layout_of(
            layer,
            router,
            kernel,
            product,
            lambda: forward_operand(layer, weight, product.key),
            "conv",
        )
        return kernel.conv_sampled(layout, plain(grad), plain(x), conv)

    return run_kernel(router, kernel, product, sparse, dense)
