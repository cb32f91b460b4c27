"""A training step tried out: its loss, and as little other effect as can be."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor


def trial_step(
    trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
) -> tuple[pl.LightningModule, Callable[[], Tensor]]:
    """A copy of the module, and a function that computes the copy's training loss of a batch.

    What the module itself holds (buffers, metrics, lists) is left alone and nothing is logged. Every call sees the same
    random numbers of torch, numpy and Python, and their streams go on as if there had been no call.
    """
    module = copy.deepcopy(pl_module)
    with contextlib.suppress(ValueError):  # raised for a module that is not compiled
        to_uncompiled(module)  # the copy's compiled methods are those of the original
    for part in module.modules():
        part._compiled_call_impl = None  # and so is what `module.compile()` left in a LightningModule
    module.trainer = trainer
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *args, **kwargs: None)
    position = (batch_idx,) if len(inspect.signature(module.training_step).parameters) > 1 else ()

    def trial() -> Tensor:
        given = copy.deepcopy(batch)  # steps pop from it and scale it
        with isolate_rng(), torch.enable_grad(), trainer.precision_plugin.train_step_context():
            output = module.training_step(given, *position)
        loss: Any = output["loss"] if isinstance(output, dict) else output
        return loss

    return module, trial
