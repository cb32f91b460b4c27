"""The products of masked layers: dense ones on masked operands, and those that a router gives to kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_nm.functional.mask_storage import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.functional.select import masked
from lightning_nm.kernels.api import (
    Convolution,
    GemmKernel,
    GemmKey,
    GemmName,
    MaskedMatrix,
    Sparsity,
    lookup,
)
from lightning_nm.kernels.gpu.two_four import ALIGNMENT
from lightning_nm.kernels.operands import (
    in_one_pass,
    masked_backward,
    masked_forward,
    permuted_columns,
)
from lightning_nm.kernels.router import Product, Router, active
from lightning_nm.nn.costs import LAYER_GEMMS, GemmKind
from lightning_nm.nn.layer import NMLayer, tensor_fingerprint

if TYPE_CHECKING:  # for the types only
    from lightning_nm.estimators.base import GradientEstimator


Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Stride, zeros on both sides, dilation, each per spatial dimension, and groups."""


def conv_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    weight_shape: torch.Size,
    geometry: Geometry,
    *,
    needs_input: bool = False,
    needs_weight: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight that are needed, and ``None`` for the others.

    dX depends on W and dY, dW on X and dY: one call makes both also where dX is of another weight than the forward's.
    Given the real X it keeps X's memory format, and converts dY to the backend's format once instead of twice.

    Args:
        grad: ``dY [batch, out, *positions]``.
        x: ``[batch, in, *size]``, of the dtype of ``grad``.
        weight: ``[out, in / groups, *kernel]`` likewise; ``None`` where dX is not needed.
        weight_shape: The shape of the weight.
        geometry: Of the convolution.
        needs_input: Whether dX is needed.
        needs_weight: Whether dW is needed.

    Returns:
        dX in the shape and memory format of ``x``, and dW in ``weight_shape``.
    """
    if not (needs_input or needs_weight):
        return None, None
    stride, padding, dilation, groups = geometry
    if weight is None:
        # As torch.nn.grad does: the operator reads the shape alone.
        weight = x.new_empty(1).expand(weight_shape)
    # The operator also knows transposed convolutions, the only ones with output padding.
    transposed = False
    output_padding = [0] * len(stride)
    # The gradient of the bias is a sum, which the caller makes.
    bias_sizes = None
    wanted = [needs_input, needs_weight, False]
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        wanted,
    )
    return dx, dweight


def conv_weight_gradient(
    grad: Tensor, x: Tensor, weight_shape: torch.Size, geometry: Geometry
) -> Tensor:
    """Return dW in ``weight_shape``; the arguments are those of :func:`conv_gradients`."""
    _, dweight = conv_gradients(grad, x, None, weight_shape, geometry, needs_weight=True)
    assert dweight is not None
    return dweight


def conv_input_gradient(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return dX in the shape and memory format of ``x``; the arguments are those of :func:`conv_gradients`."""
    dx, _ = conv_gradients(grad, x, weight, weight.shape, geometry, needs_input=True)
    assert dx is not None
    return dx


def estimated(layer: NMLayer, dy_to: Tensor, seed: Tensor) -> Tensor:
    """E(dY) for ``dY [tokens, out]``, by the layer's estimator.

    Raises:
        TypeError: If that is of another shape or dtype.
    """
    estimator = layer.spec.estimator
    assert estimator is not None
    estimate = estimator.estimate(layer, dy_to, seed)
    if estimate.shape != dy_to.shape or estimate.dtype != dy_to.dtype:
        raise TypeError(
            f"{type(estimator).__name__} made {estimate.dtype} {tuple(estimate.shape)} of the output gradient at layer "
            f"'{layer.name}', which is {dy_to.dtype} {tuple(dy_to.shape)}: keep the shape and the dtype"
        )
    return estimate


