"""N:M sparse training for PyTorch Lightning."""

from lightning_nm.callbacks import NMSparsityCallback
from lightning_nm.estimators import GradientEstimator
from lightning_nm.methods import ASP, BAME, SRSTE, STE, BiMask, Dense, Method, TransposableMask
from lightning_nm.pattern import NMPattern
from lightning_nm.sparsifier import NMSparsifier

__all__ = [
    "ASP",
    "BAME",
    "SRSTE",
    "STE",
    "BiMask",
    "Dense",
    "GradientEstimator",
    "Method",
    "NMPattern",
    "NMSparsifier",
    "NMSparsityCallback",
    "TransposableMask",
    "functional",
]

from lightning_nm import functional
