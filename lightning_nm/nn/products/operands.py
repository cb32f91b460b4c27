"""Sparse operands of a layer's products for kernels: masked, laid out, packed, and kept while nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional.mask_bits import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.kernels.api import GemmKernel, GemmKey, MaskedMatrix
from lightning_nm.kernels.operands import masked_backward, masked_forward
from lightning_nm.kernels.router.router import Product, Router
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.memory import memory_state


def packable_forward(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W_F ``[out, in]`` as kernels pack it, contiguous; in one pass where the method selects entries."""
    method, masks = layer.spec.method, layer.masks
    bits = masks.bits if masks.has_forward and method.selects_entries else None
    if bits is None or bits.stride() != weight.stride():
        return layer.matrix(method.forward_weight(layer, weight)).to(dtype).contiguous()
    return masked_forward(layer.matrix(weight), layer.matrix(bits), dtype)


def packable_backward(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W_B^T ``[in, out]`` likewise, its columns in the order of the permutation if there is a backward mask."""
    method, masks = layer.spec.method, layer.masks
    own = masks.has_backward
    order = masks.permutation if own else None
    bits = masks.bits if (masks.has_forward or own) and method.selects_entries else None
    if bits is None or bits.stride() != weight.stride():
        return _transposed(layer.matrix(method.backward_weight(layer, weight)).to(dtype), order)
    return masked_backward(layer.matrix(weight), layer.matrix(bits), dtype, order, own_backward=own)


def forward_operand(layer: NMLayer, weight: Tensor, key: GemmKey) -> MaskedMatrix:
    """W_F ``[out, in]`` for kernels."""
    method, bits = layer.spec.method, layer.masks.bits
    if method.selects_entries:
        return _operand(
            layer,
            weight,
            bits,
            FORWARD_BIT,
            key,
            None,
            lambda: packable_forward(layer, weight, key.dtype),
        )
    values = layer.matrix(method.forward_weight(layer, weight)).to(key.dtype)
    return _operand(layer, values, bits, FORWARD_BIT, key, None, values.contiguous)


def backward_operand(layer: NMLayer, weight: Tensor, key: GemmKey) -> MaskedMatrix:
    """W_B^T ``[in, out]`` for kernels, with the permutation of a backward mask."""
    method, masks = layer.spec.method, layer.masks
    values = weight if method.selects_entries else method.backward_weight(layer, weight)
    bit, order = (BACKWARD_BIT, masks.permutation) if masks.has_backward else (FORWARD_BIT, None)

    def dense() -> Tensor:
        if method.selects_entries:
            return packable_backward(layer, weight, key.dtype)
        return _transposed(layer.matrix(values).to(key.dtype), order)

    found = _operand(layer, values, masks.bits, bit, key, order, dense)
    return found._replace(values=found.values.t(), bits=found.bits.t())


def conv_backward_operand(layer: NMLayer, weight: Tensor, key: GemmKey) -> MaskedMatrix:
    """W_B ``[out, in / groups * taps]`` of a convolution for kernels: not transposed, and in the order of memory."""

    def dense() -> Tensor:
        return (
            layer.matrix(layer.spec.method.backward_weight(layer, weight))
            .to(key.dtype)
            .contiguous()
        )

    found = backward_operand(layer, weight, key)
    return found._replace(values=found.values.t(), bits=found.bits.t(), order=None, dense=dense)


def _operand(
    layer: NMLayer,
    values: Tensor,
    bits: Tensor | None,
    bit: int,
    key: GemmKey,
    order: Tensor | None,
    dense: Callable[[], Tensor],
) -> MaskedMatrix:
    assert bits is not None  # a product without masks has no sparse operand
    return MaskedMatrix(
        layer.matrix(values), layer.matrix(bits), bit, key.pattern, key.dtype, order, dense
    )


def _transposed(rows: Tensor, order: Tensor | None) -> Tensor:
    """Rows in an order, transposed and contiguous."""
    return (rows if order is None else rows[order]).t().contiguous()


def layout_of(
    layer: NMLayer,
    router: Router,
    kernel: GemmKernel,
    product: Product,
    matrix: Callable[[], MaskedMatrix],
    side: str = "",
) -> Any:
    """What a packed operand has of the masks, which is kept while they stand still.

    `side` names the operand; by default dgrad has one of its own. Products of another dtype may take another layout.
    """
    stamp: Hashable = (layer.masks.state, product.key.pattern)
    side = side or ("dgrad" if product.key.gemm == "dgrad" else "forward")
    name = (kernel.name, "layout", side, product.key.dtype)
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
    """The packed operand of a weight, which changes with the weight, the masks, or anything that a step does.

    Packs are kept for training alone: evaluation may be of other weights, swapped in where no version is counted. A
    kernel that only gathers values makes its packs anew: nothing is gained by asking whether the weight changed.
    """

    def make() -> Any:
        matrix = operand(layer, weight, product.key)
        return kernel.pack_masked(
            matrix, layout_of(layer, router, kernel, product, lambda: matrix, side)
        )

    if not keep or not kernel.keeps_packs:
        return make()
    tensors = tuple(memory_state(tensor) for tensor in (weight, *layer.read_tensors()))
    # Not every optimizer leaves a version, so steps count; and memory belongs to the stream where it was made.
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
    stamp: Hashable = (
        tensors,
        layer.masks.state,
        layer.progress.step,
        layer.progress.clock,
        stream,
    )
    name = (kernel.name, side or product.key.gemm, product.key.dtype)
    return router.packed(layer, name, stamp, make)
