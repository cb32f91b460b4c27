from .ddp import NMDDPStrategy as NMDDPStrategy
from .trainer import NMFSDPPrecision as NMFSDPPrecision
from .trainer import NMHalfPrecision as NMHalfPrecision
from .trainer import NMMixedPrecision as NMMixedPrecision
from .trainer import NMPrecision as NMPrecision
