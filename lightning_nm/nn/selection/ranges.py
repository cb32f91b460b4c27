"""Names that differ in numbers alone: written as one name with ranges, and read again."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

_LIST = re.compile(r"\{(\w+(?:,\w+)+|\d+\.\.\d+)\}")
_COUNT = re.compile(r"\s+x\d+$")  # of the names that a printed one stands for
_MOST = 100_000  # names that one text may stand for


def grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join rows that are equal but for the numbers in their names, which become ranges.

    Example:
        >>> grouped([("blocks.0.up", "2:4"), ("head", "-"), ("blocks.1.up", "2:4"), ("blocks.3.up", "2:4")])
        [('blocks.{0,1,3}.up x3', '2:4'), ('head', '-')]
    """
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name, *cells in rows:
        parts = name.split(".")
        template = ".".join("#" if part.isdigit() else part for part in parts)
        groups.setdefault((template, *cells), []).append(
            tuple(part for part in parts if part.isdigit())
        )
    found = []
    for (template, *cells), numbers in groups.items():
        seen = [sorted({row[k] for row in numbers}, key=int) for k in range(len(numbers[0]))]
        if len(numbers) == math.prod(map(len, seen)):
            name = _filled(template, [_range(places) for places in seen])
            found.append((f"{name} x{len(numbers)}" if len(numbers) > 1 else name, *cells))
        else:  # the ranges would promise layers that are not there
            found += [(_filled(template, row), *cells) for row in numbers]
    return found


def _filled(template: str, numbers: Iterable[str]) -> str:
    places = iter(numbers)
    return ".".join(next(places) if part == "#" else part for part in template.split("."))


def _range(places: Sequence[str]) -> str:
    if len(places) == 1:
        return places[0]
    first, last = int(places[0]), int(places[-1])
    return (
        f"{{{first}..{last}}}" if last - first + 1 == len(places) > 2 else f"{{{','.join(places)}}}"
    )


def quoted(group: str) -> str:
    """A name that :func:`grouped` wrote, in quotes, and how many names it stands for.

    Example:
        >>> quoted("blocks.{0,1,3}.up x3"), quoted("head")
        ("'blocks.{0,1,3}.up' (3)", "'head'")
    """
    name, several, count = group.rpartition(" x")
    return f"'{name}' ({count})" if several and count.isdigit() else f"'{group}'"


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
    parts = _LIST.split(_COUNT.sub("", text) if _LIST.search(text) else text)
    numbers = [_sizes(part) for part in parts[1::2]]
    if math.prod(len(each) for each in numbers) > _MOST:
        raise ValueError(f"'{text}' stands for more than {_MOST} names")
    chosen = itertools.product(
        *([literal] if k % 2 == 0 else numbers[k // 2] for k, literal in enumerate(parts))
    )
    return tuple("".join(each) for each in chosen)


def _sizes(part: str) -> Sequence[str]:
    """What stands between two braces."""
    first, dots, last = part.partition("..")
    if not dots:
        return part.split(",")
    if int(last) - int(first) >= _MOST:
        raise ValueError(f"'{{{part}}}' stands for more than {_MOST} names")
    return [str(number) for number in range(int(first), int(last) + 1)]
