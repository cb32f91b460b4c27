"""How long a training will be, as far as a Trainer can tell, and who wants to know."""

from __future__ import annotations

import math

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_nm.estimators import GradientEstimator
from lightning_nm.methods import Method


def has_schedule(part: Method | GradientEstimator | None) -> bool:
    """Whether something begins or ends while training, so that the plan matters."""
    if part is None:
        return False
    try:
        return bool(part.schedule(None))
    except ValueError:  # shares of a plan
        return True


def planned_steps(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int | None:
    """The batches after which the optimizer will step in the whole training, if the Trainer can tell."""
    if not pl_module.automatic_optimization:  # any number of steps a batch
        return None
    if getattr(trainer, "fast_dev_run", False):  # one step of a training whose length it does not know
        return 1 << 30
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        planned: float = trainer.max_steps if trainer.max_epochs == -1 else math.inf
    else:
        planned = trainer.estimated_stepping_batches
    return int(planned) if 0 < planned < math.inf else None
