"""Images of masks and histograms of mask margins, as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional import mask_margin
from lightning_nm.nn.layer import NMLayer

CROP = 256  # rows and columns of an image, which shows the upper left corner of [out, in]
EDGES = torch.arange(-20, 21, dtype=torch.float64) / 20  # bins of margins; one edge is 0, the margin of equal weights


def mask_pictures(layer: NMLayer, before: Tensor | None = None) -> dict[str, Tensor]:
    """Return the masks of a layer as images, uint8 ``[1, rows, columns]``; kept or changed entries are white.

    They are ``forward_mask``; ``backward_mask`` if dgrad has its own mask; and ``changed_mask`` relative to an earlier
    ``forward_mask`` image ``before``. There is none if the layer has no forward mask.
    """
    masks = {"forward_mask": layer.forward_mask, "backward_mask": layer.backward_mask}
    pictures = {}
    for name, mask in masks.items():
        if mask is not None:
            rows = layer.rows(mask).movedim(1, -1).flatten(1)  # kernel taps lie side by side, so blocks stay together
            pictures[name] = rows[:CROP, :CROP].cpu().to(torch.uint8).mul(255).unsqueeze(0)
    if before is not None and "forward_mask" in pictures:
        pictures["changed_mask"] = pictures["forward_mask"] ^ before
    return pictures


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
    """
    if layer.forward_mask is None:
        return None
    with torch.no_grad(), layer.full():
        margins = mask_margin(layer.rows(layer.weight), layer.rows(layer.forward_mask), layer.pattern, 1).double()
    known = ~margins.isnan()
    margins = torch.where(known, margins, 0)
    edges = EDGES.to(margins.device)
    # Blocks without a margin have a bin of their own, so that shapes do not depend on values.
    bins = torch.bucketize(margins, edges[1:-1], right=True).where(known, len(EDGES) - 1)
    counts = torch.bincount(bins.flatten(), minlength=len(EDGES))[:-1]
    low, high = torch.where(known, margins, torch.inf).amin(), torch.where(known, margins, -torch.inf).amax()
    moments = torch.stack([low, high, margins.sum(), margins.square().sum()])
    lowest, highest, total, squares, *each = torch.cat([moments, counts.double()]).tolist()
    return Histogram(lowest, highest, total, squares, [int(count) for count in each]) if sum(each) else None


def merge(histograms: Sequence[Histogram]) -> Histogram:
    """Merge one or more histograms."""
    return Histogram(
        min(one.low for one in histograms),
        max(one.high for one in histograms),
        sum(one.total for one in histograms),
        sum(one.squares for one in histograms),
        [sum(column) for column in zip(*(one.counts for one in histograms), strict=True)],
    )
