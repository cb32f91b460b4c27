"""The GEMMs of masked layers: dense matmuls of masked operands, or those of the kernels that a router chose.

The path of one call::

    adapter.forward -> nm_linear, nm_conv -> autograd function -> gemm(layer, "forward", operands) -> Y
                                                               -> gemm(layer, "dgrad", operands) -> dX
                                                               -> gemm(layer, "wgrad", operands) -> dW
                                                                    -> method.weight_gradient -> W.grad

The operands are X, W, dY, the bias and the noise of this call. :mod:`lightning_nm.nn.costs` says what a GEMM is now:
N:M along the summed axis, masked, needed only at kept entries, or dense. Without a router, or if dense, it is torch's
matmul on ``method.forward_weight(W)``, ``method.backward_weight(W)`` or ``estimator.estimate(dY)``. With a router,
``router.choose`` picks a kernel, which packs the masked operand (:mod:`lightning_nm.kernels.operands`); if it fails,
the dense matmul follows.

Backward keeps X, the parameter and the mask bytes. Where a router is active, forward and backward each become one
``torch.library`` operator, which calls the same ``gemm``. An embedding looks its rows up (:func:`nm_embedding`), and
experts multiply group by group (:mod:`lightning_nm.nn.adapters.experts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_nm.functional.mask_storage import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.functional.select import masked
from lightning_nm.kernels.api import (
    Convolution,
    GemmKey,
    GemmName,
    Geometry,
    MaskedMatrix,
    Sparsity,
    attempt,
    lookup,
    multiply,
)
from lightning_nm.kernels.gpu.two_four import ALIGNMENT
from lightning_nm.kernels.operands import in_one_pass, masked_operand, permuted_columns
from lightning_nm.kernels.router import Choice, Product, Router, active
from lightning_nm.nn.costs import Gemm, GemmKind
from lightning_nm.nn.layer import NMLayer, gemms_key, tensor_fingerprint
from lightning_nm.nn.weight import Layout

if TYPE_CHECKING:  # for the types only
    from lightning_nm.estimators.estimator import GradientEstimator

GEMMS: tuple[GemmName, ...] = ("forward", "dgrad", "wgrad")
"""The GEMMs of a layer, in the order in which they run."""

# Convolutions by the number of spatial dimensions, less one.
CONVOLUTIONS: list[Callable[..., Tensor]] = [F.conv1d, F.conv2d, F.conv3d]

# Why a GEMM is dense although a router is active.
_OF_A_PART = "a part of a joint projection"
_DIFFERENTIATED = "its gradient is differentiated, too"
_ESTIMATED_CONVOLUTION = "no kernel takes an estimated dY of a convolution"
_DRAWN_CONVOLUTION = "no kernel takes a drawn weight of a convolution"

# What kernels know of a GEMM's sparse operand; dense kinds are left out.
_SPARSITY: dict[GemmKind, Sparsity] = {"n:m": "n:m", "masked": "masked", "outputs": "outputs"}


class Route(NamedTuple):
    """The active router of a call."""

    router: Router
    trains: bool = True  # whether a backward pass will follow
    reason: str = ""  # why the call is dense all the same; empty if kernels may run it


class Operands(NamedTuple):
    """The tensors of one call of a module that its three GEMMs read."""

    x: Tensor  # [tokens, in], or [batch, in, *positions] of a convolution
    weight: Tensor  # the latent parameter, in the layout of the layer
    bias: Tensor | None
    dtype: torch.dtype  # of the GEMMs
    noise: Tensor | None = None  # that of the layer in the forward pass, for a drawn W_B
    rows: slice = slice(None)  # the outputs that are used: a part of a joint projection
    geometry: Geometry | None = None  # of a convolution
    route: Any = None  # a Route; None where no router is active
    # Rows of the weight as a matrix. It is known in an operator alone, where kernels may also make dense operands.
    out: int | None = None
    dy: Any = None  # dY, of the shape of the output; None in a forward pass
    seed: Tensor | None = None  # of the estimate of dY; None where dW is made of dY itself
    estimate: Tensor | None = None  # E(dY), where it is known already
    # What one pass over dY made for two GEMMs: E(dY)^T, and dY in the order of a permuted W_B.
    estimate_ot: Tensor | None = None
    dy_in_order: Tensor | None = None


# ----------------------------------------------------------------------------------------------------- one GEMM


def gemm(
    layer: NMLayer, which: GemmName, operands: Operands, choice: Choice | None = None
) -> Tensor:
    """One of the three GEMMs of a layer: dense, or by the kernel that a router chose.

    The dense GEMM replaces a kernel that fails, see :func:`~lightning_nm.kernels.api.attempt`.

    Args:
        layer: Its method and masks make the sparse operand.
        which: ``"forward"`` is ``X W_F^T + bias``, ``"dgrad"`` is ``dY W_B``, ``"wgrad"`` is ``E(dY)^T X``.
        operands: The tensors of this call.
        choice: What :func:`choose` returned; ``None`` is dense.

    Returns:
        Y ``[tokens, out]``, dX ``[tokens, in]`` or dW ``[out, in]``; those of a convolution are shaped as Y, X and W.
    """
    # Of a pass that is observed, E(dY) is made here, for the kernel as for the comparison with dY.
    is_estimated = which == "wgrad" and operands.seed is not None
    # A compiled graph cannot hand figures out.
    observed = is_estimated and not torch.compiler.is_compiling() and layer.progress.observing
    if observed:
        operands = operands._replace(estimate=_estimate(layer, operands))
    dense = partial(_dense_product, layer, which, operands)
    if choice is None:
        result = dense()
    else:
        failures = operands.route.router.registry.failures
        sparse = partial(_kernel_product, layer, which, operands, choice)
        result = attempt(choice.kernel, choice.key, failures, sparse, dense)
        shape = list(result.shape)
        if operands.geometry is not None:
            # Kernels return dW as a matrix, and planes of height 1 for a convolution in one dimension.
            spatial = operands.x.dim() - 2
            is_weight = which == "wgrad"
            shape = list(operands.weight.shape) if is_weight else shape[:2] + shape[-spatial:]
        # No view, as that of cut padding: autograd would not let the model change it in place.
        result = torch.ops.aten._unsafe_view(result, shape)
    if observed:
        assert operands.estimate is not None
        # One more dense wgrad, which only the passes of observed layers pay for.
        exact = _weight_gradient(operands, operands.dy)
        layer.progress.observe(operands.estimate, exact, result)
    return result


def _dense_product(layer: NMLayer, which: GemmName, operands: Operands) -> Tensor:
    """The dense GEMM of the masked operands; see :func:`gemm`."""
    x, dy, geometry = operands.x, operands.dy, operands.geometry
    if which == "wgrad":
        if operands.seed is not None:
            dy = _estimate(layer, operands)
        return _weight_gradient(operands, dy)
    weight = dense_weight(layer, which, operands)
    if which == "forward":
        if geometry is None:
            return F.linear(x, weight, operands.bias)
        # geometry[0] has a stride for each spatial dimension.
        return CONVOLUTIONS[len(geometry[0]) - 1](x, weight, operands.bias, *geometry)
    if geometry is None:
        return dy @ weight
    dx, _ = conv_gradients(dy, x, weight, weight.shape, geometry, True, False)
    assert dx is not None
    return dx


def _kernel_product(layer: NMLayer, which: GemmName, operands: Operands, choice: Choice) -> Tensor:
    """The GEMM of the kernel's packed operand; see :func:`gemm`."""
    kernel, key = choice
    # In the operator of a linear layer dY is plain already.
    dy = operands.dy if which == "forward" or key.conv is None else plain(operands.dy)
    if which == "wgrad":
        x = plain(operands.x)
        if key.sparsity == "outputs":
            # At entries that are not kept dW may be anything.
            return multiply(kernel, key, _packed(layer, which, operands, choice), x, grad=dy)
        # E(dY)^T [out, tokens]: made for dgrad and wgrad together, or for the comparison with dY, or now.
        estimate_ot = operands.estimate_ot
        if operands.estimate is not None:
            estimate_ot = operands.estimate.t().contiguous()
        elif estimate_ot is None:
            assert operands.seed is not None
            estimate_ot, _ = _estimator(layer).estimate_transposed(layer, dy, operands.seed)
        return multiply(kernel, key, kernel.pack(estimate_ot), x)
    if key.drawn:
        assert operands.noise is not None
        # Another draw in each pass: its pack is never kept.
        drawn_io = drawn_matrix(layer, operands.weight, operands.noise, key.dtype, transposed=True)
        return multiply(kernel, key, kernel.pack(plain(drawn_io)), dy)
    packed = _packed(layer, which, operands, choice)
    if which == "forward":
        bias = operands.bias
        bias = None if bias is None else plain(bias)
        return multiply(kernel, key, packed, plain(operands.x), bias)
    if key.permuted and kernel.ordered:
        # A pack in the order of the permutation needs the columns of dY in the same order.
        order: Any = layer.masks.permutation
        in_order = operands.dy_in_order
        dy = permuted_columns(dy, order) if in_order is None else in_order
    return multiply(kernel, key, packed, dy)


