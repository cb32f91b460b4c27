"""S-STE: pruning by a soft threshold, which is continuous in the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.functional import soft_threshold_nm
from lightning_nm.functional.masks import wide_dtype
from lightning_nm.methods.ste import STE
from lightning_nm.nn.layer import NMLayer

SCALE = "scale"
"""The buffer that holds the frozen factor of a layer, one number: float64 without axes would be traced twice."""


class SSTE(STE):
    r"""Smooth STE (Hu et al., NeurIPS 2024, arXiv 2409.09099): the forward weight is continuous in the latent weight.

    :math:`W_F = \beta S(W)` with :math:`S(w)_i = \mathrm{sign}(w_i) \max(|w_i| - t, 0)`, where t is the (M-N)-th
    smallest magnitude of the block: an entry is 0 when it enters or leaves the mask. The factor
    :math:`\beta = \langle W, S(W) \rangle / \langle S(W), S(W) \rangle`, by which S(W) comes closest to W, is computed
    once for each weight, from its values when the masks first come, and is frozen from then on.
    :math:`dL/dW = dL/dW_F` for every entry, and there is no decay. dgrad uses the same :math:`W_F`, which is not N:M
    along `out`.

    The paper's training also replaces dY in wgrad by an unbiased 2:4 estimate: ``grad_estimator="approx-mvue"``, as
    ``preset="paper"`` sets it. Forward and wgrad are then N:M, and dgrad is masked.

    Args:
        dense_start: How long training stays dense before the first masks: training steps, or a fraction of them.
        dense_end: How long it is dense again at the end, in the same units: **the trained model is dense then**.

    Raises:
        TypeError, ValueError: What :class:`STE` refuses.

    Example:
        >>> from torch import nn
        >>> from lightning_nm import NMSparsifier
        >>> sparsifier = NMSparsifier(nn.Linear(8, 4), "2:4", SSTE(), skip_first_last=False).attach()
        >>> sparsifier.violations()
        0
    """

    short_name = "s-ste"

    def init_masks(self, layer: NMLayer) -> None:
        """Select the first masks and compute the factor, unless training starts dense."""
        # These weights may replace others.
        layer.buffers.pop(SCALE, None)
        super().init_masks(layer)

    def select(self, layer: NMLayer) -> None:
        """Select the masks from the weight as it is now; the first time compute the factor."""
        super().select(layer)
        mask = layer.masks.forward_view
        # Layers whose forward GEMM stays dense need no factor, and a factor that is there is frozen.
        if mask is None or SCALE in layer.buffers:
            return
        weight = layer.weight.detach()
        shrunk = self._shrunk(layer, weight, mask)
        # Not every device has float64.
        dtype = torch.float32 if weight.device.type == "mps" else torch.float64
        product = (weight.to(dtype) * shrunk.to(dtype)).sum()
        square = shrunk.to(dtype).square().sum()
        # A weight whose blocks have one magnitude each shrinks to 0, which any factor leaves at 0. A select, not a
        # branch: reading the sum would wait for the device.
        scale = torch.where(square > 0, product / square, 1)
        layer.buffers[SCALE] = scale.to(wide_dtype(weight)).reshape(1)

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """The scaled soft threshold of the weight; the weight itself in a dense phase."""
        mask = layer.masks.forward_view
        if mask is None:
            return weight
        scale = layer.buffers[SCALE].to(weight.dtype)
        return self._shrunk(layer, weight, mask) * scale

    @staticmethod
    def _shrunk(layer: NMLayer, weight: Tensor, mask: Tensor) -> Tensor:
        # The masks were selected after the last step, so that their threshold needs no second selection.
        rows = layer.view.rows(weight)
        mask_rows = layer.view.rows(mask)
        shrunk = soft_threshold_nm(rows, layer.pattern, dim=1, mask=mask_rows)
        return layer.view.unrows(shrunk)
