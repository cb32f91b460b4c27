"""What all estimators that prune blocks of tokens share: their pattern, their schedule, and padding."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_nm.estimators.base import GradientEstimator
from lightning_nm.functional import counter_uniform
from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.functional.schedule import Moment, check_window
from lightning_nm.nn.layer import NMLayer


class BlockEstimator(GradientEstimator):
    """Keeps N of M consecutive tokens' gradients, for each output by itself; a last block is padded with zeros.

    Args:
        pattern: The N:M pattern along the tokens; ``None`` takes each layer's own.
        dense_start: How long wgrad stays dense when training begins: an integer counts training steps (batches after
            which an optimizer stepped), a float in [0, 1] is a share of the planned ones.
        dense_end: How long wgrad is dense again before training ends, likewise.

    Raises:
        TypeError: If a length of a dense phase is no number.
        ValueError: For an impossible pattern, a share out of [0, 1], or no step between the dense phases.

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
        uniform = counter_uniform(count, seed).view(self.numbers, blocks, out)
        pruned = self.prune(padded, pattern, uniform)
        # Zeros were added at the end: only they are cut off.
        return pruned[:tokens]
