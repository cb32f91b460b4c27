"""Share of the forward mask that the backward mask keeps."""

from __future__ import annotations

from lightning_nm.functional.statistics import OVERLAP, overlap_counts
from lightning_nm.metrics.base import Layers, RatioMetric, pairs


class MaskOverlap(RatioMetric):
    r"""Share of the forward masks' entries that backward masks keep: :math:`\sum_i |F_i \cap B_i| / \sum_i |F_i|`.

    ``update(masks, backward_masks)`` takes bool masks: two tensors, or two dicts by layer name. ``compute()`` returns a
    float32 number, 1 if the forward masks keep nothing. The functional form is :func:`mask_overlap`.

    Args:
        kwargs: Arguments of :class:`torchmetrics.Metric`.

    Raises:
        TypeError: On update, if a mask is not a bool tensor.
        ValueError: On update, if shapes or layer names differ.

    Example::

        >>> import torch
        >>> overlap = MaskOverlap()
        >>> overlap.update(torch.tensor([True, True, False, False]), torch.tensor([True, False, False, False]))
        >>> overlap.compute()
        tensor(0.5000)
    """

    higher_is_better = True
    ratio = OVERLAP
    sums = ("both", "forward_entries")

    def update(self, masks: Layers, backward_masks: Layers) -> None:
        """Count the common entries."""
        self.add(overlap_counts(*pair) for pair in pairs(masks, backward_masks))
