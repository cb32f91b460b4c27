"""Weights in the form that kernels for N:M operands pack: contiguous, in order, with +0 at pruned entries."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.kernels.operands import masked_backward, masked_forward
from lightning_nm.nn.layer import NMLayer


def packable_forward(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W_F ``[out, in]``, contiguous; in one pass over weight and masks where the method selects entries.

    Args:
        layer: The layer.
        weight: The latent weight, in the layout of the layer.
        dtype: Of the result.
    """
    bits = layer.masks.bits
    if bits is None or not layer.masks.has_forward or not _in_one_pass(layer, weight, bits):
        return layer.matrix(layer.method.forward_weight(layer, weight)).to(dtype).contiguous()
    return masked_forward(layer.matrix(weight), layer.matrix(bits), dtype)


def packable_backward(layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W_B^T ``[in, out]``, contiguous, its columns in the order of the layer's permutation.

    Args:
        layer: The layer; without a backward mask it has no permutation.
        weight: The latent weight, in the layout of the layer.
        dtype: Of the result.
    """
    masks = layer.masks
    order = masks.permutation if masks.has_backward else None
    if (
        masks.bits is None
        or not (masks.has_forward or masks.has_backward)
        or not _in_one_pass(layer, weight, masks.bits)
    ):
        rows = layer.matrix(layer.method.backward_weight(layer, weight)).to(dtype)
        return (rows if order is None else rows[order]).t().contiguous()
    return masked_backward(
        layer.matrix(weight), layer.matrix(masks.bits), dtype, order, own_backward=masks.has_backward
    )


def _in_one_pass(layer: NMLayer, weight: Tensor, bits: Tensor) -> bool:
    return layer.method.selects_entries and bits.stride() == weight.stride()
