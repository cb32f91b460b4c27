"""Unbiased N:M neural gradients of least variance, and the paper's cheaper approximation."""

from __future__ import annotations

from torch import Tensor

from lightning_nm.estimators.estimator import BlockEstimator
from lightning_nm.functional import approx_mvue, mvue
from lightning_nm.kernels.operands import TOKENS, in_one_pass, mvue_transposed
from lightning_nm.nn.layer import NMLayer
from lightning_nm.pattern import NMPattern
from lightning_nm.schedule import Moment


class MVUE(BlockEstimator):
    r"""The minimum-variance unbiased estimator (Chmiel et al., ICLR 2023, arXiv 2203.10991), exact for any N:M.

    Of every M consecutive tokens at most N keep a gradient: :math:`E(dY)_i = dY_i / p_i` with probability
    :math:`p_i = \min(1, c |dY_i|)`, else 0, so :math:`\mathbb{E}[E(dY)] = dY` and, of all such estimators,
    :math:`\sum_i dY_i^2 (1/p_i - 1)` is least. See :func:`lightning_nm.functional.mvue`.

    The paper finds 1:2 enough for most models; 2:4 has the lesser variance. A coarse pattern such as 1:16 makes very
    noisy gradients: give them their own. Errors are those of :class:`~lightning_nm.estimators.BlockEstimator`.

    Args:
        pattern: The N:M pattern along the tokens; ``None`` takes each layer's own.
        dense_start: How long wgrad stays dense when training begins: an integer counts training steps (batches after
            which an optimizer stepped), a float in [0, 1] is a fraction of the planned ones.
        dense_end: How long wgrad is dense again before training ends, in the same units. The weights stay N:M.

    Example:
        >>> MVUE("1:2", dense_end=0.1).schedule(planned_steps=1000)
        (0, 900)
    """

    numbers = 1

    def prune(self, grad: Tensor, pattern: NMPattern, uniform: Tensor) -> Tensor:
        """Draw a sample of the estimator."""
        # One number decides a whole block, by systematic sampling.
        return mvue(grad, pattern, dim=0, uniform=uniform[0])

    def estimate(self, layer: NMLayer, grad: Tensor, seed: Tensor) -> Tensor:
        """Draw a sample of the estimator, in one pass where there is a kernel for it."""
        if not self._has_kernel(layer) or not in_one_pass(grad):
            return super().estimate(layer, grad, seed)
        pattern = self.pattern_of(layer)
        # [out, tokens], the tokens padded to a multiple of TOKENS.
        transposed, _ = mvue_transposed(grad.contiguous(), seed, pattern)
        tokens = len(grad)
        return transposed.t()[:tokens]

    def estimate_transposed(
        self,
        layer: NMLayer,
        grad: Tensor,
        seed: Tensor,
        gather: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Draw the same sample, in one pass over ``dY`` where there is a kernel for it."""
        if not self._has_kernel(layer):
            return super().estimate_transposed(layer, grad, seed, gather)
        return mvue_transposed(grad, seed, self.pattern_of(layer), gather=gather)

    def _has_kernel(self, layer: NMLayer) -> bool:
        """Tell whether the kernel draws this estimator with this pattern."""
        # A subclass that overrides one of these may draw something that the kernel does not know.
        cls = type(self)
        is_known = cls.prune is MVUE.prune and cls.estimate is MVUE.estimate
        # The kernel pads the tokens to a multiple of TOKENS, which must be whole blocks.
        return is_known and TOKENS % self.pattern_of(layer).m == 0


class ApproxMVUE(BlockEstimator):
    """The paper's cheaper unbiased estimator (arXiv 2203.10991): 2:4 by two draws without sorting, for comparison.

    Its variance is below twice the least in every block, and 1.06 times in a sum over Gaussian ones; see
    :func:`lightning_nm.functional.approx_mvue`. :class:`MVUE` costs no more.

    Args:
        dense_start: How long wgrad stays dense when training begins, as for :class:`MVUE`.
        dense_end: How long wgrad is dense again before training ends, in the same units.

    Example:
        >>> ApproxMVUE(dense_start=100).schedule(planned_steps=None)
        (100,)
    """

    numbers = 2

    def __init__(self, dense_start: Moment = 0, dense_end: Moment = 0) -> None:
        # The two draws are defined for this pattern alone, whatever the layer's.
        super().__init__("2:4", dense_start, dense_end)

    def prune(self, grad: Tensor, pattern: NMPattern, uniform: Tensor) -> Tensor:
        """Draw a sample of the estimator."""
        return approx_mvue(grad, pattern, dim=0, uniform=uniform)
