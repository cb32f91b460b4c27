"""Curves of loss over steps and seconds, and their comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import mean, median, quantiles
from typing import Any

from studies.speed.side import Precision

WINDOW = 0.15
"""Fraction of the steps, or of the seconds, whose losses are averaged: the last before the moment of the comparison.

At equal seconds a number of steps would reach further back on the slower side, where losses were higher.
"""
FEW = 30
"""Steps below which a comparison is called rough."""
MARGIN = 0.03
"""Share by which speeds must differ to be called different; less is noise on a shared machine."""


@dataclass
class Curve:
    """The steps of one side. The first step, in which kernels are measured and memory is allocated, is kept apart.

    Attributes:
        name: ``"sparse"`` or ``"dense"``.
        precision: Of its Trainer.
        tokens: Tokens of a step.
        start_s: Seconds of the first step; ``None`` before it.
        seconds: Of each later step.
        losses: Training loss of each later step.
        val_loss: On held-out text after the last step; ``None`` without.
        kernels: What its kernels were.
    """

    name: str
    precision: Precision
    tokens: int
    start_s: float | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    val_loss: float | None = None
    kernels: dict[str, Any] = field(default_factory=dict)

    def add(self, seconds: float, loss: float) -> None:
        """Add a step."""
        if self.start_s is None:
            self.start_s = seconds
            return
        self.seconds.append(seconds)
        self.losses.append(loss)

    @property
    def total_s(self) -> float:
        """Seconds of all steps but the first."""
        return sum(self.seconds)

    @property
    def ends(self) -> list[float]:
        """When each step ended, in training seconds."""
        return list(accumulate(self.seconds))

    @property
    def step_ms(self) -> float:
        """Median of a step."""
        return 1e3 * median(self.seconds)

    @property
    def median_interval_s(self) -> tuple[float, float]:
        """A 95 % interval of the median seconds of a step, by order statistics: it assumes no distribution."""
        ordered = sorted(self.seconds)
        reach = 0.98 * len(ordered) ** 0.5
        middle = (len(ordered) - 1) / 2
        low, high = (
            max(math.floor(middle - reach), 0),
            min(math.ceil(middle + reach), len(ordered) - 1),
        )
        return ordered[low], ordered[high]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step by its median time."""
        return self.tokens / (self.step_ms / 1e3)

    @property
    def middle_half_ms(self) -> tuple[float, float]:
        """First and third quartile of a step."""
        if len(self.seconds) < 2:
            return self.step_ms, self.step_ms
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return 1e3 * low, 1e3 * high

    def loss_at(self, steps: int, window: int | None = None) -> float:
        """Mean training loss of the last `window` of the first `steps` steps, by default a fraction of them."""
        window = max(1, round(WINDOW * steps)) if window is None else window
        return mean(self.losses[max(steps - window, 0) : steps])

    def loss_after(self, seconds: float, window: float | None = None) -> float:
        """Mean training loss of the steps that ended in the last `window` seconds, by default a fraction of `seconds`.

        If none did, the loss of the last step before, or of the first one.
        """
        window = WINDOW * seconds if window is None else window
        end = seconds * (1 + 1e-9)
        losses = [
            loss
            for when, loss in zip(self.ends, self.losses, strict=True)
            if seconds - window <= when <= end
        ]
        return (
            mean(losses)
            if losses
            else self.losses[max(sum(when <= end for when in self.ends) - 1, 0)]
        )


def means(curves: Sequence[Curve]) -> tuple[list[list[float]], list[list[float]]]:
    """Of each curve its mean losses at every step, over seconds and over steps, with windows that all share."""
    trained = [curve for curve in curves if curve.seconds]
    seconds = WINDOW * min((curve.total_s for curve in trained), default=0.0)
    steps = max(1, round(WINDOW * min((len(curve.losses) for curve in trained), default=0)))
    timed = [[curve.loss_after(end, seconds) for end in curve.ends] for curve in curves]
    counted = [
        [curve.loss_at(step, steps) for step in range(1, len(curve.losses) + 1)] for curve in curves
    ]
    return timed, counted


