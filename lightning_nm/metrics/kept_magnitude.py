"""Share of the weights' magnitude that masks keep."""

from __future__ import annotations

import torch

from lightning_nm.functional.statistics import KEPT_MAGNITUDE, magnitude_sums
from lightning_nm.metrics.base import Layers, RatioMetric, pairs


class KeptMagnitude(RatioMetric):
    r"""Share of the magnitude of all weights that their masks keep: :math:`\sum_{j \in m} |W_j| / \sum_j |W_j|`.

    ``update(weights, masks)`` takes weights of any floating dtype and bool masks: two tensors, or two dicts by layer
    name. ``compute()`` returns a float32 number: 1 if all weights are zero, NaN until the next reset after a NaN or an
    infinity. The functional form is :func:`kept_magnitude`.

    Args:
        kwargs: Arguments of :class:`torchmetrics.Metric`.

    Raises:
        TypeError: On update, if a mask is not a bool tensor or a weight not of a floating dtype.
        ValueError: On update, if shapes or layer names differ.

    Example::

        >>> import torch
        >>> kept = KeptMagnitude()
        >>> kept.update(torch.tensor([3.0, -4.0, 2.0, -1.0]), torch.tensor([True, True, False, False]))
        >>> kept.compute()
        tensor(0.7000)
    """

    higher_is_better = True
    ratio = KEPT_MAGNITUDE
    sums = ("kept", "total")
    sum_dtype = torch.float64

    def update(self, weights: Layers, masks: Layers) -> None:
        """Add magnitudes."""
        self.add(magnitude_sums(*pair) for pair in pairs(weights, masks))
