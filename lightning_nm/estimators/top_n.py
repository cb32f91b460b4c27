"""The N largest gradients of every M: biased, and here to show what that does."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.estimators.estimator import BlockEstimator
from lightning_nm.functional import nm_mask
from lightning_nm.pattern import NMPattern


class TopN(BlockEstimator):
    """Keeps the N largest of every M gradients: the least error in one block, but biased.

    The errors of many gradients do not average out, as the MVUE paper (arXiv 2203.10991) warns.

    Args:
        pattern: The N:M pattern along the tokens; ``None`` takes each layer's own.
        dense_start: How long wgrad stays dense when training begins, as for :class:`~lightning_nm.MVUE`.
        dense_end: How long wgrad is dense again before training ends, in the same units.

    Example:
        >>> grad = torch.tensor([[1.0], [-3.0]])
        >>> TopN("1:2").prune(grad, NMPattern(1, 2), torch.empty(0)).flatten().tolist()
        [0.0, -3.0]
    """

    def prune(self, grad: Tensor, pattern: NMPattern, uniform: Tensor) -> Tensor:
        """Keep the largest gradients; a NaN counts as such, so that a GradScaler sees it."""
        # Without posinf, nan_to_num would make the largest finite number of an infinity.
        magnitudes = grad.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        mask = nm_mask(magnitudes, pattern, dim=0)
        return torch.where(mask, grad, 0)
