"""The op seam: one autograd function per layer kind, with separate weights for the forward and the dgrad GEMM.

For a linear layer with ``X [tokens, in]`` and ``W [out, in]``::

    Y  = X W_F^T          forward weight W_F = method.forward_weight(W)
    dX = dY W_B           backward weight W_B = method.backward_weight(W)
    dW = E(dY)^T X        E = the gradient estimator, routed to W by method.weight_gradient

Only X, W, the estimator's noise and the masks are saved for backward; W_F and W_B are made again. Autograd then notices
masks that move between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.functional.select import masked
from lightning_nm.kernels.router.router import Router, active
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.products.dense_conv import conv_gradients, conv_weight_gradient
from lightning_nm.nn.products.routed_conv import backward_convs, flattened, forward_conv
from lightning_nm.nn.products.routed_ops import (
    ESTIMATED_CONVOLUTION,
    backward_gemms,
    forward_gemm,
    is_estimating,
    record_dense,
)

# Convolutions by the number of spatial dimensions, less one.
CONVOLUTIONS: list[Callable[..., Tensor]] = [F.conv1d, F.conv2d, F.conv3d]

# Why a product that no router runs is dense.
_PART = "a part of a joint projection"


class PackedProduct(Protocol):
    """A packed weight, which a module of a registered adapter has in the place of a layer when it is for inference."""

    def linear(self, x: Tensor, bias: Tensor | None, rows: tuple[int, int] | None) -> Tensor:
        """``x @ W^T + bias``."""

    def conv(self, x: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        """The convolution of x with W; stride, padding, dilation and groups."""


def nm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: NMLayer | PackedProduct,
    rows: tuple[int, int] | None = None,
    *,
    routed: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``x @ W_F^T + bias`` whose input gradient uses W_B.

    Args:
        x: ``[..., in]``.
        weight: The latent parameter: ``[out, in]``, or ``[in, out]`` for a transposed layout.
        bias: ``[out]`` or ``None``.
        layer: Method, estimator and masks; or a packed weight, whose product is then made.
        rows: Use only the output rows ``rows[0]:rows[1]``, as cross-attention does of a joint projection.
        routed: Whether a router may choose the kernels.
        dtype: What the weight is cast to where autocast does not decide; by default nothing.

    Returns:
        ``[..., out]`` in the dtype that ``F.linear`` would return, autocast included.
    """
    if not isinstance(layer, NMLayer):
        return layer.linear(x, bias, rows)
    x, bias, dtype = _autocast(x, dtype or weight.dtype, bias)
    router = (
        active() if routed and x.dtype == dtype else None
    )  # a mismatch is the dense product's to refuse
    if rows is not None and bias is not None:
        bias = bias[rows[0] : rows[1]]
    with _without_autocast(x.device.type):
        # Outside of the function, so that its output is no view: that may be changed in place.
        tokens = x.reshape(-1, x.shape[-1])
        route = None if router is None else (router, torch.is_grad_enabled())
        y = _Linear.apply(
            tokens,
            weight,
            bias,
            layer,
            dtype,
            rows,
            route,
            layer.noise.words,
            *layer.read_tensors(),
        )
        # As torch's own linear: nothing else holds y, and FSDP's hooks are lost by changes in place of a view.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])


def nm_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: NMLayer | PackedProduct,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Convolution with W_F whose input gradient uses W_B.

    Args:
        x: ``[batch, in, *positions]``.
        weight: The latent parameter ``[out, in / groups, *kernel]``.
        bias: ``[out]`` or ``None``.
        layer: Method, estimator and masks; or a packed weight.
        stride: Per spatial dimension.
        padding: Zeros on both sides, per spatial dimension.
        dilation: Per spatial dimension.
        groups: Groups of the convolution.
    """
    if not isinstance(layer, NMLayer):
        return layer.conv(x, bias, stride, padding, dilation, groups)
    if (
        active() is not None
        and {*stride, *dilation, *weight.shape[2:], groups} == {1}
        and not any(padding)
    ):
        tokens = x.movedim(1, -1)
        if (
            tokens.is_contiguous()
        ):  # channels last: a matrix product, [batch x positions, in] with [in, out]
            return nm_linear(tokens, weight, bias, layer).movedim(-1, 1)
    x, bias, dtype = _autocast(x, weight.dtype, bias)
    router = active()
    with _without_autocast(x.device.type):
        geometry = (stride, padding, dilation, groups)
        # A mismatch of dtypes is the dense product's to refuse.
        routed = (
            router is not None
            and x.dim() < 5
            and x.dtype == dtype
            and router.convolves(x.device.type)
        )
        route = (router, torch.is_grad_enabled()) if routed else None
        arguments = (x, weight, bias, layer, dtype, geometry, router, route)
        return _Conv.apply(*arguments, layer.noise.words, *layer.read_tensors())


def nm_embedding(
    tokens: Tensor,
    weight: Tensor,
    layer: NMLayer,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Rows of W_F, whose gradient is routed to W by the method; no estimator, because dW is a sum and no product.

    Args:
        tokens: Integers ``[...]``.
        weight: The latent parameter ``[num_embeddings, embedding_dim]``; blocks lie along ``embedding_dim``.
        layer: Method and masks.
        padding_idx: The row that receives no gradient, or ``None``.
        scale_grad_by_freq: Whether gradients are divided by how often a row occurs in ``tokens``.

    Returns:
        ``[..., embedding_dim]``.
    """
    padding = -1 if padding_idx is None else padding_idx
    return _Embedding.apply(
        tokens, weight, layer, padding, scale_grad_by_freq, *layer.read_tensors()
    )


