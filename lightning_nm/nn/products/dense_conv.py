"""Dense gradients of a convolution, all by one call of the operator that autograd itself calls."""

from __future__ import annotations

import torch
from torch import Tensor

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
