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
    """What the plugins for the Trainer have in common."""

    keeps_packs = True  # whether a packed weight is kept for the micro-batches of a step
    _had_callbacks = False  # whether the Trainer had any when the fit was set up

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare for a fit, and convert the module as Lightning does; the micro-batches of a step share packs."""
        # The strategy calls this once in each call of the Trainer, before on_fit_start. Within Fabric a LightningModule
        # has the attribute `fabric`, and no Trainer.
        if not isinstance(module, pl.LightningModule) or module.fabric is not None:
            own = type(self).__name__
            advice = f"Fabric takes lightning_nm.plugins.fabric.{own}"
            raise TypeError(f"lightning_nm.{own} is for lightning.pytorch.Trainer: {advice}")
        trainer = module.trainer
        self._models.clear()  # that of an earlier fit
        self._models.add(module)
        self._checked = False
        self._had_callbacks = bool(_callbacks(trainer))

        # A weight stays the same during the micro-batches of a step, so each uses the same pack.
        pack_uses = trainer.accumulate_grad_batches if self.keeps_packs else 1
        self.router.keeps_layouts = self.keeps_packs
        self.router.reset(pack_uses)
        self.router.initialize(trainer.strategy.root_device)
        return super().convert_module(module)  # type: ignore[misc]

    def _require_masked(self) -> None:
        """Refuse to train without a masked layer, except in Lightning's searches."""
        for model in self._models:
            if self._checked:
                break
            assert isinstance(model, pl.LightningModule)
            trainer = model.trainer
            # A search trains without the callback that masks, and frozen layers are masked later.
            if self._is_searching(trainer) or _waits_for_frozen_layers(trainer):
                return
        super()._require_masked()

    def _is_searching(self, trainer: pl.Trainer) -> bool:
        """Whether Lightning searches a learning rate or a batch size."""
        # For both it removes the Trainer's callbacks; for a learning rate it adds one of its own, a private class.
        callbacks = _callbacks(trainer)
        if not callbacks:
            return self._had_callbacks  # a Trainer that never had any is not searching
        return any(type(callback).__name__ == "_LRCallback" for callback in callbacks)

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Lightning's context, if the model has a masked layer."""
        # Callbacks have masked the model in on_fit_start, so an error comes before the first forward pass.
        self._require_masked()
        with super().train_step_context():  # type: ignore[misc]
            yield

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save a scaler's state also under the name of Lightning's plugin, which may resume the run."""
        # Lightning itself saves it under the name of this class.
        state = self.state_dict()  # type: ignore[attr-defined]
        if state:
            checkpoint[self._lightning_name] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Resume the scaler of a run with Lightning's plugin."""
        # A state under the name of this class is loaded by Lightning.
        own_name = type(self).__qualname__
        if own_name not in checkpoint and self._lightning_name in checkpoint:
            self.load_state_dict(checkpoint[self._lightning_name])  # type: ignore[attr-defined]

    @property
    def _lightning_name(self) -> str:
        """Name of the Lightning plugin that this one extends."""
        names = [
            base.__qualname__
            for base in type(self).__mro__
            if base.__module__.startswith("lightning.")
        ]
        return names[0]  # the nearest base class; the others are bases of it


def _waits_for_frozen_layers(trainer: pl.Trainer) -> bool:
    """Whether a sparsifier waits for an optimizer to train the layers that it would mask."""
    for callback in _callbacks(trainer):
        sparsifier = getattr(callback, "sparsifier", None)
        if isinstance(sparsifier, NMSparsifier) and sparsifier.selection.frozen:
            return True
    return False


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return getattr(trainer, "callbacks", [])  # missing in the Trainer's annotations


# In each class below the arguments' mixin comes first: it passes them by name to the router's mixin, which keeps its
# own and passes the rest to Lightning's plugin.


class NMPrecision(_TrainerRouting, Precision):
    """Float32, with the products of masked layers on the kernels chosen for each.

    CPUs have sparse kernels for float32; GPUs have none, so all products are dense there, except on ``backends=``.

    The arguments are those of :class:`~lightning_nm.plugins.routing.KernelRouting`.

    Example::

        >>> trainer = pl.Trainer(plugins=[NMPrecision()], logger=False, accelerator="cpu")
    """


class NMMixedPrecision(MixedArguments, _TrainerRouting, MixedPrecision):
    """Autocast, with the products of masked layers on the kernels chosen for each.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: The device type for autocast; CUDA if there is one.
        scaler: A gradient scaler for ``"16-mixed"``.
        kwargs: Those of :class:`~lightning_nm.plugins.routing.KernelRouting`.

    Example::

        >>> plugin = NMMixedPrecision("bf16-mixed", device="cpu", kernels="auto")
        >>> trainer = pl.Trainer(plugins=[plugin], logger=False, accelerator="cpu")
    """


class NMHalfPrecision(HalfArguments, _TrainerRouting, HalfPrecision):
    """Half-precision weights, with the products of masked layers on the kernels chosen for each.

    Args:
        precision: ``"bf16-true"`` or ``"16-true"``.
        kwargs: Those of :class:`~lightning_nm.plugins.routing.KernelRouting`.

    Example::

        >>> trainer = pl.Trainer(plugins=[NMHalfPrecision("bf16-true")], logger=False, accelerator="cpu")
    """


class NMFSDPPrecision(ShardedArguments, _TrainerRouting, FSDPPrecision):
    """The precision plugin for ``FSDPStrategy``, with the products of masked layers on the kernels chosen for each.

    No packs are kept: they would hold full weights on every process.

    Args:
        precision: ``"32-true"``, ``"bf16-true"``, ``"16-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        kwargs: Those of :class:`~lightning_nm.plugins.routing.KernelRouting`.

    Example:
        >>> plugin = NMFSDPPrecision("bf16-mixed")
        >>> plugin.precision
        'bf16-mixed'
    """

    keeps_packs = False
