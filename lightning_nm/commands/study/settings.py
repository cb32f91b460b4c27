"""The settings that a study was started with, and what a later study file may change of them."""

from __future__ import annotations

import json
from typing import Any

from lightning_nm.commands.study.config import flat
from lightning_nm.commands.study.spec import Spec

Settings = dict[str, Any]

ADVICE = "variants, seeds, grid values and trials may be added; for other changes take another --output"

_FIXED = ("metric", "direction", "config", "overrides", "sampler", "search", "seconds", "model", "data")
_GROWING = ("variants", "grid", "seeds", "trials")


def to_settings(spec: Spec) -> Settings:
    """Everything that decides what is trained, as JSON has it; the config's content, not its path."""
    settings: Settings = json.loads(json.dumps({key: getattr(spec, key) for key in (*_FIXED, *_GROWING)}, default=str))
    return settings


def forbidden_changes(before: Settings, now: Settings) -> list[str]:
    """What changed and would make old and new trials different; one line for each key."""
    faults = []
    for key in _FIXED:
        old, new = dict(flat(before.get(key), key)), dict(flat(now[key], key))
        for place in sorted(old.keys() | new.keys()):
            if old.get(place) != new.get(place):
                faults.append(f"{place}: was {old.get(place)!r}, is {new.get(place)!r}")
    for name, changes in before["variants"].items():
        if name not in now["variants"]:
            faults.append(f"variants.{name}: was removed")
        elif now["variants"][name] != changes:
            faults.append(f"variants.{name}: was {changes!r}, is {now['variants'][name]!r}")
    if before["grid"].keys() != now["grid"].keys():
        return [*faults, f"grid: had the keys {list(before['grid'])}, has {list(now['grid'])}"]
    lists = {"seeds": (before["seeds"], now["seeds"])}
    lists |= {f"grid.{key}": (values, now["grid"][key]) for key, values in before["grid"].items()}
    faults += [
        f"{key}: {value!r} was removed" for key, (old, new) in lists.items() for value in old if value not in new
    ]
    if (before["trials"] or 0) > (now["trials"] or 0):
        faults.append(f"trials: was {before['trials']}, is {now['trials']}")
    return faults
