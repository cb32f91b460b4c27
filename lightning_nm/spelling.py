"""How messages write names: what was meant by one that does not exist, and ranges in place of many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args


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


def with_settings(part: object) -> str:
    """The class of a method or an estimator and its settings: the public attributes of the object itself."""
    settings = [f"{key}={value!r}" for key, value in vars(part).items() if not key.startswith("_")]
    return f"{type(part).__name__}({', '.join(settings)})"


def check_keys(name: str, given: Any, known: Sequence[str]) -> None:
    """Refuse a setting that is no mapping, or has a key that is not known.

    Raises:
        TypeError: For another type.
        ValueError: For an unknown key, with the closest known one.

    Example:
        >>> check_keys("schedule", {"rmp": []}, ["ramp", "dense_end"])
        Traceback (most recent call last):
        ValueError: schedule takes no key 'rmp' (it takes ramp, dense_end); did you mean 'ramp'?
    """
    listed = ", ".join(known)
    if not isinstance(given, Mapping):
        raise TypeError(f"{name}={given!r} must be a mapping with the keys {listed}")
    for key in given:
        if key not in known:  # in YAML a key may also be a number
            raise ValueError(
                f"{name} takes no key {key!r} (it takes {listed}){did_you_mean(str(key), known)}"
            )


def check_option(name: str, value: Any, options: Any) -> None:
    """Raise ``ValueError`` for an option that is not one of a ``Literal``.

    Example:
        >>> from typing import Literal
        >>> check_option("frozen", "no", Literal["dense", "mask"])
        Traceback (most recent call last):
        ValueError: frozen='no' is unknown: use 'dense' or 'mask'
    """
    names = get_args(options)
    if value not in names:
        raise ValueError(f"{name}={value!r} is unknown: use {' or '.join(map(repr, names))}")


def check_interval(name: str, number: int, unit: str = "optimizer steps") -> None:
    """Raise ``ValueError`` for what is no number of steps.

    Example:
        >>> check_interval("images_every", -1)
        Traceback (most recent call last):
        ValueError: images_every=-1 must be a number of optimizer steps, or 0 for never
    """
    # bool is a subclass of int, but True is no number of steps.
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{name}={number} must be a number of {unit}, or 0 for never")


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(filter(str.isalnum, name.lower()))


def grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join rows that are equal but for the numbers in their names, which become ranges.

    Args:
        rows: A name and further cells, which must be equal in the rows that are joined.

    Example:
        >>> grouped([("blocks.0.up", "2:4"), ("head", "-"), ("blocks.1.up", "2:4"), ("blocks.3.up", "2:4")])
        [('blocks.{0,1,3}.up x3', '2:4'), ('head', '-')]
    """
    # (template, cells) -> the numbers of each row, in the order of their places in the template
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[str, ...]]] = {}
    for name, *cells in rows:
        # The template is filled in by the operator %, for which %% stands for one %.
        parts = name.replace("%", "%%").split(".")
        template = ".".join("%s" if part.isdigit() else part for part in parts)
        numbers = tuple(part for part in parts if part.isdigit())
        groups.setdefault((template, tuple(cells)), []).append(numbers)
    joined: list[tuple[str, ...]] = []
    for (template, key), members in groups.items():
        # As numbers: 10 comes after 9.
        places = [sorted(set(numbers), key=int) for numbers in zip(*members, strict=True)]
        # Names are unique: with as many rows as combinations of the numbers, all combinations are there.
        if math.prod(map(len, places)) == len(members):
            count = f" x{len(members)}" if len(members) > 1 else ""
            names = [template % tuple(map(_range, places)) + count]
        else:
            # The ranges would promise layers that are not there.
            names = [template % numbers for numbers in members]
        joined += [(name, *key) for name in names]
    return joined


def _range(numbers: Sequence[str]) -> str:
    """Write sorted numbers as one, as ``{first..last}`` without gaps, or as a list in braces."""
    if len(numbers) == 1:
        return numbers[0]
    first, last = int(numbers[0]), int(numbers[-1])
    has_gaps = last - first + 1 != len(numbers)
    # "{0,1}" reads better than "{0..1}".
    between = ",".join(numbers) if has_gaps or len(numbers) == 2 else f"{first}..{last}"
    return "{" + between + "}"


def quoted(group: str) -> str:
    """Put a name that :func:`grouped` wrote in quotes, and the number of names behind it in parentheses.

    Example:
        >>> quoted("blocks.{0,1,3}.up x3"), quoted("head")
        ("'blocks.{0,1,3}.up' (3)", "'head'")
    """
    # From the right, and digits alone: a name may hold " x" itself.
    name, separator, count = group.rpartition(" x")
    if separator and count.isdigit():
        return f"'{name}' ({count})"
    return f"'{group}'"


def some_of(texts: Sequence[str], most: int = 8, separator: str = "; ") -> str:
    """The first texts as one, and how many more there are.

    Example:
        >>> some_of(["a", "b", "c"], most=2)
        'a; b; and 1 more'
    """
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return separator.join([*texts[:most], *more])