def _weight_gradient(operands: Operands, dy: Tensor) -> Tensor:
    """The dense ``dY^T X``, of a convolution in the weight's shape, for dY or an estimate of it."""
    x, geometry = operands.x, operands.geometry
    if geometry is None:
        return dy.t() @ x
    _, dweight = conv_gradients(dy, x, None, operands.weight.shape, geometry, False, True)
    assert dweight is not None
    return dweight


def conv_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    weight_shape: torch.Size,
    geometry: Geometry,
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight that are needed, and ``None`` for the others.

    dX depends on W and dY, dW on X and dY: one call makes both also where dX is of another weight than the forward's.
    Given the real X it keeps X's memory format, and converts dY to the backend's format once instead of twice.

    Args:
        grad: ``dY [batch, out, *positions]``.
        x: ``[batch, in, *size]``, of the dtype of ``grad``.
        weight: ``[out, in / groups, *kernel]`` of that dtype; ``None`` where dX is not needed.
        weight_shape: The shape of the weight.
        geometry: Of the convolution.
        needs_input: Whether dX is needed.
        needs_weight: Whether dW is needed.

    Returns:
        dX in the shape and memory format of ``x``, and dW in ``weight_shape``.
    """
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


# ----------------------------------------------------------------------------------------------------- operands


def dense_weight(layer: NMLayer, which: GemmName, operands: Operands) -> Tensor:
    """W_F or W_B as a dense GEMM takes it: ``[out, in]``, of a convolution in the weight's shape.

    Args:
        layer: The layer.
        which: ``"forward"`` or ``"dgrad"``.
        operands: The tensors of this call.
    """
    view = layer.view
    weight, dtype, noise = operands.weight, operands.dtype, operands.noise
    is_matrix = operands.geometry is None
    # Without noise the backward pass is itself differentiated, and takes W_F, the mean of the draws.
    if which == "dgrad" and noise is not None and layer.draws_backward:
        drawn_oi = drawn_matrix(layer, weight, noise, dtype, operands.rows)
        return drawn_oi if is_matrix else view.unrows(drawn_oi.reshape(view.rows(weight).shape))
    if operands.out is not None and is_matrix and in_one_pass(weight):
        if which == "forward":
            return packable(layer, which, weight, dtype)
        # The one pass would order the rows of a permuted W_B, which takes more passes here.
        if not layer.masks.has_backward or layer.masks.permutation is None:
            return packable(layer, which, weight, dtype).t()
    # One name for the weight and its cast: the memory of the first is free during the GEMM.
    values = layer.values_of(which, weight)
    if is_matrix:
        values = view.matrix(values)[operands.rows]
    return values.to(dtype)


def packable(
    layer: NMLayer,
    which: GemmName,
    weight: Tensor,
    dtype: torch.dtype,
    values: Tensor | None = None,
    *,
    convolves: bool = False,
) -> Tensor:
    """W_F ``[out, in]`` or, for ``"dgrad"``, W_B^T ``[in, out]`` as kernels pack it: contiguous.

    The columns of W_B^T are in the order of a backward mask. Where the method selects entries it is made in one pass.

    Args:
        layer: The layer.
        which: ``"forward"`` or ``"dgrad"``.
        weight: The parameter as GEMMs get it.
        dtype: Of the GEMM.
        values: What the method made of the weight, if that is known.
        convolves: Whether the GEMM is a convolution's: W_B is not transposed, and in the order of memory.
    """
    masks = layer.masks
    view = layer.view
    of_backward = which == "dgrad" and masks.has_backward
    transposed = which == "dgrad" and not convolves
    order = masks.permutation if of_backward and transposed else None
    # The one pass walks weight and bits together, so both must lie in the same order.
    if layer.spec.method.selects_entries and (of_backward or masks.has_forward):
        bits = masks.bits
        if bits is not None and bits.stride() == weight.stride():
            bit = BACKWARD_BIT if of_backward else FORWARD_BIT
            matrices = view.matrix(weight), view.matrix(bits)
            return masked_operand(*matrices, dtype, bit, order, transposed=transposed)
    if values is None:
        values = layer.values_of(which, weight)
    matrix_oi = view.matrix(values).to(dtype)
    if order is not None:
        matrix_oi = matrix_oi[order]
    return (matrix_oi.t() if transposed else matrix_oi).contiguous()


def masked_matrix(layer: NMLayer, which: GemmName, weight: Tensor, key: GemmKey) -> MaskedMatrix:
    """W_F ``[out, in]`` or, for ``"dgrad"``, W_B^T ``[in, out]`` for kernels, with the order of a backward mask.

    W_B of a convolution is not transposed, and in the order of memory: one layout serves both GEMMs.
    """
    masks = layer.masks
    is_dgrad = which == "dgrad"
    # Without a backward mask dgrad uses the forward one, which has no permutation.
    of_backward = is_dgrad and masks.has_backward
    transposed = is_dgrad and key.conv is None
    order = masks.permutation if of_backward and transposed else None
    values = None
    # The method makes the values: once, for the matrix as for `dense`.
    if not layer.spec.method.selects_entries:
        values = layer.values_of(which, weight).to(key.dtype)
    dense = partial(
        packable, layer, which, weight, key.dtype, values, convolves=key.conv is not None
    )
    assert masks.bits is not None  # a GEMM without masks has no sparse operand
    # Both are views; only `dense` copies.
    matrix = layer.view.matrix(weight if values is None else values)
    bits = layer.view.matrix(masks.bits)
    if transposed:
        matrix, bits = matrix.t(), bits.t()
    bit = BACKWARD_BIT if of_backward else FORWARD_BIT
    return MaskedMatrix(matrix, bits, bit, key.pattern, key.dtype, order, dense)


def _packed(layer: NMLayer, which: GemmName, operands: Operands, choice: Choice) -> Any:
    """The packed W_F or W_B, which changes with the weight, the masks, or anything that a step does.

    Where outputs are sparse it is the layout of their mask: what a packed operand has of the masks alone.

    Packs are kept for training alone: evaluation may be of other weights, swapped in where no version is counted. A
    kernel that only gathers values packs them again: nothing is gained by asking whether the weight changed.
    """
    kernel, key = choice
    weight, masks = operands.weight, layer.masks
    router, trains, _ = operands.route
    by_outputs = key.sparsity == "outputs"
    # The pack of a convolution is not transposed: where W_B is W_F, that of the forward serves dgrad, too. And dW has
    # the mask of the forward.
    is_forward = (
        key.conv is not None and layer.spec.method.selects_entries and not masks.has_backward
    )
    if by_outputs or is_forward:
        which = "forward"
    # Those of convolutions and of other dtypes may be others.
    name = (kernel.packs_as or kernel.name, which, key.conv is None, key.dtype)
    # A pack is worth its memory only if the micro-batches of a step share it.
    if trains and router.reuse > 1 and kernel.keeps_packs and not by_outputs:
        # Memory belongs to the stream where it was made.
        stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
        # Not every optimizer leaves a version of the weight, so steps count, too.
        stamp: Hashable = (
            tuple(tensor_fingerprint(tensor) for tensor in (weight, *layer.read_tensors())),
            masks.cache_key,
            layer.progress.step,
            layer.progress.clock,
            stream,
        )
        # With trains=False this function makes the pack, and does not look for a kept one.
        once = operands._replace(route=Route(router, trains=False))
        make = partial(_packed, layer, which, once, choice)
        return router.kept(layer, ("pack", *name), stamp, make)
    make_matrix = partial(masked_matrix, layer, which, weight, key)
    # The layout of outputs is all that is needed, so a matrix is made for a new one alone.
    matrix = None if by_outputs else make_matrix()

    def make_layout() -> Any:
        return kernel.layout(matrix or make_matrix())

    if router.keeps_layouts:
        # A method may change its pattern without moving the masks.
        stamp = (masks.cache_key, key.pattern)
        layout = router.kept(layer, ("layout", *name), stamp, make_layout)
    else:
        layout = make_layout()
    return layout if matrix is None else kernel.pack_masked(matrix, layout)


def estimated(layer: NMLayer, dy_to: Tensor, seed: Tensor) -> Tensor:
    """E(dY) for ``dY [tokens, out]``, by the layer's estimator.

    Raises:
        TypeError: If that is of another shape or dtype.
    """
    estimator = _estimator(layer)
    estimate = estimator.estimate(layer, dy_to, seed)
    if estimate.shape != dy_to.shape or estimate.dtype != dy_to.dtype:
        raise TypeError(
            f"{type(estimator).__name__} made {estimate.dtype} {tuple(estimate.shape)} of the output gradient at layer "
            f"'{layer.name}', which is {dy_to.dtype} {tuple(dy_to.shape)}: keep the shape and the dtype"
        )
    return estimate


def _estimator(layer: NMLayer) -> GradientEstimator:
    estimator = layer.spec.estimator
    assert estimator is not None
    return estimator


def _estimate(layer: NMLayer, operands: Operands) -> Tensor:
    """E(dY) in the shape of dY; blocks lie along batch x positions, for one output."""
    if operands.estimate is not None:
        return operands.estimate
    dy: Tensor = operands.dy
    assert operands.seed is not None
    if operands.geometry is None:
        return estimated(layer, dy, operands.seed)
    by_token = dy.movedim(1, -1)  # [batch, *positions, out]
    estimate_to = estimated(layer, by_token.flatten(0, -2), operands.seed)
    estimate = estimate_to.reshape(by_token.shape).movedim(-1, 1)
    # Convolutions are several times slower where X and dY lie in different orders, channels last and first. A compiler
    # chooses the order itself, and torch 2.6's does not let a graph ask for strides in a backward pass.
    if not torch.compiler.is_compiling() and estimate.stride() != dy.stride():
        estimate = torch.empty_like(dy).copy_(estimate)
    return estimate


def drawn_matrix(
    layer: NMLayer,
    weight: Tensor,
    noise: Tensor,
    dtype: torch.dtype,
    rows: slice = slice(None),
    *,
    transposed: bool = False,
) -> Tensor:
    r"""Draw W_B ``[out, in]`` for a layer with ``draws_backward``: N:M along `out`, and W_F in the mean.

    Of every M consecutive outputs at most N keep their weight of an input: :math:`W_B = W_F / p` with probability
    :math:`p`, as :class:`~lightning_nm.estimators.MVUE` draws dY. So :math:`\mathbb{E}[dY W_B] = dY W_F`.

    Args:
        layer: The layer.
        weight: The parameter as GEMMs get it.
        noise: The layer's noise in the forward pass.
        dtype: Of the GEMM.
        rows: The outputs of the GEMM, in whole blocks: a part of a joint projection.
        transposed: Whether to return W_B^T ``[in, out]``, contiguous, as kernels pack it.
    """
    sampler = layer.spec.dgrad
    assert sampler is not None
    # What the exact GEMM would use: rounded to the dtype of the GEMM before it is drawn.
    forward_oi = layer.view.matrix(layer.values_of("forward", weight))[rows].to(dtype)
    seed = layer.noise.for_weight(noise, layer.first_row + (rows.start or 0))
    if not transposed:
        return sampler.estimate(layer, forward_oi, seed)
    drawn_io, _ = sampler.estimate_transposed(layer, forward_oi.contiguous(), seed)
    # It may be padded, as the tokens of a wgrad are.
    return drawn_io[:, : len(forward_oi)].contiguous()


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor or a copy of it for kernels: contiguous, at an address that they take, and in two dimensions."""
    if tensor.dim() == 3:  # of a convolution in one dimension, which is one over images of height 1
        tensor = tensor.unsqueeze(2)
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


