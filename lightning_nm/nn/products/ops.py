"""The masked operators: one autograd function per layer kind, with its own weights in the forward and the dgrad GEMM.

For a linear layer with ``X [tokens, in]`` and ``W [out, in]``::

    Y  = X W_F^T          forward weight W_F = method.forward_weight(W)
    dX = dY W_B           backward weight W_B = method.backward_weight(W)
    dW = E(dY)^T X        E = the gradient estimator, routed to W by method.weight_gradient

A layer with ``draws_backward`` has a random W_B instead, which is W_F in the mean. A backward pass that is itself
differentiated uses W_F there: the derivative of a draw is not that of its mean.

Only X, W, the layer's noise and the masks are saved for backward; W_F and W_B are made again. Autograd then notices
masks that move between forward and backward.

The last letters of a name are the dimensions of its tensor: t tokens, i inputs, o outputs. A name without them, such as
``weight``, is of a tensor whose layout depends on the layer.
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
from lightning_nm.nn.products.estimates import backward_matrix, backward_weight, estimated
from lightning_nm.nn.products.routed_conv import backward_convs, flattened, forward_conv
from lightning_nm.nn.products.routed_ops import (
    DRAWN_CONVOLUTION,
    ESTIMATED_CONVOLUTION,
    backward_gemms,
    forward_gemm,
    is_estimating,
    record_dense,
)

# Convolutions by the number of spatial dimensions, less one.
CONVOLUTIONS: list[Callable[..., Tensor]] = [F.conv1d, F.conv2d, F.conv3d]

# Why the product of some rows alone is dense.
_PART_REASON = "a part of a joint projection"

# Where the layer's own tensors begin among the arguments of the two functions: those before are named in forward.
_LINEAR_TENSORS = 8
_CONV_TENSORS = 9
_EMBEDDING_TENSORS = 5


class PackedProduct(Protocol):
    """A packed weight, which a module of a registered adapter has in the place of a layer when it is for inference."""

    def linear(self, x: Tensor, bias: Tensor | None, rows: tuple[int, int] | None) -> Tensor:
        """Return ``x @ W^T + bias``, or the columns of these rows of W."""

    def conv(self, x: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        """Return the convolution of x with W; the geometry is stride, padding, dilation and groups."""


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
    """Return ``x @ W_F^T + bias``, whose input gradient uses W_B.

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
    # A mismatch of dtypes is the dense product's to refuse.
    router = active() if routed and x.dtype == dtype else None
    if rows is not None and bias is not None:
        bias = bias[rows[0] : rows[1]]
    with _without_autocast(x.device.type):
        # Outside of the function, so that its output is no view: that may be changed in place.
        x_ti = x.reshape(-1, x.shape[-1])
        # Within the function gradients are always off, so it is told whether a backward pass will follow.
        route = None if router is None else (router, torch.is_grad_enabled())
        y_to = _Linear.apply(
            x_ti,
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
        return torch.ops.aten._unsafe_view(y_to, [*x.shape[:-1], y_to.shape[-1]])


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
    """Return the convolution with W_F, whose input gradient uses W_B.

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
    router = active()
    # The router first: most calls have none, and then need not look at the geometry.
    if router is not None and _is_pointwise(layer.view.shape, stride, padding, dilation, groups):
        tokens = x.movedim(1, -1)
        # Channels last: a matrix product, [batch x positions, in] with [in, out].
        if tokens.is_contiguous():
            return nm_linear(tokens, weight, bias, layer).movedim(-1, 1)
    x, bias, dtype = _autocast(x, weight.dtype, bias)
    with _without_autocast(x.device.type):
        geometry = (stride, padding, dilation, groups)
        # A mismatch of dtypes is the dense product's to refuse. The routed operators take planes at most.
        routed = (
            router is not None
            and x.dim() < 5
            and x.dtype == dtype
            and router.convolves(x.device.type)
        )
        route = (router, torch.is_grad_enabled()) if routed else None
        # Without a route the function still reports its dense products to the router.
        arguments = (x, weight, bias, layer, dtype, geometry, router, route)
        return _Conv.apply(*arguments, layer.noise.words, *layer.read_tensors())


def _is_pointwise(
    shape: torch.Size,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> bool:
    """Whether each output position of a convolution is a product of one input position with the whole weight."""
    taps = shape[2:]
    return not any(padding) and {*stride, *dilation, *taps, groups} == {1}


def nm_embedding(
    tokens: Tensor,
    weight: Tensor,
    layer: NMLayer,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Return rows of W_F, whose gradient is routed to W by the method.

    There is no estimator, because dW is a sum and no product.

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
    """Return input, bias and the dtype of the product, cast as autocast casts for a matmul.

    The weight is cast inside the operator, so that the parameter itself is saved for backward. `own` is its dtype
    without autocast.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return x.to(dtype), None if bias is None else bias.to(dtype), dtype
    return x, bias, own


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off."""
    # Entering torch's own context takes as long as a small product: not where autocast is off anyway.
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _weight_gradient(
    layer: NMLayer,
    dy: Tensor,
    noise: Tensor | None,
    multiply: Callable[[Tensor], Tensor],
    first_row: int = 0,
) -> Tensor:
    """Return dW, which is ``multiply(E(dY))``, before the method routes it.

    Args:
        layer: The layer.
        dy: ``dY [batch, out, *positions]`` or ``[tokens, out]``.
        noise: The estimator's noise in the forward pass.
        multiply: Makes dW of dY.
        first_row: The row of the weight that belongs to the first output in `dy`.
    """
    if layer.spec.estimator is None or noise is None or not layer.progress.estimating:
        return multiply(dy)
    by_token = dy.movedim(1, -1)  # blocks lie along batch x positions, for one output
    dy_to = by_token.flatten(0, -2)
    seed = layer.noise.for_call(noise, layer.first_row + first_row)
    estimate_to = estimated(layer, dy_to, seed)
    estimate = estimate_to.reshape(by_token.shape).movedim(-1, 1)
    compiling = torch.compiler.is_compiling()
    # Convolutions are several times slower where X and dY lie in different orders, channels last and first. A compiler
    # chooses the order itself, and torch 2.6's does not let a graph ask for strides in a backward pass.
    if dy.dim() > 2 and not compiling and estimate.stride() != dy.stride():
        estimate = torch.empty_like(dy).copy_(estimate)
    dweight = multiply(estimate)
    if not compiling and layer.observation.active:  # a compiled graph cannot hand figures out
        layer.observation.add(layer.progress.clock, estimate, multiply(dy), dweight)
    return dweight


def _route(
    layer: NMLayer, weight: Tensor, dweight: Tensor, number: int
) -> tuple[Tensor | None, list[Any]]:
    """Return the gradients of the weight and of the layer's tensors, of which there are `number`.

    Of those tensors, only the method's own parameters have a gradient. They are the last ones.
    """
    if not torch.compiler.is_compiling():
        layer.progress.note_gradient()
    dweight = dweight.to(weight.dtype)
    if not layer.routes_gradients:
        return dweight, [None] * number
    routed, *dparameters = layer.spec.method.weight_gradient(layer, weight, dweight)
    without_gradient: list[Any] = [None] * (number - len(layer.parameters))
    return routed, without_gradient + dparameters


def _differentiated() -> bool:
    """Whether this backward pass is itself recorded, for a second derivative, which no kernel has."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


# The forward passes take *inputs: where no gradient is needed, Dynamo (torch 2.13) leaves ctx out if a forward has as
# many parameters as apply has arguments, which two tensors behind named parameters would amount to.


class _Linear(torch.autograd.Function):
    """The three products of a linear layer."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        layer: NMLayer
        route: tuple[Router, bool] | None
        x_ti, weight, bias, layer, dtype, rows, route, noise, *tensors = inputs
        ctx.save_for_backward(x_ti, weight, noise, *tensors)
        ctx.layer = layer
        ctx.dtype = dtype
        ctx.rows = slice(None) if rows is None else slice(*rows)
        ctx.router = None if route is None else route[0]
        if route is not None and rows is None:
            router, trains = route
            out = layer.view.matrix_shape(weight)[0]
            return forward_gemm(
                x_ti, weight, bias, tensors, trains, out, layer.handle_tensor, router.handle
            )
        record_dense(layer, ctx.router, "forward", len(x_ti), x_ti, _PART_REASON)
        # One name for W_F and its cast: the memory of the first is free during the product.
        weight_oi = layer.view.matrix(layer.view.forward_of(weight))
        weight_oi = weight_oi[ctx.rows].to(dtype)
        return F.linear(x_ti, weight_oi, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_ti, weight, noise, *tensors = ctx.saved_tensors
        layer: NMLayer = ctx.layer
        (dy_to,) = grads
        needs_x = ctx.needs_input_grad[0]
        # The method's parameters get their gradients with the weight's, perhaps while the weight itself is frozen.
        needs_weight = ctx.needs_input_grad[1] or any(ctx.needs_input_grad[_LINEAR_TENSORS:])
        needs_bias = ctx.needs_input_grad[2]
        dx_ti = dweight = dbias = None
        dtensors: list[Any] = [None] * len(tensors)
        is_whole = ctx.rows == slice(None)
        if ctx.router is not None and is_whole and not _differentiated():
            dx_ti, dweight_oi = backward_gemms(
                dy_to,
                x_ti,
                weight,
                noise,
                tensors,
                needs_x,
                needs_weight,
                layer.handle_tensor,
                ctx.router.handle,
            )
            if not needs_x:
                dx_ti = None  # what the operator returned is empty
        else:
            if needs_x:
                record_dense(layer, ctx.router, "dgrad", len(x_ti), x_ti, _PART_REASON)
                drawn_with = None if _differentiated() else noise
                weight_oi = backward_matrix(layer, weight, drawn_with, ctx.dtype, ctx.rows)
                dx_ti = dy_to @ weight_oi
                del weight_oi  # its memory is free for dW
            if needs_weight:
                record_dense(layer, ctx.router, "wgrad", len(x_ti), x_ti, _PART_REASON)

                def multiply(dy_to: Tensor) -> Tensor:
                    return dy_to.t() @ x_ti

                dweight_oi = _weight_gradient(layer, dy_to, noise, multiply, ctx.rows.start or 0)
        if needs_weight:
            if not is_whole:
                part_oi = dweight_oi
                dweight_oi = part_oi.new_zeros(layer.view.matrix_shape(weight))
                dweight_oi[ctx.rows] = part_oi
            # A 1x1 convolution and a transposed layer have a weight that is not [out, in].
            dweight = layer.view.unrows(dweight_oi.view(layer.view.rows(weight).shape))
            dweight, dtensors = _route(layer, weight, dweight, len(tensors))
        if needs_bias:
            dbias = dy_to.sum(0)
        return dx_ti, dweight, dbias, None, None, None, None, None, *dtensors


class _Embedding(torch.autograd.Function):
    """The rows of W_F that tokens name, and the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        layer: NMLayer
        tokens, weight, layer, padding, by_frequency, *tensors = inputs
        ctx.save_for_backward(tokens, weight, *tensors)
        ctx.layer = layer
        ctx.padding = padding
        ctx.by_frequency = by_frequency
        method = layer.spec.method
        if not method.selects_entries:
            return F.embedding(tokens, layer.view.forward_of(weight))
        # Only the rows that are looked up are masked: W_F of a large vocabulary is never made.
        rows = F.embedding(tokens, weight)
        mask = layer.masks.forward_view
        return rows if mask is None else masked(rows, mask[tokens])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tokens, weight, *tensors = ctx.saved_tensors
        dweight = None
        dtensors: list[Any] = [None] * len(tensors)
        if ctx.needs_input_grad[1] or any(ctx.needs_input_grad[_EMBEDDING_TENSORS:]):
            dweight = torch.ops.aten.embedding_dense_backward(
                grads[0], tokens, len(weight), ctx.padding, ctx.by_frequency
            )
            dweight, dtensors = _route(ctx.layer, weight, dweight, len(tensors))
        return None, dweight, None, None, None, *dtensors


class _Conv(torch.autograd.Function):
    """The three products of a convolution of ``[batch, in, *positions]`` with ``[out, in / groups, *kernel]``."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        layer: NMLayer
        router: Router | None
        route: tuple[Router, bool] | None
        x, weight, bias, layer, dtype, geometry, router, route, noise, *tensors = inputs
        ctx.save_for_backward(x, weight, noise, *tensors)
        ctx.layer = layer
        ctx.dtype = dtype
        ctx.geometry = geometry
        ctx.router = router
        ctx.routed = route is not None
        if route is not None:
            known_router, trains = route
            y = forward_conv(
                _planes(x),
                weight,
                bias,
                tensors,
                trains,
                flattened(*geometry),
                layer.handle_tensor,
                known_router.handle,
            )
            if x.dim() == 4:
                return y
            # Without the height of 1 that _planes added; no view, as in nm_linear.
            return torch.ops.aten._unsafe_view(y, [len(y), y.shape[1], y.shape[3]])
        convolve = CONVOLUTIONS[x.dim() - 3]
        forward_weight = layer.view.forward_of(weight).to(dtype)
        y = convolve(x, forward_weight, bias, *geometry)
        record_dense(layer, router, "forward", y.numel() // y.shape[1], x, _dense_reason(x))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, noise, *tensors = ctx.saved_tensors
        layer: NMLayer = ctx.layer
        (dy,) = grads
        geometry = ctx.geometry
        dx = dweight = dbias = None
        dtensors: list[Any] = [None] * len(tensors)
        tokens = dy.numel() // dy.shape[1]
        needs_x = ctx.needs_input_grad[0]
        needs_weight = ctx.needs_input_grad[1] or any(ctx.needs_input_grad[_CONV_TENSORS:])
        needs_bias = ctx.needs_input_grad[2]
        routed = ctx.routed and not _differentiated()
        estimated = noise is not None and is_estimating(layer)
        # One call makes dX and dW, unless dW is of another dY than dX.
        needs_weight_of_dy = needs_weight and not estimated
        # No kernel takes a weight that is drawn: this dX is a dense product, whatever makes dW.
        routes_x = routed and not layer.draws_backward
        if routed and (needs_x or needs_weight):
            dx, dweight = backward_convs(
                _planes(dy),
                _planes(x),
                weight,
                tensors,
                needs_x and routes_x,
                needs_weight_of_dy,
                flattened(*geometry),
                layer.handle_tensor,
                ctx.router.handle,
            )
            # What is not needed came back empty.
            dx = dx.view(x.shape) if needs_x and routes_x else None
            dweight = dweight.view(layer.view.shape) if needs_weight_of_dy else None
        if not routed or (needs_x and not routes_x):
            weight_of_dx = None
            if needs_x:
                reason = DRAWN_CONVOLUTION if routed else _dense_reason(x)
                record_dense(layer, ctx.router, "dgrad", tokens, x, reason)
                drawn_with = None if _differentiated() else noise
                weight_of_dx = backward_weight(layer, weight, drawn_with, ctx.dtype)
            dx, dweight_here = conv_gradients(
                dy,
                x,
                weight_of_dx,
                layer.view.shape,
                geometry,
                needs_input=needs_x,
                needs_weight=needs_weight_of_dy and not routed,
            )
            if not routed:
                dweight = dweight_here
        if needs_weight:
            if estimated or not routed:
                reason = ESTIMATED_CONVOLUTION if ctx.routed else _dense_reason(x)
                record_dense(layer, ctx.router, "wgrad", tokens, x, reason)
            if dweight is None:

                def convolve(dy: Tensor) -> Tensor:
                    return conv_weight_gradient(dy, x, layer.view.shape, geometry)

                dweight = _weight_gradient(layer, dy, noise, convolve)
            dweight, dtensors = _route(layer, weight, dweight, len(tensors))
        if needs_bias:
            batch_and_positions = (0, *range(2, dy.dim()))
            dbias = dy.sum(batch_and_positions)
        return dx, dweight, dbias, None, None, None, None, None, None, *dtensors


def _planes(x: Tensor) -> Tensor:
    """Return ``[images, channels, height, width]``; one dimension gets a height of 1."""
    return x if x.dim() == 4 else x.unsqueeze(2)


def _dense_reason(x: Tensor) -> str:
    """Why a convolution that no router runs is dense."""
    return "a convolution, left to cuDNN" if x.is_cuda else "a convolution that no kernel takes"