def _autocast(
    x: Tensor, own: torch.dtype, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """Cast as autocast casts for a matmul; the weight is cast inside the op so that the parameter itself is saved."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return x.to(dtype), None if bias is None else bias.to(dtype), dtype
    return x, bias, own


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Within, autocast is off. Entering torch's own context takes as long as a small product: not where it is off."""
    return (
        torch.autocast(device, enabled=False)
        if torch.is_autocast_enabled(device)
        else nullcontext()
    )


def _wgrad(
    layer: NMLayer,
    grad: Tensor,
    noise: Tensor | None,
    gemm: Callable[[Tensor], Tensor],
    row: int = 0,
) -> Tensor:
    """``gemm(E(dY))`` for ``dY [batch, out, *positions]`` or ``[tokens, out]``, whose first output is `row`."""
    if layer.spec.estimator is None or noise is None or not layer.progress.estimating:
        return gemm(grad)
    by_token = grad.movedim(1, -1)  # blocks lie along batch x positions, for one output
    tokens = by_token.flatten(0, -2)
    pruned = layer.estimate(tokens, layer.noise.for_call(noise, layer.first_row + row))
    estimate = pruned.reshape(by_token.shape).movedim(-1, 1)
    compiling = torch.compiler.is_compiling()
    # Convolutions are several times slower where X and dY lie in different orders, channels last and first. A compiler
    # chooses the order itself, and torch 2.6's does not let a graph ask for strides in a backward pass.
    if grad.dim() > 2 and not compiling and estimate.stride() != grad.stride():
        estimate = torch.empty_like(grad).copy_(estimate)
    found = gemm(estimate)
    if not compiling and layer.observation.active:  # a compiled graph cannot hand figures out
        layer.observation.add(layer.progress.clock, estimate, gemm(grad), found)
    return found


def _route(
    layer: NMLayer, weight: Tensor, grad: Tensor, tensors: int
) -> tuple[Tensor | None, list[Any]]:
    """Gradients of the weight and of the layer's tensors, of which only the method's own parameters have one."""
    if not layer.routes_gradients:
        return grad.to(weight.dtype), [None] * tensors
    grad_weight, *grad_parameters = layer.spec.method.weight_gradient(
        layer, weight, grad.to(weight.dtype)
    )
    rest: list[Any] = [None] * (tensors - len(layer.parameters))
    return grad_weight, rest + grad_parameters


def _differentiated() -> bool:
    """Whether this backward pass is itself recorded, for a second derivative, which no kernel has."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


# The forward passes take *inputs: where no gradient is needed, Dynamo (torch 2.13) leaves ctx out if a forward has as
# many parameters as apply has arguments, which two tensors behind named parameters would amount to.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        layer: NMLayer
        route: tuple[Router, bool] | None
        x, weight, bias, layer, dtype, rows, route, noise, *tensors = inputs
        ctx.save_for_backward(x, weight, noise, *tensors)
        ctx.layer, ctx.dtype, ctx.rows = layer, dtype, slice(None) if rows is None else slice(*rows)
        ctx.router = None if route is None else route[0]
        if route is not None and rows is None:
            router, trains = route
            out = layer.matrix(weight).shape[0]
            return forward_gemm(
                x, weight, bias, tensors, trains, out, layer.handle_tensor, router.handle
            )
        record_dense(layer, ctx.router, "forward", len(x), x, _PART)
        return F.linear(
            x,
            layer.matrix(layer.spec.method.forward_weight(layer, weight))[ctx.rows].to(dtype),
            bias,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, noise, *tensors = ctx.saved_tensors
        layer: NMLayer = ctx.layer
        (grad,) = grads
        needs_input = ctx.needs_input_grad[0]
        needs_weight = ctx.needs_input_grad[1] or any(ctx.needs_input_grad[8:])
        grad_x = grad_weight = grad_bias = None
        rest: list[Any] = [None] * len(tensors)
        whole = ctx.rows == slice(None)
        if ctx.router is not None and whole and not _differentiated():
            made = backward_gemms(
                grad,
                x,
                weight,
                noise,
                tensors,
                needs_input,
                needs_weight,
                layer.handle_tensor,
                ctx.router.handle,
            )
            grad_x, found = made[0] if needs_input else None, made[1]
        else:
            if needs_input:
                record_dense(layer, ctx.router, "dgrad", len(x), x, _PART)
                grad_x = grad @ layer.matrix(layer.spec.method.backward_weight(layer, weight))[
                    ctx.rows
                ].to(ctx.dtype)
            if needs_weight:
                record_dense(layer, ctx.router, "wgrad", len(x), x, _PART)
                found = _wgrad(layer, grad, noise, lambda dy: dy.t() @ x, ctx.rows.start or 0)
        if needs_weight:
            if not whole:
                part, found = found, torch.zeros_like(layer.matrix(weight), dtype=found.dtype)
                found[ctx.rows] = part
            full = layer.unrows(found.view(layer.rows(weight).shape))
            grad_weight, rest = _route(layer, weight, full, len(tensors))
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, *rest


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        layer: NMLayer
        tokens, weight, layer, padding, by_frequency, *tensors = inputs
        ctx.save_for_backward(tokens, weight, *tensors)
        ctx.layer, ctx.padding, ctx.by_frequency = layer, padding, by_frequency
        method = layer.spec.method
        if not method.selects_entries:
            return F.embedding(tokens, method.forward_weight(layer, weight))
        rows, mask = F.embedding(tokens, weight), layer.forward_mask_view
        return rows if mask is None else masked(rows, mask[tokens])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tokens, weight, *tensors = ctx.saved_tensors
        grad_weight, rest = None, [None] * len(tensors)
        if ctx.needs_input_grad[1] or any(ctx.needs_input_grad[5:]):
            found = torch.ops.aten.embedding_dense_backward(
                grads[0], tokens, len(weight), ctx.padding, ctx.by_frequency
            )
            grad_weight, rest = _route(ctx.layer, weight, found, len(tensors))
        return None, grad_weight, None, None, None, *rest


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        layer: NMLayer
        router: Router | None
        route: tuple[Router, bool] | None
        x, weight, bias, layer, dtype, geometry, router, route, noise, *tensors = inputs
        ctx.save_for_backward(x, weight, noise, *tensors)
        ctx.layer, ctx.dtype, ctx.geometry, ctx.router, ctx.routed = (
            layer,
            dtype,
            geometry,
            router,
            route is not None,
        )
        if route is not None:
            flat, tag = flattened(*geometry), layer.handle_tensor
            y = forward_conv(
                _planes(x), weight, bias, tensors, route[1], flat, tag, route[0].handle
            )
            return (
                y
                if x.dim() == 4
                else torch.ops.aten._unsafe_view(y, [len(y), y.shape[1], y.shape[3]])
            )
        y = CONVOLUTIONS[x.dim() - 3](
            x, layer.spec.method.forward_weight(layer, weight).to(dtype), bias, *geometry
        )
        record_dense(layer, router, "forward", y.numel() // y.shape[1], x, _dense_reason(x))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, noise, *tensors = ctx.saved_tensors
        layer: NMLayer = ctx.layer
        (grad,) = grads
        geometry = ctx.geometry
        grad_x = grad_weight = grad_bias = full = None
        rest: list[Any] = [None] * len(tensors)
        tokens = grad.numel() // grad.shape[1]
        needs_input = ctx.needs_input_grad[0]
        needs_weight = ctx.needs_input_grad[1] or any(ctx.needs_input_grad[9:])
        routed = ctx.routed and not _differentiated()
        estimated = noise is not None and is_estimating(layer)
        exact = needs_weight and not estimated
        if routed and (needs_input or needs_weight):
            flat = flattened(*geometry)
            tag, handle = layer.handle_tensor, ctx.router.handle
            made = backward_convs(
                _planes(grad), _planes(x), weight, tensors, needs_input, exact, flat, tag, handle
            )
            grad_x = made[0].view(x.shape) if needs_input else None
            full = made[1].view(weight.shape) if exact else None
        else:
            backward_weight = None
            if needs_input:
                record_dense(layer, ctx.router, "dgrad", tokens, x, _dense_reason(x))
                backward_weight = layer.spec.method.backward_weight(layer, weight).to(ctx.dtype)
            wanted = {"needs_input": needs_input, "needs_weight": exact}
            grad_x, full = conv_gradients(
                grad, x, backward_weight, weight.shape, geometry, **wanted
            )
        if needs_weight:
            if estimated or not routed:
                reason = ESTIMATED_CONVOLUTION if ctx.routed else _dense_reason(x)
                record_dense(layer, ctx.router, "wgrad", tokens, x, reason)
            if full is None:
                full = _wgrad(
                    layer,
                    grad,
                    noise,
                    lambda dy: conv_weight_gradient(dy, x, weight.shape, geometry),
                )
            grad_weight, rest = _route(layer, weight, full, len(tensors))
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum((0, *range(2, grad.dim())))
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None, *rest


def _planes(x: Tensor) -> Tensor:
    """``[images, channels, height, width]``; one dimension has a height of 1."""
    return x if x.dim() == 4 else x.unsqueeze(2)


def _dense_reason(x: Tensor) -> str:
    """Why a convolution that no router runs is dense."""
    return "a convolution, left to cuDNN" if x.is_cuda else "a convolution that no kernel takes"
