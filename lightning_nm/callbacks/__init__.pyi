from .monitor import MaskMonitor as MaskMonitor
from .quantization import QuantizationAwareTraining as QuantizationAwareTraining
from .rng_state import RNGState as RNGState
from .sparsity import NMSparsityCallback as NMSparsityCallback
