"""Precision plugins for ``lightning.fabric.Fabric``: those for the Trainer under the same names."""

from __future__ import annotations

from lightning.fabric.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_nm.plugins.precision import (
    HalfArguments,
    KernelRouting,
    MixedArguments,
    ShardedArguments,
)


class _FabricRouting(KernelRouting):
    """What the plugins for Fabric have in common.

    Fabric does not count micro-batches: its user sets ``router.reuse`` to the number that share a packed weight.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Remember a model, and convert it as Lightning does; one of several models has to have masked layers."""
        # Fabric calls this once for each model that it sets up, as for the two of a GAN.
        self._models.add(module)
        self._checked = False
        return super().convert_module(module)  # type: ignore[misc]


class NMPrecision(_FabricRouting, Precision):
    """Float32 with sparse kernels for Fabric; the arguments are those of :class:`lightning_nm.NMPrecision`.

    Example::

        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(plugins=[NMPrecision()], accelerator="cpu")
    """


class NMMixedPrecision(MixedArguments, _FabricRouting, MixedPrecision):
    """Autocast with sparse kernels for Fabric; the arguments are those of :class:`lightning_nm.NMMixedPrecision`.

    Example::

        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(plugins=[NMMixedPrecision("bf16-mixed", device="cpu")], accelerator="cpu")
    """


class NMHalfPrecision(HalfArguments, _FabricRouting, HalfPrecision):
    """Half-precision weights with sparse kernels for Fabric; arguments as of :class:`lightning_nm.NMHalfPrecision`.

    Example::

        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(plugins=[NMHalfPrecision("bf16-true")], accelerator="cpu")
    """


class NMFSDPPrecision(ShardedArguments, _FabricRouting, FSDPPrecision):
    """The precision of FSDP with sparse kernels for Fabric; arguments as of :class:`lightning_nm.NMFSDPPrecision`.

    Example:
        >>> NMFSDPPrecision("bf16-mixed").precision
        'bf16-mixed'
    """
