"""Precision plugins for ``lightning.fabric.Fabric``: as those for the Trainer, under the same names."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.fabric.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_nm.plugins.routing import KernelRouting, default_device


class _FabricRouting(KernelRouting):
    """What the plugins for Fabric share: it has no micro-batches of its own, so ``router.reuse`` is for its user."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Lightning's conversion; one of several models has to have masked layers."""
        self._models.add(module)
        self._checked = False
        return super().convert_module(module)  # type: ignore[misc]


class NMPrecision(_FabricRouting, Precision):
    """As :class:`lightning_nm.NMPrecision`."""


class NMMixedPrecision(_FabricRouting, MixedPrecision):
    """As :class:`lightning_nm.NMMixedPrecision`."""

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"] = "bf16-mixed",
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(precision=precision, device=device or default_device(), scaler=scaler, **kwargs)


class NMHalfPrecision(_FabricRouting, HalfPrecision):
    """As :class:`lightning_nm.NMHalfPrecision`."""

    def __init__(self, precision: Literal["bf16-true", "16-true"] = "bf16-true", **kwargs: Any) -> None:
        super().__init__(precision=precision, **kwargs)


class NMFSDPPrecision(_FabricRouting, FSDPPrecision):
    """As :class:`lightning_nm.NMFSDPPrecision`."""

    def __init__(
        self,
        precision: Literal["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"] = "bf16-mixed",
        **kwargs: Any,
    ) -> None:
        super().__init__(precision=precision, **kwargs)
