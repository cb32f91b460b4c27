"""Lightning callbacks."""

from lightning_nm.callbacks.rng_state import RNGState
from lightning_nm.callbacks.sparsity import NMSparsityCallback

__all__ = ["NMSparsityCallback", "RNGState"]
