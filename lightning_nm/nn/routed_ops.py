"""The three products of a layer on the kernels that a router chooses, as two operators that compiled graphs call.

They compute what :mod:`lightning_nm.nn.ops` computes without a router. They look up the layer and the router by handle:
the choice, the packs and the fused passes over operands happen when a graph runs, not when it is traced. A layer's
handle is the size of an empty tensor, because a graph is recompiled for another integer, but not for other sizes: equal
blocks of a model share one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_nm.kernels.api import GemmKernel, GemmKey, GemmName, token_bucket
from lightning_nm.kernels.backends.two_four import ALIGNMENT
from lightning_nm.kernels.dispatch import Product, Router
from lightning_nm.kernels.handles import lookup
from lightning_nm.kernels.operands import in_one_pass, permuted_columns
from lightning_nm.nn.gemms import Gemm
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.packable import packable_backward, packable_forward

GEMMS: tuple[GemmName, ...] = ("forward", "dgrad", "wgrad")

_NO_OPERAND = "none of its operands is N:M"


def products(
    layer: NMLayer, tokens: int, dtype: torch.dtype, device: torch.device, gemms: Sequence[GemmName] = GEMMS
) -> list[Product]:
    """The layer's products as they would run now on a batch of so many tokens, by default all three."""
    treated = layer.gemms()
    sizes = _sizes(layer, tokens)
    found = []
    for gemm in gemms:
        how: Gemm = getattr(treated, gemm)
        reason = "" if how.pattern else f"{how.treatment}; {how.reason}" if how.reason else _NO_OPERAND
        permuted = gemm == "dgrad" and layer.masks.has_backward and layer.permutation is not None
        key = GemmKey(gemm, *sizes[gemm], dtype, how.pattern or layer.pattern, str(device), permuted)
        found.append(Product(layer.name, key, reason))
    return found


def _sizes(layer: NMLayer, tokens: int) -> dict[GemmName, tuple[int, int, int]]:
    out = layer.rows(layer.weight).shape[0]
    width = layer.weight.numel() // out
    return {"forward": (out, width, tokens), "dgrad": (width, out, tokens), "wgrad": (out, tokens, width)}


def record_dense(
    layer: NMLayer, router: Router | None, gemms: Sequence[GemmName], tokens: int, x: Tensor, reason: str
) -> None:
    """Count products that stay dense without a choice, for the router's report; compiled graphs are not counted.

    Args:
        layer: The layer.
        router: The active router, if there is one.
        gemms: Which of its products.
        tokens: Output positions of the batch.
        x: The input, for dtype and device.
        reason: Why they are dense.
    """
    if router is None or torch.compiler.is_compiling():
        return
    sizes = _sizes(layer, tokens)
    for gemm in gemms:
        router.kernel(Product(layer.name, GemmKey(gemm, *sizes[gemm], x.dtype, layer.pattern, str(x.device)), reason))


# What the operators do depends on more than their arguments, which a replayed CUDA graph would not see.
_OPTIONS: dict[str, Any] = {"mutates_args": ()}
if hasattr(torch.Tag, "cudagraph_unsafe"):  # an older torch knows neither the tag nor, perhaps, the argument
    _OPTIONS["tags"] = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("lightning_nm::forward_gemm", **_OPTIONS)
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
        tensors: What the method keeps beside the weight: the operator reads it through the layer.
        trains: Whether a backward pass will follow.
        out: Rows of the weight.
        tag: The :class:`~lightning_nm.nn.layer.NMLayer`'s.
        router: Handle of the :class:`~lightning_nm.kernels.dispatch.Router`.

    Returns:
        ``[tokens, out]``.
    """
    nm, route = lookup(tag.shape[0]), lookup(router)
    recorded = GEMMS if trains and not route.tuned else GEMMS[:1]
    product, *later = products(nm, len(x), x.dtype, x.device, recorded)
    route.record([product, *later])
    kernel = route.kernel(product)

    def dense() -> Tensor:
        return F.linear(x, _forward_matrix(nm, weight, x.dtype), bias)

    def sparse() -> Tensor:
        def operand() -> Tensor:
            return packable_forward(nm, weight, x.dtype)

        # Packs are kept for training alone: evaluation may be of other weights, swapped in where no version is counted.
        packed = _pack(nm, route, kernel, product, weight, operand) if trains else kernel.pack(operand())
        return kernel.linear(packed, _plain(x), None if bias is None else _plain(bias))

    return _run(route, kernel, product, sparse, dense)


@forward_gemm.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tensors: Sequence[Tensor],
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


@torch.library.custom_op("lightning_nm::backward_gemms", **_OPTIONS)
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
        noise: The noise that the forward pass saw, for the estimator.
        tensors: What the method keeps beside the weight: the operator reads it through the layer.
        needs_input: Whether dX is needed.
        needs_weight: Whether dW is needed.
        tag: The :class:`~lightning_nm.nn.layer.NMLayer`'s.
        router: Handle of the :class:`~lightning_nm.kernels.dispatch.Router`.

    Returns:
        ``dX [tokens, in]`` and ``dW [out, in]``.
    """
    nm, route = lookup(tag.shape[0]), lookup(router)
    dgrad, wgrad = products(nm, len(x), x.dtype, x.device, GEMMS[1:])
    route.tune_if_single()
    dgrad_kernel = route.kernel(dgrad) if needs_input else None
    wgrad_kernel = route.kernel(wgrad) if needs_weight else None
    gradient = _Gradient(nm, route, _plain(grad), noise if needs_weight else None)
    gradient.packed = wgrad_kernel not in (None, route.registry.reference)
    return (
        grad.new_empty(0) if dgrad_kernel is None else _dgrad(nm, route, dgrad_kernel, dgrad, gradient, weight),
        grad.new_empty(0) if wgrad_kernel is None else _wgrad(nm, route, wgrad_kernel, wgrad, gradient, x),
    )


