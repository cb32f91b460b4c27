"""Share of entries that are not zero."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_nm.functional.statistics import DENSITY, density_counts
from lightning_nm.metrics.base import Layers, NMMetric, by_name


class MaskDensity(NMMetric):
    r"""Share of the entries that a mask keeps, over layers and updates: :math:`\sum_i \#\{x_i \ne 0\} / \sum_i \#x_i`.

    Blocks that break a pattern are counted by :class:`MaskViolations`: a share and a count make no common plot.

    ``update(masks)`` takes masks, or values whose nonzeros are counted; a tensor or a dict by layer name. ``compute()``
    returns a float32 number, NaN if nothing was counted. The functional form is :func:`mask_density`.

    Args:
        kwargs: What :class:`torchmetrics.Metric` takes.

    Example::

        >>> import torch
        >>> density = MaskDensity()
        >>> density.update({"0": torch.tensor([True, False, False, True]), "1": torch.tensor([1.0, 0.0, 0.0, 0.0])})
        >>> density.compute()
        tensor(0.3750)
    """

    higher_is_better = None

    nonzeros: Tensor
    entries: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("nonzeros")
        self.add_sum("entries")

    def update(self, masks: Layers) -> None:
        """Count the nonzeros of masks or values."""
        for mask in by_name(masks).values():
            nonzeros, entries = density_counts(mask)
            self.nonzeros = self.nonzeros + nonzeros
            self.entries = self.entries + entries

    def compute(self) -> Tensor:
        """Divide."""
        return DENSITY(self.nonzeros, self.entries)
