"""Cases that cover every pair of values of three axes, without their full cross product."""

from collections.abc import Iterable
from typing import Any


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
