"""Histograms of mask margins, as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional import mask_margin
from lightning_nm.nn.layer import NMLayer

# Between the bins of margins, which lie in [-1, 1]. One edge is exactly 0, the margin of equal weights.
EDGES = torch.arange(-20, 21, dtype=torch.float64) / 20


class Histogram(NamedTuple):
    """Counts of margins in the bins between :data:`EDGES`, and their moments."""

    low: float
    high: float
    total: float
    squares: float
    counts: list[int]  # an edge belongs to the bin above it, 1 to the last bin


def margin_histogram(layer: NMLayer) -> Histogram | None:
    """Count the margins of all blocks of a layer, with one device synchronization; ``None`` if there are none.

    With sharded weights all processes must call it.

    Example:
        >>> from torch import nn
        >>> from lightning_nm import NMSparsifier
        >>> sparsifier = NMSparsifier(nn.Linear(8, 8), "2:4", "sr-ste", skip_first_last=False).attach()
        >>> (layer,) = sparsifier.layers.values()
        >>> sum(margin_histogram(layer).counts)
        16
    """
    if layer.forward_mask is None:
        return None
    with torch.no_grad(), layer.full():
        margins = block_margins(layer).double()
    known = ~margins.isnan()
    margins = torch.where(known, margins, 0)
    lowest = torch.where(known, margins, torch.inf).amin()
    highest = torch.where(known, margins, -torch.inf).amax()
    total = margins.sum()
    squares = margins.square().sum()

    # Blocks without a margin have a bin of their own, so that shapes do not depend on values.
    inner_edges = EDGES[1:-1].to(margins.device)
    bins = torch.bucketize(margins, inner_edges, right=True)
    bins = bins.where(known, len(EDGES) - 1)
    counts = torch.bincount(bins.flatten(), minlength=len(EDGES))[:-1]

    # One copy of all numbers waits for the device once.
    moments = torch.stack([lowest, highest, total, squares])
    low, high, total_sum, square_sum, *bin_counts = torch.cat([moments, counts.double()]).tolist()
    if not any(bin_counts):
        return None
    return Histogram(
        low=low,
        high=high,
        total=total_sum,
        squares=square_sum,
        counts=[int(count) for count in bin_counts],
    )


def block_margins(layer: NMLayer) -> Tensor:
    """Return the margin of each block; NaN where it has none. The layer has a forward mask, and its weight is whole."""
    assert layer.forward_mask is not None
    weight = layer.view.rows(layer.weight)
    mask = layer.view.rows(layer.forward_mask)
    # Blocks lie along the input channels, axis 1.
    return mask_margin(weight, mask, layer.pattern, 1)


def merge(histograms: Sequence[Histogram]) -> Histogram:
    """Merge one or more histograms.

    Example:
        >>> one = Histogram(0.1, 0.2, total=0.3, squares=0.05, counts=[2, 0])
        >>> merge([one, one]).counts
        [4, 0]
    """
    # All histograms have the bins of EDGES, so their counts add up.
    counts_of_bins = zip(*(histogram.counts for histogram in histograms), strict=True)
    return Histogram(
        low=min(histogram.low for histogram in histograms),
        high=max(histogram.high for histogram in histograms),
        total=sum(histogram.total for histogram in histograms),
        squares=sum(histogram.squares for histogram in histograms),
        counts=[sum(counts) for counts in counts_of_bins],
    )
