"""Share of mask entries that an update changed."""

from __future__ import annotations

from torch import Tensor

from lightning_nm.functional.packing import count_bits
from lightning_nm.functional.statistics import FLIP_RATE
from lightning_nm.metrics.history import MaskHistory


class MaskFlipRate(MaskHistory):
    r"""Share of mask entries that an update changed, averaged over updates: :math:`\sum_t \|m_t - m_{t-1}\|_1 / (T D)`.

    ``update(masks)`` takes the bool mask of one layer, or those of several layers by name, and compares each with the
    last one of its name: update it once per mask update. ``compute()`` returns a float32 number, 0 if nothing was
    compared yet; ``forward`` returns the changes since the previous update. The functional form is
    :func:`mask_flip_rate`.

    ``reset`` clears the average and keeps the masks; :meth:`forget` clears both.

    Args:
        kwargs: Arguments of :class:`torchmetrics.Metric`.

    Raises:
        TypeError: On update, if a mask is not a bool tensor.
        ValueError: On update, if a mask has another shape than the last one of its name.

    Example::

        >>> import torch
        >>> flip_rate = MaskFlipRate()
        >>> flip_rate.update({"encoder": torch.tensor([True, True, False, False])})
        >>> flip_rate.update({"encoder": torch.tensor([True, False, True, False])})
        >>> flip_rate.compute()
        tensor(0.5000)

    Source: Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024, arXiv:2404.01847.
    """

    higher_is_better = None
    ratio = FLIP_RATE
    sums = ("flips", "compared")

    def compare(self, packed: Tensor, rows: Tensor, entries: int) -> Tensor:
        """Count the flips."""
        self.add([(count_bits(packed ^ rows[0]), entries)])
        return self.remember(packed)
