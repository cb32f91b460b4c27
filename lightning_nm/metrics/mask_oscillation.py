"""How often mask entries flip back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional.packing import count_bits
from lightning_nm.functional.statistics import OSCILLATION
from lightning_nm.metrics.history import MaskHistory


class MaskOscillation(MaskHistory):
    r"""How often entries flip back, per entry and update: flips of entries that flipped before.

    .. math:: \frac{1}{T D} \sum_{t=1}^{T} \sum_k [m_{t,k} \ne m_{t-1,k}] \, [\exists s < t: m_{s,k} \ne m_{s-1,k}]

    At most :class:`MaskFlipRate` over the same updates; their ratio is the share of flips that undo an earlier one. It
    remembers two bits an entry: the mask, and whether the entry ever flipped.

    ``update(masks)`` takes the bool mask of one layer, or those of several layers by name: update it once per mask
    update. ``compute()`` returns a float32 number, 0 if nothing was compared yet; ``forward`` returns the flips back
    since the previous update. The functional form is :func:`mask_oscillation`.

    ``reset`` clears the average, and keeps the masks and which entries flipped; :meth:`forget` clears all.

    Args:
        kwargs: What :class:`torchmetrics.Metric` takes.

    Raises:
        TypeError: On update, if a mask is not a bool tensor.
        ValueError: On update, if a mask has another shape than the last one of its name.

    Example::

        >>> import torch
        >>> went, came = torch.tensor([True, False]), torch.tensor([False, True])
        >>> oscillation = MaskOscillation()
        >>> for mask in (went, came, went):
        ...     oscillation.update(mask)
        >>> oscillation.compute()
        tensor(0.5000)

    Source: Nagel et al., "Overcoming Oscillations in Quantization-Aware Training", ICML 2022, arXiv:2203.11086, for
    oscillations of rounded weights; applied to masks here, with the plain mean in place of a moving one.
    """

    higher_is_better = False

    returns: Tensor
    compared: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("returns")
        self.add_sum("compared")

    def remember(self, packed: Tensor) -> Tensor:
        """Return the mask, and that no entry flipped yet."""
        return torch.stack([packed, torch.zeros_like(packed)])

    def compare(self, packed: Tensor, rows: Tensor, entries: int) -> Tensor:
        """Count the flips of entries that flipped before."""
        before, flipped = rows
        flips = packed ^ before
        self.returns = self.returns + count_bits(flips & flipped)
        self.compared = self.compared + entries
        return torch.stack([packed, flipped | flips])

    def compute(self) -> Tensor:
        """Divide."""
        return OSCILLATION(self.returns, self.compared)
