"""The settings that a study was started with, and what a later study file may change of them."""

from __future__ import annotations

import json
from typing import Any

from lightning_nm.commands.study.config import flat
from lightning_nm.commands.study.spec import Spec

Settings = dict[str, Any]

ADVICE = (
    "variants, seeds, grid values and trials may be added; for other changes take another --output"
)

_FIXED = (
    *("metric", "direction", "config", "overrides"),
    *("sampler", "search", "seconds"),
    *("model", "data"),
)
_GROWING = ("variants", "grid", "seeds", "trials")


def to_settings(spec: Spec) -> Settings:
    """Everything that decides what is trained, as JSON has it; the config's content, not its path."""
    values = {key: getattr(spec, key) for key in (*_FIXED, *_GROWING)}
    # JSON makes lists of tuples: settings that were read compare equal to new ones.
    settings: Settings = json.loads(json.dumps(values, default=str))
    return settings


def forbidden_changes(before: Settings, now: Settings) -> list[str]:
    """What changed and would make old and new trials different; one line for each key."""
    faults = []
    for key in _FIXED:
        old = dict(flat(before.get(key), key))
        new = dict(flat(now[key], key))
        for place in sorted(old.keys() | new.keys()):
            if old.get(place) != new.get(place):
                faults.append(f"{place}: was {old.get(place)!r}, is {new.get(place)!r}")
    variants = now["variants"]
    for name, changes in before["variants"].items():
        if name not in variants:
            faults.append(f"variants.{name}: was removed")
        elif variants[name] != changes:
            faults.append(f"variants.{name}: was {changes!r}, is {variants[name]!r}")
    old_grid = before["grid"]
    new_grid = now["grid"]
    if old_grid.keys() != new_grid.keys():
        return [*faults, f"grid: had the keys {list(old_grid)}, has {list(new_grid)}"]
    faults += _removed("seeds", before["seeds"], now["seeds"])
    for key, values in old_grid.items():
        faults += _removed(f"grid.{key}", values, new_grid[key])
    if (before["trials"] or 0) > (now["trials"] or 0):
        faults.append(f"trials: was {before['trials']}, is {now['trials']}")
    return faults


def _removed(key: str, before: list[Any], now: list[Any]) -> list[str]:
    return [f"{key}: {value!r} was removed" for value in before if value not in now]
