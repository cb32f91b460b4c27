"""When a training is dense and when sparse: moments as steps or as fractions of it, a dense start and end, a ramp.

A window lies between a dense start and a dense end. Stages are windows with a ramp of patterns that narrow to N:M.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict, TypeVar

from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.spelling import check_keys

Moment = int | float
"""An integer counts training steps, a float in [0, 1] is a fraction of those that the training is planned to take."""

Steps = tuple[int, ...]
"""The training steps at which something begins or ends."""


class UnknownLength(ValueError):
    """The number of training steps is needed, but not known. Callers that can be told it add how.

    Example:
        >>> print(UnknownLength("LBC's stop=0.5 is a fraction of the steps", "write LBC(stop=10000)"))
        LBC's stop=0.5 is a fraction of the steps, but their number is not known: write LBC(stop=10000)
    """

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(f"{what}, but their number is not known: {way_out}")


def check_moment(name: str, moment: Moment) -> None:
    """Refuse what is neither a step (else a ``TypeError``) nor a fraction within [0, 1] (else a ``ValueError``)."""
    if isinstance(moment, bool) or not isinstance(moment, (int, float)):
        raise TypeError(
            f"{name}={moment!r} must be an integer (training steps) or a float (a fraction of them)"
        )
    # True of NaN as well.
    if isinstance(moment, float) and not 0 <= moment <= 1:
        raise ValueError(
            f"{name}={moment} is not a fraction of the training: give a float from 0 to 1, or an integer for training "
            "steps"
        )
    if moment < 0:
        raise ValueError(f"{name}={moment} must be a training step, 0 or later")


def resolve_moment(owner: object, name: str, moment: Moment, planned_steps: int | None) -> int:
    """Turn a moment into a training step; a fraction needs the number of planned steps, else a ``ValueError``.

    Example:
        >>> resolve_moment(None, "dense_start", 0.1, 1000), resolve_moment(None, "dense_start", 50, None)
        (100, 50)
    """
    # 0.0 is the beginning, however long the training is.
    if isinstance(moment, float) and moment:
        if planned_steps is None:
            raise _unknown_length(owner, name, moment)
        # The type decides: 1 is a training step, 1.0 is the end of the training.
        return round(moment * planned_steps)
    return int(moment)


def _unknown_length(owner: object, name: str, moment: Moment) -> UnknownLength:
    """The error of a moment that needs the number of planned steps, with what to write in its place."""
    what = "is a fraction" if isinstance(moment, float) else "counts from the end"
    if name == "dense_end":
        # As an integer it would count from the end, too.
        advice = "leave dense_end out"
    elif isinstance(owner, str):
        advice = f"give {name} as an integer, the training step"
    else:
        # All fractions at once: the next error would ask for the next one.
        fractions = {}
        for argument, parameter in inspect.signature(type(owner)).parameters.items():
            value = getattr(owner, argument, None)
            # The modules of methods have annotations as text, in which `Moment | None` counts, too.
            is_moment = "Moment" in str(parameter.annotation) and argument != "dense_end"
            if is_moment and isinstance(value, float) and value:
                fractions[argument] = value
        # A class from outside may have other annotations: then the error names this moment alone.
        ordered = sorted(fractions, key=lambda argument: fractions[argument]) or [name]
        # Steps that follow each other as the fractions do: 10000, 20000 and so on.
        steps = [f"{argument}={10_000 * k}" for k, argument in enumerate(ordered, 1)]
        advice = (
            f"write {type(owner).__name__}({', '.join(steps)}), with training steps of your own"
        )
    return UnknownLength(
        f"{_name(owner)}'s {name}={moment} {what} of the planned training steps", advice
    )


def _name(owner: object) -> str:
    return owner if isinstance(owner, str) else type(owner).__name__


def check_window(dense_start: Moment, dense_end: Moment) -> None:
    """Refuse a dense start and a dense end that are no moments, or as fractions leave nothing between them."""
    check_moment("dense_start", dense_start)
    check_moment("dense_end", dense_end)
    # Steps and fractions can be compared only when the number of steps is known: see resolve_window.
    fractions = [moment for moment in (dense_start, dense_end) if isinstance(moment, float)]
    if sum(fractions) >= 1:
        raise ValueError(
            f"dense_start={dense_start} and dense_end={dense_end} make the whole training dense: fractions must add up "
            "to less than 1"
        )


def resolve_window(
    owner: object,
    dense_start: Moment,
    dense_end: Moment,
    planned_steps: int | None,
    start_name: str = "dense_start",
) -> Steps:
    """Return the training steps between which a training is sparse: ``()`` always, ``(start,)`` or ``(start, stop)``.

    Args:
        owner: The object that is scheduled, for the errors; or how they call it, if users do not make it.
        dense_start: Dense steps, or fraction of them, at the beginning.
        dense_end: The same at the end.
        planned_steps: Training steps of the whole training, if known.
        start_name: What the owner calls the former, for the errors.

    Raises:
        ValueError: If it takes the number of steps and that is not known, or no step is left.

    Example:
        >>> resolve_window(None, 0.1, 0.2, 1000), resolve_window(None, 50, 0, None), resolve_window(None, 0, 0, None)
        ((100, 800), (50,), ())
    """
    start = resolve_moment(owner, start_name, dense_start, planned_steps)
    # Sparse from the first step on: nothing begins, and no moment is kept.
    without_end = (start,) if start else ()
    if planned_steps is None:
        if dense_end:
            # Also a number of steps counts from the end, which must be known.
            raise _unknown_length(owner, "dense_end", dense_end)
        return without_end
    end = resolve_moment(owner, "dense_end", dense_end, planned_steps)
    stop = planned_steps - end
    if start >= stop:
        raise ValueError(
            f"{_name(owner)} would never be sparse: {start_name}={dense_start} ends at step {start} and "
            f"dense_end={dense_end} begins at step {stop} of {planned_steps}"
        )
    # A fraction may round to no step: then nothing is left to be trained densely, and the masks stay.
    if end == 0:
        return without_end
    return start, stop


def within(window: Sequence[int], clock: int) -> bool:
    """Tell whether a training step lies in a window of :func:`resolve_window`.

    Example::

        >>> within((), 5), within((6,), 5), within((2, 5), 5)
        (True, False, False)
    """
    if window and clock < window[0]:
        return False
    has_end = len(window) == 2
    return not has_end or clock < window[1]


class Phases(NamedTuple):
    """What the moments of a method mean for one layer.

    Attributes:
        sparse: The training steps between which there are masks, as :func:`resolve_window` gives them, for a method
            that begins and ends its masks by itself; else ``()``.
        is_latest: Whether masks may come before the first of these.
        moves_until: The training step from which the masks stand still, for a method whose masks move until then.
    """

    sparse: Steps = ()
    is_latest: bool = False
    moves_until: int | None = None


Part = TypeVar("Part")


def shown_name(method: object) -> str:
    """The short name of a method for messages, else that of its class."""
    name = getattr(method, "short_name", "")
    return f"'{name}'" if name else type(method).__name__


def refuse_second(part: object, name: str) -> None:
    """Refuse a method or an estimator with a dense phase of its own, between which a schedule's would not lie."""
    if getattr(part, name, 0):
        raise ValueError(
            f"{part!r} has a dense phase of its own, {name}={getattr(part, name)}, next to that of the schedule: leave "
            f"it out, and give {name} in `schedule`. If a `preset` sets it, give the method itself without the preset"
        )


