"""What a study file says: read, checked, and turned into cells and configs of trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lightning_nm.commands.build import Classes
from lightning_nm.commands.study.config import (
    as_list,
    flat,
    override,
    quiet,
    read_yaml,
    trains_dense,
)
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.functional.spelling import did_you_mean

Direction = Literal["minimize", "maximize"]
Sampler = Literal["grid", "tpe", "random"]

# The keys that end a training, of which `seconds` takes the place.
_LENGTHS = (
    *("trainer.max_steps", "trainer.max_epochs", "trainer.max_time"),
    *("trainer.min_steps", "trainer.min_epochs", "trainer.min_time"),
)
_INTERVAL_KEYS = {"low", "high", "log", "step"}


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
        values = [f"{key} {value}" for key, value in self.values.items()]
        return ", ".join([self.variant, *values])


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
        others = dict(cell.values)
        del others["pattern"]
        same = []
        for each in self.cells():
            if each.variant == cell.variant and others.items() <= each.values.items():
                same.append(each)
        return same

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
    """The study of a file's content; each step relies on those before it."""
    _check_texts(given)
    given["config"] = read_yaml(folder / given["config"])
    for key in ("variants", "overrides", "grid", "search"):
        # A key without a value is None in YAML.
        value = given.get(key) or {}
        _require(isinstance(value, dict), f"{key}: {value!r} must be a mapping")
        given[key] = value
    given["variants"] = _variants(given["variants"])
    given["grid"] = _grid(given["grid"])
    given["baselines"] = _baselines(given.get("baselines") or [], list(given["variants"]))
    given["seeds"] = _seeds(given.get("seeds", Spec.seeds))
    given["search"] = _search(given["search"])
    spec = Spec(**given)
    _check_search(spec)
    _check_seconds(spec)
    _check_variants(spec)
    return spec


def _check_texts(given: dict[str, Any]) -> None:
    for key in ("name", "config", "metric"):
        value = given[key]
        _require(isinstance(value, str), f"{key}: {value!r} must be a text")
    for key in ("model", "data"):
        value = given.get(key, "")
        _require(isinstance(value, str), f"{key}: {value!r} must be a class as module.Class")
    name = given["name"]
    _require("/" not in name and "\\" not in name, f"name: {name!r} must not hold a slash")
    _check_choice("direction", given, get_args(Direction))
    _check_choice("sampler", given, get_args(Sampler))


def _check_choice(key: str, given: dict[str, Any], options: Sequence[str]) -> None:
    value = given.get(key, options[0])
    _require(value in options, f"{key}: {value!r} must be {' or '.join(options)}")


def _check_search(spec: Spec) -> None:
    searches = spec.sampler != "grid"
    fault = "goes with `sampler: tpe` or `sampler: random`, and only so"
    _require(bool(spec.search) == searches, f"search: {fault}")
    trials = spec.trials
    _require(bool(trials) == searches, f"trials: {fault}")
    is_count = isinstance(trials, int) and trials > 0
    _require(is_count or not searches, f"trials: {trials!r} must be a positive integer")
    for key in spec.search:
        _require(
            key not in spec.grid, f"search.{key}: is in the grid, too; leave it out of one of them"
        )


def _check_variants(spec: Spec) -> None:
    for name, changes in spec.variants.items():
        for key in (*spec.grid, *spec.search):
            _require(
                key not in changes,
                f"variants.{name}.{key}: is in the grid or the search, too; give it once",
            )


def _check_seconds(spec: Spec) -> None:
    seconds = spec.seconds
    if seconds is None:
        return
    is_number = _is_integer(seconds) or isinstance(seconds, float)
    _require(
        is_number and 0 < seconds < math.inf, f"seconds: {seconds!r} must be a positive number"
    )
    _require(
        not spec.search,
        "seconds: goes with a grid, not with a search, which may change the time of a step",
    )
    places = {"overrides": spec.overrides, "grid": spec.grid}
    for name, changes in spec.variants.items():
        places[f"variants.{name}"] = changes
    for place, changes in places.items():
        for key, _ in flat(changes):
            _require(
                key not in _LENGTHS,
                f"{place}.{key}: `seconds` sets the number of steps; leave out one of them",
            )


def _variants(given: dict[Any, Any]) -> dict[str, dict[str, Any]]:
    variants = {}
    for name, changes in given.items():
        fault = f"variants.{name}: {changes!r} must be a mapping of config keys, or {{}} for the config as it is"
        _require(changes is None or isinstance(changes, dict), fault)
        variants[str(name)] = dict(changes or {})
    return variants


def _baselines(given: Any, variants: list[str]) -> tuple[str, ...]:
    names = as_list(given)
    for name in names:
        _require(
            name in variants, f"baselines: {name!r} is no variant; variants: {', '.join(variants)}"
        )
    return tuple(dict.fromkeys(names))


def _seeds(given: Any) -> tuple[int, ...]:
    if _is_integer(given) and given > 0:
        return tuple(range(given))
    fault = f"seeds: {given!r} must be a positive number of seeds, or a list of integers from 0 on, each once"
    _require(isinstance(given, (list, tuple)) and given, fault)
    for seed in given:
        _require(_is_integer(seed) and seed >= 0, fault)
        _require(given.count(seed) == 1, fault)
    return tuple(given)


def _grid(given: dict[Any, Any]) -> dict[str, Any]:
    return {str(key): _choices(f"grid.{key}", key, values) for key, values in given.items()}


def _search(given: dict[Any, Any]) -> dict[str, Any]:
    return {str(key): _range(f"search.{key}", key, bounds) for key, bounds in given.items()}


def _choices(place: str, key: Any, values: Any) -> list[Any]:
    _require(isinstance(values, list) and values, f"{place}: {values!r} must be a list of values")
    values = [_plain(place, key, value) for value in values]
    _require(
        all(values.count(value) == 1 for value in values),
        f"{place}: {values!r} holds a value twice",
    )
    return values


def _plain(place: str, key: Any, value: Any) -> Any:
    """A value that can be in a table, a pattern as text."""
    if key == "pattern":
        return str(NMPattern.parse(value))
    advice = "must be a number, a text, a bool or null; give settings that are mappings as variants"
    _require(
        value is None or isinstance(value, (bool, int, float, str)), f"{place}: {value!r} {advice}"
    )
    return value


def _range(place: str, key: Any, bounds: Any) -> Any:
    if isinstance(bounds, list):
        return _choices(place, key, bounds)
    fault = f"{place}: {bounds!r} must be a list of choices, or {{low: ..., high: ..., log: true, step: ...}}"
    _require(isinstance(bounds, dict), fault)
    _require({"low", "high"} <= bounds.keys() <= _INTERVAL_KEYS, fault)
    numbers = dict(bounds)
    log = numbers.pop("log", False)
    for name, number in numbers.items():
        # Optuna draws integers where both bounds are integers; YAML reads 1e-4 as a text.
        if not _is_integer(number):
            try:
                numbers[name] = float(number)
            except (TypeError, ValueError) as error:
                raise ValueError(fault) from error
    low = numbers["low"]
    _require(isinstance(log, bool), f"{fault}, with low below high")
    _require(low < numbers["high"], f"{fault}, with low below high")
    if log:
        _require(low > 0 and "step" not in numbers, f"{fault}; log needs low above 0 and no step")
    return {**numbers, "log": log}


def _is_integer(value: Any) -> bool:
    """Whether a value of YAML is an integer: Python counts booleans among them."""
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: Any, fault: str) -> None:
    if not condition:
        raise ValueError(fault)
