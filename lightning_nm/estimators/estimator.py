"""The base class of gradient estimators: what replaces dY in the wgrad GEMM."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_nm.functional import counter_uniform
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.products import estimated
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.schedule import Moment, Steps, check_window, resolve_window
from lightning_nm.spelling import with_settings


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
    """How long wgrad stays dense when training begins: training steps, or a fraction of them as a float."""
    dense_end: Moment = 0
    """How long wgrad is dense again before training ends, in the same units."""

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
        # No pass has made dY[:, gather]: the caller gathers by itself.
        return estimate.t().contiguous(), None

    def pattern_of(self, layer: NMLayer) -> NMPattern | None:
        """Return the pattern along the tokens; ``None`` for an estimator without blocks."""
        return None

    def schedule(self, planned_steps: int | None) -> Steps:
        """Return the training steps at which estimation begins and ends; ``()`` if it always works.

        Raises:
            ValueError: If that takes the number of planned steps and it is not known, or no step is left.
        """
        return resolve_window(self, self.dense_start, self.dense_end, planned_steps)

    def __repr__(self) -> str:
        return with_settings(self)


class BlockEstimator(GradientEstimator):
    """Keeps N of M consecutive tokens' gradients, for each output by itself; a last block is padded with zeros.

    Args:
        pattern: The N:M pattern along the tokens; ``None`` takes each layer's own.
        dense_start: How long wgrad stays dense when training begins: an integer counts training steps (batches after
            which an optimizer stepped), a float in [0, 1] is a fraction of the planned ones.
        dense_end: How long wgrad is dense again before training ends, in the same units.

    Raises:
        TypeError: If a length of a dense phase is no number.
        ValueError: For an impossible pattern, a fraction out of [0, 1], or no step between the dense phases.

    Example:
        >>> import torch
        >>> class First(BlockEstimator):
        ...     def prune(self, grad, pattern, uniform):
        ...         tokens = torch.arange(len(grad)) % pattern.m
        ...         return torch.where(tokens.unsqueeze(1) < pattern.n, grad, 0)
        >>> First("1:2").prune(torch.ones(4, 1), NMPattern(1, 2), torch.empty(0)).flatten().tolist()
        [1.0, 0.0, 1.0, 0.0]
    """

    # Random numbers per block: how many `prune` gets.
    numbers = 0

    def __init__(
        self,
        pattern: PatternLike | None = None,
        dense_start: Moment = 0,
        dense_end: Moment = 0,
    ) -> None:
        check_window(dense_start, dense_end)
        self.pattern = None if pattern is None else NMPattern.parse(pattern)
        self.dense_start = dense_start
        self.dense_end = dense_end

    def pattern_of(self, layer: NMLayer) -> NMPattern:
        """Return the estimator's own pattern, or the layer's, also while a schedule's ramp narrows to it."""
        # A ramp narrows the pattern of the weight, and this one is of dY.
        return self.pattern or layer.spec.pattern

    def prune(self, grad: Tensor, pattern: NMPattern, uniform: Tensor) -> Tensor:
        """Make ``dY [tokens, out]`` N:M along the tokens, a multiple of M.

        ``uniform`` are random numbers in [0, 1), float32 ``[numbers, tokens / M, out]``.
        """
        raise NotImplementedError

    def estimate(self, layer: NMLayer, grad: Tensor, seed: Tensor) -> Tensor:
        """Return ``E(dY)``: the gradient padded to whole blocks, pruned, and cut to its tokens."""
        pattern = self.pattern_of(layer)
        tokens, out = grad.shape
        missing = -tokens % pattern.m
        padded = grad
        if missing:
            # Pairs of sizes from the last axis on: none for `out`, and only at the end of the tokens.
            padded = F.pad(grad, (0, 0, 0, missing))
        blocks = padded.shape[0] // pattern.m
        count = self.numbers * blocks * out
        # Block b of column o takes number b * out + o of each row: kernels count alike, and draw the same sample.
        uniform = counter_uniform(count, seed).view(self.numbers, blocks, out)
        pruned = self.prune(padded, pattern, uniform)
        # Zeros were added at the end: only they are cut off.
        return pruned[:tokens]
