"""Lightning callbacks."""

from lightning_nm.callbacks.monitor import MaskMonitor
from lightning_nm.callbacks.quantization import QuantizationAwareTraining
from lightning_nm.callbacks.rng_state import RNGState
from lightning_nm.callbacks.sparsity import NMSparsityCallback

__all__ = ["MaskMonitor", "NMSparsityCallback", "QuantizationAwareTraining", "RNGState"]
