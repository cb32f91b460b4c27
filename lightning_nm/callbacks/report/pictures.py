"""Pictures of masks and histograms of their margins, as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional import mask_margin
from lightning_nm.nn.layer import NMLayer

CROP = 256
"""Rows and columns of a picture at most: the upper left corner of ``[out, in]``."""

EDGES = torch.arange(-20, 21, dtype=torch.float64) / 20
"""The bins of a histogram of margins; 0, the margin of equal weights, is one of the edges."""


def _corner(layer: NMLayer, mask: Tensor) -> Tensor:
    """The picture's part of a mask, ``[out, in]``; a convolution's taps lie side by side, so blocks stay together."""
    return layer.rows(mask).movedim(1, -1).flatten(1)[:CROP, :CROP].cpu()


def mask_pictures(layer: NMLayer, before: Tensor | None = None) -> dict[str, Tensor]:
    """The masks of a layer as pictures, kept or changed entries white.

    Args:
        layer: A masked layer.
        before: The ``forward_mask`` picture that ``changed_mask`` is to be relative to.

    Returns:
        uint8 ``[1, rows, columns]`` each: ``forward_mask``; ``backward_mask`` where dgrad has a mask of its own; and
        ``changed_mask`` where there is a picture before. Empty in a layer, or a phase, without a forward mask.
    """
    forward, backward = layer.forward_mask, layer.backward_mask
    pictures = {}
    if forward is not None:
        pictures["forward_mask"] = _corner(layer, forward)
    if backward is not None:
        pictures["backward_mask"] = _corner(layer, backward)
    pictures = {name: corner.to(torch.uint8).mul(255).unsqueeze(0) for name, corner in pictures.items()}
    if before is not None and forward is not None:
        pictures["changed_mask"] = pictures["forward_mask"] ^ before
    return pictures


class Histogram(NamedTuple):
    """Counts of margins in the bins between :data:`EDGES`, and their moments.

    Args:
        low: The least margin.
        high: The largest.
        total: Their sum.
        squares: The sum of their squares.
        counts: How many lie in each bin; an edge belongs to the bin above it, 1 to the last.
    """

    low: float
    high: float
    total: float
    squares: float
    counts: list[int]


def margin_histogram(layer: NMLayer) -> Histogram | None:
    """The margins of all blocks of a layer, with one device synchronisation.

    All processes that shard the weight call it alike.

    Returns:
        ``None`` without a forward mask, or if no block has a margin.
    """
    if layer.forward_mask is None:
        return None
    with torch.no_grad(), layer.whole():
        margins = mask_margin(layer.rows(layer.weight), layer.rows(layer.forward_mask), layer.pattern, 1).double()
    known = ~margins.isnan()
    margins = torch.where(known, margins, 0)
    edges = EDGES.to(margins.device)
    # Margins of blocks without one go into a bin of their own, so that shapes do not depend on values.
    bins = torch.bucketize(margins, edges[1:-1], right=True).where(known, len(EDGES) - 1)
    counts = torch.bincount(bins.flatten(), minlength=len(EDGES))[:-1]
    low, high = torch.where(known, margins, torch.inf).amin(), torch.where(known, margins, -torch.inf).amax()
    moments = torch.stack([low, high, margins.sum(), margins.square().sum()])
    lowest, highest, total, squares, *each = torch.cat([moments, counts.double()]).tolist()
    return Histogram(lowest, highest, total, squares, [int(count) for count in each]) if sum(each) else None


def together(histograms: Sequence[Histogram]) -> Histogram:
    """One histogram of all of these, of which there must be some."""
    return Histogram(
        min(one.low for one in histograms),
        max(one.high for one in histograms),
        sum(one.total for one in histograms),
        sum(one.squares for one in histograms),
        [sum(column) for column in zip(*(one.counts for one in histograms), strict=True)],
    )
