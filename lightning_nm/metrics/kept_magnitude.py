"""Share of the weights' magnitude that masks keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional.statistics import KEPT_MAGNITUDE, magnitude_sums
from lightning_nm.metrics.base import Layers, NMMetric, pairs


class KeptMagnitude(NMMetric):
    r"""Share of the magnitude of all weights that their masks keep: :math:`\sum_{j \in m} |W_j| / \sum_j |W_j|`.

    ``update(weights, masks)`` takes weights of any floating dtype and bool masks: two tensors, or two dicts by layer
    name. ``compute()`` returns a float32 number, 1 if all weights are zero; one NaN or infinity makes it NaN until it
    is reset. The functional form is :func:`kept_magnitude`.

    Args:
        kwargs: What :class:`torchmetrics.Metric` takes.

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

    kept: Tensor
    total: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("kept", torch.float64)
        self.add_sum("total", torch.float64)

    def update(self, weights: Layers, masks: Layers) -> None:
        """Add up magnitudes."""
        kept, total = self.kept, self.total
        for weight, mask, layer in pairs(weights, masks):
            part, whole = magnitude_sums(weight, mask, layer)
            kept, total = kept + part, total + whole
        self.kept, self.total = kept, total

    def compute(self) -> Tensor:
        """Divide."""
        return KEPT_MAGNITUDE(self.kept, self.total)
