"""What a study file says: read, checked, and turned into trainings with their configs."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from lightning_nm.commands.from_config import QUIET, read_yaml
from lightning_nm.pattern import NMPattern

_CALLBACK = "NMSparsityCallback"
# Keys that mean arguments of the NMSparsityCallback, wherever it stands in the config.
_SHORT_KEYS = ("pattern", "method", "grad_estimator", "dgrad", "scale", "base_density")

# Of a trial, which prints, logs and saves nothing of its own, unless the study's overrides say so.
_QUIET_MASKS = {"show_tables": False, "grad_snr_every": 0}

# Callbacks that print, or need a logger or checkpoints, by the last part of their class path.
# EarlyStopping and Timer are not among them: they decide how long a training is.
_WATCHERS = (
    *("ModelCheckpoint", "OnExceptionCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor"),
    *("ModelSummary", "RichModelSummary", "ProgressBar", "TQDMProgressBar", "RichProgressBar"),
)

# The arguments of the Trainer that end a training, of which `seconds` takes the place.
LENGTHS = ("max_steps", "max_epochs", "max_time", "min_steps", "min_epochs")


Classes: TypeAlias = tuple[str | None, str | None]
"""Import paths of the model's and the data module's class, where the config does not name them."""


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


class Job(NamedTuple):
    """What one process trains at a time, and the storage keeps as one trial.

    Attributes:
        cell: Variant and grid values.
        number: The seed, or in a search the number of the sampled settings.
        seeds: The seeds to train with: one, or in a search all.
        key: A digest of everything that decides the outcome.
    """

    cell: Cell
    number: int
    seeds: list[int]
    key: str


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
        search: Optuna's distributions of dotted keys; in the file ``{low, high, log, step}`` or a list of choices.
        trials: Sampled settings for each cell.
        seconds: Of training, the same for every cell: each makes as many steps as take these seconds, by a measurement
            before the first training. ``None`` leaves the number of steps to the config.
        model: Import path of the model's class, such as ``train.Net``, if the config is that of a
            ``LightningCLI(Net, Data)`` of one's own.
        data: The same for the data module.
    """

    name: str
    config: dict[str, Any]
    metric: str
    variants: dict[str, dict[str, Any]]
    direction: Literal["minimize", "maximize"] = "minimize"
    baselines: list[str] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[bool | int | float | str | None]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: list(range(5)))
    sampler: Literal["grid", "tpe", "random"] = "grid"
    search: dict[str, Any] = field(default_factory=dict)
    trials: int | None = None
    seconds: float | None = None
    model: str | None = None
    data: str | None = None

    @property
    def classes(self) -> Classes:
        """The classes that the config does not name."""
        return self.model, self.data

    def points(self) -> list[dict[str, Any]]:
        """The points of the grid; a single one without keys if there is no grid."""
        points = itertools.product(*self.grid.values())
        return [dict(zip(self.grid, point, strict=True)) for point in points]

    def cells(self) -> list[Cell]:
        """Every variant at every point of the grid."""
        return [Cell(variant, point) for point in self.points() for variant in self.variants]

    def jobs(self) -> Iterator[Job]:
        """Everything to train; a grid comes seed by seed, so that an unfinished study has whole pairs."""
        for number in range(self.trials) if self.trials else self.seeds:
            for cell in self.cells():
                # Settings of a search are compared by their mean over all seeds, so one job trains them all.
                seeds = self.seeds if self.search else [number]
                yield Job(cell, number, seeds, self.fingerprint(cell, number))

    def trial_config(
        self, cell: Cell, searched: Mapping[str, Any], steps: int | None = None
    ) -> dict[str, Any]:
        """The LightningCLI config of a trial: the study's, quiet, then changed by overrides, variant, grid and search.

        With `steps`, the training ends after so many optimizer steps, and by nothing else.

        Raises:
            ValueError: If the config has several NMSparsityCallbacks and a short key is changed.
        """
        # Quiet first, so that an override can bring a logger or a table back; of the changes later ones win.
        config = quiet(self.config)
        for changes in (self.overrides, self.variants[cell.variant], cell.values, searched):
            override(config, changes)
        if steps is not None:
            # No other limit may end it earlier or later; -1 epochs are no limit.
            config["trainer"] |= {**dict.fromkeys(LENGTHS), "max_steps": steps, "max_epochs": -1}
        return config

    def fingerprint(self, cell: Cell, number: int | None = None) -> str:
        """A digest of everything that decides a training: what it has in common with no other, whatever its name.

        So variants, seeds and grid values can be added to a study that has begun, and what is changed in its file or
        its config is trained again.
        """
        # Without sampled settings: trials of a search are told apart by their numbers.
        config = self.trial_config(cell, {})
        for entry in callbacks_of(config["trainer"]):
            arguments = entry["init_args"]
            # Dense training does not depend on the pattern, unless one of these names another method or an estimator.
            keys = ("grad_estimator", "dgrad", "rules", "config", "preset")
            if arguments.get("method") == "dense" and not any(map(arguments.get, keys)):
                arguments.pop("pattern", None)
        # Names, baselines and the number of trials change no training, so they are left out.
        decides: list[Any] = [config, self.metric, self.classes, self.seconds, number]
        if self.search:
            decides += [self.sampler, self.search, self.seeds]
        # The order of keys in a file means nothing. Optuna's distributions are no JSON, but their text has all bounds.
        text = json.dumps(decides, sort_keys=True, default=str)
        # 64 bits, short enough for the name of a lock's file.
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(path: Path) -> Spec:
    """Read a study file, whose keys and types are checked by the parser that reads configs.

    Raises:
        OSError: If it, or its config, cannot be read.
        ValueError: For each bad key or value, with the key, the value and what to write instead.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    given = {"name": path.stem, **read_yaml(path)}
    if isinstance(given.get("config"), str):
        # Relative to the study file, wherever the command is called.
        given["config"] = read_yaml(path.parent / given["config"])
    # Not isinstance: True is an int, too, and no number of seeds.
    if type(given.get("seeds")) is int:
        given["seeds"] = list(range(given["seeds"]))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Spec)
    try:
        # Not its values: it makes a number of a text such as "2:4".
        parser.parse_object(copy.deepcopy(given))
        spec = Spec(**given)
        # YAML 1.1 reads an unquoted 1:16 as 76, in base 60. The callback would read that back, but values of the grid
        # are also printed in labels and tables.
        if patterns := spec.grid.get("pattern"):
            spec.grid["pattern"] = [str(NMPattern.parse(each)) for each in patterns]  # type: ignore[arg-type]
        for key, values in spec.search.items():
            spec.search[key] = _distribution(key, values)
        _check_together(spec)
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"{path}: {error}; docs/studies.md lists the keys") from error
    return spec


def _check_together(spec: Spec) -> None:
    for name in spec.baselines:
        fault = f"baselines: {name!r} is no variant; variants: {', '.join(spec.variants)}"
        _require(name in spec.variants, fault)
    for key, values in (("variants", spec.variants), ("seeds", spec.seeds), *spec.grid.items()):
        _require(values, f"{key}: {values!r} must hold one value at least")
    searches = spec.sampler != "grid"
    fault = "`search` and `trials` go with `sampler: tpe` or `sampler: random`, and only so"
    # All three or none.
    _require(bool(spec.search) == ((spec.trials or 0) > 0) == searches, fault)
    fault = f"seconds: {spec.seconds!r} must be positive, and goes with a grid, as a search may change the step"
    _require(spec.seconds is None or (spec.seconds > 0 and not searches), fault)
    for variant, changes in spec.variants.items():
        # The grid and the search would make such variants the same.
        for key in changes.keys() & {*spec.grid, *spec.search}:
            raise ValueError(f"{variant}: {key} is in the grid or the search, too; give it once")


def _distribution(key: str, values: Any) -> Any:
    from optuna import distributions

    if isinstance(values, list):
        return distributions.CategoricalDistribution(values)
    try:
        # YAML reads 1e-4 as a text.
        numbers: dict[str, Any] = {
            # Integers stay: they make a range of integers. A bool, as of `log`, is an int, too.
            name: value if isinstance(value, int) else float(value)
            for name, value in values.items()
        }
        if float in map(type, numbers.values()):
            return distributions.FloatDistribution(**numbers)
        return distributions.IntDistribution(**numbers)
    except (AttributeError, TypeError, ValueError) as error:
        fault = f"search.{key}: {values!r} must be a list of choices, or {{low: ..., high: ..., log: true, step: ...}}"
        raise ValueError(f"{fault}: {error}") from error


def _require(condition: Any, fault: str) -> None:
    if not condition:
        raise ValueError(fault)


def quiet(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without loggers, checkpoints, progress bars and tables."""
    # What follows changes the config in place, and the study has one for all its trials.
    result = copy.deepcopy(dict(config))
    for key in ("ckpt_path", "weights_only"):  # in the configs that `fit` saves
        result.pop(key, None)
    # A section that is empty in YAML is None.
    result["trainer"] = trainer = {**(result.get("trainer") or {}), **QUIET}
    entries = [entry for entry in callbacks_of(trainer) if last_part(entry) not in _WATCHERS]
    for entry in entries:
        if last_part(entry) == _CALLBACK:
            entry["init_args"] |= _QUIET_MASKS
    trainer["callbacks"] = entries
    return result


