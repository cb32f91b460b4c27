"""Magnitude masks with a straight-through gradient: STE and SR-STE."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_nm.functional import magnitude_mask
from lightning_nm.methods.base import MaskMethod
from lightning_nm.nn.layer import NMLayer


class STE(MaskMethod):
    r"""Straight-through estimator: the forward weight is re-masked by magnitude after every step.

    :math:`W_F = m \odot W` with :math:`m = \mathrm{nm\_mask}(|W|)`, and :math:`dL/dW = dL/dW_F` for every entry, pruned
    ones included. dgrad uses the same masked weight, which is not N:M along `out`.
    """

    def init(self, layer: NMLayer) -> None:
        """Mask by magnitude."""
        self.update(layer)

    @torch.no_grad()
    def update(self, layer: NMLayer) -> None:
        """Select the mask from the weight as it is now."""
        layer.set_masks(layer.unrows(magnitude_mask(layer.rows(layer.weight.detach()), layer.pattern, dim=1)))


class SRSTE(STE):
    r"""Sparse-refined STE (Zhou et al., 2021, arXiv 2102.04010): STE with a decay on pruned weights.

    :math:`g \leftarrow g + \lambda (1 - m) \odot W`, once per real optimizer step, before clipping. The decay makes it
    costly to revive an entry and so steadies the mask.

    Args:
        decay: :math:`\lambda`, the paper's 2e-4 by default; useful values lie between 6e-5 and 6e-4.

    Raises:
        ValueError: If ``decay`` is negative.
    """

    def __init__(self, decay: float = 2e-4) -> None:
        if decay < 0:
            raise ValueError(f"decay={decay} must not be negative: it pulls pruned weights to zero; 0 is plain 'ste'")
        self.decay = decay

    @torch.no_grad()
    def before_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Add the decay of the pruned entries to the gradient."""
        super().before_step(layer, optimizer)
        mask, weight = layer.forward_mask, layer.weight
        if mask is not None and weight.grad is not None:
            weight.grad.add_(torch.where(mask, 0, weight.detach()), alpha=self.decay)
