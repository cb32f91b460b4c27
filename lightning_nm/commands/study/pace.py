"""Equal training time: how many steps of each cell take the study's seconds on this machine."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import lightning.pytorch as pl

from lightning_nm.commands.study.config import override
from lightning_nm.commands.study.spec import Cell, Spec
from lightning_nm.commands.study.trial import build, silence

STEPS = 20
"""Steps of a timed training."""
ROUNDS = 3
"""Timed trainings of each cell."""
WARM_UP = 6
"""Steps of an untimed training of each cell, before the timed ones."""
_FIRST = 2  # steps that do not count: memory is allocated, kernels are looked up


class _Clock(pl.Callback):
    """Notes when each optimizer step ended, on a clock that stands still in validations."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}
        self._validating = 0.0  # seconds so far

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ends[trainer.global_step] = time.perf_counter() - self._validating

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._validating -= time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._validating += time.perf_counter()


def measure(spec: Spec, cells: list[Cell]) -> list[float]:
    """Seconds of an optimizer step of each cell: the median over short trainings of their mean step.

    A short training has the same phases in the same proportions as a long one, if a method's moments are shares of the
    planned steps; its mean step includes them all. The cells take turns, so that a change of the machine's speed meets
    all of them. A training before those that count lets precision plugins measure kernels. Validation does not count.

    Args:
        spec: The study.
        cells: Which of its cells.
    """
    for cell in cells:
        _mean_step(spec, cell, WARM_UP)
    rounds = [[_mean_step(spec, cell, STEPS) for cell in cells] for _ in range(ROUNDS)]
    return [median(found) for found in zip(*rounds, strict=True)]


def _mean_step(spec: Spec, cell: Cell, steps: int) -> float:
    config = spec.trial_config(cell, {})
    set_steps(config, steps)
    if config["trainer"].get("limit_val_batches") != 0:  # callbacks and schedulers may need a validation
        override(config, {"trainer.limit_val_batches": 1})
    clock = _Clock()
    with silence():
        cli = build(config, spec.seeds[0], spec.classes)
        cli.trainer.callbacks.append(clock)  # type: ignore[attr-defined]
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    ends = [(step, end) for step, end in clock.ends.items() if step >= _FIRST]
    (first, begin), (last, end) = ends[0], ends[-1]
    return (end - begin) / (last - first)


def steps_within(spec: Spec, step_s: float) -> int:
    """How many steps of so many seconds the study's seconds hold, at least one."""
    assert spec.seconds is not None
    return max(1, int(spec.seconds / step_s))


def set_steps(config: dict[str, Any], steps: int) -> None:
    """Let a config's training end after so many optimizer steps, and by nothing else."""
    limits = {"max_steps": steps, "max_epochs": -1, "max_time": None, "min_steps": None, "min_epochs": None}
    override(config, {"trainer": limits})
