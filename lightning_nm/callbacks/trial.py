"""A training step tried out: its loss, and no other effect."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


def trial_step(
    trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
) -> tuple[pl.LightningModule, Callable[[], Tensor]]:
    """A copy of the module, and a function that computes the copy's training loss of a batch.

    Buffers and metrics of the module itself are left alone, nothing is logged, every call sees the same random numbers,
    and the random stream goes on as if there had been no call.

    Raises:
        ValueError: If the module optimizes manually, so that its training step would do more than compute a loss.
    """
    if not pl_module.automatic_optimization:
        raise ValueError(
            f"{type(pl_module).__name__} optimizes manually, so its training step cannot be tried without training: "
            "leave log_achieved_loss off"
        )
    module = copy.deepcopy(pl_module)
    module.trainer = trainer
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *args, **kwargs: None)
    step = inspect.signature(module.training_step).parameters
    arguments = {"batch_idx": batch_idx} if "batch_idx" in step else {}
    devices = [pl_module.device] if pl_module.device.type == "cuda" else []

    def trial() -> Tensor:
        with torch.random.fork_rng(devices=devices), trainer.precision_plugin.train_step_context():
            output = module.training_step(batch, **arguments)
        loss: Any = output["loss"] if isinstance(output, dict) else output
        return loss

    return module, trial
