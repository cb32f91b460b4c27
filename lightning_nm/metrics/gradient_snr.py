"""Signal-to-noise ratio of gradient estimates."""

from __future__ import annotations

import torch

from lightning_nm.functional.statistics import GRADIENT_SNR, gradient_energies
from lightning_nm.metrics.base import Layers, RatioMetric, pairs


class GradientSNR(RatioMetric):
    r"""Norm of the exact gradients over the norm of the estimates' errors; not in decibels.

    .. math:: \sqrt{\sum_i \|G_i\|^2 / \sum_i \|\hat G_i - G_i\|^2}

    The gradients of all layers, updates and processes count as one long vector, as in ``nm/grad_snr``.

    ``update(exact, estimate)`` takes two tensors of any floating dtype, or two dicts by layer name. ``compute()``
    returns a float32 number: infinite without any error, NaN until the next reset after a NaN or an infinity. The
    functional form is :func:`gradient_snr`.

    Args:
        kwargs: Arguments of :class:`torchmetrics.Metric`.

    Raises:
        TypeError: On update, if a gradient is not of a floating dtype.
        ValueError: On update, if shapes or layer names differ.

    Example::

        >>> import torch
        >>> snr = GradientSNR()
        >>> snr.update(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0]))
        >>> snr.compute()
        tensor(2.5000)
    """

    higher_is_better = True
    plot_upper_bound = None
    ratio = GRADIENT_SNR
    sums = ("signal", "error")
    sum_dtype = torch.float64

    def update(self, exact: Layers, estimate: Layers) -> None:
        """Add squared norms."""
        self.add(gradient_energies(*pair) for pair in pairs(exact, estimate))
