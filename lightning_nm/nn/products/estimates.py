"""Estimates of output gradients and of weights, as products use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_nm.nn.layer import NMLayer

if TYPE_CHECKING:  # for the types only: imports point one way
    from lightning_nm.estimators.base import GradientEstimator


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
    forward_oi = layer.view.matrix(layer.view.forward_of(weight))[rows].to(dtype)
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
    return layer.view.matrix(layer.view.backward_of(weight))[rows].to(dtype)


def backward_weight(
    layer: NMLayer, weight: Tensor, noise: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """W_B of :func:`backward_matrix` in the shape of the weight."""
    if layer.draws_backward and noise is not None:
        drawn_oi = drawn_matrix(layer, weight, noise, dtype)
        return layer.view.unrows(drawn_oi.reshape(layer.view.rows(weight).shape))
    return layer.view.backward_of(weight).to(dtype)
