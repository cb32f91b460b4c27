"""Precision plugins that route the products of masked layers; those for Fabric are in ``plugins.fabric``."""

from lightning_nm.plugins.trainer import NMFSDPPrecision, NMHalfPrecision, NMMixedPrecision, NMPrecision

__all__ = ["NMFSDPPrecision", "NMHalfPrecision", "NMMixedPrecision", "NMPrecision"]
