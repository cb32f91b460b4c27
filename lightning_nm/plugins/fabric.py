"""Precision plugins for ``lightning.fabric.Fabric``: those for the Trainer under the same names."""

from __future__ import annotations

from lightning.fabric.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_nm.plugins.routing import (
    HalfArguments,
    KernelRouting,
    MixedArguments,
    ShardedArguments,
)


class _FabricRouting(KernelRouting):
    """The plugins for Fabric, which has no micro-batches of its own: its user sets ``router.reuse``."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Lightning's conversion; one of several models has to have masked layers."""
        self._models.add(module)
        self._checked = False
        return super().convert_module(module)  # type: ignore[misc]


class NMPrecision(_FabricRouting, Precision):
    """As :class:`lightning_nm.NMPrecision`."""


class NMMixedPrecision(MixedArguments, _FabricRouting, MixedPrecision):
    """As :class:`lightning_nm.NMMixedPrecision`."""


class NMHalfPrecision(HalfArguments, _FabricRouting, HalfPrecision):
    """As :class:`lightning_nm.NMHalfPrecision`."""


class NMFSDPPrecision(ShardedArguments, _FabricRouting, FSDPPrecision):
    """As :class:`lightning_nm.NMFSDPPrecision`."""
