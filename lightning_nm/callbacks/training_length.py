"""The planned number of optimizer steps of a Trainer, for schedules that are given as shares of it."""

from __future__ import annotations

import math

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_nm.estimators import GradientEstimator
from lightning_nm.methods import Method
from lightning_nm.nn.selection.selection import Rule


def has_schedule(part: Method | GradientEstimator | None) -> bool:
    """Return whether a method or an estimator starts or stops during training.

    Example:
        >>> from lightning_nm import BAME, SRSTE
        >>> has_schedule(BAME()), has_schedule(SRSTE()), has_schedule(None)
        (True, False, False)
    """
    if part is None:
        return False
    try:
        return bool(part.schedule(None))
    except ValueError:
        # The schedule is given as shares of the training length, which is not known here.
        return True


def is_scheduled(rule: Rule) -> bool:
    """Return whether anything that a rule gives its layers starts or stops during training."""
    has_stages = rule.schedule is not None
    return has_stages or has_schedule(rule.method) or has_schedule(rule.estimator)


def planned_steps(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int | None:
    """Return the number of optimizer steps of the whole training; ``None`` if the Trainer does not know it."""
    if not pl_module.automatic_optimization:  # a batch takes any number of steps
        return None
    if getattr(trainer, "fast_dev_run", False):  # one step of a training of unknown length
        return 1 << 30
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        # Lightning cannot estimate the number of steps where they have different numbers of batches. -1 is its sign for
        # no limit of epochs: then max_steps alone ends the training.
        planned: float = trainer.max_steps if trainer.max_epochs == -1 else math.inf
    else:
        planned = trainer.estimated_stepping_batches
    # A training without end has -1 or infinitely many steps.
    is_known = 0 < planned < math.inf
    return int(planned) if is_known else None
