"""Sparse operands of a layer's products for kernels: masked, laid out, packed, and kept while nothing changed.

The last letters of a name are the dimensions of its tensor: i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional.mask_storage import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.kernels.api import GemmKernel, GemmKey, MaskedMatrix
from lightning_nm.kernels.operands import masked_backward, masked_forward
from lightning_nm.kernels.router.router import Product, Router
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.memory import memory_state


def packable_forward(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return W_F ``[out, in]`` as kernels pack it, contiguous; in one pass where the method selects entries."""
    method = layer.spec.method
    masks = layer.masks
    bits = masks.bits if masks.has_forward and method.selects_entries else None
    # The one pass walks weight and bits together, so both must lie in the same order.
    if bits is None or bits.stride() != weight.stride():
        weight_oi = layer.view.matrix(layer.view.forward_of(weight))
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
        weight_oi = layer.view.matrix(layer.view.backward_of(weight))
        return _transposed(weight_oi.to(dtype), order)
    return masked_backward(
        layer.view.matrix(weight), layer.view.matrix(bits), dtype, order, own_backward=own_backward
    )


def forward_operand(layer: NMLayer, weight: Tensor, key: GemmKey) -> MaskedMatrix:
    """Return W_F ``[out, in]`` for kernels."""
    method = layer.spec.method
    bits = layer.masks.bits
    if not method.selects_entries:
        values = method.forward_weight(layer, weight).to(key.dtype)
        weight_oi = layer.view.matrix(values)
        return _operand(layer, values, bits, FORWARD_BIT, key, None, weight_oi.contiguous)

    def dense() -> Tensor:
        return packable_forward(layer, weight, key.dtype)

    return _operand(layer, weight, bits, FORWARD_BIT, key, None, dense)


def backward_operand(layer: NMLayer, weight: Tensor, key: GemmKey) -> MaskedMatrix:
    """Return W_B^T ``[in, out]`` for kernels, with the permutation of a backward mask."""
    method = layer.spec.method
    masks = layer.masks
    values = weight if method.selects_entries else method.backward_weight(layer, weight)
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
        weight_oi = layer.view.matrix(layer.view.backward_of(weight))
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
    stamp: Hashable = (layer.masks.state, product.key.pattern)
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
        tuple(memory_state(tensor) for tensor in tensors),
        layer.masks.state,
        layer.progress.step,
        layer.progress.clock,
        stream,
    )
    name = (kernel.name, side or product.key.gemm, product.key.dtype)
    return router.packed(layer, name, stamp, make)
