"""The N:M pattern: at most N nonzeros in every M consecutive entries along one axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias


class _OneValue:
    """A base that is no dataclass: jsonargparse spreads a pure dataclass into one option per field."""


# Frozen, and so hashable: a pattern is a part of cache keys, and many layers share one object.
@dataclass(frozen=True)
class NMPattern(_OneValue):
    """At most ``n`` nonzeros in every ``m`` consecutive entries.

    Args:
        n: Entries that each block keeps, ``1 <= n < m``.
        m: Length of a block.

    Raises:
        ValueError: If ``n`` and ``m`` are not integers with ``1 <= n < m``.

    Example::

        >>> pattern = NMPattern.parse("2:4")
        >>> str(pattern), pattern.density
        ('2:4', 0.5)
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        for name, value in (("n", self.n), ("m", self.m)):
            # bool is a subclass of int: True would count as 1.
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(
                    f"pattern {name}={value!r} is not an integer: write the pattern as 'N:M', for example '2:4'"
                )
        if self.n < 1:
            raise ValueError(
                f"pattern '{self.n}:{self.m}' keeps nothing: N must be at least 1, for example '1:{max(self.m, 2)}'"
            )
        if self.n >= self.m:
            raise ValueError(
                f"pattern '{self.n}:{self.m}' prunes nothing: N must be smaller than M, for example '2:4'; "
                "to keep a layer dense, name it in `exclude`"
            )

    @property
    def density(self) -> float:
        """Fraction of the entries that are kept, ``n / m``."""
        return self.n / self.m

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @classmethod
    def parse(cls, value: PatternLike) -> NMPattern:
        """Read a pattern from what users and YAML write.

        YAML 1.1 reads an unquoted ``2:4`` as an integer in base 60 (124), which is read back.

        Args:
            value: ``"2:4"``, ``{"n": 2, "m": 4}``, an :class:`NMPattern`, or YAML's integer.

        Raises:
            ValueError: If the value is none of these or is not a possible pattern.

        Example::

            >>> [str(NMPattern.parse(value)) for value in ("2:4", 76, {"n": 1, "m": 8})]
            ['2:4', '1:16', '1:8']
        """
        if isinstance(value, NMPattern):
            return value
        if isinstance(value, Mapping):
            if set(value) != {"n", "m"}:
                raise ValueError(
                    f"pattern {dict(value)!r} must have exactly the keys 'n' and 'm', for example {{n: 2, m: 4}}"
                )
            return cls(value["n"], value["m"])
        if isinstance(value, str):
            n, _, m = value.partition(":")  # no regular expression: torch 2.6 cannot trace one
            if n.strip().isdecimal() and m.strip().isdecimal():
                return cls(int(n), int(m))
        elif isinstance(value, int) and not isinstance(value, bool) and value >= 60:
            # 2:4 is 2 * 60 + 4 = 124; less than 60 had no colon. YAML leaves an M of 60 or more, as in 4:64, as text.
            return cls(*divmod(value, 60))
        if isinstance(value, str) and value.strip().startswith("auto"):
            raise ValueError(
                f"cannot read {value!r} as an N:M pattern: N is not chosen in a training any more. Choose it for a "
                "trained model by lightning_nm.prune(model, budget=0.5).rules, and give the training these `rules`"
            )
        if value is NMPattern:
            raise ValueError("cannot read the class NMPattern as a pattern: write NMPattern(2, 4)")
        raise ValueError(
            f"cannot read {value!r} as an N:M pattern: write it as 'N:M', for example '2:4' or '1:16'"
        )


if TYPE_CHECKING:
    PatternLike: TypeAlias = NMPattern | str | int | Mapping[str, Any]
    """What :meth:`NMPattern.parse` reads."""
else:
    # Command lines are made from annotations: with the class alone in them, a bad pattern is refused by the parser
    # and reported with its message, instead of being accepted as just any string.
    PatternLike = NMPattern

try:
    from jsonargparse.typing import register_type
except ImportError:  # without the `cli` extra there is no command line to teach
    pass
else:
    # By `str` a printed config holds "2:4", which parse() reads again.
    register_type(NMPattern, str, NMPattern.parse, fail_already_registered=False)
