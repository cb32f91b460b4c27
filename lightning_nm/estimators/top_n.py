"""The N largest gradients of every M: biased, and here to show what that does."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.estimators.blocks import BlockEstimator
from lightning_nm.functional import nm_mask
from lightning_nm.functional.pattern import NMPattern


class TopN(BlockEstimator):
    """Keeps the N largest of every M gradients: the least error in one block, but biased.

    The errors of many gradients do not average out, as the MVUE paper (arXiv 2203.10991) warns.

    Args:
        pattern: The N:M pattern along the tokens; ``None`` takes each layer's own.
        dense_start: As :class:`~lightning_nm.MVUE`'s.
        dense_end: As :class:`~lightning_nm.MVUE`'s.
    """

    def prune(self, grad: Tensor, pattern: NMPattern, uniform: Tensor) -> Tensor:
        """The largest; a NaN counts as such, so that a GradScaler sees it."""
        magnitudes = grad.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        mask = nm_mask(magnitudes, pattern, 0)
        return torch.where(mask, grad, 0)
