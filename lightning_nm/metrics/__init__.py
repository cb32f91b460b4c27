"""Statistics of masks and gradient estimates as torchmetrics: thin classes over :mod:`lightning_nm.functional`.

``update`` takes the tensor of one layer, or those of several layers by name. A metric describes all entries since its
last reset, as if they were one tensor. ``update`` does not synchronize with the device; ``compute`` does. Arguments
have the same names everywhere, so a ``MetricCollection`` takes ``update(masks=..., backward_masks=..., weights=...)``.

Masks are equal on all processes, and ratios do not change when each mask is counted several times.
:class:`MaskViolations`, a count, returns the largest count of the processes.
"""

from lightning_nm.metrics.gradient_snr import GradientSNR
from lightning_nm.metrics.kept_magnitude import KeptMagnitude
from lightning_nm.metrics.mask_density import MaskDensity
from lightning_nm.metrics.mask_flip_rate import MaskFlipRate
from lightning_nm.metrics.mask_oscillation import MaskOscillation
from lightning_nm.metrics.mask_overlap import MaskOverlap
from lightning_nm.metrics.mask_violations import MaskViolations

__all__ = [
    "GradientSNR",
    "KeptMagnitude",
    "MaskDensity",
    "MaskFlipRate",
    "MaskOscillation",
    "MaskOverlap",
    "MaskViolations",
]
