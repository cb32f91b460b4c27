"""Precision plugins for ``lightning.pytorch.Trainer``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_nm.plugins.routing import KernelRouting, default_device


class _TrainerRouting(KernelRouting):
    """What the Trainer's plugins share."""

    keeps_packs = True

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Lightning's conversion; the micro-batches of a step share packs.

        Raises:
            TypeError: If this is no module in a Trainer.
        """
        if not isinstance(module, pl.LightningModule) or module.fabric is not None:
            raise TypeError(
                f"lightning_nm.{type(self).__name__} is for lightning.pytorch.Trainer: Fabric takes "
                f"lightning_nm.plugins.fabric.{type(self).__name__}"
            )
        trainer = module.trainer
        self._models.clear()
        self._models.add(module)
        self._checked = False
        self.router.reset(trainer.accumulate_grad_batches if self.keeps_packs else 1)
        self.router.initialize(trainer.strategy.root_device)
        return super().convert_module(module)  # type: ignore[misc]

    def _require_masked(self) -> None:
        """Refuse to train without a masked layer, but for searches of Lightning's."""
        for model in self._models:
            assert isinstance(model, pl.LightningModule)
            if not self._checked and _searching(model.trainer):
                return
        super()._require_masked()

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Lightning's context; the first one looks for masked layers.

        Raises:
            RuntimeError: If there is none.
        """
        self._require_masked()
        with super().train_step_context():  # type: ignore[misc]
            yield

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save a scaler's state under the name of Lightning's plugin, too: the run may go on without this one."""
        state = self.state_dict()  # type: ignore[attr-defined]
        if state:
            checkpoint[self._stock] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the scaler of a run that had Lightning's plugin."""
        if type(self).__qualname__ not in checkpoint and self._stock in checkpoint:
            self.load_state_dict(checkpoint[self._stock])  # type: ignore[attr-defined]

    @property
    def _stock(self) -> str:
        """Name of the Lightning plugin that this one extends."""
        return next(cls.__qualname__ for cls in type(self).__mro__ if cls.__module__.startswith("lightning."))


def _searching(trainer: pl.Trainer) -> bool:
    """Whether Lightning looks for a learning rate or, by all that can be seen, for a batch size.

    It takes the callbacks away for both.
    """
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    return not callbacks or any(type(callback).__name__ == "_LRCallback" for callback in callbacks)


class NMPrecision(_TrainerRouting, Precision):
    """Full precision. GPUs have no sparse kernel for it: this plugin is for kernels from outside, and for tests.

    The arguments are those of :class:`~lightning_nm.plugins.routing.KernelRouting`.
    """


class NMMixedPrecision(_TrainerRouting, MixedPrecision):
    """Autocast, with the products of masked layers on the kernels chosen for each.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: The device type for autocast; CUDA where there is one.
        scaler: A gradient scaler for ``"16-mixed"``.
        kwargs: Those of :class:`~lightning_nm.plugins.routing.KernelRouting`.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"] = "bf16-mixed",
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(precision=precision, device=device or default_device(), scaler=scaler, **kwargs)


class NMHalfPrecision(_TrainerRouting, HalfPrecision):
    """Half-precision weights, with the products of masked layers on the kernels chosen for each.

    Args:
        precision: ``"bf16-true"`` or ``"16-true"``.
        kwargs: Those of :class:`~lightning_nm.plugins.routing.KernelRouting`.
    """

    def __init__(self, precision: Literal["bf16-true", "16-true"] = "bf16-true", **kwargs: Any) -> None:
        if precision not in ("bf16-true", "16-true"):
            raise ValueError(f"precision={precision!r} is unknown: use 'bf16-true' or '16-true'")
        super().__init__(precision=precision, **kwargs)


class NMFSDPPrecision(_TrainerRouting, FSDPPrecision):
    """The precision plugin for ``FSDPStrategy``, with the products of masked layers on the kernels chosen for each.

    Packs are made for each product: kept ones would hold whole weights on every process.

    Args:
        precision: ``"32-true"``, ``"bf16-true"``, ``"16-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        kwargs: Those of :class:`~lightning_nm.plugins.routing.KernelRouting`.
    """

    keeps_packs = False

    def __init__(
        self,
        precision: Literal["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"] = "bf16-mixed",
        **kwargs: Any,
    ) -> None:
        super().__init__(precision=precision, **kwargs)
