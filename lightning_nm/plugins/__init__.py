"""What a Trainer takes beside callbacks: precision plugins that route the products of masked layers, and a strategy.

Those for Fabric are in ``plugins.fabric``. Importing the package registers the strategy as ``nm_ddp``.
"""

from lightning_nm.plugins.ddp import NMDDPStrategy
from lightning_nm.plugins.trainer import (
    NMFSDPPrecision,
    NMHalfPrecision,
    NMMixedPrecision,
    NMPrecision,
)

__all__ = ["NMDDPStrategy", "NMFSDPPrecision", "NMHalfPrecision", "NMMixedPrecision", "NMPrecision"]
