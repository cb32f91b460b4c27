"""Lightning strategies; importing the package registers them by name."""

from lightning_nm.strategies.ddp import NMDDPStrategy

__all__ = ["NMDDPStrategy"]