# ------------------------------------------------------------------------------------------ the choice of a kernel


def choose(
    layer: NMLayer, gemms: tuple[GemmName, ...], operands: Operands
) -> Sequence[Choice | None]:
    """Ask the active router for the kernels of GEMMs, and count the calls; ``None`` stands for the dense matmul.

    Compiled graphs do not ask: they call operators that do. With a reason in the route the GEMMs are dense whatever the
    router has.
    """
    route = operands.route
    if route is None or torch.compiler.is_compiling():
        return (None,) * len(gemms)
    x, router = operands.x, route.router
    if "forward" in gemms and not router.tuned and not route.reason:
        # The router measures all GEMMs of a layer at once, so it hears of those to come with the first.
        to_come = GEMMS if route.trains else gemms
        router.record([_product(layer, which, operands) for which in to_come])
    stamp = (
        gemms_key(layer),
        route.reason,
        x.shape,
        x.dtype,
        x.device,
        operands.weight.shape,
        operands.geometry,
    )
    return router.choose(
        layer, gemms, stamp, lambda: [_product(layer, which, operands) for which in gemms]
    )


def _product(layer: NMLayer, which: GemmName, operands: Operands) -> Product:
    """One of the layer's GEMMs as it would run now, with the reason if it can only be dense.

    It depends on nothing but what :func:`choose` compares, and on what stays as it is in a layer.
    """
    router, _, reason = operands.route
    spec = layer.spec
    masks = layer.masks
    x = operands.x
    device = str(x.device)
    out = operands.out
    if out is None:
        out, _ = layer.view.matrix_shape(operands.weight)
    # Of a convolution these are images and channels: below they become output positions and entries of a filter.
    tokens, width = x.shape[:2]
    conv = None
    if operands.geometry is not None:
        conv = convolution_of(x, operands.weight.shape, operands.geometry)
        tokens *= math.prod(conv.positions)
        width = math.prod(conv.weight_shape[1:])
    # Rows, depth and columns, as in a GemmKey: the depth is what the GEMM sums over.
    sizes = {
        "forward": (out, width, tokens),
        "dgrad": (width, out, tokens),
        "wgrad": (out, tokens, width),
    }
    size = sizes[which]
    sparsity = pattern = None
    is_dgrad = which == "dgrad"
    drawn = is_dgrad and layer.draws_backward
    if not reason:
        gemm_now: Gemm = getattr(layer.gemms(), which)
        sparsity = _SPARSITY.get(gemm_now.kind)
        if sparsity == "masked" and not spec.method.selects_entries:
            sparsity = None  # the method's own backward weight may have values at entries that the forward mask prunes
        # A masked operand is not N:M along its depth, but its mask is N:M along the other axis, if it is so anywhere.
        pattern = gemm_now.pattern or spec.method.current_pattern(layer)
        if conv is not None and which == "wgrad" and is_estimating(layer):
            reason = _ESTIMATED_CONVOLUTION
        elif conv is not None and drawn:
            reason = _DRAWN_CONVOLUTION
        # A kernel may be asked for an N:M operand always: if none takes it, the decision says why.
        elif pattern is None or sparsity not in {"n:m", *router.registry.takes(device)}:
            reason = "none of its operands is N:M"
            if gemm_now.reason:
                reason = f"{gemm_now.label}; {gemm_now.reason}"
    if reason or sparsity is None or pattern is None:
        return Product(spec.name, GemmKey(which, *size, x.dtype, spec.pattern, device), reason)
    # Only a backward mask is N:M in another order of the rows, and convolutions keep the order of memory.
    has_order = masks.has_backward and masks.permutation is not None
    key = GemmKey(
        which,
        *size,
        x.dtype,
        pattern,
        device,
        permuted=is_dgrad and has_order and conv is None,
        drawn=drawn,
        sparsity=sparsity,
        conv=None if conv is None else conv.planar,
    )
    return Product(spec.name, key)