def override(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Apply changes in place: dotted keys or nested mappings; the short keys lead into the NMSparsityCallback.

    A mapping joins the one that is there; one with a ``class_path`` replaces it, as do lists and plain values.

    Raises:
        ValueError: If the config has several NMSparsityCallbacks and a short key is changed.
    """
    for key, value in changes.items():
        # The first part decides: `method.init_args.every` leads into the callback, too.
        is_short = str(key).partition(".")[0] in _SHORT_KEYS
        _merge(_masks(config) if is_short else config, str(key), value)


def _merge(place: dict[str, Any], key: str, value: Any) -> None:
    first, _, rest = key.partition(".")
    there = place.get(first)
    joins = isinstance(value, dict) and isinstance(there, dict) and "class_path" not in value
    if rest or joins:
        # What is no mapping gives way to one; the parser of configs says if that is wrong.
        place[first] = there if isinstance(there, dict) else {}
        # Keys of nested mappings may have dots themselves.
        for inner, each in ({rest: value} if rest else value).items():
            _merge(place[first], str(inner), each)
    else:
        # A copy: later changes may lead into this value, which belongs to the study.
        place[first] = copy.deepcopy(value)


def _masks(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the config's NMSparsityCallback, which is added if there is none."""
    callbacks = callbacks_of(config.setdefault("trainer", {}))
    masks = [entry for entry in callbacks if last_part(entry) == _CALLBACK]
    if not masks:
        masks = [{"class_path": f"lightning_nm.{_CALLBACK}", "init_args": {**_QUIET_MASKS}}]
        # In place, so that the config has it, too: this is the list in its section.
        callbacks += masks
    fault = "the config has several NMSparsityCallbacks: override trainer.callbacks instead"
    _require(len(masks) == 1, fault)
    return masks[0]["init_args"]


def callbacks_of(trainer: dict[str, Any]) -> list[dict[str, Any]]:
    """The callbacks of a section ``trainer``, in place, each as ``{class_path: ..., init_args: {...}}``."""
    given = trainer.get("callbacks") or []
    # Lightning also takes a single callback, and jsonargparse a class path without arguments.
    entries = given if isinstance(given, list) else [given]
    entries = [entry if isinstance(entry, dict) else {"class_path": entry} for entry in entries]
    for entry in entries:
        entry["init_args"] = entry.get("init_args") or {}  # None if it is empty in YAML
    trainer["callbacks"] = entries
    return entries


def last_part(entry: Any) -> str:
    """The class name of an entry ``{class_path: ...}``, or of a class path."""
    path = entry.get("class_path") if isinstance(entry, dict) else entry
    return str(path).rpartition(".")[2]
