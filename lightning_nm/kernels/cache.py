"""Which kernel runs which product, and the file where that is remembered."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

import torch

from lightning_nm.kernels.api import GemmKey
from lightning_nm.kernels.environment import Environment
from lightning_nm.kernels.keys import bucketed, format_key, parse_key

SCHEMA = 1

Source = Literal["measured", "predicted", "forced", "default"]
"""Timed on the device; from the cost model; asked for; the reference because nothing else could be chosen."""


@dataclass(frozen=True)
class Decision:
    """The kernel of a product and why.

    Args:
        kernel: Its name.
        dense_ms: Milliseconds of the dense product, None if unknown.
        sparse_ms: Milliseconds of the best sparse product without packing, chosen or not.
        pack_ms: Milliseconds of packing its operand once.
        reason: Why this kernel, and why not others.
        source: What the decision rests on.
        terms: What was asked: the kernels to choose from, the uses of a pack, the margin, and whether products must be
            deterministic. Where another thing is asked, the decision does not hold.
    """

    kernel: str
    dense_ms: float | None
    sparse_ms: float | None
    pack_ms: float | None
    reason: str
    source: Source
    terms: str = ""


class Decisions(MutableMapping[GemmKey, Decision]):
    """The decisions of one environment.

    Keys whose tokens fall into one bucket (:func:`~lightning_nm.kernels.keys.token_bucket`) are the same key, and so
    are those of two devices of one type: a machine's GPUs are taken to be equal.

    Args:
        environment: Where the decisions hold.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.ignored = ""
        """Why a file was not taken over when this was loaded."""
        self._decisions: dict[GemmKey, Decision] = {}

    def __getitem__(self, key: GemmKey) -> Decision:
        return self._decisions[_shared(key)]

    def __setitem__(self, key: GemmKey, decision: Decision) -> None:
        self._decisions[_shared(key)] = decision

    def __delitem__(self, key: GemmKey) -> None:
        del self._decisions[_shared(key)]

    def __iter__(self) -> Iterator[GemmKey]:
        return iter(self._decisions)

    def __len__(self) -> int:
        return len(self._decisions)

    @classmethod
    def load(cls, path: str | os.PathLike[str], environment: Environment) -> Decisions:
        """Read the decisions of an environment.

        A file that is missing, of another schema, from other environments or damaged gives no decisions, and
        `ignored` says which of these it is.
        """
        decisions = cls(environment)
        try:
            environments = _read(Path(path))
            entries = environments.get(str(environment))
            if entries is not None:
                decisions._decisions = {parse_key(text): Decision(**entry) for text, entry in entries.items()}
            else:
                decisions.ignored = f"{path} has no decisions for {environment}, only for: {'; '.join(environments)}"
        except (OSError, ValueError, TypeError, AttributeError) as error:
            decisions.ignored = f"no decisions are taken over: {error}"
        return decisions

    def save(self, path: str | os.PathLike[str]) -> None:
        """Add the decisions to a file, beside what it holds of other environments and of other keys.

        The file is replaced at once by a new one. Of two processes that save at the same time one may be forgotten,
        which costs a measurement; the file is whole at any time.

        Raises:
            ValueError: If there is a file that does not hold decisions; one of another schema is replaced.
            OSError: If the file cannot be written.
        """
        path = Path(path)
        try:
            environments = _read(path)
        except (FileNotFoundError, _OtherSchemaError):
            environments = {}
        entries = {format_key(key): asdict(decision) for key, decision in self.items()}
        environments[str(self.environment)] = environments.get(str(self.environment), {}) | entries
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            new.write_text(json.dumps({"schema": SCHEMA, "environments": environments}, indent=1) + "\n")
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


class _OtherSchemaError(ValueError):
    """The file holds decisions, but another release wrote it."""


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries by environment."""
    text = path.read_text()
    try:
        content = json.loads(text)
        schema, environments = content["schema"], content["environments"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} does not hold decisions: give another path, or remove it") from error
    if not isinstance(environments, dict):
        raise ValueError(f"{path} does not hold decisions: give another path, or remove it")
    if schema != SCHEMA:
        raise _OtherSchemaError(f"{path} is of schema {schema!r}, not {SCHEMA}")
    return cast("dict[str, dict[str, Any]]", environments)


@lru_cache(maxsize=1 << 14)
def _shared(key: GemmKey) -> GemmKey:
    """The key under which alike products are remembered."""
    return replace(bucketed(key), device=torch.device(key.device).type)
