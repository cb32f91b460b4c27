"""Share of the forward mask that the backward mask keeps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_nm.functional.statistics import OVERLAP, overlap_counts
from lightning_nm.metrics.base import Layers, NMMetric, pairs


class MaskOverlap(NMMetric):
    r"""Share of the forward masks' entries that backward masks keep: :math:`\sum_i |F_i \cap B_i| / \sum_i |F_i|`.

    ``update(masks, backward_masks)`` takes bool masks: two tensors, or two dicts by layer name. ``compute()`` returns a
    float32 number, 1 if the forward masks keep nothing. The functional form is :func:`mask_overlap`.

    Args:
        kwargs: What :class:`torchmetrics.Metric` takes.

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

    both: Tensor
    forward_entries: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("both")
        self.add_sum("forward_entries")

    def update(self, masks: Layers, backward_masks: Layers) -> None:
        """Count what the masks share."""
        both, entries = self.both, self.forward_entries
        for forward, backward, layer in pairs(masks, backward_masks):
            shared, kept = overlap_counts(forward, backward, layer)
            both, entries = both + shared, entries + kept
        self.both, self.forward_entries = both, entries

    def compute(self) -> Tensor:
        """Divide."""
        return OVERLAP(self.both, self.forward_entries)
