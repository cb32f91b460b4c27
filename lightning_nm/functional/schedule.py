"""Moments of a training, given as steps or as shares of it, and the window between a dense start and a dense end."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

Moment = int | float
"""An integer counts training steps, a float in [0, 1] is a share of those that the training is planned to take."""


class UnknownLength(ValueError):
    """The number of training steps is needed, but not known. Callers that can be told it add how.

    Example:
        >>> print(UnknownLength("LBC's stop=0.5 is a share of the steps", "write LBC(stop=10000)"))
        LBC's stop=0.5 is a share of the steps, but their number is not known: write LBC(stop=10000)
    """

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(f"{what}, but their number is not known: {way_out}")


def check_moment(name: str, moment: Moment) -> None:
    """Refuse what is neither a step (else a ``TypeError``) nor a share within [0, 1] (else a ``ValueError``)."""
    if isinstance(moment, bool) or not isinstance(moment, (int, float)):
        raise TypeError(
            f"{name}={moment!r} must be an integer (training steps) or a float (a share of them)"
        )
    if isinstance(moment, float) and not 0 <= moment <= 1:
        raise ValueError(
            f"{name}={moment} is not a share of the training: give a float from 0 to 1, or an integer for training "
            "steps"
        )
    if moment < 0:
        raise ValueError(f"{name}={moment} must be a training step, 0 or later")


def resolve_moment(owner: object, name: str, moment: Moment, planned_steps: int | None) -> int:
    """Turn a moment into a training step; a share needs the number of planned steps, else a ``ValueError``.

    Example:
        >>> resolve_moment(None, "dense_start", 0.1, 1000), resolve_moment(None, "dense_start", 50, None)
        (100, 50)
    """
    # 0.0 is the beginning, however long the training is.
    if isinstance(moment, float) and moment:
        steps = _known_steps(owner, name, moment, planned_steps)
        return round(moment * steps)
    return int(moment)


def _known_steps(owner: object, name: str, moment: Moment, planned_steps: int | None) -> int:
    """Return the number of planned steps, or explain what it would be needed for."""
    if planned_steps is not None:
        return planned_steps
    if isinstance(moment, float):
        what = "is a share of the planned training steps"
    else:
        what = "counts from the end of the planned training steps"
    if name == "dense_end":
        # As an integer it would count from the end, too.
        advice = "leave dense_end out"
    elif not isinstance(owner, str):
        # All shares at once: the next error would ask for the next one.
        steps = [f"{share}={10_000 * k}" for k, share in enumerate(_shares(owner) or [name], 1)]
        advice = (
            f"write {type(owner).__name__}({', '.join(steps)}), with training steps of your own"
        )
    else:
        advice = f"give {name} as an integer, the training step"
    raise UnknownLength(f"{_name(owner)}'s {name}={moment} {what}", advice)


def _shares(owner: object) -> list[str]:
    """The arguments of a method or an estimator that are shares of the training and can be integers, by their value."""
    shares = {}
    for name, parameter in inspect.signature(type(owner)).parameters.items():
        value = getattr(owner, name, None)
        is_moment = "Moment" in str(parameter.annotation) and name != "dense_end"
        if is_moment and isinstance(value, float) and value:
            shares[name] = value
    return sorted(shares, key=lambda name: shares[name])


def _name(owner: object) -> str:
    return owner if isinstance(owner, str) else type(owner).__name__


def check_window(dense_start: Moment, dense_end: Moment) -> None:
    """Refuse a dense start and a dense end that are no moments, or as shares leave nothing between them."""
    check_moment("dense_start", dense_start)
    check_moment("dense_end", dense_end)
    # Steps and shares can be compared only when the number of steps is known: see resolve_window.
    shares = [moment for moment in (dense_start, dense_end) if isinstance(moment, float)]
    if sum(shares) >= 1:
        raise ValueError(
            f"dense_start={dense_start} and dense_end={dense_end} make the whole training dense: shares must add up to "
            "less than 1"
        )


def resolve_window(
    owner: object,
    dense_start: Moment,
    dense_end: Moment,
    planned_steps: int | None,
    start_name: str = "dense_start",
) -> tuple[int, ...]:
    """Return the training steps between which a training is sparse: ``()`` always, ``(start,)`` or ``(start, stop)``.

    Args:
        owner: The object that is scheduled, for the errors; or how they call it, if users do not make it.
        dense_start: Dense steps, or share of them, at the beginning.
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
    end = 0
    if dense_end:
        # Also a number of steps counts from the end, which must be known.
        steps = _known_steps(owner, "dense_end", dense_end, planned_steps)
        end = resolve_moment(owner, "dense_end", dense_end, steps)
    without_end = (start,) if start else ()
    if planned_steps is None:
        return without_end
    stop = planned_steps - end
    if start >= stop:
        raise ValueError(
            f"{_name(owner)} would never be sparse: {start_name}={dense_start} ends at step {start} and "
            f"dense_end={dense_end} begins at step {stop} of {planned_steps}"
        )
    # A share may round to no step: then nothing is left to be trained densely, and the masks stay.
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