def is_estimating(layer: NMLayer) -> bool:
    """Whether wgrad now uses an estimate of dY instead of dY itself."""
    return layer.spec.estimator is not None and layer.progress.estimating


def convolution_of(x: Tensor, weight_shape: Sequence[int], geometry: Geometry) -> Convolution:
    """The geometry with the sizes of ``x [images, in, *size]`` and of the weight ``[out, in / groups, *kernel]``."""
    outputs, _, *kernel = weight_shape
    return Convolution(x.shape[1], outputs, tuple(x.shape[2:]), tuple(kernel), *geometry)


def gradients(
    layer: NMLayer, operands: Operands, *, needs_input: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """``dX = dY W_B`` and ``dW = E(dY)^T X``: those that are needed, else ``None``; see :func:`gemm`."""
    dgrad = wgrad = None
    if needs_input and needs_weight:
        dgrad, wgrad = choose(layer, ("dgrad", "wgrad"), operands)
    elif needs_input:
        (dgrad,) = choose(layer, ("dgrad",), operands)
    else:
        (wgrad,) = choose(layer, ("wgrad",), operands)
    geometry, seed = operands.geometry, operands.seed
    both = needs_input and needs_weight
    # Not with an estimate: dX is then of dY, and dW of E(dY), which takes two calls.
    if both and geometry is not None and seed is None and dgrad is None and wgrad is None:
        weight = dense_weight(layer, "dgrad", operands)
        return conv_gradients(operands.dy, operands.x, weight, weight.shape, geometry, both, both)
    in_order = dgrad is not None and dgrad.key.permuted and dgrad.kernel.ordered
    # One pass over dY may make what both kernels take. An observed estimate is made where it is compared.
    if in_order and wgrad is not None and seed is not None and not layer.progress.observing:
        estimate_ot, dy_in_order = _estimator(layer).estimate_transposed(
            layer, operands.dy, seed, layer.masks.permutation
        )
        operands = operands._replace(estimate_ot=estimate_ot, dy_in_order=dy_in_order)
    dx = gemm(layer, "dgrad", operands, dgrad) if needs_input else None
    dweight = gemm(layer, "wgrad", operands, wgrad) if needs_weight else None
    return dx, dweight


# ------------------------------------------------------------------------------------------------------ operators

# Only where a router is active: graphs call them, flops are counted by them. What they do depends on more than their
# arguments, which a replayed CUDA graph would not see.
OPTIONS: dict[str, Any] = {"mutates_args": ()}
# An older torch knows neither the tag nor, perhaps, the argument.
if hasattr(torch.Tag, "cudagraph_unsafe"):
    OPTIONS["tags"] = (torch.Tag.cudagraph_unsafe,)


def flattened(geometry: Geometry) -> list[int]:
    """The geometry as operators take it, in one list; that of a linear layer is empty."""
    stride, padding, dilation, groups = geometry
    return [*stride, *padding, *dilation, groups]


def unflattened(numbers: Sequence[int]) -> Geometry:
    """Undo :func:`flattened`."""
    *sizes, groups = numbers
    spatial = len(sizes) // 3
    stride, padding, dilation = (
        tuple(sizes[first : first + spatial]) for first in range(0, len(sizes), spatial)
    )
    return stride, padding, dilation, groups


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels last if `x` is, else contiguous."""
    # A tensor of one channel is both, and counts as contiguous.
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return torch.contiguous_format
    return torch.channels_last


@torch.library.custom_op("lightning_nm::forward_gemm", **OPTIONS)
def forward_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tensors: Sequence[Tensor],
    trains: bool,
    out: int,
    geometry: Sequence[int],
    tag: Tensor,
    router: int,
) -> Tensor:
    """``X W_F^T + bias``, in the dtype and the memory format of `x`; see :func:`gemm`.

    Args:
        x: ``[tokens, in]``, or ``[batch, in, *positions]`` of a convolution.
        weight: The latent parameter, in the layout of the layer.
        bias: ``[out]`` of the dtype of `x`, or None.
        tensors: Masks and buffers, listed so that graphs and autograd know of them; they are read through the layer.
        trains: Whether a backward pass will follow.
        out: Rows of the weight.
        geometry: See :func:`flattened`.
        tag: The layer's handle tensor.
        router: The router's handle.
    """
    # An operator takes tensors and numbers alone: the objects are looked up.
    layer, active_router = lookup(tag.shape[0], router)
    operands = Operands(
        x,
        weight,
        bias,
        x.dtype,
        geometry=unflattened(geometry) if geometry else None,
        route=Route(active_router, trains),
        out=out,
    )
    (choice,) = choose(layer, ("forward",), operands)
    y = gemm(layer, "forward", operands, choice)
    # Whichever ran, the memory format is the one that register_fake promises to compiled graphs.
    return y.contiguous(memory_format=memory_format_of(x)) if geometry else y


@forward_gemm.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    tensors: Any,
    trains: bool,
    out: int,
    geometry: Sequence[int],
    *rest: Any,
) -> Tensor:
    if not geometry:
        return x.new_empty(x.shape[0], out)
    shape = (x.shape[0], out, *convolution_of(x, weight.shape, unflattened(geometry)).positions)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format_of(x))


@register_flop_formula(torch.ops.lightning_nm.forward_gemm)
def _forward_flops(
    x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """``2 tokens in out``: as the dense GEMM, whatever kernel makes it."""
    return int(2 * math.prod(out_shape) * _width(x_shape, weight_shape))


def _width(x_shape: Any, weight_shape: Any) -> int:
    """The columns of a weight as a matrix ``[out, in]``, which may be stored in another layout."""
    return x_shape[1] if len(x_shape) == 2 else math.prod(weight_shape[1:])


@torch.library.custom_op("lightning_nm::backward_gemms", **OPTIONS)
def backward_gemms(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    tensors: Sequence[Tensor],
    needs_input: bool,
    needs_weight: bool,
    geometry: Sequence[int],
    tag: Tensor,
    router: int,
) -> tuple[Tensor, Tensor]:
    """``dX = dY W_B`` and ``dW = E(dY)^T X``, in the dtype of `grad`: those that are needed, else an empty tensor.

    Args:
        grad: dY, of the shape of the output.
        x: ``[tokens, in]``, or ``[batch, in, *positions]`` of a convolution.
        weight: The latent parameter, in the layout of the layer.
        noise: The layer's noise in the forward pass.
        tensors: Masks and buffers, listed so that graphs and autograd know of them; they are read through the layer.
        needs_input: Whether dX is needed.
        needs_weight: Whether dW is needed.
        geometry: See :func:`flattened`.
        tag: The layer's handle tensor.
        router: The router's handle.

    Returns:
        dX in the shape and the memory format of `x`, and ``dW [out, in]``, of a convolution in the weight's shape.
    """
    layer, active_router = lookup(tag.shape[0], router)
    # Before the kernels are chosen: now all GEMMs of the batch are known, if they shall be measured.
    if not active_router.tuned:
        active_router.tune_if_single()
    operands = Operands(
        x,
        weight,
        None,
        grad.dtype,
        noise,
        geometry=unflattened(geometry) if geometry else None,
        route=Route(active_router),
        out=grad.shape[1],
        dy=grad if geometry else plain(grad),
        seed=_seed(layer, noise) if needs_weight and noise is not None else None,
    )
    dx, dweight = gradients(layer, operands, needs_input=needs_input, needs_weight=needs_weight)
    # Whichever ran, the memory formats are those that register_fake promises to compiled graphs.
    if dx is None:
        dx = grad.new_empty(0)
    elif geometry:
        dx = dx.contiguous(memory_format=memory_format_of(x))
    return dx, grad.new_empty(0) if dweight is None else dweight.contiguous()


@backward_gemms.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    noise: Any,
    tensors: Any,
    needs_input: bool,
    needs_weight: bool,
    geometry: Sequence[int],
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    dx = dweight = grad.new_empty(0)
    if needs_input:
        memory_format = memory_format_of(x) if geometry else torch.contiguous_format
        dx = torch.empty(x.shape, dtype=grad.dtype, device=grad.device, memory_format=memory_format)
    if needs_weight:
        dweight = grad.new_empty(weight.shape if geometry else (grad.shape[1], x.shape[1]))
    return dx, dweight


@register_flop_formula(torch.ops.lightning_nm.backward_gemms)
def _backward_flops(
    grad_shape: Any,
    x_shape: Any,
    weight_shape: Any,
    noise: Any,
    tensors: Any,
    needs_input: bool,
    needs_weight: bool,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """``2 tokens in out`` for each GEMM: as the dense ones, whatever kernels make them."""
    number = int(needs_input) + int(needs_weight)
    return int(number * 2 * math.prod(grad_shape) * _width(x_shape, weight_shape))


# ------------------------------------------------------------------------------------------------------- autograd


def _seed(layer: NMLayer, noise: Tensor | None, first_row: int = 0) -> Tensor | None:
    """The seed of the estimate of dY whose first output is this row of the weight; ``None`` if dW is of dY itself."""
    if noise is None or not is_estimating(layer):
        return None
    return layer.noise.for_call(noise, layer.first_row + first_row)


def _route_gradient(
    layer: NMLayer, weight: Tensor, dweight: Tensor, number: int
) -> tuple[Tensor | None, list[Any]]:
    """Return the gradients of the weight and of the layer's tensors, of which there are `number`.

    Of those tensors, only the method's own parameters have a gradient. They are the last ones.
    """
    if not torch.compiler.is_compiling():
        layer.progress.trained_by_layer = True
    # Under autocast the GEMM is of a half dtype: methods see gradients in the dtype of the weight.
    dweight = dweight.to(weight.dtype)
    if not layer.routes_gradients:
        return dweight, [None] * number
    routed, *dparameters = layer.spec.method.weight_gradient(layer, weight, dweight)
    without_gradient: list[Any] = [None] * (number - len(layer.parameters))
    return routed, without_gradient + dparameters


# The forward passes take *inputs: where no gradient is needed, Dynamo (torch 2.13) leaves ctx out if a forward has as
# many parameters as apply has arguments, which two tensors behind named parameters would amount to.


class _Gemms(torch.autograd.Function):
    """The three GEMMs of a linear layer or a convolution."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        layer: NMLayer
        route: Route | None
        x, weight, bias, layer, dtype, rows, geometry, route, noise, *tensors = inputs
        ctx.save_for_backward(x, weight, noise, *tensors)
        ctx.layer = layer
        ctx.dtype = dtype
        ctx.rows = slice(None) if rows is None else slice(*rows)
        ctx.geometry = geometry
        ctx.route = route
        # One operator, which compiled graphs do not look into: it asks the router when it runs.
        if route is not None and not route.reason:
            out, _ = layer.view.matrix_shape(weight)
            return forward_gemm(
                x,
                weight,
                bias,
                tensors,
                route.trains,
                out,
                [] if geometry is None else flattened(geometry),
                layer.handle_tensor,
                route.router.handle,
            )
        # Torch's own operations, which a compiler sees and may fuse.
        operands = Operands(x, weight, bias, dtype, None, ctx.rows, geometry, route)
        (choice,) = choose(layer, ("forward",), operands)
        return gemm(layer, "forward", operands, choice)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, noise, *tensors = ctx.saved_tensors
        layer: NMLayer = ctx.layer
        route: Route | None = ctx.route
        rows, geometry = ctx.rows, ctx.geometry
        (dy,) = grads
        needs_x = ctx.needs_input_grad[0]
        # The method's parameters get their gradients with the weight's, perhaps while the weight itself is frozen.
        first_tensor = len(ctx.needs_input_grad) - len(tensors)
        needs_weight = ctx.needs_input_grad[1] or any(ctx.needs_input_grad[first_tensor:])
        dx = dbias = None
        dweight: Any = None
        dtensors: list[Any] = [None] * len(tensors)
        # Whether this backward pass is itself recorded, for a second derivative, which no kernel has.
        is_differentiated = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if route is not None and is_differentiated:
            route = route._replace(reason=route.reason or _DIFFERENTIATED)
        if not (needs_x or needs_weight):
            pass
        elif route is not None and not route.reason:
            dx, dweight = backward_gemms(
                dy,
                x,
                weight,
                noise,
                tensors,
                needs_x,
                needs_weight,
                [] if geometry is None else flattened(geometry),
                layer.handle_tensor,
                route.router.handle,
            )
            dx = dx if needs_x else None  # what is not needed came back empty
        else:
            operands = Operands(
                x,
                weight,
                None,
                ctx.dtype,
                # A second derivative is that of W_F itself.
                None if is_differentiated else noise,
                rows,
                geometry,
                route,
                dy=dy,
                seed=_seed(layer, noise, rows.start or 0) if needs_weight else None,
            )
            dx, dweight = gradients(layer, operands, needs_input=needs_x, needs_weight=needs_weight)
        if needs_weight:
            if geometry is None:
                # The other rows get their gradients from calls of their own, and autograd adds the parts up.
                if rows != slice(None):
                    part_oi = dweight
                    dweight = part_oi.new_zeros(layer.view.matrix_shape(weight))
                    dweight[rows] = part_oi
                # A 1x1 convolution and a transposed layer have a weight that is not [out, in].
                if layer.view.layout is not Layout.PLAIN or weight.dim() > 2:
                    dweight = layer.view.unrows(dweight.view(layer.view.rows(weight).shape))
            dweight, dtensors = _route_gradient(layer, weight, dweight, len(tensors))
        if ctx.needs_input_grad[2]:
            batch_and_positions = (0, *range(2, dy.dim()))
            # Of dY itself: a sum over tokens is no GEMM, so an estimate would save nothing.
            dbias = dy.sum(batch_and_positions)
        # No gradients for the layer, the settings and the noise, which stand between the bias and the tensors.
        return dx, dweight, dbias, *[None] * (first_tensor - 3), *dtensors


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
            return F.embedding(tokens, layer.values_of("forward", weight))
        # Only the rows that are looked up are masked: W_F of a large vocabulary is never made.
        rows = F.embedding(tokens, weight)
        mask = layer.masks.forward_view
        return rows if mask is None else masked(rows, mask[tokens])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tokens, weight, *tensors = ctx.saved_tensors
        dweight = None
        dtensors: list[Any] = [None] * len(tensors)
        first_tensor = len(ctx.needs_input_grad) - len(tensors)
        if ctx.needs_input_grad[1] or any(ctx.needs_input_grad[first_tensor:]):
            dweight = torch.ops.aten.embedding_dense_backward(
                grads[0], tokens, len(weight), ctx.padding, ctx.by_frequency
            )
            dweight, dtensors = _route_gradient(ctx.layer, weight, dweight, len(tensors))
        return None, dweight, None, None, None, *dtensors


# ------------------------------------------------------------------------------------------- what adapters call


def nm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: Any,
    rows: tuple[int, int] | None = None,
    *,
    routed: bool = True,
) -> Tensor:
    """Return ``x @ W_F^T + bias``, whose input gradient uses W_B.

    Args:
        x: ``[..., in]``.
        weight: The latent parameter: ``[out, in]``, or ``[in, out]`` for a transposed layout.
        bias: ``[out]`` or ``None``.
        layer: An :class:`NMLayer` with method, estimator and masks. Or what a module of a registered adapter has in its
            place for inference: a packed weight with methods `linear` and `conv`.
        rows: Use only the output rows ``rows[0]:rows[1]``, as cross-attention does of a joint projection.
        routed: Whether a router may choose the kernels.

    Returns:
        ``[..., out]`` in the dtype that ``F.linear`` would return, autocast included.
    """
    if not isinstance(layer, NMLayer):
        return layer.linear(x, bias, rows)
    router = active() if routed else None
    reason = ""
    if rows is not None:
        reason = _OF_A_PART
        bias = None if bias is None else bias[rows[0] : rows[1]]
    # Outside of the function, so that its output is no view: that may be changed in place.
    x_ti = x.reshape(-1, x.shape[-1])
    y_to = _apply(x_ti, weight, bias, layer, rows, None, router, reason)
    # As torch's own linear: nothing else holds y, and FSDP's hooks are lost by changes in place of a view.
    return torch.ops.aten._unsafe_view(y_to, [*x.shape[:-1], y_to.shape[-1]])