def drawn_matrix(
    layer: NMLayer, weight: Tensor, noise: Tensor, dtype: torch.dtype, rows: slice = slice(None)
) -> Tensor:
    r"""Draw W_B ``[out, in]`` for a layer with ``draws_backward``: N:M along `out`, and W_F in the mean.

    Of every M consecutive outputs at most N keep their weight of an input: :math:`W_B = W_F / p` with probability
    :math:`p`, as :class:`~lightning_nm.estimators.MVUE` draws dY. So :math:`\mathbb{E}[dY W_B] = dY W_F`.

    Args:
        layer: The layer.
        weight: The parameter as products get it.
        noise: The layer's noise in the forward pass.
        dtype: Of the product.
        rows: The outputs of the product, in whole blocks: a part of a joint projection.
    """
    forward_oi, seed = _to_draw(layer, weight, noise, dtype, rows)
    return _sampler(layer).estimate(layer, forward_oi, seed)


def drawn_transposed(layer: NMLayer, weight: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """W_B^T ``[in, out]`` of :func:`drawn_matrix`, contiguous, as kernels pack it."""
    forward_oi, seed = _to_draw(layer, weight, noise, dtype)
    drawn_io, _ = _sampler(layer).estimate_transposed(layer, forward_oi.contiguous(), seed)
    # It may be padded, as the tokens of a wgrad are.
    return drawn_io[:, : len(forward_oi)].contiguous()


def _sampler(layer: NMLayer) -> GradientEstimator:
    sampler = layer.spec.dgrad
    assert sampler is not None
    return sampler


def _to_draw(
    layer: NMLayer, weight: Tensor, noise: Tensor, dtype: torch.dtype, rows: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """W_F ``[out, in]`` and the words of one draw."""
    # What the exact product would use: rounded to the dtype of the product before it is drawn.
    forward_oi = layer.view.matrix(layer.forward_of(weight))[rows].to(dtype)
    first_row = layer.first_row + (rows.start or 0)
    return forward_oi, layer.noise.for_weight(noise, first_row)


def backward_matrix(
    layer: NMLayer,
    weight: Tensor,
    noise: Tensor | None,
    dtype: torch.dtype,
    rows: slice = slice(None),
) -> Tensor:
    """W_B ``[out, in]`` of a dense dgrad: drawn, or the method's; the arguments are those of :func:`drawn_matrix`."""
    if layer.draws_backward and noise is not None:
        return drawn_matrix(layer, weight, noise, dtype, rows)
    return layer.view.matrix(layer.backward_of(weight))[rows].to(dtype)


def backward_weight(
    layer: NMLayer, weight: Tensor, noise: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """W_B of :func:`backward_matrix` in the shape of the weight."""
    if layer.draws_backward and noise is not None:
        drawn_oi = drawn_matrix(layer, weight, noise, dtype)
        return layer.view.unrows(drawn_oi.reshape(layer.view.rows(weight).shape))
    return layer.backward_of(weight).to(dtype)


def packable_forward(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return W_F ``[out, in]`` as kernels pack it, contiguous; in one pass where the method selects entries."""
    method = layer.spec.method
    masks = layer.masks
    bits = masks.bits if masks.has_forward and method.selects_entries else None
    # The one pass walks weight and bits together, so both must lie in the same order.
    if bits is None or bits.stride() != weight.stride():
        weight_oi = layer.view.matrix(layer.forward_of(weight))
        return weight_oi.to(dtype).contiguous()
    return masked_forward(layer.view.matrix(weight), layer.view.matrix(bits), dtype)


def packable_backward(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return W_B^T ``[in, out]`` as kernels pack it, contiguous; its columns in the order of a backward mask."""
    method = layer.spec.method
    masks = layer.masks
    own_backward = masks.has_backward
    order = masks.permutation if own_backward else None
    has_mask = masks.has_forward or own_backward
    bits = masks.bits if has_mask and method.selects_entries else None
    if bits is None or bits.stride() != weight.stride():
        weight_oi = layer.view.matrix(layer.backward_of(weight))
        return _transposed(weight_oi.to(dtype), order)
    return masked_backward(
        layer.view.matrix(weight), layer.view.matrix(bits), dtype, order, own_backward=own_backward
    )


def forward_operand(layer: NMLayer, weight: Tensor, key: GemmKey) -> MaskedMatrix:
    """Return W_F ``[out, in]`` for kernels."""
    method = layer.spec.method
    bits = layer.masks.bits
    if not method.selects_entries:
        values = layer.forward_of(weight).to(key.dtype)
        weight_oi = layer.view.matrix(values)
        return _operand(layer, values, bits, FORWARD_BIT, key, None, weight_oi.contiguous)

    def dense() -> Tensor:
        return packable_forward(layer, weight, key.dtype)

    return _operand(layer, weight, bits, FORWARD_BIT, key, None, dense)


def backward_operand(layer: NMLayer, weight: Tensor, key: GemmKey) -> MaskedMatrix:
    """Return W_B^T ``[in, out]`` for kernels, with the permutation of a backward mask."""
    method = layer.spec.method
    masks = layer.masks
    values = weight if method.selects_entries else layer.backward_of(weight)
    # Without a backward mask, dgrad uses the forward one, which has no permutation.
    bit = BACKWARD_BIT if masks.has_backward else FORWARD_BIT
    order = masks.permutation if masks.has_backward else None

    def dense() -> Tensor:
        if method.selects_entries:
            return packable_backward(layer, weight, key.dtype)
        return _transposed(layer.view.matrix(values).to(key.dtype), order)

    matrix_oi = _operand(layer, values, masks.bits, bit, key, order, dense)
    # Values and bits are views; only `dense` makes a transposed copy.
    values_io = matrix_oi.values.t()
    bits_io = matrix_oi.bits.t()
    return matrix_oi._replace(values=values_io, bits=bits_io)


def conv_backward_operand(layer: NMLayer, weight: Tensor, key: GemmKey) -> MaskedMatrix:
    """Return W_B ``[out, in / groups * taps]`` of a convolution for kernels, in the order of memory."""

    def dense() -> Tensor:
        weight_oi = layer.view.matrix(layer.backward_of(weight))
        return weight_oi.to(key.dtype).contiguous()

    matrix_io = backward_operand(layer, weight, key)
    # Not transposed, as for a linear layer: the layout of the forward serves both products.
    values_oi = matrix_io.values.t()
    bits_oi = matrix_io.bits.t()
    return matrix_io._replace(values=values_oi, bits=bits_oi, order=None, dense=dense)


def _operand(
    layer: NMLayer,
    values: Tensor,
    bits: Tensor | None,
    bit: int,
    key: GemmKey,
    order: Tensor | None,
    dense: Callable[[], Tensor],
) -> MaskedMatrix:
    """Return values and mask bits as the matrix ``[out, in]`` that kernels take."""
    assert bits is not None  # a product without masks has no sparse operand
    values_oi = layer.view.matrix(values)
    bits_oi = layer.view.matrix(bits)
    return MaskedMatrix(values_oi, bits_oi, bit, key.pattern, key.dtype, order, dense)


def _transposed(rows: Tensor, order: Tensor | None) -> Tensor:
    """Return rows, first put in an order, as contiguous columns."""
    if order is not None:
        rows = rows[order]
    return rows.t().contiguous()


def layout_of(
    layer: NMLayer,
    router: Router,
    kernel: GemmKernel,
    product: Product,
    matrix: Callable[[], MaskedMatrix],
    side: str = "",
) -> Any:
    """Return what a packed operand has of the masks, which is kept while they stand still.

    Args:
        layer: The layer.
        router: Keeps the layout.
        kernel: Makes the layout.
        product: One of the layer's products.
        matrix: Makes the operand; called if there is no layout of these masks yet.
        side: Names the operand; by default dgrad has one of its own, and the others share that of the forward.
    """
    if not side:
        side = "dgrad" if product.key.gemm == "dgrad" else "forward"
    # Products of another dtype may take another layout.
    name = (kernel.name, "layout", side, product.key.dtype)
    # A method may change its pattern without moving the masks.
    stamp: Hashable = (layer.masks.cache_key, product.key.pattern)
    return router.layout(layer, name, stamp, lambda: kernel.layout(matrix()))


def pack_of(
    layer: NMLayer,
    router: Router,
    kernel: GemmKernel,
    product: Product,
    weight: Tensor,
    operand: Callable[[NMLayer, Tensor, GemmKey], MaskedMatrix],
    *,
    keep: bool = True,
    side: str = "",
) -> Any:
    """Return the packed operand of a weight, which changes with the weight, the masks, or anything that a step does.

    Packs are kept for training alone: evaluation may be of other weights, swapped in where no version is counted. A
    kernel that only gathers values makes its packs anew: nothing is gained by asking whether the weight changed.
    """

    def make() -> Any:
        matrix = operand(layer, weight, product.key)
        layout = layout_of(layer, router, kernel, product, lambda: matrix, side)
        return kernel.pack_masked(matrix, layout)

    if not keep or not kernel.keeps_packs:
        return make()
    tensors = (weight, *layer.read_tensors())
    # Memory belongs to the stream where it was made.
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
    # Not every optimizer leaves a version of the weight, so steps count, too.
    stamp: Hashable = (
        tuple(tensor_fingerprint(tensor) for tensor in tensors),
        layer.masks.cache_key,
        layer.progress.step,
        layer.progress.clock,
        stream,
    )
    name = (kernel.name, side or product.key.gemm, product.key.dtype)
    return router.packed(layer, name, stamp, make)


GEMMS: tuple[GemmName, ...] = ("forward", "dgrad", "wgrad")
"""The products of a layer, in the order in which they run."""

ESTIMATED_CONVOLUTION = "no kernel takes an estimated dY of a convolution"
"""Why the wgrad of such a convolution is dense."""

DRAWN_CONVOLUTION = "no kernel takes a drawn weight of a convolution"
"""Why the dgrad of such a convolution is dense."""

# What kernels know of a product's sparse operand; dense kinds are left out.
_SPARSITY: dict[GemmKind, Sparsity] = {"n:m": "n:m", "masked": "masked", "outputs": "outputs"}


def product_now(
    layer: NMLayer,
    router: Router,
    gemm: GemmName,
    x: Tensor,
    out: int,
    width: int,
    conv: Convolution | None = None,
    tokens: int | None = None,
) -> Product:
    """Return one of the layer's products as it would run now, with a reason if it can only be dense.

    Args:
        layer: The layer.
        router: Knows which kinds of sparse operands its kernels take.
        gemm: Which of the layer's products.
        x: ``[tokens, width]``, or the input of a convolution; for dtype and device.
        out: Rows of the weight.
        width: Columns of the weight as a matrix.
        conv: The geometry of a convolution.
        tokens: Output positions of the batch, where `x` does not have one row for each.
    """
    gemm_now = LAYER_GEMMS[gemm](layer)
    spec = layer.spec
    masks = layer.masks
    device = str(x.device)
    size = _size(gemm, len(x) if tokens is None else tokens, out, width)
    sparsity = _SPARSITY.get(gemm_now.kind)
    if sparsity == "masked" and not spec.method.selects_entries:
        sparsity = None  # the method's own backward weight may have values at entries that the forward mask prunes
    # A masked operand is not N:M along its depth, but its mask is N:M along the other axis: not while it is so nowhere.
    pattern = gemm_now.pattern or spec.method.current_pattern(layer)
    if pattern is None:
        sparsity = None
    reason = ""
    if conv is not None and gemm == "wgrad" and is_estimating(layer):
        reason = ESTIMATED_CONVOLUTION
    elif conv is not None and gemm == "dgrad" and layer.draws_backward:
        reason = DRAWN_CONVOLUTION
    elif sparsity is None or sparsity not in router.takes(device):
        reason = "none of its operands is N:M"
        if gemm_now.reason:
            reason = f"{gemm_now.label}; {gemm_now.reason}"
    if reason or sparsity is None or pattern is None:
        key = GemmKey(gemm, *size, x.dtype, spec.pattern, device)
        return Product(spec.name, key, reason)
    # Only a backward mask is N:M in another order of the rows, and convolutions keep the order of memory.
    has_order = masks.has_backward and masks.permutation is not None
    permuted = conv is None and gemm == "dgrad" and has_order
    drawn = gemm == "dgrad" and layer.draws_backward
    key = GemmKey(
        gemm,
        *size,
        x.dtype,
        pattern,
        device,
        permuted=permuted,
        drawn=drawn,
        sparsity=sparsity,
        conv=conv,
    )
    return Product(spec.name, key)


def is_estimating(layer: NMLayer) -> bool:
    """Whether wgrad is of an estimate of dY now."""
    return layer.spec.estimator is not None and layer.progress.estimating


def _size(gemm: GemmName, tokens: int, out: int, width: int) -> tuple[int, int, int]:
    """Return rows, depth and columns of a product, see :class:`~lightning_nm.kernels.api.GemmKey`."""
    if gemm == "forward":
        return out, width, tokens
    if gemm == "dgrad":
        return width, out, tokens
    return out, tokens, width


def record_dense(
    layer: NMLayer, router: Router | None, gemm: GemmName, tokens: int, x: Tensor, reason: str
) -> None:
    """Report a product that is always dense to the router; compiled graphs do not report.

    Args:
        layer: The layer.
        router: The active router, if there is one.
        gemm: Which of its products.
        tokens: Output positions of the batch.
        x: The input, for dtype and device.
        reason: Why it is dense.
    """
    if router is not None and not torch.compiler.is_compiling():
        out, columns = layer.view.matrix_shape(layer.param)
        size = _size(gemm, tokens, out, columns)
        key = GemmKey(gemm, *size, x.dtype, layer.spec.pattern, str(x.device))
        # Asking for a kernel is what the router counts; with a reason it is always the dense one.
        router.kernel(Product(layer.spec.name, key, reason))


# What the operators do depends on more than their arguments, which a replayed CUDA graph would not see.
OPTIONS: dict[str, Any] = {"mutates_args": ()}
# An older torch knows neither the tag nor, perhaps, the argument.
if hasattr(torch.Tag, "cudagraph_unsafe"):
    OPTIONS["tags"] = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("lightning_nm::forward_gemm", **OPTIONS)
def forward_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tensors: Sequence[Tensor],
    trains: bool,
    out: int,
    tag: Tensor,
    router: int,
) -> Tensor:
    """``x W_F^T + bias`` with ``x [tokens, in]``, in the dtype of `x`.

    Args:
        x: ``[tokens, in]``.
        weight: The latent parameter, in the layout of the layer.
        bias: ``[out]`` of the dtype of `x`, or None.
        tensors: What the method keeps beside the weight; it is read through the layer.
        trains: Whether a backward pass will follow.
        out: Rows of the weight.
        tag: The layer's handle tensor.
        router: The router's handle.

    Returns:
        ``[tokens, out]``.
    """
    # An operator takes tensors and numbers alone: the objects are looked up.
    layer: NMLayer = lookup(tag.shape[0])
    active_router: Router = lookup(router)
    # The router measures all products of a layer at once, so it hears of those to come with the first.
    gemms = GEMMS if trains and not active_router.tuned else GEMMS[:1]
    products = [product_now(layer, active_router, gemm, x, out, x.shape[1]) for gemm in gemms]
    active_router.record(products)
    product = products[0]
    kernel = active_router.kernel(product)

    def dense() -> Tensor:
        return F.linear(x, _forward_matrix(layer, weight, x.dtype), bias)

    def sparse() -> Tensor:
        packed = pack_of(
            layer, active_router, kernel, product, weight, forward_operand, keep=trains
        )
        return kernel.linear(packed, plain(x), None if bias is None else plain(bias))

    return run_kernel(active_router, kernel, product, sparse, dense)


@forward_gemm.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    tensors: Any,
    trains: bool,
    out: int,
    tag: Tensor,
    router: int,
) -> Tensor:
    return x.new_empty(x.shape[0], out)


@register_flop_formula(torch.ops.lightning_nm.forward_gemm)
def _forward_flops(x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """``2 tokens in out``: as the dense product, whatever kernel makes it."""
    tokens, inputs = x_shape
    return 2 * tokens * inputs * out_shape[1]


@torch.library.custom_op("lightning_nm::backward_gemms", **OPTIONS)
def backward_gemms(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    tensors: Sequence[Tensor],
    needs_input: bool,
    needs_weight: bool,
    tag: Tensor,
    router: int,
) -> tuple[Tensor, Tensor]:
    """``dX = dY W_B`` and ``dW = E(dY)^T X``, in the dtype of `grad`: those that are needed, else an empty tensor.

    Args:
        grad: ``dY [tokens, out]``.
        x: ``[tokens, in]``.
        weight: The latent parameter, in the layout of the layer.
        noise: The layer's noise in the forward pass.
        tensors: What the method keeps beside the weight; it is read through the layer.
        needs_input: Whether dX is needed.
        needs_weight: Whether dW is needed.
        tag: The layer's handle tensor.
        router: The router's handle.

    Returns:
        ``dX [tokens, in]`` and ``dW [out, in]``.
    """
    layer: NMLayer = lookup(tag.shape[0])
    active_router: Router = lookup(router)
    out = grad.shape[1]
    width = x.shape[1]
    dgrad = wgrad = None
    if needs_input:
        dgrad = product_now(layer, active_router, "dgrad", x, out, width)
    if needs_weight:
        wgrad = product_now(layer, active_router, "wgrad", x, out, width)
    # Before the kernels are chosen: now all products of the batch are known, if they shall be measured.
    active_router.tune_if_single()
    dgrad_kernel = None if dgrad is None else active_router.kernel(dgrad)
    wgrad_kernel = None if wgrad is None else active_router.kernel(wgrad)
    gradient = _OutputGradient(layer, active_router, plain(grad), noise if needs_weight else None)
    # Where wgrad is dense, it makes E(dY) in the form that a dense product takes.
    gradient.packed = wgrad_kernel not in (None, active_router.registry.reference)
    # dX first: what it needs of dY may be made in one pass with what dW needs.
    if dgrad is None:
        dx = grad.new_empty(0)
    else:
        dx = _dgrad(layer, active_router, dgrad_kernel, dgrad, gradient, weight, noise)
    if wgrad is None:
        dweight = grad.new_empty(0)
    else:
        dweight = _wgrad(layer, active_router, wgrad_kernel, wgrad, gradient, weight, x)
    return dx, dweight


@backward_gemms.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    noise: Any,
    tensors: Any,
    needs_input: bool,
    needs_weight: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    tokens, out = grad.shape
    width = x.shape[1]
    dx = grad.new_empty(tokens, width) if needs_input else grad.new_empty(0)
    dweight = grad.new_empty(out, width) if needs_weight else grad.new_empty(0)
    return dx, dweight


@register_flop_formula(torch.ops.lightning_nm.backward_gemms)
def _backward_flops(
    grad_shape: Any,
    x_shape: Any,
    weight: Any,
    noise: Any,
    tensors: Any,
    needs_input: bool,
    needs_weight: bool,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """``2 tokens in out`` for each product: as the dense ones, whatever kernels make them."""
    tokens, out = grad_shape
    number = int(needs_input) + int(needs_weight)
    return number * 2 * tokens * out * x_shape[1]


class _OutputGradient:
    """dY ``[tokens, out]``, contiguous, in the forms that products take; one pass over it may make two of them."""

    packed = False  # whether a kernel packs E(dY)

    def __init__(self, layer: NMLayer, router: Router, dy_to: Tensor, noise: Tensor | None) -> None:
        self.layer = layer
        self.router = router
        self.dy_to = dy_to
        self.seed: Tensor | None = None  # None where dW is made of dY itself
        if noise is not None and is_estimating(layer):
            self.seed = layer.noise.for_call(noise, layer.first_row)
        self._estimate_ot: Tensor | None = None

    def permuted(self, order: Tensor) -> Tensor:
        """Return ``dY[:, order]``."""
        layer = self.layer
        dy_to = self.dy_to
        seed = self.seed
        estimator = layer.spec.estimator
        if not self.packed or estimator is None or seed is None:
            return permuted_columns(dy_to, order)
        # An observed estimate is compared with dY, and so made where it is compared.
        if layer.progress.observing:
            return permuted_columns(dy_to, order)

        self._estimate_ot, permuted_to = estimator.estimate_transposed(layer, dy_to, seed, order)
        # The estimator may have no pass that does both.
        return permuted_columns(dy_to, order) if permuted_to is None else permuted_to

    def estimate_transposed(self) -> Tensor:
        """Return ``E(dY)^T``."""
        estimator = self.layer.spec.estimator
        assert estimator is not None
        assert self.seed is not None
        if self._estimate_ot is None:
            self._estimate_ot, _ = estimator.estimate_transposed(self.layer, self.dy_to, self.seed)
        return self._estimate_ot


def _dgrad(
    layer: NMLayer,
    router: Router,
    kernel: Any,
    product: Product,
    gradient: _OutputGradient,
    weight: Tensor,
    noise: Tensor | None,
) -> Tensor:
    """Return ``dX = dY W_B``, ``[tokens, in]``."""
    dy_to = gradient.dy_to

    def dense() -> Tensor:
        return dy_to @ _backward_matrix(layer, weight, noise, dy_to.dtype)

    def sparse() -> Tensor:
        if product.key.drawn:
            assert noise is not None
            drawn_io = drawn_transposed(layer, weight, noise, dy_to.dtype)
            return kernel.linear(kernel.pack(plain(drawn_io)), dy_to)
        packed = pack_of(layer, router, kernel, product, weight, backward_operand)
        # A pack in the order of the permutation needs the columns of dY in the same order.
        order = layer.masks.permutation if product.key.permuted and kernel.ordered else None
        return kernel.linear(packed, dy_to if order is None else gradient.permuted(order))

    return run_kernel(router, kernel, product, sparse, dense)


def _wgrad(
    layer: NMLayer,
    router: Router,
    kernel: Any,
    product: Product,
    gradient: _OutputGradient,
    weight: Tensor,
    x_ti: Tensor,
) -> Tensor:
    """Return ``dW = E(dY)^T X``, ``[out, in]``."""
    dy_to = gradient.dy_to
    seed = gradient.seed
    if product.key.sparsity == "outputs":

        def operand() -> MaskedMatrix:
            return forward_operand(layer, weight, product.key)

        # The kernel computes the entries that the forward mask keeps, and no others.
        def at_kept_entries() -> Tensor:
            layout = layout_of(layer, router, kernel, product, operand)
            return kernel.sampled(layout, dy_to, plain(x_ti))

        def at_all_entries() -> Tensor:
            return dy_to.t() @ x_ti

        return run_kernel(router, kernel, product, at_kept_entries, at_all_entries)
    # Without an estimator no operand of wgrad is sparse.
    if seed is None:
        return dy_to.t() @ x_ti
    if layer.progress.observing:
        return _observed_wgrad(layer, router, kernel, product, dy_to, seed, x_ti)

    def sparse() -> Tensor:
        return kernel.matmul(kernel.pack(gradient.estimate_transposed()), plain(x_ti))

    def dense() -> Tensor:
        return estimated(layer, dy_to, seed).t() @ x_ti

    return run_kernel(router, kernel, product, sparse, dense)


def _observed_wgrad(
    layer: NMLayer,
    router: Router,
    kernel: Any,
    product: Product,
    dy_to: Tensor,
    seed: Tensor,
    x_ti: Tensor,
) -> Tensor:
    """Return dW made of E(dY), and tell the layer how far it is from that made of dY."""
    estimate_to = estimated(layer, dy_to, seed)
    estimate_ot = estimate_to.t().contiguous()
    plain_x_ti = plain(x_ti)

    def sparse() -> Tensor:
        return kernel.matmul(kernel.pack(estimate_ot), plain_x_ti)

    def dense() -> Tensor:
        return estimate_to.t() @ x_ti

    dweight_oi = run_kernel(router, kernel, product, sparse, dense)
    layer.progress.observe(estimate_to, dy_to.t() @ x_ti, dweight_oi)
    return dweight_oi


def _forward_matrix(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return W_F ``[out, in]`` for a dense product: masked and cast in one pass where a kernel does that."""
    if in_one_pass(weight):
        return packable_forward(layer, weight, dtype)
    return layer.view.matrix(layer.forward_of(weight)).to(dtype)


def _backward_matrix(
    layer: NMLayer, weight: Tensor, noise: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return W_B ``[out, in]`` for a dense product: masked and cast in one pass where a kernel does that."""
    if layer.draws_backward:
        return backward_matrix(layer, weight, noise, dtype)
    # The one pass would order the rows of a permuted W_B, which takes more passes here.
    is_permuted = layer.masks.has_backward and layer.masks.permutation is not None
    if in_one_pass(weight) and not is_permuted:
        return packable_backward(layer, weight, dtype).t()
    return layer.view.matrix(layer.backward_of(weight)).to(dtype)


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor or a copy of it: contiguous, and at an address that kernels take."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def run_kernel(
    router: Router,
    kernel: GemmKernel,
    product: Product,
    sparse: Callable[[], Tensor],
    dense: Callable[[], Tensor],
) -> Tensor:
    """Return the dense product if that was chosen, else the kernel's, with the dense one to fall back on."""
    registry = router.registry
    if kernel is registry.reference:
        return dense()
    result = registry.attempt(kernel, product.key, sparse, dense)
    # Cut padding makes a view, which autograd would not let the model change in place.
    return torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result


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
        forward_weight = layer.forward_of(weight).to(x.dtype)
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
def _forward_flops_of_routed_conv(
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
        dx = _dgrad_of_routed_conv(layer, active_router, dgrad, conv, grad, weight, x)
    if wgrad is None:
        dweight = grad.new_empty(0)
    else:
        dweight = _wgrad_of_routed_conv(layer, active_router, wgrad, conv, grad, weight, x)
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
def _backward_flops_of_routed_conv(
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


def _dgrad_of_routed_conv(
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
        backward_weight = layer.backward_of(weight).to(dy.dtype)
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


def _wgrad_of_routed_conv(
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
    if not compiling and layer.progress.observing:  # a compiled graph cannot hand figures out
        layer.progress.observe(estimate, multiply(dy), dweight)
    return dweight


def _route(
    layer: NMLayer, weight: Tensor, dweight: Tensor, number: int
) -> tuple[Tensor | None, list[Any]]:
    """Return the gradients of the weight and of the layer's tensors, of which there are `number`.

    Of those tensors, only the method's own parameters have a gradient. They are the last ones.
    """
    if not torch.compiler.is_compiling():
        layer.progress.trained_by_layer = True
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
        weight_oi = layer.view.matrix(layer.forward_of(weight))
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
            return F.embedding(tokens, layer.forward_of(weight))
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
        forward_weight = layer.forward_of(weight).to(dtype)
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
