"""Configs as nested mappings: dotted keys, merging, short keys of NMSparsityCallback, and what a trial leaves out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SHORT_KEYS = ("pattern", "method", "grad_estimator")
"""Keys that mean the arguments of the config's :class:`~lightning_nm.NMSparsityCallback`."""

# A trial prints, logs and saves nothing of its own, unless the study's overrides say so.
QUIET: dict[str, Any] = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "num_sanity_val_steps": 0,
}
_QUIET_MASKS = {"show_tables": False, "grad_snr_every": 0}

# Callbacks that print, or need a logger or checkpoints, by the last part of their class path.
_WATCHERS = {
    *("ModelCheckpoint", "OnExceptionCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor"),
    *("ModelSummary", "RichModelSummary", "ProgressBar", "TQDMProgressBar", "RichProgressBar"),
}
_ARGUMENTS_OF_FIT = ("ckpt_path", "weights_only")  # in the configs that `fit` saves


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file that holds one mapping.

    Raises:
        ValueError: If there is no such file, or it is not YAML, holds something else or a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise yaml.YAMLError(f"the key {twice!r} is given twice")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(), Loader=Loader)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a mapping of keys to values, not {content!r:.60}")
    return content


def quiet(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without loggers, checkpoints, progress bars and tables."""
    result = copy.deepcopy({key: value for key, value in config.items() if key not in _ARGUMENTS_OF_FIT})
    trainer = result["trainer"] = {**(result.get("trainer") or {}), **QUIET}
    given = trainer.get("callbacks") or []
    trainer["callbacks"] = [entry for entry in as_list(given) if last_part(entry) not in _WATCHERS]
    for entry in trainer["callbacks"]:
        if last_part(entry) == "NMSparsityCallback" and isinstance(entry, dict):
            entry["init_args"] = {**(entry.get("init_args") or {}), **_QUIET_MASKS}
    return result


def trains_dense(config: Mapping[str, Any]) -> bool:
    """Whether no callback of a config masks a weight or estimates a gradient: its ``pattern`` then changes nothing."""
    entries = as_list(config.get("trainer", {}).get("callbacks") or [])
    for entry in entries:
        if last_part(entry) != "NMSparsityCallback":
            continue
        arguments = (entry.get("init_args") or {}) if isinstance(entry, dict) else {}
        dense_estimator = arguments.get("grad_estimator") in (None, "dense")
        plain = not arguments.get("rules") and not arguments.get("config") and not arguments.get("preset")
        if arguments.get("method") != "dense" or not dense_estimator or not plain:
            return False
    return True


def override(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Apply changes in place: dotted keys or nested mappings; the short keys lead into the NMSparsityCallback.

    A mapping joins the one that is there; one with a ``class_path`` replaces it, as do lists and plain values.

    Raises:
        ValueError: If a dotted key leads through something that is no mapping.
    """
    for key, value in changes.items():
        short = str(key).split(".")[0] in SHORT_KEYS
        _set(_masks(config) if short else config, str(key), value)


def _set(place: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for number, part in enumerate(path, 1):
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise ValueError(f"{key}: {'.'.join(path[:number])} is {place!r:.60}, which has no keys")
    there = place.get(last)
    if isinstance(value, Mapping) and isinstance(there, dict) and "class_path" not in value:
        for inner, each in value.items():
            _set(there, str(inner), each)
    else:
        place[last] = copy.deepcopy(value)


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings; lists are values."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from flat(each, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def last_part(entry: Any) -> str:
    """The class name of an entry ``{class_path: ...}``, or of a class path."""
    path = entry.get("class_path", "") if isinstance(entry, dict) else entry
    return str(path).rsplit(".", 1)[-1]


def as_list(given: Any) -> list[Any]:
    """A list as it is, anything else as the only entry of one."""
    return list(given) if isinstance(given, list) else [given]


def _masks(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the config's NMSparsityCallback, which is added if there is none."""
    trainer = config.setdefault("trainer", {})
    callbacks = trainer["callbacks"] = as_list(trainer.get("callbacks") or [])
    found = [number for number, entry in enumerate(callbacks) if last_part(entry) == "NMSparsityCallback"]
    if len(found) > 1:
        raise ValueError("the config has several NMSparsityCallbacks: override trainer.callbacks instead")
    if not found:
        callbacks.append({"class_path": "lightning_nm.NMSparsityCallback", "init_args": dict(_QUIET_MASKS)})
    elif not isinstance(callbacks[found[0]], dict):
        callbacks[found[0]] = {"class_path": "lightning_nm.NMSparsityCallback", "init_args": dict(_QUIET_MASKS)}
    entry = callbacks[found[0] if found else -1]
    entry["init_args"] = entry.get("init_args") or {}
    arguments: dict[str, Any] = entry["init_args"]
    return arguments
