"""The N:M pattern: at most N nonzeros in every M consecutive entries along one axis; and the choice of N per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias


class _OneValue:
    """A base that is no dataclass: jsonargparse spreads a pure dataclass into one option per field."""


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
        """Share of the entries that are kept, ``n / m``."""
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
            return cls(*divmod(value, 60))
        if isinstance(value, AutoPattern) or (isinstance(value, str) and value.startswith("auto:")):
            raise ValueError(
                f"one N:M pattern is needed here, not '{value}', which chooses one for each layer of a training; "
                "lightning_nm.prune(model, budget=0.5) chooses for a trained model"
            )
        if value is NMPattern:
            raise ValueError("cannot read the class NMPattern as a pattern: write NMPattern(2, 4)")
        raise ValueError(
            f"cannot read {value!r} as an N:M pattern: write it as 'N:M', for example '2:4' or '1:16'"
        )


@dataclass(frozen=True)
class AutoPattern(_OneValue):
    """N is chosen for each layer, so that the whole model keeps a share of its weights; M is the same for all.

    Written ``"auto:0.5"`` for M = 16, ``"auto:0.5:8"``, or ``"auto:0.5:16:flops"``.

    Args:
        budget: The share of the entries of all weights that may be kept, more than 0 and at most 1. Weights that stay
            dense count whole; embeddings, biases and norms do not count.
        m: Length of a block.
        counted: With ``"flops"``, the budget is a share of the multiply-adds of a dense forward pass.

    Raises:
        ValueError: If the budget is no share, or a block of ``m`` entries has no pattern.

    Example::

        >>> AutoPattern.parse("auto:0.5:8")
        AutoPattern(budget=0.5, m=8, counted='parameters')
    """

    budget: float
    m: int = 16
    counted: Literal["parameters", "flops"] = "parameters"

    def __post_init__(self) -> None:
        is_number = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool)
        if not is_number or not 0 < self.budget <= 1:
            raise ValueError(
                f"the budget {self.budget!r} of an auto pattern must be the share of the model's weights that is kept: "
                "more than 0 and at most 1, for example 'auto:0.5'"
            )
        if isinstance(self.m, bool) or not isinstance(self.m, int) or self.m < 2:
            raise ValueError(
                f"the block length {self.m!r} of an auto pattern must be an integer, 2 or more, for example "
                "'auto:0.5:16'"
            )
        if self.counted not in ("parameters", "flops"):
            raise ValueError(
                f"an auto pattern cannot count {self.counted!r}: write 'auto:0.5:16', or 'auto:0.5:16:flops'"
            )

    def __str__(self) -> str:
        text = f"auto:{self.budget:g}:{self.m}"
        return text if self.counted == "parameters" else f"{text}:{self.counted}"

    @property
    def uniform(self) -> NMPattern:
        """The densest pattern that keeps the budget within a layer, or 1:M: for layers that are not chosen for."""
        # A budget such as 0.3 is not exact in binary: 0.3 * 10 must give 3.
        n = int(self.budget * self.m + 1e-9)
        return NMPattern(min(max(n, 1), self.m - 1), self.m)

    @classmethod
    def parse(cls, text: str) -> AutoPattern:
        """Read ``"auto:BUDGET"``, ``"auto:BUDGET:M"`` or ``"auto:BUDGET:M:flops"``.

        Raises:
            ValueError: If the text is none of these, or for a value out of range.
        """
        word, *parts = (part.strip() for part in text.split(":"))
        if word != "auto" or not 1 <= len(parts) <= 3:
            raise ValueError(f"cannot read {text!r} as an auto pattern: write it as 'auto:0.5'")
        try:
            budget = float(parts[0])
            m = int(parts[1]) if len(parts) > 1 else 16
        except ValueError:
            raise ValueError(
                f"cannot read {text!r} as an auto pattern: write it as 'auto:0.5', or 'auto:0.5:8' for blocks of 8"
            ) from None
        counted: Any = parts[2] if len(parts) > 2 else "parameters"
        return cls(budget, m, counted)


def parse_pattern_setting(value: PatternSetting) -> NMPattern | AutoPattern:
    """Read a pattern, or one that is chosen for each layer, from what users and YAML write.

    Args:
        value: What :meth:`NMPattern.parse` reads; an :class:`AutoPattern`, or its text.

    Raises:
        ValueError: If the value is none of these or is not a possible pattern.

    Example::

        >>> [str(parse_pattern_setting(value)) for value in ("2:4", "auto:0.5")]
        ['2:4', 'auto:0.5:16']
    """
    if isinstance(value, AutoPattern):
        return value
    if isinstance(value, str) and value.strip().startswith("auto"):
        return AutoPattern.parse(value)
    return NMPattern.parse(value)


if TYPE_CHECKING:
    PatternLike: TypeAlias = NMPattern | str | int | Mapping[str, Any]
    """What :meth:`NMPattern.parse` reads."""
    PatternSetting: TypeAlias = PatternLike | AutoPattern
    """What :func:`parse_pattern_setting` reads."""
else:
    # Command lines are made from annotations: with the class alone in them, a bad pattern is refused by the parser
    # and reported with its message, instead of being accepted as just any string.
    PatternLike = NMPattern
    PatternSetting = NMPattern

try:
    from jsonargparse.typing import register_type
except ImportError:  # without the `cli` extra there is no command line to teach
    pass
else:

    def _is_pattern(value: Any, _: type) -> bool:
        return isinstance(value, (NMPattern, AutoPattern))

    register_type(
        NMPattern,
        str,
        parse_pattern_setting,
        type_check=_is_pattern,
        fail_already_registered=False,
    )
