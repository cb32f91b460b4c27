from .ddp import NMDDPStrategy as NMDDPStrategy
from .precision import NMFSDPPrecision as NMFSDPPrecision
from .precision import NMHalfPrecision as NMHalfPrecision
from .precision import NMMixedPrecision as NMMixedPrecision
from .precision import NMPrecision as NMPrecision
