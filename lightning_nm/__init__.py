"""N:M sparse training for PyTorch Lightning."""

from typing import TYPE_CHECKING, Any

from lightning_nm import functional, metrics, moved
from lightning_nm.callbacks import MaskMonitor, NMSparsityCallback, RNGState
from lightning_nm.config import SparsityConfig
from lightning_nm.estimators import MVUE, ApproxMVUE, GradientEstimator, TopN
from lightning_nm.export import load_packed, pack, packed_summary, save_packed, unpacked_state_dict, warm_up
from lightning_nm.methods import ASP, BAME, SRSTE, STE, BiMask, Dense, Method, TransposableMask
from lightning_nm.one_shot import prune
from lightning_nm.pattern import NMPattern
from lightning_nm.plugins import NMFSDPPrecision, NMHalfPrecision, NMMixedPrecision, NMPrecision
from lightning_nm.presets import preset_method
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.strategies import NMDDPStrategy

__version__ = "0.2.0"

if TYPE_CHECKING:
    from lightning_nm.lightning_cli import NMLightningCLI

moved.install()

__all__ = [
    "ASP",
    "BAME",
    "MVUE",
    "SRSTE",
    "STE",
    "ApproxMVUE",
    "BiMask",
    "Dense",
    "GradientEstimator",
    "MaskMonitor",
    "Method",
    "NMDDPStrategy",
    "NMFSDPPrecision",
    "NMHalfPrecision",
    "NMLightningCLI",
    "NMMixedPrecision",
    "NMPattern",
    "NMPrecision",
    "NMSparsifier",
    "NMSparsityCallback",
    "RNGState",
    "SparsityConfig",
    "TopN",
    "TransposableMask",
    "__version__",
    "functional",
    "load_packed",
    "metrics",
    "pack",
    "packed_summary",
    "preset_method",
    "prune",
    "save_packed",
    "unpacked_state_dict",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    """Import the command line's class when it is asked for: its packages take a while, and are in an extra."""
    if name == "NMLightningCLI":
        from lightning_nm.lightning_cli import NMLightningCLI

        return NMLightningCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
