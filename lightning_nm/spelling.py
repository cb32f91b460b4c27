"""What was meant by a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message, ``"; did you mean '...'?"`` with the closest known name; empty if none is close.

    Case and signs do not count.

    Example:
        >>> did_you_mean("SRSTE", ["ste", "sr-ste", "bi-mask"])
        "; did you mean 'sr-ste'?"
        >>> did_you_mean("adam", ["ste", "sr-ste", "bi-mask"])
        ''
    """
    by_letters: dict[str, str] = {}
    for name in known:
        # Of names with the same letters, the first one is proposed.
        by_letters.setdefault(_letters(name), name)
    close = get_close_matches(_letters(word), by_letters, n=1)
    if not close:
        return ""
    meant = by_letters[close[0]]
    return f"; did you mean '{meant}'?"


def not_given(value: Any) -> str:
    """Return the end of a message that refuses a value, ``", not ..."``; of a class, how to make an object of it.

    Example:
        >>> not_given(3), not_given(dict)
        (', not 3', ', not the class dict: write dict()')
    """
    if isinstance(value, type):
        return f", not the class {value.__name__}: write {value.__name__}()"
    return f", not {value!r}"


def check_keys(name: str, given: Any, known: Sequence[str]) -> None:
    """Refuse a setting that is no mapping, or has a key that is not known.

    Raises:
        TypeError: For another type.
        ValueError: For an unknown key, with the closest known one.

    Example:
        >>> check_keys("schedule", {"rmp": []}, ["ramp", "dense_end"])
        Traceback (most recent call last):
        ValueError: schedule has no 'rmp'; did you mean 'ramp'?; it has ramp, dense_end
    """
    listed = ", ".join(known)
    if not isinstance(given, Mapping):
        raise TypeError(f"{name}={given!r} must be a mapping with the keys {listed}")
    for key in given:
        if key not in known:
            raise ValueError(
                f"{name} has no {key!r}{did_you_mean(str(key), known)}; it has {listed}"
            )


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(filter(str.isalnum, name.lower()))


def some_of(texts: Sequence[str], most: int = 8) -> str:
    """The first texts as one, and how many more there are.

    Example:
        >>> some_of(["a", "b", "c"], most=2)
        'a; b; and 1 more'
    """
    shown = "; ".join(texts[:most])
    return shown if len(texts) <= most else f"{shown}; and {len(texts) - most} more"
