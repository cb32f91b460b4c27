"""How often mask entries flip back."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.functional.packing import count_bits
from lightning_nm.functional.statistics import OSCILLATION
from lightning_nm.metrics.history import MaskHistory


class MaskOscillation(MaskHistory):
    r"""How often entries flip back, per entry and update: flips of entries that flipped before.

    .. math:: \frac{1}{T D} \sum_{t=1}^{T} \sum_k [m_{t,k} \ne m_{t-1,k}] \, [\exists s < t: m_{s,k} \ne m_{s-1,k}]

    It is at most :class:`MaskFlipRate` over the same updates; their ratio is the share of flips that undo an earlier
    one. The metric stores two bits per entry: the mask, and whether the entry ever flipped.

    ``update(masks)`` takes the bool mask of one layer, or those of several layers by name: update it once per mask
    update. ``compute()`` returns a float32 number, 0 if nothing was compared yet; ``forward`` returns the flips back
    since the previous update. The functional form is :func:`mask_oscillation`.

    ``reset`` clears the average, and keeps the masks and which entries flipped; :meth:`forget` clears all.

    Args:
        kwargs: Arguments of :class:`torchmetrics.Metric`.

    Raises:
        TypeError: On update, if a mask is not a bool tensor.
        ValueError: On update, if a mask has another shape than the last one of its name.

    Example::

        >>> import torch
        >>> first, second = torch.tensor([True, False]), torch.tensor([False, True])
        >>> oscillation = MaskOscillation()
        >>> for mask in (first, second, first):
        ...     oscillation.update(mask)
        >>> oscillation.compute()
        tensor(0.5000)

    Source: Nagel et al., "Overcoming Oscillations in Quantization-Aware Training", ICML 2022, arXiv:2203.11086, for
    rounded weights; here for masks, with the plain mean instead of a moving one.
    """

    higher_is_better = False
    ratio = OSCILLATION
    sums = ("returns", "compared")

    def remember(self, packed: Tensor) -> Tensor:
        """Return the mask, and that no entry flipped yet."""
        return torch.stack([packed, torch.zeros_like(packed)])

    def compare(self, packed: Tensor, rows: Tensor, entries: int) -> Tensor:
        """Count the flips of entries that flipped before."""
        before, flipped = rows
        flips = packed ^ before
        self.add([(count_bits(flips & flipped), entries)])
        return torch.stack([packed, flipped | flips])