def nm_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: Any,
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
    if router is not None and not any(padding):
        # Each output position is the product of one input position with the whole weight. If channels are last, that
        # is a matrix product, [batch x positions, in] with [in, out].
        is_pointwise = {*stride, *dilation, *layer.view.shape[2:], groups} == {1}
        tokens = x.movedim(1, -1)
        if is_pointwise and tokens.is_contiguous():
            return nm_linear(tokens, weight, bias, layer).movedim(-1, 1)
    reason = ""
    # Kernels take planes at most.
    if router is not None and (x.dim() > 4 or not router.convolves(x.device.type)):
        reason = "a convolution that no kernel takes"
        if x.is_cuda:
            reason = "a convolution, left to cuDNN"
    geometry = (stride, padding, dilation, groups)
    return _apply(x, weight, bias, layer, None, geometry, router, reason)


def nm_embedding(
    tokens: Tensor,
    weight: Tensor,
    layer: NMLayer,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Return rows of W_F, whose gradient is routed to W by the method.

    There is no estimator, because dW is a sum and no GEMM.

    Args:
        tokens: Integers ``[...]``.
        weight: The latent parameter ``[num_embeddings, embedding_dim]``; blocks lie along ``embedding_dim``.
        layer: Method and masks.
        padding_idx: The row that receives no gradient, or ``None``.
        scale_grad_by_freq: Whether gradients are divided by how often a row occurs in ``tokens``.

    Returns:
        ``[..., embedding_dim]``.
    """
    # -1 is no row: torch itself passes it to the operator where nothing is padding.
    padding = -1 if padding_idx is None else padding_idx
    return _Embedding.apply(
        tokens, weight, layer, padding, scale_grad_by_freq, *layer.read_tensors()
    )


def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: NMLayer,
    rows: tuple[int, int] | None,
    geometry: Geometry | None,
    router: Router | None,
    reason: str,
) -> Tensor:
    """Apply :class:`_Gemms` to input and bias, cast as autocast casts for a matmul.

    The weight is cast inside the function, so that the parameter itself is saved for backward.
    """
    device = x.device.type
    dtype = weight.dtype
    without_autocast: AbstractContextManager[Any] = nullcontext()
    # Entering torch's own context takes as long as a small GEMM: not where autocast is off anyway.
    if torch.is_autocast_enabled(device):
        without_autocast = torch.autocast(device, enabled=False)
        # Autocast leaves float64 as it is.
        if x.is_floating_point() and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
    route = None
    # A mismatch of dtypes is the dense product's to refuse.
    if router is not None and x.dtype == dtype:
        # Within the function gradients are always off, so it is told whether a backward pass will follow.
        route = Route(router, torch.is_grad_enabled(), reason)
    arguments = (x, weight, bias, layer, dtype, rows, geometry, route)
    with without_autocast:
        # As an input, the noise is saved: the backward pass has the words that were drawn before its forward pass.
        return _Gemms.apply(*arguments, layer.noise.words, *layer.read_tensors())
