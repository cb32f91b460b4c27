"""Signal-to-noise ratio of gradient estimates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional.statistics import GRADIENT_SNR, gradient_energies
from lightning_nm.metrics.base import Layers, NMMetric, pairs


class GradientSNR(NMMetric):
    r"""Norm of the exact gradients over the norm of the estimates' errors.

    .. math:: \sqrt{\sum_i \|G_i\|^2 / \sum_i \|\hat G_i - G_i\|^2}

    Gradients of all layers, updates and processes are taken as one long vector, as ``nm/grad_snr`` takes them:
    different gradients of several processes all count, and equal ones change nothing. Not in decibels.

    ``update(exact, estimate)`` takes tensors of any floating dtype: two, or two dicts by layer name. ``compute()``
    returns a float32 number, infinite if there was no error; one NaN or infinity makes it NaN until it is reset. The
    functional form is :func:`gradient_snr`.

    Args:
        kwargs: What :class:`torchmetrics.Metric` takes.

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

    signal: Tensor
    error: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("signal", torch.float64)
        self.add_sum("error", torch.float64)

    def update(self, exact: Layers, estimate: Layers) -> None:
        """Add up squares."""
        signal, error = self.signal, self.error
        for gradient, found, layer in pairs(exact, estimate):
            more, noise = gradient_energies(gradient, found, layer)
            signal, error = signal + more, error + noise
        self.signal, self.error = signal, error

    def compute(self) -> Tensor:
        """Divide, and take the root."""
        return GRADIENT_SNR(self.signal, self.error)
