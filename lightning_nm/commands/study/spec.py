"""What a study file says: read, checked, and turned into cells and configs of trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lightning_nm.commands.build import Classes
from lightning_nm.commands.study.config import flat, override, quiet, read_yaml, trains_dense
from lightning_nm.pattern import NMPattern
from lightning_nm.spelling import did_you_mean

Direction = Literal["minimize", "maximize"]
Sampler = Literal["grid", "tpe", "random"]

_LENGTHS = tuple(f"trainer.{limit}_{unit}" for limit in ("max", "min") for unit in ("steps", "epochs", "time"))


class Cell(NamedTuple):
    """A variant at one point of the grid; its seeds make one row of every table.

    Attributes:
        variant: Name of the variant.
        values: Dotted keys of the grid, and their values.
    """

    variant: str
    values: dict[str, Any]

    @property
    def label(self) -> str:
        """For messages, such as ``bame, pattern 1:16``."""
        return ", ".join([self.variant, *(f"{key} {value}" for key, value in self.values.items())])


@dataclass(frozen=True)
class Spec:
    """A study, as its file describes it; every field is a key of the file.

    Attributes:
        name: Name of the study, and of its output folder.
        config: The LightningCLI config, read.
        metric: The metric that decides, as ``trainer.test`` logs it.
        direction: Whether less or more of it is better.
        variants: Changes of the config, by name.
        baselines: Variants that the others are compared with.
        overrides: Changes of the config for every trial.
        grid: Values of dotted keys; every combination is trained with every variant.
        seeds: Seeds of every cell.
        sampler: ``grid``, or how `search` is sampled.
        search: Ranges of dotted keys: ``{low, high, log, step}`` or a list of choices.
        trials: Sampled settings for each cell.
        seconds: Of training, the same for every cell: each makes as many steps as take these seconds, by a measurement
            before the first training. ``None`` leaves the number of steps to the config.
        model: Import path of the model's class, such as ``train.Net``, if the config is that of a
            ``LightningCLI(Net, Data)`` of one's own.
        data: Likewise of the data module.
    """

    name: str
    config: dict[str, Any]
    metric: str
    variants: dict[str, dict[str, Any]]
    direction: Direction = "minimize"
    baselines: tuple[str, ...] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    sampler: Sampler = "grid"
    search: dict[str, Any] = field(default_factory=dict)
    trials: int | None = None
    seconds: float | None = None
    model: str | None = None
    data: str | None = None

    @property
    def classes(self) -> Classes:
        """The classes that the config does not name."""
        return Classes(self.model, self.data)

    def cells(self) -> Iterator[Cell]:
        """Every variant at every point of the grid."""
        for point in itertools.product(*self.grid.values()):
            for variant in self.variants:
                yield Cell(variant, dict(zip(self.grid, point, strict=True)))

    def same_trainings(self, cell: Cell) -> list[Cell]:
        """The cells whose trainings are those of `cell`, itself included: dense ones do not depend on the pattern."""
        if "pattern" not in self.grid or not trains_dense(self.trial_config(cell, {})):
            return [cell]
        others = {key: value for key, value in cell.values.items() if key != "pattern"}
        return [each for each in self.cells() if each.variant == cell.variant and others.items() <= each.values.items()]

    def trial_config(self, cell: Cell, searched: Mapping[str, Any]) -> dict[str, Any]:
        """The LightningCLI config of a trial: the study's, quiet, then changed by overrides, variant, grid and search.

        Raises:
            ValueError: If a key cannot be applied.
        """
        config = quiet(self.config)
        for changes in (self.overrides, self.variants[cell.variant], cell.values, searched):
            override(config, changes)
        return config


def read(path: Path) -> Spec:
    """Read a study file.

    Raises:
        ValueError: For a file that cannot be read and for each bad key or value, with the key, the value and what to
            write instead.
    """
    given = read_yaml(path)
    keys = list(Spec.__dataclass_fields__)
    for key in given:
        if key not in keys:
            meant = did_you_mean(str(key), keys)
            raise ValueError(f"{path}: unknown key {key!r}, the keys are {', '.join(keys)}{meant}")
    for key in ("config", "metric", "variants"):
        _require(given.get(key), f"{path}: the key {key!r} is missing")
    try:
        return _checked({"name": path.stem} | given, path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _checked(given: dict[str, Any], folder: Path) -> Spec:
    for key in ("name", "config", "metric"):
        _require(isinstance(given[key], str), f"{key}: {given[key]!r} must be a text")
    for key in ("model", "data"):
        _require(isinstance(given.get(key, ""), str), f"{key}: {given.get(key)!r} must be a class as module.Class")
    _require(not set(given["name"]) & set("/\\"), f"name: {given['name']!r} must not hold a slash")
    given["config"] = read_yaml(folder / given["config"])
    for key, options in (("direction", get_args(Direction)), ("sampler", get_args(Sampler))):
        _require(given.get(key, options[0]) in options, f"{key}: {given.get(key)!r} must be {' or '.join(options)}")
    for key in ("variants", "overrides", "grid", "search"):
        given[key] = given.get(key) or {}
        _require(isinstance(given[key], dict), f"{key}: {given[key]!r} must be a mapping")
    given["variants"] = _variants(given["variants"])
    given["grid"] = {str(key): _choices(f"grid.{key}", key, values) for key, values in given["grid"].items()}
    given["baselines"] = _baselines(given.get("baselines") or [], list(given["variants"]))
    given["seeds"] = _seeds(given.get("seeds", Spec.seeds))
    given["search"] = {str(key): _range(f"search.{key}", key, bounds) for key, bounds in given["search"].items()}
    searches = given.get("sampler", "grid") != "grid"
    for key in ("search", "trials"):
        _require(bool(given.get(key)) == searches, f"{key}: goes with `sampler: tpe` or `sampler: random`, and only so")
    trials = given.get("trials")
    _require(not searches or (isinstance(trials, int) and trials > 0), f"trials: {trials!r} must be a positive integer")
    for key in given["search"]:
        _require(key not in given["grid"], f"search.{key}: is in the grid, too; leave it out of one of them")
    _check_seconds(given)
    for name, changes in given["variants"].items():
        for key in {**given["grid"], **given["search"]}:
            _require(key not in changes, f"variants.{name}.{key}: is in the grid or the search, too; give it once")
    return Spec(**given)


def _check_seconds(given: dict[str, Any]) -> None:
    seconds = given.get("seconds")
    if seconds is None:
        return
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    _require(is_number and 0 < seconds < math.inf, f"seconds: {seconds!r} must be a positive number")
    _require(not given["search"], "seconds: goes with a grid, not with a search, which may change the time of a step")
    for place in ("overrides", "grid", *(f"variants.{name}" for name in given["variants"])):
        for key, _ in flat(given["variants"][place[9:]] if place.startswith("variants.") else given[place]):
            _require(key not in _LENGTHS, f"{place}.{key}: `seconds` sets the number of steps; leave out one of them")


def _variants(given: dict[Any, Any]) -> dict[str, dict[str, Any]]:
    for name, changes in given.items():
        fault = f"variants.{name}: {changes!r} must be a mapping of config keys, or {{}} for the config as it is"
        _require(changes is None or isinstance(changes, dict), fault)
    return {str(name): dict(changes or {}) for name, changes in given.items()}


def _baselines(given: Any, variants: list[str]) -> tuple[str, ...]:
    names = given if isinstance(given, list) else [given]
    for name in names:
        _require(name in variants, f"baselines: {name!r} is no variant; variants: {', '.join(variants)}")
    return tuple(dict.fromkeys(names))


def _seeds(given: Any) -> tuple[int, ...]:
    if _is_integer(given) and given > 0:
        return tuple(range(given))
    fault = f"seeds: {given!r} must be a positive number of seeds, or a list of integers from 0 on, each once"
    _require(isinstance(given, (list, tuple)) and given and all(_is_integer(s) and s >= 0 for s in given), fault)
    _require(len(set(given)) == len(given), fault)
    return tuple(given)


def _choices(place: str, key: Any, values: Any) -> list[Any]:
    _require(isinstance(values, list) and values, f"{place}: {values!r} must be a list of values")
    values = [_plain(place, key, value) for value in values]
    _require(all(values.count(value) == 1 for value in values), f"{place}: {values!r} holds a value twice")
    return values


def _plain(place: str, key: Any, value: Any) -> Any:
    """A value that can be in a table, a pattern as text."""
    if key == "pattern":
        return str(NMPattern.parse(value))
    advice = "must be a number, a text, a bool or null; give settings that are mappings as variants"
    _require(value is None or isinstance(value, (bool, int, float, str)), f"{place}: {value!r} {advice}")
    return value


def _range(place: str, key: Any, bounds: Any) -> Any:
    if isinstance(bounds, list):
        return _choices(place, key, bounds)
    fault = f"{place}: {bounds!r} must be a list of choices, or {{low: ..., high: ..., log: true, step: ...}}"
    _require(isinstance(bounds, dict) and {"low", "high"} <= set(bounds) <= {"low", "high", "log", "step"}, fault)
    try:
        numbers = {k: v if _is_integer(v) else float(v) for k, v in bounds.items() if k != "log"}
    except (TypeError, ValueError) as error:
        raise ValueError(fault) from error
    log = bounds.get("log", False)
    _require(isinstance(log, bool) and numbers["low"] < numbers["high"], f"{fault}, with low below high")
    _require(not log or (numbers["low"] > 0 and "step" not in numbers), f"{fault}; log needs low above 0 and no step")
    return {**numbers, "log": log}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: Any, fault: str) -> None:
    if not condition:
        raise ValueError(fault)
