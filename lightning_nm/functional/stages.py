"""The stages of a training: dense at first, patterns that narrow to N:M, and dense again at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypedDict

from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.functional.schedule import (
    Moment,
    UnknownLength,
    check_moment,
    check_window,
    resolve_moment,
    resolve_window,
)
from lightning_nm.functional.spelling import check_keys

DENSE = "dense"
"""The stage without masks."""
FINAL = "final"
"""The stage of a layer's own pattern. The others are named by their pattern."""

Stages = tuple[tuple[int, str], ...]
"""The training step at which each stage begins, and the stage; the first one begins at 0."""


class ScheduleSpec(TypedDict, total=False):
    """The ``schedule`` of :class:`~lightning_nm.SparsityConfig`, as users write it; :class:`Schedule` has the keys.

    Example:
        >>> schedule: ScheduleSpec = {"dense_start": 0.1, "ramp": ["8:16", "4:16"], "dense_end": 0.1}
    """

    dense_start: Moment
    ramp: list[PatternLike]
    ramp_ends: list[Moment] | None
    dense_end: Moment


@dataclass(frozen=True)
class Schedule:
    """A dense start, a ramp of patterns, and a dense end.

    Moments are training steps (an integer) or shares of the training (a float in [0, 1]).

    Attributes:
        dense_start: How long training is dense before the first masks.
        ramp: The patterns before the layers' own, each narrower than the one before, with the same M.
        ramp_ends: When each of them gives way to the next, counted from the beginning of the training. ``None``: each
            pattern, the layers' own included, has an equal share of the time between the dense phases.
        dense_end: How long training is dense again at the end.

    Raises:
        TypeError: For a moment that is no number.
        ValueError: For moments or patterns that do not follow each other.

    Example:
        >>> schedule = Schedule(dense_start=0.1, ramp=(NMPattern(8, 16), NMPattern(4, 16)), dense_end=0.3)
        >>> schedule.stages(planned_steps=1000)
        ((0, 'dense'), (100, '8:16'), (300, '4:16'), (500, 'final'), (700, 'dense'))
    """

    dense_start: Moment = 0
    ramp: tuple[NMPattern, ...] = ()
    ramp_ends: tuple[Moment, ...] | None = None
    dense_end: Moment = 0

    def __post_init__(self) -> None:
        check_window(self.dense_start, self.dense_end)
        for wider, narrower in pairwise(self.ramp):
            check_narrower(wider, narrower)
        if self.ramp_ends is None:
            return
        if len(self.ramp_ends) != len(self.ramp):
            raise ValueError(
                f"schedule has {len(self.ramp)} patterns in `ramp`, but {len(self.ramp_ends)} moments in `ramp_ends`: "
                "give the moment at which each of them gives way to the next"
            )
        for moment in self.ramp_ends:
            check_moment("ramp_ends", moment)
        for before, after in pairwise(self.ramp_ends):
            # Steps and shares can be compared only when the number of steps is known: see _ends().
            if isinstance(before, float) == isinstance(after, float) and before >= after:
                raise ValueError(
                    f"the schedule's ramp_ends={list(self.ramp_ends)} must increase: each pattern of the ramp gives "
                    "way to the next at its moment"
                )

    @classmethod
    def parse(cls, spec: Mapping[str, Any] | None) -> Schedule | None:
        """Read what users and YAML write; ``None`` for no schedule.

        Raises:
            TypeError: For another type.
            ValueError: For an unknown key, and what the class refuses.

        Example:
            >>> Schedule.parse({"ramp": ["2:4"], "dense_end": 0.1})
            Schedule(dense_start=0, ramp=(NMPattern(n=2, m=4),), ramp_ends=None, dense_end=0.1)
        """
        if spec is None:
            return None
        check_keys("schedule", spec, list(ScheduleSpec.__annotations__))
        ramp = _checked_list("ramp", spec.get("ramp"), '["8:16", "4:16"]')
        ends = _checked_list("ramp_ends", spec.get("ramp_ends"), "[0.3, 0.5]")
        schedule = cls(
            dense_start=spec.get("dense_start", 0),
            ramp=tuple(map(_parse_pattern, ramp or ())),
            ramp_ends=None if ends is None else tuple(ends),
            dense_end=spec.get("dense_end", 0),
        )
        return schedule if schedule.parts else None

    @property
    def parts(self) -> list[str]:
        """The parts that this schedule has: any of ``dense_start``, ``ramp``, ``dense_end``."""
        return [name for name in ("dense_start", "ramp", "dense_end") if getattr(self, name)]

    def stages(
        self, planned_steps: int | None, masks_between: Sequence[int] | None = None
    ) -> Stages:
        """The stages of a training; ``()`` if it has the layers' own pattern all the time.

        Args:
            planned_steps: Training steps of the whole training, if known.
            masks_between: The steps between which a method that plans its dense phases by itself has masks, as
                :func:`~lightning_nm.functional.schedule.resolve_window` gives them. The stages then have no dense ones.

        Raises:
            ValueError: If that takes the number of steps and it is not known, or the stages leave each other no step.
        """
        window = masks_between
        if window is None:
            window = resolve_window("the schedule", self.dense_start, self.dense_end, planned_steps)
        start = window[0] if window else 0
        stop = window[1] if len(window) > 1 else planned_steps
        begins = [start, *self._ends(start, stop, planned_steps)]
        names = [*map(str, self.ramp), FINAL]
        stages = list(zip(begins, names, strict=True))
        if masks_between is not None:
            # The method itself knows that masks have not come yet.
            stages[0] = (0, names[0])
        else:
            if start:
                stages.insert(0, (0, DENSE))
            if len(window) > 1:
                stages.append((window[1], DENSE))
        return () if stages == [(0, FINAL)] else tuple(stages)

    def _ends(self, start: int, stop: int | None, planned_steps: int | None) -> list[int]:
        """The steps at which each pattern of the ramp gives way to the next."""
        if not self.ramp:
            return []
        count = len(self.ramp) + 1
        if self.ramp_ends is not None:
            ends = [
                resolve_moment("the schedule", "ramp_ends", end, planned_steps)
                for end in self.ramp_ends
            ]
        elif stop is None:
            raise UnknownLength(
                "the stages of the schedule's ramp are equal shares of the planned training steps",
                "give ramp_ends as integers, the training steps",
            )
        else:
            ends = [start + round(k * (stop - start) / count) for k in range(1, count)]
        begins = [start, *ends]
        if stop is not None:
            begins.append(stop)
        if any(before >= after for before, after in pairwise(begins)):
            raise ValueError(
                f"the schedule's ramp leaves a pattern no step: masks come at step {start}, patterns give way to the "
                f"next at the steps {ends}, and the last one ends at step {stop}; use other moments, fewer patterns or "
                "a longer training"
            )
        return ends


