"""Precision plugins for ``lightning.pytorch.Trainer``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_nm.plugins.routing import (
    HalfArguments,
    KernelRouting,
    MixedArguments,
    ShardedArguments,
)
from lightning_nm.sparsifier import NMSparsifier


class _TrainerRouting(KernelRouting):
    """The plugins for the Trainer."""

    keeps_packs = True
    _had_callbacks = False  # whether the Trainer had any when the fit was set up

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Lightning's conversion, for a LightningModule in a Trainer; the micro-batches of a step share packs."""
        if not isinstance(module, pl.LightningModule) or module.fabric is not None:
            own = type(self).__name__
            advice = f"Fabric takes lightning_nm.plugins.fabric.{own}"
            raise TypeError(f"lightning_nm.{own} is for lightning.pytorch.Trainer: {advice}")
        trainer = module.trainer
        self._models.clear()
        self._models.add(module)
        self._checked = False
        self._had_callbacks = bool(_callbacks(trainer))
        self.router.keeps_layouts = self.keeps_packs
        self.router.reset(trainer.accumulate_grad_batches if self.keeps_packs else 1)
        self.router.initialize(trainer.strategy.root_device)
        return super().convert_module(module)  # type: ignore[misc]

    def _require_masked(self) -> None:
        """Refuse to train without a masked layer, except in Lightning's searches."""
        for model in self._models:
            assert isinstance(model, pl.LightningModule)
            if not self._checked and (self._searching(model.trainer) or _all_frozen(model.trainer)):
                return
        super()._require_masked()

    def _searching(self, trainer: pl.Trainer) -> bool:
        """Whether Lightning searches a learning rate or a batch size: it removes the callbacks for both."""
        callbacks = _callbacks(trainer)
        if not callbacks:
            return self._had_callbacks  # a Trainer that never had any is not searching
        return any(type(callback).__name__ == "_LRCallback" for callback in callbacks)

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Lightning's context, if the model has a masked layer."""
        self._require_masked()
        with super().train_step_context():  # type: ignore[misc]
            yield

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save a scaler's state also under the name of Lightning's plugin, which may resume the run."""
        state = self.state_dict()  # type: ignore[attr-defined]
        if state:
            checkpoint[self._stock] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Resume the scaler of a run with Lightning's plugin."""
        if type(self).__qualname__ not in checkpoint and self._stock in checkpoint:
            self.load_state_dict(checkpoint[self._stock])  # type: ignore[attr-defined]

    @property
    def _stock(self) -> str:
        """Name of the Lightning plugin that this one extends."""
        return next(
            cls.__qualname__
            for cls in type(self).__mro__
            if cls.__module__.startswith("lightning.")
        )


def _all_frozen(trainer: pl.Trainer) -> bool:
    """Whether a sparsifier waits for an optimizer to train the layers that it would mask."""
    sparsifiers = (getattr(callback, "sparsifier", None) for callback in _callbacks(trainer))
    return any(isinstance(each, NMSparsifier) and each.selection.waiting for each in sparsifiers)


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return getattr(trainer, "callbacks", [])  # missing in the Trainer's annotations


class NMPrecision(_TrainerRouting, Precision):
    """Float32, with the products of masked layers on the kernels chosen for each.

    CPUs have sparse kernels for float32; GPUs have none, so all products are dense there, except on ``backends=``.

    The arguments are those of :class:`~lightning_nm.plugins.routing.KernelRouting`.
    """


class NMMixedPrecision(MixedArguments, _TrainerRouting, MixedPrecision):
    """Autocast, with the products of masked layers on the kernels chosen for each.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: The device type for autocast; CUDA if there is one.
        scaler: A gradient scaler for ``"16-mixed"``.
        kwargs: Those of :class:`~lightning_nm.plugins.routing.KernelRouting`.
    """


class NMHalfPrecision(HalfArguments, _TrainerRouting, HalfPrecision):
    """Half-precision weights, with the products of masked layers on the kernels chosen for each.

    Args:
        precision: ``"bf16-true"`` or ``"16-true"``.
        kwargs: As :class:`NMMixedPrecision`'s.
    """


class NMFSDPPrecision(ShardedArguments, _TrainerRouting, FSDPPrecision):
    """The precision plugin for ``FSDPStrategy``, with the products of masked layers on the kernels chosen for each.

    No packs are kept: they would hold full weights on every process.

    Args:
        precision: ``"32-true"``, ``"bf16-true"``, ``"16-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        kwargs: As :class:`NMMixedPrecision`'s.
    """

    keeps_packs = False
