"""The base class of gradient estimators: what replaces dY in the wgrad GEMM."""

from __future__ import annotations

from torch import Tensor

from lightning_nm.functional.pattern import NMPattern
from lightning_nm.functional.schedule import Moment, resolve_window
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.products.estimates import estimated


class GradientEstimator:
    """Replaces ``dY`` by ``E(dY)`` in ``dW = E(dY)^T X``; the input gradient and the bias gradient keep ``dY``.

    ``dY`` arrives as ``[tokens, out]`` (for a convolution the tokens are batch x positions), so blocks along the
    contraction axis of this GEMM are blocks along dimension 0. One instance serves many layers.

    Example:
        >>> class Halved(GradientEstimator):
        ...     def estimate(self, layer, grad, seed):
        ...         return 0.5 * grad
        >>> Halved(), Halved().schedule(planned_steps=None)
        (Halved(), ())
    """

    # Class attributes, so that a subclass need not define __init__.
    dense_start: Moment = 0
    """How long wgrad stays dense when training begins: training steps, or a share of them as a float."""
    dense_end: Moment = 0
    """How long wgrad is dense again before training ends, likewise."""

    def estimate(self, layer: NMLayer, grad: Tensor, seed: Tensor) -> Tensor:
        """Return ``E(dY)``, here the identity. Traced by ``torch.compile``, so it must be plain tensor code.

        Args:
            layer: The layer whose gradient this is.
            grad: ``dY [tokens, out]``, in the dtype of the GEMM. The number of tokens is whatever the batch brought.
            seed: Four words, int64 [4], that differ by layer, micro-batch and process: all randomness must come from
                them, see :func:`~lightning_nm.functional.counter_uniform`.

        Returns:
            A tensor of the shape and dtype of ``grad``.
        """
        return grad

    def estimate_transposed(
        self,
        layer: NMLayer,
        grad: Tensor,
        seed: Tensor,
        gather: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``E(dY)`` as a kernel packs it, with the values of :meth:`estimate`.

        Args:
            layer: The layer.
            grad: ``dY [tokens, out]``, contiguous.
            seed: Four words, as for :meth:`estimate`.
            gather: An order of the columns of ``dY``, int64 ``[out]``.

        Returns:
            ``E(dY)^T [out, tokens]``, contiguous, its tokens perhaps padded with zeros; and ``dY[:, gather]`` if the
            same pass made it, else ``None``.
        """
        # This also checks the shape and dtype of what a subclass returns.
        estimate = estimated(layer, grad, seed)
        return estimate.t().contiguous(), None

    def pattern_of(self, layer: NMLayer) -> NMPattern | None:
        """Return the pattern along the tokens; ``None`` for an estimator without blocks."""
        return None

    def schedule(self, planned_steps: int | None) -> tuple[int, ...]:
        """Return the training steps at which estimation begins and ends; ``()`` if it always works.

        Raises:
            ValueError: If that takes the number of planned steps and it is not known, or no step is left.
        """
        return resolve_window(self, self.dense_start, self.dense_end, planned_steps)

    def __repr__(self) -> str:
        settings = []
        for key, value in vars(self).items():
            # What a subclass keeps for itself is no setting.
            if not key.startswith("_"):
                settings.append(f"{key}={value!r}")
        return f"{type(self).__name__}({', '.join(settings)})"