# ------------------------------------------------------------------------------------------------------- stages

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

    Moments are training steps (an integer) or fractions of the training (a float in [0, 1]).

    Attributes:
        dense_start: How long training is dense before the first masks.
        ramp: The patterns before the layers' own, each narrower than the one before, with the same M.
        ramp_ends: When each of them gives way to the next, counted from the beginning of the training. ``None``: each
            pattern, the layers' own included, has an equal fraction of the time between the dense phases.
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
        # The layers' own patterns come after the ramp and are not known here: config.py compares the last pair.
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
            # Steps and fractions can be compared only when the number of steps is known: see _ends().
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
        for name, example in (("ramp", '["8:16", "4:16"]'), ("ramp_ends", "[0.3, 0.5]")):
            # A text is a sequence, too: "8:16" would be read letter by letter.
            if not isinstance(spec.get(name), (list, tuple, type(None))):
                raise TypeError(
                    f"the schedule's {name}={spec[name]!r} must be a list, for example {example}"
                )
        ramp = []
        for pattern in spec.get("ramp") or ():
            try:
                ramp.append(NMPattern.parse(pattern))
            except ValueError as error:
                raise ValueError(
                    f"the schedule's ramp has {pattern!r}: {error}. A dense phase before the ramp is `dense_start`"
                ) from error
        ends = spec.get("ramp_ends")
        ramp_ends = None if ends is None else tuple(ends)
        schedule = cls(**{**spec, "ramp": tuple(ramp), "ramp_ends": ramp_ends})
        # One without parts is as good as none, and callers then ask for None alone.
        return schedule if schedule.parts else None

    @property
    def parts(self) -> list[str]:
        """The parts that this schedule has: any of ``dense_start``, ``ramp``, ``dense_end``."""
        return [name for name in ("dense_start", "ramp", "dense_end") if getattr(self, name)]

    def refuse(self, method: object, **reasons: str) -> None:
        """Raise a ``ValueError`` if this schedule has one of the parts that a method cannot follow.

        ``reasons`` tell why, and the way out, by ``dense_start``, ``ramp`` and ``dense_end``.
        """
        for part in self.parts:
            if part in reasons:
                raise ValueError(
                    f"schedule has {part}, which method {shown_name(method)} refuses: {reasons[part]}"
                )

    def handed_to(self, part: Part) -> Part:
        """A copy of a method or an estimator with the dense phases of this schedule, of which it must have none."""
        # A copy: several rules may share one object, each with a schedule of its own, and a user's object stays.
        part = copy.copy(part)
        for name in ("dense_start", "dense_end"):
            moment = getattr(self, name)
            if moment:
                refuse_second(part, name)
                setattr(part, name, moment)
        return part

    def stages(self, planned_steps: int | None, masks_between: Sequence[int] = ()) -> Stages:
        """The stages of a training; ``()`` if it has the layers' own pattern all the time.

        Args:
            planned_steps: Training steps of the whole training, if known.
            masks_between: The steps between which a method that begins and ends its masks by itself has some, as
                :attr:`Phases.sparse`. The stages then have no dense ones.

        Raises:
            ValueError: If that takes the number of steps and it is not known, or the stages leave each other no step.
        """
        # A method that plans its own dense phases has taken those of the schedule into its plan.
        window = masks_between or resolve_window(
            "the schedule", self.dense_start, self.dense_end, planned_steps
        )
        start = window[0] if window else 0
        stop = window[1] if len(window) > 1 else planned_steps
        begins = [start, *self._ends(start, stop, planned_steps)]
        names = [*map(str, self.ramp), FINAL]
        stages = list(zip(begins, names, strict=True))
        if masks_between:
            # The method itself knows that masks have not come yet.
            stages[0] = (0, names[0])
        else:
            if start:
                stages.insert(0, (0, DENSE))
            if len(window) > 1:
                stages.append((window[1], DENSE))
        # The own pattern all the time is what a layer without a schedule has: () spares it the checks of every step.
        return () if stages == [(0, FINAL)] else tuple(stages)

    def _ends(self, start: int, stop: int | None, planned_steps: int | None) -> list[int]:
        """The steps at which each pattern of the ramp gives way to the next."""
        if not self.ramp:
            return []
        count = len(self.ramp) + 1  # the layers' own pattern is one more
        if self.ramp_ends is not None:
            ends = [
                resolve_moment("the schedule", "ramp_ends", end, planned_steps)
                for end in self.ramp_ends
            ]
        elif stop is None:
            raise UnknownLength(
                "the stages of the schedule's ramp are equal fractions of the planned training steps",
                "give ramp_ends as integers, the training steps",
            )
        else:
            # Each rounded from the whole and not added up: the lengths differ by one step at most.
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
    # In the order of time: the last stage that has begun counts.
    present = FINAL
    for begin, name in stages:
        if begin <= clock:
            present = name
    return present
