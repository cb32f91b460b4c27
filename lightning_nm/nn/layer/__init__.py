"""One masked weight: what was decided on it, its masks, and all else that it owns."""

from lightning_nm.nn.layer.layer import NMLayer

__all__ = ["NMLayer"]