def check_narrower(wider: NMPattern, narrower: NMPattern) -> None:
    """Refuse a pattern that does not follow another one in a ramp, by a ``ValueError``."""
    if wider.m != narrower.m or wider.n <= narrower.n:
        raise ValueError(
            f"the schedule's ramp goes from {wider} to {narrower}: each pattern must keep fewer entries of blocks of "
            "the same length, as in 8:16, 4:16, 2:16"
        )


def describe(stages: Stages, pattern: NMPattern) -> str:
    """The stages of a layer of this pattern, and the training steps at which they begin, as text.

    Example:
        >>> describe(((0, "dense"), (5, "final")), NMPattern(2, 4))
        'dense from training step 0, 2:4 from training step 5'
    """
    texts = []
    for begin, name in stages or ((0, FINAL),):
        shown = str(pattern) if name == FINAL else name
        texts.append(f"{shown} from training step {begin}")
    return ", ".join(texts)


def stage_at(stages: Stages, clock: int) -> str:
    """The stage of a training step.

    Example:
        >>> stage_at(((0, "dense"), (5, "final")), 4), stage_at((), 4)
        ('dense', 'final')
    """
    present = FINAL
    for begin, name in stages:
        if begin <= clock:
            present = name
    return present


def _parse_pattern(pattern: PatternLike) -> NMPattern:
    """A pattern of a ramp."""
    try:
        return NMPattern.parse(pattern)
    except ValueError as error:
        raise ValueError(
            f"the schedule's ramp has {pattern!r}: {error}. A dense phase before the ramp is `dense_start`"
        ) from error


def _checked_list(name: str, value: Any, example: str) -> Sequence[Any] | None:
    """Refuse what is no list by a ``TypeError``."""
    if value is None or isinstance(value, (list, tuple)):
        return value
    raise TypeError(f"the schedule's {name}={value!r} must be a list, for example {example}")
