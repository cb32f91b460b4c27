"""Share of entries that are not zero."""

from __future__ import annotations

from lightning_nm.functional.statistics import DENSITY, density_counts
from lightning_nm.metrics.base import Layers, RatioMetric, by_name


class MaskDensity(RatioMetric):
    r"""Share of the entries that a mask keeps, over layers and updates: :math:`\sum_i \#\{x_i \ne 0\} / \sum_i \#x_i`.

    :class:`MaskViolations` counts the blocks that break a pattern.

    ``update(masks)`` takes masks, or values whose nonzeros are counted; a tensor or a dict by layer name. ``compute()``
    returns a float32 number, NaN if nothing was counted. The functional form is :func:`mask_density`.

    Args:
        kwargs: Arguments of :class:`torchmetrics.Metric`.

    Example::

        >>> import torch
        >>> density = MaskDensity()
        >>> density.update({"0": torch.tensor([True, False, False, True]), "1": torch.tensor([1.0, 0.0, 0.0, 0.0])})
        >>> density.compute()
        tensor(0.3750)
    """

    higher_is_better = None
    ratio = DENSITY
    sums = ("nonzeros", "entries")

    def update(self, masks: Layers) -> None:
        """Count the nonzeros of masks or values."""
        self.add(density_counts(mask) for mask in by_name(masks).values())
