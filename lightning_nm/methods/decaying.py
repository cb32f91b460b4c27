"""Decaying masks: pruned entries fade out, or the pattern narrows to N:M in frames."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Literal

import torch
from torch import Tensor

from lightning_nm.functional import magnitude_mask
from lightning_nm.functional.masks import wide_dtype
from lightning_nm.methods.base import Method, set_tensor
from lightning_nm.methods.checks import check_number, check_option
from lightning_nm.methods.ste import STE
from lightning_nm.nn.layer import NMLayer
from lightning_nm.pattern import NMPattern
from lightning_nm.schedule import (
    Moment,
    Phases,
    Schedule,
    Steps,
    UnknownLength,
    check_moment,
    resolve_moment,
    resolve_window,
    within,
)

Decay = Literal["linear", "exponential", "structure"]

FADE = "fade"
"""The buffer with the factor b of pruned entries while they fade, one number: float64 without axes would be traced
twice."""


def narrowing_patterns(pattern: NMPattern) -> tuple[NMPattern, ...]:
    """The patterns from (M-1):M to N:M, by halving: M-1, M/2, M/4, ..., N of every M.

    Example:
        >>> [str(each) for each in narrowing_patterns(NMPattern(1, 16))]
        ['15:16', '8:16', '4:16', '2:16', '1:16']
        >>> [str(each) for each in narrowing_patterns(NMPattern(3, 8))]
        ['7:8', '4:8', '3:8']
    """
    m = pattern.m
    counts = []
    n = m - 1
    divisor = 2
    # M/2, M/4, ... are rounded down. They end above N: the pattern itself comes last.
    while n > pattern.n:
        counts.append(n)
        n = m // divisor
        divisor *= 2
    return (*(NMPattern(count, m) for count in counts), pattern)


class DecayingMask(STE):
    r"""Reach N:M by degrees (Kao et al., arXiv 2209.07617; Bambhaniya et al., arXiv 2402.04744).

    ``"linear"`` and ``"exponential"``: pruned entries fade. With the magnitude mask m of the present weights,

    .. math:: W_F = W \odot (m + (1 - m) b(s)), \quad b(s) = 1 - s \text{ or } e^{-r s},

    where s runs from 0 at the end of ``dense_start`` to 1 at ``stop``, and b is 0 from there on. **The forward weight
    is N:M from** ``stop`` **only.** Until then the layer has no mask: statistics, FLOPs and ``violations()`` are those
    of a dense layer.

    ``"structure"``: masks are hard from the start, and the pattern narrows from (M-1):M by halves to N:M, see
    :func:`narrowing_patterns`, in frames of equal length. FLOPs and ``violations()`` go by the pattern of the frame.

    In all cases masks follow the weights after every step, and :math:`dL/dW = dL/dW_F` for every entry.

    Args:
        decay: How N:M is reached.
        dense_start: How long training stays dense before: training steps, or a fraction of them.
        stop: When N:M is reached: a training step, or a fraction of the training; it counts from the beginning of the
            training. ``None``: a fade takes half of the steps between the dense phases; every pattern of
            ``"structure"``, N:M included, has an equal fraction of them.
        dense_end: How long training is dense again at the end: **the trained model is dense then**.
        rate: r of the exponential decay. At 5, 0.7 % of a pruned entry is left just before ``stop``.

    Raises:
        TypeError: If a moment is no number.
        ValueError: For an unknown ``decay``, a ``rate`` that is not positive, and what :class:`STE` refuses; when
            training starts, if ``stop`` is not between the dense phases, or the number of planned steps is needed and
            not known.

    Example:
        >>> DecayingMask(dense_start=0.1, stop=0.6).schedule(planned_steps=1000)
        (100, 600)
    """

    short_name = "decaying"

    def __init__(
        self,
        decay: Decay = "linear",
        dense_start: Moment = 0,
        stop: Moment | None = None,
        dense_end: Moment = 0,
        rate: float = 5.0,
    ) -> None:
        super().__init__(dense_start, dense_end)
        check_option("decay", decay, Decay)
        if stop is not None:
            check_moment("stop", stop)
        check_number("rate", rate, "it is how fast pruned entries fade")
        self.decay = decay
        self.stop = stop
        self.rate = rate

    @property
    def fades(self) -> bool:
        """Whether pruned entries fade; else the pattern narrows."""
        return self.decay != "structure"

    # ------------------------------------------------------------------------------------------------------- schedule

    def schedule(self, planned_steps: int | None) -> Steps:
        """The training steps at which the decay begins, at which N:M is reached, and at which ``dense_end`` begins."""
        # Without a layer there is no pattern to narrow: one frame before N:M and one from there on.
        return self._moments(planned_steps, patterns=2)

    def layer_schedule(self, layer: NMLayer, planned_steps: int | None) -> Steps:
        """:meth:`schedule`, with the beginning of every frame of the layer's pattern between the first two."""
        return self._moments(planned_steps, len(self._patterns(layer)))

    def _patterns(self, layer: NMLayer) -> tuple[NMPattern, ...]:
        """The patterns of the frames; a fade has two, before and after N:M is reached."""
        pattern = layer.pattern
        return (pattern, pattern) if self.fades else narrowing_patterns(pattern)

    def _moments(self, planned_steps: int | None, patterns: int) -> Steps:
        """The beginnings of so many frames of equal length, the last at ``stop``, and that of ``dense_end``, if any."""
        window = resolve_window(self, self.dense_start, self.dense_end, planned_steps)
        # resolve_window() returns nothing where neither dense phase is set.
        start = window[0] if window else 0
        dense_from = window[1:]
        end = dense_from[0] if dense_from else planned_steps
        if self.stop is not None:
            stop = resolve_moment(self, "stop", self.stop, planned_steps)
        elif end is None:
            raise UnknownLength(
                "DecayingMask's stop=None is a fraction of the planned training steps",
                "write DecayingMask(stop=10000), with a training step of your own",
            )
        else:
            # Of a narrowing pattern, the last frame, that of N:M, lies after `stop` and is as long as the others.
            fraction = 0.5 if self.fades else (patterns - 1) / patterns
            stop = start + round(fraction * (end - start))
        if stop < start or (end is not None and stop >= end):
            raise ValueError(
                f"DecayingMask would never be N:M: stop={self.stop} is step {stop}, which must lie between the end of "
                f"dense_start={self.dense_start} at step {start} and the end of the sparse training at step {end}"
            )
        # Each from the start on, not by adding a rounded length: the last one is `stop` exactly. One pattern alone has
        # no frames in between, and nothing is divided by 0.
        frames = [start + round(k * (stop - start) / (patterns - 1)) for k in range(1, patterns)]
        return (start, *frames, *dense_from)

    def _frames(self, layer: NMLayer) -> Steps:
        """The beginnings of the frames, of which the last is that of N:M."""
        return layer.progress.schedule[: len(self._patterns(layer))]

    def follow(self, schedule: Schedule) -> Method:
        """Take the dense phases."""
        schedule.refuse(
            self,
            ramp="it reaches N:M by degrees itself. Give DecayingMask('structure'), which narrows the pattern by "
            "halves, or use 'ste' with the ramp",
        )
        return schedule.handed_to(self)

    def phases(self, layer: NMLayer) -> Phases:
        """From where there are masks to the dense phase at the end."""
        frames = self._frames(layer)
        # What follows the frames is the beginning of the dense phase at the end, or nothing.
        dense_from = layer.progress.schedule[len(frames) :]
        # Fading entries have no mask; a narrowing pattern has one in its first frame.
        begins = frames[-1] if self.fades else frames[0]
        return Phases((begins, *dense_from))

    def current_pattern(self, layer: NMLayer) -> NMPattern:
        """The pattern of the frame; N:M where pruned entries fade, and before the first frame."""
        # How many frames have begun; 0 in the dense phase before them.
        begun = bisect_right(self._frames(layer), layer.progress.clock)
        # A narrowing pattern of one frame alone, as of 1:2, is N:M from the start.
        return self._patterns(layer)[begun - 1] if begun else layer.pattern

    # ---------------------------------------------------------------------------------------------------------- masks

    def init_masks(self, layer: NMLayer) -> None:
        """Select the first masks, or begin the fade; neither if training starts dense."""
        # While entries fade this selects no mask, since phases() begins at `stop`.
        super().init_masks(layer)
        self._set_fade(layer)

    def update(self, layer: NMLayer) -> None:
        """Select the masks again, or let the pruned entries fade further."""
        super().update(layer)
        self._set_fade(layer)

    def _set_fade(self, layer: NMLayer) -> None:
        """Keep b as a tensor, which a compiled graph reads; there is none before and after the fade."""
        clock = layer.progress.clock
        frames = self._frames(layer)
        if not self.fades or layer.spec.forward_reason or not within(frames, clock):
            layer.buffers.pop(FADE, None)
            return
        start, stop = frames
        fraction = (clock - start) / (stop - start)
        # The linear factor reaches 0 at `stop`. The exponential one is e^-rate just before, and drops to 0 with the
        # mask.
        factor = 1 - fraction if self.decay == "linear" else math.exp(-self.rate * fraction)
        weight = layer.param
        dtype = wide_dtype(weight)
        set_tensor(layer.buffers, FADE, torch.tensor([factor], dtype=dtype, device=weight.device))

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """W under the mask; while pruned entries fade, W with these multiplied by b."""
        factor = layer.buffers.get(FADE)
        if factor is None:
            return super().forward_weight(layer, weight)
        rows = layer.view.rows(weight)
        # Selected here, so that the layer has no mask as long as it is not N:M.
        mask = magnitude_mask(rows, layer.pattern, dim=1)
        faded = torch.where(mask, rows, rows * factor.to(weight.dtype))
        return layer.view.unrows(faded)
