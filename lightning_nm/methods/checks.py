"""What methods, estimators and :func:`~lightning_nm.prune` refuse in their settings."""

from __future__ import annotations

import math
import warnings
from typing import Any

from lightning_nm.nn.layer import NMLayer
from lightning_nm.schedule import Moment, check_moment
from lightning_nm.spelling import check_option as check_option


def check_number(
    name: str, value: float, why: str, *, zero: bool = False, most: float = math.inf
) -> None:
    """Raise ``TypeError`` for a setting that is not a number, ``ValueError`` for one that is out of its range.

    Args:
        name: Of the setting.
        value: Of the setting.
        why: What the number is, or what to do: the end of the message.
        zero: Whether 0 is allowed; negative numbers are not.
        most: The largest number that is allowed; infinity allows any finite one.
    """
    # bool is a subclass of int, but True is no number here.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}: {why}")
    # A NaN fails the first comparison. Infinity passes it where there is no limit.
    if not 0 <= value <= most or value == math.inf or (value == 0 and not zero):
        kind = "0 or a positive number" if zero else "a positive number"
        limit = "" if most == math.inf else f" of at most {most:g}"
        raise ValueError(f"{name}={value} must be {kind}{limit}: {why}")


def check_span(start: Moment, stop: Moment, advice: str) -> None:
    """Refuse a `start` and a `stop` that are no moments, or certainly in the wrong order."""
    check_moment("start", start)
    check_moment("stop", stop)
    # Steps and fractions can be compared only when the number of steps is known.
    if isinstance(start, float) == isinstance(stop, float) and stop < start:
        raise ValueError(f"stop={stop} lies before start={start}: {advice}")


def resolve_span(method: Any, planned_steps: int | None) -> tuple[int, int]:
    """The training steps of a method's `start` and `stop`; a ``ValueError`` if they are in the wrong order."""
    start, stop = method.schedule(planned_steps)
    if stop < start:
        raise ValueError(
            f"stop={method.stop} is step {stop} of {planned_steps}, before start={method.start} ({start})"
        )
    return start, stop


def check_count(name: str, value: int | None, least: int, *, optional: bool = True) -> None:
    """Raise ``ValueError`` for a setting that is not an integer, or is below its least value.

    ``optional``: ``None`` is allowed, for a setting that is not made.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")


def warn_of_late_stop(method: Any, planned_steps: int | None, what: str) -> None:
    """Warn of a method's `stop` that the training does not reach; ``what``: what is the case then, a clause."""
    *_, stop = method.schedule(planned_steps)
    if planned_steps is not None and stop > planned_steps:
        warnings.warn(
            f"{what}: stop={method.stop} is step {stop} of {planned_steps}; use a smaller `stop`",
            stacklevel=3,
        )


def refuse_tensor_parallel(layer: NMLayer, what: str) -> None:
    """Raise a ``ValueError`` if each process multiplies by its own part of the weight, for a method that needs all.

    Args:
        layer: The layer.
        what: What the method needs the whole weight for, a noun phrase.
    """
    if layer.spec.tensor_parallel:
        raise ValueError(
            f"tensor parallelism cuts the weight of layer '{layer.name}', but {type(layer.spec.method).__name__} has "
            f"{what}: use DDP, name the layer in `exclude`, or use another method"
        )
