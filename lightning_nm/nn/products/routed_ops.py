"""The three products of a layer on the kernels that a router chooses, as two operators that compiled graphs call.

They compute what :mod:`lightning_nm.nn.products.ops` computes without a router, and look up layer and router by handle
when a graph runs. A layer's handle is the size of an empty tensor: a graph is recompiled for another integer, but not
for another size, so equal blocks of a model share one graph.
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
    Sparsity,
    token_bucket,
)
from lightning_nm.kernels.gpu.two_four import ALIGNMENT
from lightning_nm.kernels.operands import in_one_pass, permuted_columns
from lightning_nm.kernels.router.handles import lookup
from lightning_nm.kernels.router.router import Product, Router
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.gemms import LAYER_GEMMS, GemmKind
from lightning_nm.nn.products.operands import (
    backward_operand,
    forward_operand,
    layout_of,
    pack_of,
    packable_backward,
    packable_forward,
)

GEMMS: tuple[GemmName, ...] = ("forward", "dgrad", "wgrad")


ESTIMATED_CONVOLUTION = "no kernel takes an estimated dY of a convolution"

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
    """One of the layer's products as it would run now on ``x [tokens, width]``, or on the input of a convolution."""
    how, masks, spec, device = LAYER_GEMMS[gemm](layer), layer.masks, layer.spec, str(x.device)
    size = _size(gemm, len(x) if tokens is None else tokens, out, width)
    sparsity = _SPARSITY.get(how.kind)
    if sparsity == "masked" and not spec.method.selects_entries:
        sparsity = None  # the method's own backward weight may have values at entries that the forward mask prunes
    reason = ""
    if conv is not None and gemm == "wgrad" and is_estimating(layer):
        reason = ESTIMATED_CONVOLUTION
    elif sparsity is None or sparsity not in router.takes(device):
        reason = f"{how.treatment}; {how.reason}" if how.reason else "none of its operands is N:M"
    if reason or sparsity is None:
        return Product(spec.name, GemmKey(gemm, *size, x.dtype, spec.pattern, device), reason)
    pattern = how.pattern or spec.method.current_pattern(layer)
    permuted = (
        conv is None and gemm == "dgrad" and masks.has_backward and masks.permutation is not None
    )
    return Product(
        spec.name, GemmKey(gemm, *size, x.dtype, pattern, device, permuted, sparsity, conv)
    )


def is_estimating(layer: NMLayer) -> bool:
    """Whether wgrad is of an estimate of dY now."""
    return layer.spec.estimator is not None and layer.progress.estimating


