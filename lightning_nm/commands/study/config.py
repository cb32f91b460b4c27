"""Configs as nested mappings: dotted keys, merging, short keys of NMSparsityCallback, and what a trial leaves out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SHORT_KEYS = ("pattern", "method", "grad_estimator", "dgrad", "scale", "base_density")
"""Keys that mean the arguments of the config's :class:`~lightning_nm.NMSparsityCallback`."""

# A trial prints, logs and saves nothing of its own, unless the study's overrides say so.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
_QUIET_MASKS = {"show_tables": False, "grad_snr_every": 0}

# Callbacks that print, or need a logger or checkpoints, by the last part of their class path.
_WATCHERS = {
    *("ModelCheckpoint", "OnExceptionCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor"),
    *("ModelSummary", "RichModelSummary", "ProgressBar", "TQDMProgressBar", "RichProgressBar"),
}
_CALLBACK = "NMSparsityCallback"
_ARGUMENTS_OF_FIT = ("ckpt_path", "weights_only")  # in the configs that `fit` saves


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file that holds one mapping.

    Raises:
        ValueError: If there is no such file, or it is not YAML, holds something else or a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # PyYAML keeps the last of equal keys. A merge key, <<, may come several times.
            keys = set()
            for key, _ in node.value:
                if key.value in keys and key.tag != "tag:yaml.org,2002:merge":
                    raise yaml.YAMLError(f"the key {key.value!r} is given twice")
                keys.add(key.value)
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
    result = copy.deepcopy(dict(config))
    for key in _ARGUMENTS_OF_FIT:
        result.pop(key, None)
    # A section or a list that is empty in YAML is None.
    trainer = {**(result.get("trainer") or {}), **QUIET}
    callbacks = as_list(trainer.get("callbacks") or [])
    callbacks = [entry for entry in callbacks if last_part(entry) not in _WATCHERS]
    for entry in callbacks:
        if last_part(entry) == _CALLBACK and isinstance(entry, dict):
            entry["init_args"] = {**(entry.get("init_args") or {}), **_QUIET_MASKS}
    trainer["callbacks"] = callbacks
    result["trainer"] = trainer
    return result


def trains_dense(config: Mapping[str, Any]) -> bool:
    """Whether no callback of a config masks a weight or estimates a product: its ``pattern`` then changes nothing."""
    for entry in as_list(config.get("trainer", {}).get("callbacks") or []):
        if last_part(entry) != _CALLBACK:
            continue
        given = entry.get("init_args") if isinstance(entry, dict) else None
        arguments = given or {}
        if arguments.get("method") != "dense" or arguments.get("grad_estimator") not in (
            None,
            "dense",
        ):
            return False
        if arguments.get("dgrad") is not None:
            return False
        # These may name other methods.
        if arguments.get("rules") or arguments.get("config") or arguments.get("preset"):
            return False
    return True


def override(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Apply changes in place: dotted keys or nested mappings; the short keys lead into the NMSparsityCallback.

    A mapping joins the one that is there; one with a ``class_path`` replaces it, as do lists and plain values.

    Raises:
        ValueError: If a dotted key leads through something that is no mapping.
    """
    for name, value in changes.items():
        key = str(name)
        first, _, _ = key.partition(".")
        place = _masks(config) if first in SHORT_KEYS else config
        _set(place, key, value)


def _set(place: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for number, part in enumerate(path, 1):
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise ValueError(
                f"{key}: {'.'.join(path[:number])} is {place!r:.60}, which has no keys"
            )
    there = place.get(last)
    if isinstance(value, Mapping) and isinstance(there, dict) and "class_path" not in value:
        for inner, each in value.items():
            _set(there, str(inner), each)
    else:
        place[last] = copy.deepcopy(value)


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings; lists are values."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            place = f"{prefix}.{key}" if prefix else str(key)
            yield from flat(inner, place)
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
    callbacks = as_list(trainer.get("callbacks") or [])
    trainer["callbacks"] = callbacks
    places = [place for place, entry in enumerate(callbacks) if last_part(entry) == _CALLBACK]
    if len(places) > 1:
        raise ValueError(
            "the config has several NMSparsityCallbacks: override trainer.callbacks instead"
        )
    if not places:
        places = [len(callbacks)]
        callbacks.append(_CALLBACK)
    entry = callbacks[places[0]]
    # An entry may be the class path alone.
    if not isinstance(entry, dict):
        entry = {"class_path": f"lightning_nm.{_CALLBACK}", "init_args": dict(_QUIET_MASKS)}
        callbacks[places[0]] = entry
    entry["init_args"] = entry.get("init_args") or {}
    arguments: dict[str, Any] = entry["init_args"]
    return arguments
