"""What was meant by a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(filter(str.isalnum, name.lower()))
