"""Cases that cover every pair of values of three axes, without their full cross product."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mostly_slow(cases: Sequence[tuple[Any, ...]], every: int) -> list[Any]:
    """The same cases, of which all but one of so many are slow.

    Consecutive cases share their first value, which meets other second values than the values next to it.
    """
    marked = []
    places: dict[Any, int] = {}
    firsts: dict[Any, int] = {}
    for case in cases:
        first = firsts.setdefault(case[0], len(firsts))
        place = places.get(case[0], 0)
        places[case[0]] = place + 1
        is_fast = (place + first) % every == 0
        marks = () if is_fast else pytest.mark.slow
        marked.append(pytest.param(*case, marks=marks))
    return marked


def pairwise_cases(
    first: Iterable[Any], second: Iterable[Any], third: Iterable[Any]
) -> list[tuple[Any, Any, Any]]:
    """Every pair of the first two axes, each with one value of the third: a Latin square of that.

    Every value of the third meets every value of the others, if neither of these is shorter than the third.
    """
    first, second, third = list(first), list(second), list(third)
    assert min(len(first), len(second)) >= len(third), "the third axis must be the shortest"
    return [
        (a, b, third[(i + j) % len(third)])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