@backward_gemms.register_fake
def _(
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
    *args: Any,
    **kwargs: Any,
) -> int:
    """``2 tokens in out`` for each product: as the dense ones, whatever kernels make them."""
    return 2 * grad_shape[0] * grad_shape[1] * x_shape[1] * (needs_input + needs_weight)


class _Gradient:
    """dY in the forms that the products of a backward pass take; two forms may come of one pass over it.

    Args:
        layer: The layer.
        router: Chooses between one pass and two.
        grad: ``dY [tokens, out]``, contiguous.
        noise: The noise of the estimator, ``None`` where it has nothing to do.
    """

    packed = False
    """Whether a kernel packs E(dY)."""

    def __init__(self, layer: NMLayer, router: Router, grad: Tensor, noise: Tensor | None) -> None:
        self.layer, self.router, self.grad = layer, router, grad
        estimating = layer.estimator is not None and layer.estimating
        self.seed = layer.noise.for_call(noise, 0) if estimating and noise is not None else None
        self._transposed: Tensor | None = None

    def permuted(self, order: Tensor) -> Tensor:
        """``dY[:, order]``."""
        layer, grad, estimator, seed = self.layer, self.grad, self.layer.estimator, self.seed
        if not self.packed or estimator is None or seed is None or layer.observation.active:
            return permuted_columns(grad, order)

        def two_passes() -> tuple[Tensor, Tensor]:
            return estimator.estimate_transposed(layer, grad, seed)[0], permuted_columns(grad, order)

        def one_pass() -> tuple[Tensor, Tensor]:
            estimate, permuted = estimator.estimate_transposed(layer, grad, seed, order)
            return estimate, permuted_columns(grad, order) if permuted is None else permuted

        size = (token_bucket(len(grad)), grad.shape[1])
        name = (type(estimator), estimator.pattern_of(layer), size, grad.dtype)
        self._transposed, permuted = self.router.pick_fastest(name, (one_pass, two_passes), grad.device)()
        return permuted

    def transposed(self) -> Tensor:
        """``E(dY)^T``."""
        assert self.layer.estimator is not None
        assert self.seed is not None
        if self._transposed is None:
            self._transposed, _ = self.layer.estimator.estimate_transposed(self.layer, self.grad, self.seed)
        return self._transposed


def _dgrad(
    layer: NMLayer, router: Router, kernel: GemmKernel, product: Product, gradient: _Gradient, weight: Tensor
) -> Tensor:
    grad = gradient.grad

    def dense() -> Tensor:
        return grad @ _backward_matrix(layer, weight, grad.dtype)

    def sparse() -> Tensor:
        packed = _pack(layer, router, kernel, product, weight, lambda: packable_backward(layer, weight, grad.dtype))
        order = layer.permutation if product.key.permuted else None
        return kernel.linear(packed, grad if order is None else gradient.permuted(order))

    return _run(router, kernel, product, sparse, dense)


def _wgrad(
    layer: NMLayer, router: Router, kernel: GemmKernel, product: Product, gradient: _Gradient, x: Tensor
) -> Tensor:
    grad, seed = gradient.grad, gradient.seed
    if seed is None:
        return grad.t() @ x
    if layer.observation.active:
        estimate = layer.estimate(grad, seed)
        matrix, other = estimate.t().contiguous(), _plain(x)
        found = _run(
            router, kernel, product, lambda: kernel.matmul(kernel.pack(matrix), other), lambda: estimate.t() @ x
        )
        layer.observation.add(layer.clock, estimate, grad.t() @ x, found)
        return found

    def sparse() -> Tensor:
        return kernel.matmul(kernel.pack(gradient.transposed()), _plain(x))

    return _run(router, kernel, product, sparse, lambda: layer.estimate(grad, seed).t() @ x)


def _forward_matrix(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W_F ``[out, in]`` for a dense product: masked and cast in one pass over the weight where a kernel does that."""
    if in_one_pass(weight):
        return packable_forward(layer, weight, dtype)
    return layer.matrix(layer.method.forward_weight(layer, weight)).to(dtype)


def _backward_matrix(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W_B ``[out, in]`` likewise; the one pass would order the rows of a permuted W_B, which takes more passes here."""
    if in_one_pass(weight) and not (layer.masks.has_backward and layer.permutation is not None):
        return packable_backward(layer, weight, dtype).t()
    return layer.matrix(layer.method.backward_weight(layer, weight)).to(dtype)


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, and at an address that kernels take."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def _run(
    router: Router, kernel: GemmKernel, product: Product, sparse: Callable[[], Tensor], dense: Callable[[], Tensor]
) -> Tensor:
    """The dense product if that was chosen, else the kernel's, with the dense one to fall back on."""
    registry = router.registry
    if kernel is registry.reference:
        return dense()
    result = registry.attempt(kernel, product.key, sparse, dense)
    # Cut padding makes a view, which autograd would not let the model change in place.
    return torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result


def _pack(
    layer: NMLayer,
    router: Router,
    kernel: GemmKernel,
    product: Product,
    weight: Tensor,
    operand: Callable[[], Tensor],
) -> Tensor:
    """The packed operand of a weight, which changes with the weight, the masks, or anything that a step does."""
    versions = tuple((tensor.data_ptr(), tensor._version) for tensor in (weight, *layer.tensors()))
    # Steps count, too, as not every optimizer leaves a version; and memory belongs to the stream where it was made.
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
    stamp: Hashable = (versions, layer.step, layer.clock, stream)
    name = (kernel.name, product.key.gemm, product.key.dtype)
    return router.packed(layer, name, stamp, lambda: kernel.pack(operand()))
