"""A training step tried out: its loss, and as little other effect as can be."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_nm.methods.bame.exchange import achieved_loss_change, adapted_now
from lightning_nm.sparsifier import NMSparsifier


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


class AchievedLoss:
    """What the last adaptation of a fit changed the loss by, found by repeating training steps.

    A figure is not worth a training run: after the first failure one warning, and no more figures.

    Args:
        pl_module: The module.

    Raises:
        ValueError: If it optimizes manually.
    """

    def __init__(self, pl_module: pl.LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} optimizes manually, so its training step cannot be tried without "
                "training: leave log_achieved_loss off"
            )
        self.change: float | None = None
        """The last change; ``None`` before the first adaptation."""
        self._batch: Any = None
        self._working = True

    def keep(self, sparsifier: NMSparsifier, pl_module: pl.LightningModule, batch: Any) -> None:
        """Keep the batch as it came if its loss is to be computed again: training steps like to pop from it."""
        if self._working and any(layer.dense_gradient for layer in sparsifier.layers.values()):
            try:
                self._batch = copy.deepcopy(batch)
            except Exception as error:
                self._give_up(pl_module, error)

    def settle(
        self, sparsifier: NMSparsifier, trainer: pl.Trainer, pl_module: pl.LightningModule, batch_idx: int
    ) -> None:
        """After an optimizer's step and before masks are updated: try the masks if they were adapted."""
        batch, self._batch = self._batch, None
        layers = [layer for layer in sparsifier.layers.values() if adapted_now(layer)]
        if not self._working or not layers:
            return
        try:
            copied, loss = trial_step(trainer, pl_module, batch, batch_idx)
            modules = dict(copied.named_modules())
            names = {id(module): name for name, module in pl_module.named_modules()}
            twins = [modules[names[id(layer.module)]].nm_layers[layer.parameter] for layer in layers]
            self.change = achieved_loss_change(twins, loss)
        except Exception as error:
            self._give_up(pl_module, error)

    def _give_up(self, pl_module: pl.LightningModule, error: Exception) -> None:
        self._working, self.change = False, None
        rank_zero_warn(
            f"log_achieved_loss is switched off: a copy of {type(pl_module).__name__} cannot repeat its training step "
            f"({type(error).__name__}: {error})"
        )
