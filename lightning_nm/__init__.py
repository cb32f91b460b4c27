"""N:M sparse training for PyTorch Lightning."""

from typing import TYPE_CHECKING, Any

from lightning_nm import functional, metrics
from lightning_nm.callbacks import (
    MaskMonitor,
    NMSparsityCallback,
    QuantizationAwareTraining,
    RNGState,
)
from lightning_nm.config import SparsityConfig, preset_method
from lightning_nm.estimators import MVUE, ApproxMVUE, GradientEstimator, TopN
from lightning_nm.export import (
    load_packed,
    pack,
    packed_summary,
    save_packed,
    unpacked_state_dict,
    warm_up,
)
from lightning_nm.methods import (
    ASP,
    BAME,
    CAST,
    LBC,
    SRSTE,
    SSTE,
    STE,
    STEP,
    BiMask,
    DecayingMask,
    Dense,
    MaskLogits,
    MaxQ,
    Method,
    RigL,
    SLoPe,
    TransposableMask,
)
from lightning_nm.methods.prune import prune
from lightning_nm.pattern import NMPattern
from lightning_nm.plugins import (
    NMDDPStrategy,
    NMFSDPPrecision,
    NMHalfPrecision,
    NMMixedPrecision,
    NMPrecision,
)
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.checkpoint import rename_layers

__version__ = "0.3.0"

# At run time __getattr__ below imports it.
if TYPE_CHECKING:
    from lightning_nm.commands.lightning_cli import NMLightningCLI

__all__ = [
    "ASP",
    "BAME",
    "CAST",
    "LBC",
    "MVUE",
    "SRSTE",
    "SSTE",
    "STE",
    "STEP",
    "ApproxMVUE",
    "BiMask",
    "DecayingMask",
    "Dense",
    "GradientEstimator",
    "MaskLogits",
    "MaskMonitor",
    "MaxQ",
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
    "QuantizationAwareTraining",
    "RNGState",
    "RigL",
    "SLoPe",
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
    "rename_layers",
    "save_packed",
    "unpacked_state_dict",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    """Import the command line's class when it is asked for: its packages take a while, and are in an extra."""
    if name == "NMLightningCLI":
        from lightning_nm.commands.lightning_cli import NMLightningCLI

        return NMLightningCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
