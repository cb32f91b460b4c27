"""The three products of a layer on the kernels that a router chooses, as two operators that compiled graphs call.

They compute what :mod:`lightning_nm.nn.products.ops` computes without a router, and look up layer and router by handle
when a graph runs. A layer's handle is the size of an empty tensor: a graph is recompiled for another integer, but not
for another size, so equal blocks of a model share one graph.

The last letters of a name are the dimensions of its tensor: t tokens, i inputs, o outputs. The operators name their
arguments without them, because these names are part of the operators' schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

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
from lightning_nm.kernels.operands import in_one_pass, permuted_columns
from lightning_nm.kernels.router.router import Product, Router
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.gemms import LAYER_GEMMS, GemmKind
from lightning_nm.nn.products.estimates import backward_matrix, drawn_transposed, estimated
from lightning_nm.nn.products.operands import (
    backward_operand,
    forward_operand,
    layout_of,
    pack_of,
    packable_backward,
    packable_forward,
)

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
        if layer.observation.active:
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
    if layer.observation.active:
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
    layer.observation.add(layer.progress.clock, estimate_to, dy_to.t() @ x_ti, dweight_oi)
    return dweight_oi


def _forward_matrix(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return W_F ``[out, in]`` for a dense product: masked and cast in one pass where a kernel does that."""
    if in_one_pass(weight):
        return packable_forward(layer, weight, dtype)
    return layer.view.matrix(layer.view.forward_of(weight)).to(dtype)


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
    return layer.view.matrix(layer.view.backward_of(weight)).to(dtype)


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
