"""Names that differ in numbers alone: written as one name with ranges, and read again."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

# "{0,1,3}" or "{0..3}". The group makes re.split return what stands between the braces, too.
_BRACES = re.compile(r"\{(\w+(?:,\w+)+|\d+\.\.\d+)\}")

# " x3" at the end of a printed name: how many names it stands for.
_COUNT = re.compile(r"\s+x\d+$")

# A typing error such as "{0..10000000000}" must not fill the memory.
_MOST_NAMES = 100_000


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


def expanded(text: str) -> tuple[str, ...]:
    """Read a name as :func:`grouped` writes it: the names that it stands for.

    Raises:
        ValueError: If it stands for more than 100,000 names.

    Example:
        >>> expanded("blocks.{0,1,3}.up x3")
        ('blocks.0.up', 'blocks.1.up', 'blocks.3.up')
        >>> expanded("blocks.{0..1}.*")
        ('blocks.0.*', 'blocks.1.*')
    """
    if _BRACES.search(text):
        text = _COUNT.sub("", text)
    # Literals at even places, what stands between two braces at odd ones.
    parts = _BRACES.split(text)
    choices: list[Sequence[str]] = []
    for place, part in enumerate(parts):
        if place % 2 == 0:
            choices.append([part])
        else:
            choices.append(_numbers_between(part))
    if math.prod(len(choice) for choice in choices) > _MOST_NAMES:
        raise ValueError(f"'{text}' stands for more than {_MOST_NAMES} names")
    return tuple("".join(chosen) for chosen in itertools.product(*choices))


def _numbers_between(braces: str) -> Sequence[str]:
    """Return what the text between two braces lists, ``"0,1,3"`` or ``"0..3"``."""
    first, dots, last = braces.partition("..")
    if not dots:
        return braces.split(",")
    if int(last) - int(first) >= _MOST_NAMES:
        raise ValueError(f"'{{{braces}}}' stands for more than {_MOST_NAMES} names")
    return [str(number) for number in range(int(first), int(last) + 1)]
