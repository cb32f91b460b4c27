"""The three products of a convolution on the kernels that a router chooses: two operators, as for linear layers.

W is the matrix ``[out, in / groups * taps]`` in all three products, so one layout and one packed form serve the forward
and, where the layer has no mask of its own for it, dgrad. A convolution of one dimension runs as one of planes with a
height of 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_nm.kernels.api import Convolution, GemmName, MaskedMatrix, lookup
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
    """Return the geometry for ``x [images, in, height, width]``."""
    stride, padding, dilation, groups = unflattened(geometry)
    _, inputs, height, width = x.shape
    outputs = len(weight)
    # The last two of (1, height, width) or of (1, width).
    kernel = (1, *weight.shape[2:])[-2:]
    size = (height, width)
    return Convolution(inputs, outputs, size, kernel, stride, padding, dilation, groups)


def flattened(
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> tuple[int, ...]:
    """Return the geometry as operators take it, in one tuple; that of one dimension with a height of 1.

    Example:
        >>> flattened((2,), (1,), (1,), 4)
        (1, 2, 0, 1, 1, 1, 4)
    """
    # The last two entries: one dimension takes what a height of 1 needs, two keep their own.
    stride = (1, *stride)[-2:]
    padding = (0, *padding)[-2:]
    dilation = (1, *dilation)[-2:]
    return *stride, *padding, *dilation, groups


def unflattened(
    geometry: Sequence[int],
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]:
    """Return stride, padding, dilation and groups from what :func:`flattened` returned."""
    stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, groups = geometry
    return (stride_y, stride_x), (padding_y, padding_x), (dilation_y, dilation_x), groups


def _memory_format(x: Tensor) -> torch.memory_format:
    """Return channels last if `x` is, else contiguous."""
    # A tensor of one channel is both, and counts as contiguous.
    if x.is_contiguous():
        return torch.contiguous_format
    if x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _product(
    layer: NMLayer, router: Router, gemm: GemmName, x: Tensor, conv: Convolution
) -> Product:
    """Return one of the layer's products as it would run now."""
    # As of matrices: [outputs, in / groups * taps], and a token for each output position of each image.
    width = math.prod(conv.weight_shape[1:])
    positions = len(x) * math.prod(conv.positions)
    return product_now(layer, router, gemm, x, conv.outputs, width, conv, positions)


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
    """Convolve `x` with W_F, in the dtype and the memory format of `x`.

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
    # The size of the tag is the layer's handle.
    layer: NMLayer = lookup(tag.shape[0])
    active_router: Router = lookup(router)
    conv = _convolution(x, weight, geometry)
    # The router measures all products of a layer at once, so it hears of those to come with the first.
    gemms = GEMMS if trains and not active_router.tuned else GEMMS[:1]
    products = [_product(layer, active_router, gemm, x, conv) for gemm in gemms]
    active_router.record(products)
    product = products[0]
    kernel = active_router.kernel(product)

    def dense() -> Tensor:
        # The shape of the weight has the height of 1, too.
        forward_weight = layer.view.forward_of(weight).to(x.dtype)
        return F.conv2d(x, forward_weight.view(conv.weight_shape), bias, *conv.arguments)

    def sparse() -> Tensor:
        packed = pack_of(
            layer,
            active_router,
            kernel,
            product,
            weight,
            forward_operand,
            keep=trains,
            side="conv",
        )
        return kernel.conv(packed, plain(x), conv, None if bias is None else plain(bias))

    y = run_kernel(active_router, kernel, product, sparse, dense)
    # Whichever ran, the memory format is the one that register_fake promises to compiled graphs.
    return y.contiguous(memory_format=_memory_format(x))


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
        memory_format=_memory_format(x),
    )


@register_flop_formula(torch.ops.lightning_nm.forward_conv)
def _forward_flops(
    x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """``2 positions out in / groups taps``: as the dense product, whatever kernel makes it."""
    width = math.prod(weight_shape[1:])
    return int(2 * math.prod(out_shape) * width)


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
    """Return dX with W_B, in the memory format of `x`, and dW; an empty tensor for what is not needed.

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
    # The size of the tag is the layer's handle.
    layer: NMLayer = lookup(tag.shape[0])
    active_router: Router = lookup(router)
    conv = _convolution(x, weight, geometry)
    dgrad = wgrad = None
    if needs_input:
        dgrad = _product(layer, active_router, "dgrad", x, conv)
    if needs_weight:
        wgrad = _product(layer, active_router, "wgrad", x, conv)
    # Before the kernels are chosen: now all products of the batch are known, if they shall be measured.
    active_router.tune_if_single()
    if dgrad is None:
        dx = grad.new_empty(0)
    else:
        dx = _dgrad(layer, active_router, dgrad, conv, grad, weight, x)
    if wgrad is None:
        dweight = grad.new_empty(0)
    else:
        dweight = _wgrad(layer, active_router, wgrad, conv, grad, weight, x)
    return dx, dweight


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
    dx = grad.new_empty(0)
    if needs_input:
        dx = torch.empty(
            x.shape, dtype=grad.dtype, device=grad.device, memory_format=_memory_format(x)
        )
    dweight = grad.new_empty(0)
    if needs_weight:
        out = weight.shape[0]
        dweight = grad.new_empty(out, weight.numel() // out)
    return dx, dweight


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
    """``2 positions out in / groups taps`` for each product: as the dense ones, whatever kernels make them."""
    number = int(needs_input) + int(needs_weight)
    width = math.prod(weight_shape[1:])
    return int(number * 2 * math.prod(grad_shape) * width)


def _dgrad(
    layer: NMLayer,
    router: Router,
    product: Product,
    conv: Convolution,
    dy: Tensor,
    weight: Tensor,
    x: Tensor,
) -> Tensor:
    """Return dX ``[images, in, height, width]``."""
    kernel = router.kernel(product)
    method = layer.spec.method

    def dense() -> Tensor:
        backward_weight = layer.view.backward_of(weight).to(dy.dtype)
        return conv_input_gradient(dy, x, backward_weight.view(conv.weight_shape), conv.arguments)

    def sparse() -> Tensor:
        # Where W_B is W_F, the pack of the forward serves dgrad, too.
        own_weight = layer.masks.has_backward or not method.selects_entries
        operand = conv_backward_operand if own_weight else forward_operand
        side = "conv dgrad" if own_weight else "conv"
        packed = pack_of(layer, router, kernel, product, weight, operand, side=side)
        return kernel.conv_input(packed, plain(dy), conv)

    dx = run_kernel(router, kernel, product, sparse, dense)
    return dx.contiguous(memory_format=_memory_format(x))


def _wgrad(
    layer: NMLayer,
    router: Router,
    product: Product,
    conv: Convolution,
    dy: Tensor,
    weight: Tensor,
    x: Tensor,
) -> Tensor:
    """Return dW ``[out, in / groups * taps]``."""
    kernel = router.kernel(product)

    def dense() -> Tensor:
        shape = torch.Size(conv.weight_shape)
        dweight = conv_weight_gradient(dy, x, shape, conv.arguments)
        return dweight.contiguous().view(conv.outputs, -1)

    # Called only where there is no layout of these masks yet.
    def operand() -> MaskedMatrix:
        return forward_operand(layer, weight, product.key)

    def sparse() -> Tensor:
        # The mask bits of the forward are those of dW, and so is their layout.
        layout = layout_of(layer, router, kernel, product, operand, "conv")
        return kernel.conv_sampled(layout, plain(dy), plain(x), conv)

    return run_kernel(router, kernel, product, sparse, dense)