def _size(gemm: GemmName, tokens: int, out: int, width: int) -> tuple[int, int, int]:
    return {
        "forward": (out, width, tokens),
        "dgrad": (width, out, tokens),
        "wgrad": (out, tokens, width),
    }[gemm]


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
        weight = layer.param
        out = layer.rows(weight).shape[0]
        size = _size(gemm, tokens, out, weight.numel() // out)
        key = GemmKey(gemm, *size, x.dtype, layer.spec.pattern, str(x.device))
        router.kernel(Product(layer.spec.name, key, reason))


# What the operators do depends on more than their arguments, which a replayed CUDA graph would not see.
OPTIONS: dict[str, Any] = {"mutates_args": ()}
if hasattr(
    torch.Tag, "cudagraph_unsafe"
):  # an older torch knows neither the tag nor, perhaps, the argument
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
    nm, route = lookup(tag.shape[0]), lookup(router)
    gemms = GEMMS if trains and not route.tuned else GEMMS[:1]
    product, *later = [product_now(nm, route, gemm, x, out, x.shape[1]) for gemm in gemms]
    route.record([product, *later])
    kernel = route.kernel(product)

    def dense() -> Tensor:
        return F.linear(x, _forward_matrix(nm, weight, x.dtype), bias)

    def sparse() -> Tensor:
        packed = pack_of(nm, route, kernel, product, weight, forward_operand, keep=trains)
        return kernel.linear(packed, plain(x), None if bias is None else plain(bias))

    return run_kernel(route, kernel, product, sparse, dense)


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
    return 2 * x_shape[0] * x_shape[1] * out_shape[1]


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
        noise: The estimator's noise in the forward pass.
        tensors: What the method keeps beside the weight; it is read through the layer.
        needs_input: Whether dX is needed.
        needs_weight: Whether dW is needed.
        tag: The layer's handle tensor.
        router: The router's handle.

    Returns:
        ``dX [tokens, in]`` and ``dW [out, in]``.
    """
    nm, route = lookup(tag.shape[0]), lookup(router)
    sizes = grad.shape[1], x.shape[1]
    dgrad = product_now(nm, route, "dgrad", x, *sizes) if needs_input else None
    wgrad = product_now(nm, route, "wgrad", x, *sizes) if needs_weight else None
    route.tune_if_single()
    dgrad_kernel = None if dgrad is None else route.kernel(dgrad)
    wgrad_kernel = None if wgrad is None else route.kernel(wgrad)
    gradient = _Gradient(nm, route, plain(grad), noise if needs_weight else None)
    gradient.packed = wgrad_kernel not in (None, route.registry.reference)
    return (
        grad.new_empty(0)
        if dgrad is None
        else _dgrad(nm, route, dgrad_kernel, dgrad, gradient, weight),
        grad.new_empty(0)
        if wgrad is None
        else _wgrad(nm, route, wgrad_kernel, wgrad, gradient, weight, x),
    )


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
    return (
        grad.new_empty(grad.shape[0], x.shape[1]) if needs_input else grad.new_empty(0),
        grad.new_empty(grad.shape[1], x.shape[1]) if needs_weight else grad.new_empty(0),
    )


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
    return 2 * grad_shape[0] * grad_shape[1] * x_shape[1] * (needs_input + needs_weight)


class _Gradient:
    """dY ``[tokens, out]``, contiguous, in the forms that products take; one pass over it may make two of them."""

    packed = False  # whether a kernel packs E(dY)

    def __init__(self, layer: NMLayer, router: Router, grad: Tensor, noise: Tensor | None) -> None:
        self.layer, self.router, self.grad = layer, router, grad
        self.seed: Tensor | None = None
        if noise is not None and is_estimating(layer):
            self.seed = layer.noise.for_call(noise, layer.first_row)
        self._transposed: Tensor | None = None

    def permuted(self, order: Tensor) -> Tensor:
        """``dY[:, order]``."""
        layer, grad, estimator, seed = self.layer, self.grad, self.layer.spec.estimator, self.seed
        if not self.packed or estimator is None or seed is None or layer.observation.active:
            return permuted_columns(grad, order)

        def two_passes() -> tuple[Tensor, Tensor]:
            return estimator.estimate_transposed(layer, grad, seed)[0], permuted_columns(
                grad, order
            )

        def one_pass() -> tuple[Tensor, Tensor]:
            estimate, permuted = estimator.estimate_transposed(layer, grad, seed, order)
            return estimate, permuted_columns(grad, order) if permuted is None else permuted

        size = (token_bucket(len(grad)), grad.shape[1])
        name = (type(estimator), estimator.pattern_of(layer), size, grad.dtype)
        self._transposed, permuted = self.router.pick_fastest(
            name, (one_pass, two_passes), grad.device
        )()
        return permuted

    def transposed(self) -> Tensor:
        """``E(dY)^T``."""
        estimator = self.layer.spec.estimator
        assert estimator is not None
        assert self.seed is not None
        if self._transposed is None:
            self._transposed, _ = estimator.estimate_transposed(self.layer, self.grad, self.seed)
        return self._transposed


def _dgrad(
    layer: NMLayer,
    router: Router,
    kernel: Any,
    product: Product,
    gradient: _Gradient,
    weight: Tensor,
) -> Tensor:
    grad = gradient.grad

    def dense() -> Tensor:
        return grad @ _backward_matrix(layer, weight, grad.dtype)

    def sparse() -> Tensor:
        packed = pack_of(layer, router, kernel, product, weight, backward_operand)
        order = layer.masks.permutation if product.key.permuted and kernel.ordered else None
        return kernel.linear(packed, grad if order is None else gradient.permuted(order))

    return run_kernel(router, kernel, product, sparse, dense)


def _wgrad(
    layer: NMLayer,
    router: Router,
    kernel: Any,
    product: Product,
    gradient: _Gradient,
    weight: Tensor,
    x: Tensor,
) -> Tensor:
    grad, seed = gradient.grad, gradient.seed
    if product.key.sparsity == "outputs":

        def at_kept_entries() -> Tensor:
            layout = layout_of(
                layer, router, kernel, product, lambda: forward_operand(layer, weight, product.key)
            )
            return kernel.sampled(layout, grad, plain(x))

        return run_kernel(router, kernel, product, at_kept_entries, lambda: grad.t() @ x)
    if seed is None:
        return grad.t() @ x
    if layer.observation.active:
        estimate = layer.estimate(grad, seed)
        matrix, other = estimate.t().contiguous(), plain(x)
        found = run_kernel(
            router,
            kernel,
            product,
            lambda: kernel.matmul(kernel.pack(matrix), other),
            lambda: estimate.t() @ x,
        )
        layer.observation.add(layer.progress.clock, estimate, grad.t() @ x, found)
        return found

    def sparse() -> Tensor:
        return kernel.matmul(kernel.pack(gradient.transposed()), plain(x))

    return run_kernel(router, kernel, product, sparse, lambda: layer.estimate(grad, seed).t() @ x)


def _forward_matrix(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W_F ``[out, in]`` for a dense product: masked and cast in one pass over the weight where a kernel does that."""
    if in_one_pass(weight):
        return packable_forward(layer, weight, dtype)
    return layer.matrix(layer.spec.method.forward_weight(layer, weight)).to(dtype)


def _backward_matrix(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W_B ``[out, in]`` likewise; the one pass would order the rows of a permuted W_B, which takes more passes here."""
    if in_one_pass(weight) and not (
        layer.masks.has_backward and layer.masks.permutation is not None
    ):
        return packable_backward(layer, weight, dtype).t()
    return layer.matrix(layer.spec.method.backward_weight(layer, weight)).to(dtype)


def plain(tensor: Tensor) -> Tensor:
    """Contiguous, and at an address that kernels take."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def run_kernel(
    router: Router,
    kernel: GemmKernel,
    product: Product,
    sparse: Callable[[], Tensor],
    dense: Callable[[], Tensor],
) -> Tensor:
    """The dense product if that was chosen, else the kernel's, with the dense one to fall back on."""
    registry = router.registry
    if kernel is registry.reference:
        return dense()
    result = registry.attempt(kernel, product.key, sparse, dense)
    # Cut padding makes a view, which autograd would not let the model change in place.
    return torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result
