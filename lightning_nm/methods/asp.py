"""One-shot pruning with a fixed mask, as NVIDIA's automatic sparsity does."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional import is_nm, magnitude_mask
from lightning_nm.functional.select import mask_
from lightning_nm.methods.base import MaskMethod, check_option
from lightning_nm.nn.layer import NMLayer


class ASP(MaskMethod):
    """Prune once, then keep the mask: train densely, mask by magnitude at a step, go on training the kept weights.

    After pruning there is no latent weight: pruned entries get no gradient, and are set to zero after every step.

    Args:
        start: Optimizer step at which to prune; 0 prunes before the first step (fine-tuning of a trained model).
        init: ``"magnitude"`` keeps the largest entries. ``"zeros"`` keeps the nonzeros of a model that is already N:M
            sparse.

    Raises:
        ValueError: If ``start`` is negative, if ``init="zeros"`` is combined with a later start, or if a weight is not
            N:M sparse with ``init="zeros"``.
    """

    short_name = "asp"
    restores_masks = True
    latent = False

    def __init__(self, start: int = 0, init: Literal["magnitude", "zeros"] = "magnitude") -> None:
        if start < 0:
            raise ValueError(f"start={start} must be an optimizer step, 0 or later")
        check_option("init", init, "magnitude", "zeros")
        if init == "zeros" and start > 0:
            raise ValueError(f"init='zeros' reads the mask of the given weights, so start must be 0, not {start}")
        self.start, self.init = start, init

    def init_masks(self, layer: NMLayer) -> None:
        """Prune now if the run starts pruned."""
        layer.set_masks(None)
        if layer.step >= self.start:
            self._prune(layer)

    def update(self, layer: NMLayer) -> None:
        """Prune when the clock reaches ``start``."""
        if layer.masks.bits is None and layer.step >= self.start:
            self._prune(layer)

    @torch.no_grad()
    def _prune(self, layer: NMLayer) -> None:
        if layer.forward_reason:
            return
        if self.init == "zeros":
            weight = layer.weight.detach()
            if not is_nm(layer.rows(weight), layer.pattern, dim=1):
                dense = f"layer '{layer.name}' is not {layer.pattern} sparse, so init='zeros' cannot take its mask"
                raise ValueError(f"{dense}: use init='magnitude', or load the sparse weights first")
            mask = weight != 0
        else:
            mask = layer.by_rows(lambda rows: magnitude_mask(rows, layer.pattern, dim=1))
        layer.set_masks(mask)
        if layer.step:  # else after the first step: a fit that fails before it changes no weight
            mask_(layer.local_weight, layer.local_shard(mask))

    def gradient_at_pruned(self, layer: NMLayer) -> bool:
        """Only before pruning, when there are no pruned entries."""
        return layer.masks.bits is None

    def weight_gradient(self, layer: NMLayer, weight: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Pruned entries receive no gradient."""
        mask = layer.forward_mask_view
        return (grad if mask is None else mask_(grad, mask),)

    @torch.no_grad()
    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Keep pruned entries at zero, whatever the optimizer did."""
        mask = layer.forward_mask_view
        if mask is not None:
            mask_(layer.local_weight, layer.local_shard(mask))
