"""The base class of gradient estimators: what replaces dY in the wgrad GEMM."""

from __future__ import annotations

from torch import Tensor

from lightning_nm.nn.layer import Gemm, NMLayer


class GradientEstimator:
    """Replaces ``dY`` by ``E(dY)`` in ``dW = E(dY)^T X``; the input gradient and the bias gradient keep ``dY``.

    ``dY`` arrives as ``[tokens, out]`` (for a convolution the tokens are batch x positions), so blocks along the
    contraction axis of this GEMM are blocks along dimension 0. :meth:`estimate` is traced by ``torch.compile``.
    """

    def estimate(self, layer: NMLayer, grad: Tensor) -> Tensor:
        """``E(dY)``, of the shape and dtype of ``grad``; the identity unless overridden."""
        return grad

    def gemm(self, layer: NMLayer) -> Gemm:
        """What the wgrad GEMM does with this estimator and what it costs."""
        return Gemm("dense")

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if not key.startswith("_"))
        return f"{type(self).__name__}({settings})"
