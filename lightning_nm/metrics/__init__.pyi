from .history import MaskFlipRate as MaskFlipRate
from .history import MaskOscillation as MaskOscillation
from .statistics import GradientSNR as GradientSNR
from .statistics import KeptMagnitude as KeptMagnitude
from .statistics import MaskDensity as MaskDensity
from .statistics import MaskOverlap as MaskOverlap
from .statistics import MaskViolations as MaskViolations