@dataclass(frozen=True)
class Comparison:
    """Two sides, each with a step, at equal steps and at equal seconds.

    Attributes:
        steps: The fewest steps of a side.
        seconds: The shortest training of a side.
        speed: Tokens per second of the sparse side, by those of the dense side.
        interval: Of the speed, from the intervals of both medians: wider than 95 % needs.
        at_steps: Loss of the sparse and the dense side after `steps`.
        at_seconds: Loss of the sparse and the dense side after `seconds`.
    """

    steps: int
    seconds: float
    speed: float
    interval: tuple[float, float]
    at_steps: tuple[float, float]
    at_seconds: tuple[float, float]

    @classmethod
    def of(cls, sparse: Curve, dense: Curve) -> Comparison:
        """Compare two sides."""
        both = (sparse, dense)
        steps, seconds = (
            min(len(curve.seconds) for curve in both),
            min(curve.total_s for curve in both),
        )
        return cls(
            steps,
            seconds,
            sparse.tokens_per_s / dense.tokens_per_s,
            (
                dense.median_interval_s[0] / sparse.median_interval_s[1],
                dense.median_interval_s[1] / sparse.median_interval_s[0],
            ),
            (sparse.loss_at(steps), dense.loss_at(steps)),
            (sparse.loss_after(seconds), dense.loss_after(seconds)),
        )


def findings(sparse: Curve, dense: Curve) -> list[str]:
    """What the comparison says, in sentences; also where the sparse side is not faster, or learns less."""
    if not (sparse.seconds and dense.seconds):
        return [
            "Nothing to compare: each side needs two steps. Give it more --seconds, or a smaller --width."
        ]
    found = Comparison.of(sparse, dense)
    lines = [_kernels(sparse), _speed(found.speed, found.interval)]
    if skipped := sparse.kernels.get("not measured"):
        lines.append(
            f"{skipped} GEMMs were not measured yet, and were dense; a second run measures them at once."
        )
    s, d = found.at_seconds
    after = f"After {found.seconds:.0f} s of training each"
    if s < d:
        lines.append(
            f"{after}, the sparse side has the lower training loss: {s:.3f}, dense {d:.3f}."
        )
    else:
        lines.append(
            f"{after}, the sparse side has learned less: training loss {s:.3f}, dense {d:.3f}."
        )
    s, d = found.at_steps
    more = "more" if s < d else "less"
    lines.append(
        f"After {found.steps} steps each, the sparse side has learned {more}: training loss {s:.3f}, dense {d:.3f}."
    )
    if s < d:
        lines.append(
            "Fewer weights should not learn more per step: this learning rate may suit the dense side less; try --lr."
        )
    if sparse.val_loss is not None and dense.val_loss is not None:
        s, d = sparse.val_loss, dense.val_loss
        lines.append(
            f"On held-out text the sparse side's loss is {'lower' if s < d else 'higher'}: {s:.3f}, dense {d:.3f}."
        )
    if found.steps < FEW:
        lines.append(
            f"{found.steps} steps are few: speeds and losses are rough. More --seconds give better ones."
        )
    lines.append("One seed, one learning rate: a small difference of loss means nothing.")
    return lines


def _speed(ratio: float, interval: tuple[float, float]) -> str:
    low, high = interval
    spread = f"{low:.2f} to {high:.2f}"
    if low > 1 + MARGIN:
        return f"The sparse side is {ratio:.2f} times as fast as the dense side ({spread} by the spread of the steps)."
    if high < 1 - MARGIN:
        return (
            f"The sparse side is SLOWER here: {ratio:.2f} times the dense side's speed ({spread})."
        )
    if low >= 1 - MARGIN and high <= 1 + MARGIN:
        return f"The sparse side is NOT faster here: {ratio:.2f} times the dense side's speed ({spread})."
    return (
        f"Too noisy to say which side is faster: {spread} times the dense side's speed, by the spread of the steps. "
        "Other work on the machine, or too few steps: try again, with more --seconds."
    )


def _kernels(sparse: Curve) -> str:
    facts = sparse.kernels
    if facts.get("unavailable"):
        return f"No sparse kernel works here, so every GEMM was dense: {facts['unavailable']}."
    if not facts.get("sparse share"):
        return "No GEMM ran on a sparse kernel: none was measured to be faster."
    return f"Sparse kernels ran {facts['sparse share']:.0%} of the masked layers' GEMM time (by {facts['share of']})."
