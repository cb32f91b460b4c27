"""Lightning callbacks."""

from lightning_nm.callbacks.sparsity import NMSparsityCallback

__all__ = ["NMSparsityCallback"]
