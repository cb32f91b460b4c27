"""Estimates of output gradients, as products use them."""

from __future__ import annotations

from torch import Tensor

from lightning_nm.nn.layer import NMLayer


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
