"""Names that differ in numbers alone, written as one name with ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join rows that are equal but for the numbers in their names, which become ranges.

    Args:
        rows: A name and further cells, which must be equal in the rows that are joined.

    Example:
        >>> grouped([("blocks.0.up", "2:4"), ("head", "-"), ("blocks.1.up", "2:4"), ("blocks.3.up", "2:4")])
        [('blocks.{0,1,3}.up x3', '2:4'), ('head', '-')]
    """
    # (template, *cells) -> the numbers of each row, in the order of their places in the template
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name, *cells in rows:
        template, numbers = _split_numbers(name)
        groups.setdefault((template, *cells), []).append(numbers)
    joined: list[tuple[str, ...]] = []
    for (template, *cells), members in groups.items():
        for name in _joined_names(template, members):
            joined.append((name, *cells))
    return joined


def _split_numbers(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a name with "#" in the place of each number, and the numbers."""
    template = []
    numbers = []
    for part in name.split("."):
        if part.isdigit():
            template.append("#")
            numbers.append(part)
        else:
            template.append(part)
    return ".".join(template), tuple(numbers)


def _joined_names(template: str, members: list[tuple[str, ...]]) -> list[str]:
    """Return one name with ranges for all members of a group, or the name of each member."""
    numbers_by_place = []
    for numbers in zip(*members, strict=True):
        numbers_by_place.append(sorted(set(numbers), key=int))
    combinations = math.prod(len(numbers) for numbers in numbers_by_place)
    if combinations != len(members):
        # The ranges would promise layers that are not there.
        return [_fill(template, numbers) for numbers in members]
    name = _fill(template, [_range(numbers) for numbers in numbers_by_place])
    if len(members) > 1:
        name += f" x{len(members)}"
    return [name]


def _fill(template: str, numbers: Iterable[str]) -> str:
    """Put numbers, or ranges of them, into the places of a template."""
    remaining = iter(numbers)
    parts = template.split(".")
    return ".".join(next(remaining) if part == "#" else part for part in parts)


def _range(numbers: Sequence[str]) -> str:
    """Write sorted numbers as one, as ``{first..last}`` without gaps, or as a list in braces."""
    if len(numbers) == 1:
        return numbers[0]
    first = int(numbers[0])
    last = int(numbers[-1])
    has_gaps = last - first + 1 != len(numbers)
    # "{0,1}" reads better than "{0..1}".
    if has_gaps or len(numbers) == 2:
        between_braces = ",".join(numbers)
    else:
        between_braces = f"{first}..{last}"
    return "{" + between_braces + "}"


def quoted(group: str) -> str:
    """Put a name that :func:`grouped` wrote in quotes, and the number of names behind it in parentheses.

    Example:
        >>> quoted("blocks.{0,1,3}.up x3"), quoted("head")
        ("'blocks.{0,1,3}.up' (3)", "'head'")
    """
    name, separator, count = group.rpartition(" x")
    if separator and count.isdigit():
        return f"'{name}' ({count})"
    return f"'{group}'"
