"""MaxQ: N:M masks that come block by block, and soft masks that let the large weights of other axes count for more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_nm.functional import magnitude_mask
from lightning_nm.functional.evolution import as_blocks, from_blocks
from lightning_nm.functional.masks import wide_dtype
from lightning_nm.functional.select import masked
from lightning_nm.methods.base import Method, has_ended, set_tensor, weighted_mean
from lightning_nm.methods.checks import (
    check_number,
    check_option,
    check_span,
    refuse_tensor_parallel,
    resolve_span,
    warn_of_late_stop,
)
from lightning_nm.methods.ste import SRSTE, Decay, DecayAt, DecayScale
from lightning_nm.nn.layer import NMLayer
from lightning_nm.pattern import NMPattern
from lightning_nm.schedule import Moment, Phases

Ramp = Literal["linear", "cubic", "cos", "exp"]


class MaxQ(SRSTE):
    r"""Multi-axis query (Xiang et al., CVPR 2024, arXiv 2312.07061): a hard N:M mask times soft masks of other axes.

    .. math:: W_F = m \odot W \odot (1 + s_{filter} + s_{position}), \quad
        s = [|W| > \theta]\, \sigma((|W| - \theta) / \tau)

    A filter's threshold :math:`\theta` has the fraction (M - N) / M of its weights below it. A kernel position's has
    that of all weights at that position; layers without several positions, as linear ones, have :math:`s_{filter}`
    alone. W gets the gradient of W_F unchanged, and pruned weights the decay of SR-STE. Masks and thresholds are
    selected again after every step.

    From ``start`` to ``stop`` the hard mask comes block by block: the blocks of the smallest sums of magnitudes stay
    dense longest. **Masks are N:M from** ``stop`` **on**; before, no GEMM counts as N:M, and ``violations`` counts
    the blocks that are dense still.

    The state dict, files and exports hold W_F, the soft factors in it: the trained model needs no further operation.

    Args:
        start: When blocks begin to be pruned: an integer counts training steps, a float in [0, 1] is a fraction of the
            planned ones.
        stop: When all blocks are N:M, in the same units. The code's is a quarter: 30 of 120 epochs.
        ramp: How the fraction of dense blocks falls in between: ``"linear"``, as in the code's scripts, ``"cubic"``,
            ``"cos"`` or ``"exp"``.
        decay: The decay of pruned weights, see :class:`SRSTE`.
        temperature: :math:`\tau`.
        decay_scale: A factor of the decay. ``"world-size"`` is the number of processes.
        decay_at: ``"before-clipping"`` or ``"after-clipping"``, see :class:`SRSTE`.

    Raises:
        TypeError: If a moment is neither an integer nor a float.
        ValueError: For a setting out of its range; when training starts, if ``stop`` comes before ``start``, a fraction
            is given but no number of steps, or tensor parallelism cuts the weight.

    Example:
        >>> MaxQ().schedule(planned_steps=1000)
        (0, 250)
    """

    short_name = "maxq"
    _scheduled = ("start", "stop")
    _refused = {
        "dense_start": "it prunes block by block from its `start`, and its soft factors hold from the first step on. "
        "Give MaxQ(start=...)",
        "ramp": "its masks narrow block by block from its `start` to its `stop`",
        "dense_end": "its weights are multiplied by soft factors, without which all of them would change at once",
    }

    def __init__(
        self,
        start: Moment = 0,
        stop: Moment = 0.25,
        ramp: Ramp = "linear",
        decay: Decay = 2e-4,
        temperature: float = 0.01,
        decay_scale: DecayScale = 1.0,
        decay_at: DecayAt = "before-clipping",
    ) -> None:
        # Without dense phases: the soft factors hold from the first step on.
        super().__init__(decay, decay_scale=decay_scale, decay_at=decay_at)
        check_span(start, stop, "give a later `stop`, too")
        check_option("ramp", ramp, Ramp)
        check_number("temperature", temperature, "the default is 0.01")
        self.start = start
        self.stop = stop
        self.ramp = ramp
        self.temperature = temperature

    def phases(self, layer: NMLayer) -> Phases:
        """There are masks from the first step on."""
        return Phases()

    # The training steps at which blocks begin to be pruned, and at which all of them are.
    schedule = Method.schedule

    def check(self, planned_steps: int | None) -> None:
        """Refuse a stop before the start, and warn of one that the training does not reach."""
        resolve_span(self, planned_steps)  # for its error
        warn_of_late_stop(self, planned_steps, "MaxQ's masks never become N:M")

    def current_pattern(self, layer: NMLayer) -> NMPattern | None:
        """The layer's pattern from ``stop`` on, ``None`` before."""
        return layer.spec.pattern if has_ended(layer) else None

    def init_masks(self, layer: NMLayer) -> None:
        """Select the first masks and thresholds."""
        refuse_tensor_parallel(layer, "thresholds of whole filters")
        layer.set_masks(None)
        layer.buffers.clear()
        self.select(layer)

    def select(self, layer: NMLayer) -> None:
        """Select the masks and thresholds."""
        if layer.spec.forward_reason:
            return
        weight = layer.weight.detach()
        rows = layer.view.rows(weight)
        mask_rows = magnitude_mask(rows, layer.pattern, dim=1)
        mask_blocks = as_blocks(mask_rows, layer.pattern.m)  # [blocks, M]
        start, stop = layer.progress.schedule
        clock = layer.progress.clock
        dense = 0
        if clock < stop:
            progress = (clock - start) / (stop - start) if clock > start else 0.0
            dense = int(_share_left(self.ramp, progress) * len(mask_blocks))
        if dense:
            # Blocks are ranked in the whole layer, not row by row.
            magnitudes = as_blocks(rows.abs(), layer.pattern.m)
            sums = magnitudes.sum(1, dtype=wide_dtype(weight))
            smallest_first = sums.argsort(stable=True)
            # A copy: the blocks may be a view of the mask.
            mask_blocks = mask_blocks.index_fill(0, smallest_first[:dense], True)
            mask_rows = from_blocks(mask_blocks, rows.shape)
        layer.set_masks(layer.view.unrows(mask_rows))
        # Thresholds are of the weight itself: pruned entries count in them, too.
        magnitudes = _by_filters(layer, weight).abs()
        magnitudes = magnitudes.to(wide_dtype(magnitudes))  # [out, in, *taps]
        out, _, *taps = magnitudes.shape
        filters = _threshold(magnitudes.flatten(1), layer.pattern)
        set_tensor(layer.buffers, "filters", filters.view(out, *[1] * (magnitudes.dim() - 1)))
        # With a single tap, the position's threshold would be that of the whole layer.
        if math.prod(taps) > 1:
            by_position = magnitudes.flatten(2).flatten(0, 1).t()  # [taps, out * in]
            positions = _threshold(by_position, layer.pattern)
            set_tensor(layer.buffers, "positions", positions.view(1, 1, *taps))

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """W under the mask, times the soft factors."""
        mask = layer.masks.forward_view
        if mask is None:
            return weight
        values = _by_filters(layer, weight)
        # Of the filters, and of the positions where there are several.
        thresholds = list(layer.buffers.values())
        # 1 + sum_a [|W| > theta_a] sigmoid((|W| - theta_a) / tau), over the axes a
        factor = torch.ones((), dtype=thresholds[0].dtype, device=weight.device)
        magnitudes = values.abs().to(factor.dtype)
        for threshold in thresholds:
            above = magnitudes - threshold
            factor = factor + torch.where(above > 0, torch.sigmoid(above / self.temperature), 0)
        scaled = (values * factor).to(weight.dtype)
        # _by_filters() leaves a flat weight in its own shape.
        if layer.spec.layout != "flat":
            scaled = layer.view.unrows(scaled)
        return masked(scaled, mask)

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """``dense_blocks``: the fraction of blocks that keep all their entries; 0 from ``stop`` on."""
        parts = []
        for layer in layers:
            if layer.masks.has_forward:
                size = layer.view.shape.numel()
                # A pruned block lost 1 - N / M of its entries, and a dense one none.
                pruned_share = (1 - layer.masks.density) / (1 - layer.pattern.density)
                parts.append((size * (1 - pruned_share), size))
        return weighted_mean("dense_blocks", parts)


def _by_filters(layer: NMLayer, weight: Tensor) -> Tensor:
    """The weight as ``[out, in, *taps]``."""
    # Flat blocks cross the taps, but filters and positions are those of the convolution.
    return weight if layer.spec.layout == "flat" else layer.view.rows(weight)


def _threshold(magnitudes: Tensor, pattern: NMPattern) -> Tensor:
    r"""The threshold of each row, ``[rows]``.

    Of its n magnitudes :math:`k = \lfloor n (M - N) / M \rfloor` lie below: it is the mean of the k-th and the next
    smallest one.
    """
    size = magnitudes.shape[1]
    # In integers, so that no rounding error moves the threshold by an entry.
    below = size * (pattern.m - pattern.n) // pattern.m
    # On a GPU a selection is refused where torch is asked for deterministic algorithms.
    neighbours = _by_selection if magnitudes.is_cpu else _by_sorting
    return neighbours(magnitudes, below).mean(1)


def _by_sorting(magnitudes: Tensor, below: int) -> Tensor:
    """The ``below``-th smallest number of each row and the next one; the smallest alone if ``below`` is 0."""
    ranked = magnitudes.sort(dim=1).values
    return ranked[:, max(below - 1, 0) : below + 1]


def _by_selection(magnitudes: Tensor, below: int) -> Tensor:
    """The same in less than half the time on a CPU."""
    # kthvalue() counts from 1.
    ranks = (below, below + 1) if below else (1,)
    return torch.stack([magnitudes.kthvalue(rank, dim=1).values for rank in ranks], dim=1)


_EXPONENT = 1.5  # of "exp": the code's 0.05 for each of 30 epochs


def _share_left(ramp: str, progress: float) -> float:
    """Return the fraction of blocks that are not pruned yet at a point of the ramp, from 0 to 1.

    ``"linear"``: ``1 - p``; ``"cubic"``: ``(1 - p)^3``; ``"cos"``: ``cos(p pi / 2)``; ``"exp"``: ``1 - (1 - e^-1.5p) /
    (1 - e^-1.5)``.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress == 1:
        return 0.0
    if ramp == "cos":
        return math.cos(progress * math.pi / 2)
    if ramp == "exp":
        return 1 - math.expm1(-_EXPONENT * progress) / math.expm1(-_EXPONENT)
    return (1 - progress) ** (3 if ramp == "cubic" else 1)
