"""Statistics of masks and gradient estimates as torchmetrics: thin classes over :mod:`lightning_nm.functional`.

``update`` takes the tensor of one layer, or a dict of those of several layers by name. A metric describes all entries
since its last reset, as if they were one tensor; a ratio is a float32 number. ``update`` does not synchronize with the
device; ``compute`` does. ``update`` raises the errors of the functional form, and ValueError if its arguments name
different layers. Arguments have the same names everywhere, so a ``MetricCollection`` takes ``update(masks=...,
backward_masks=..., weights=...)``. Constructors take the keyword arguments of :class:`torchmetrics.Metric`.

Masks are equal on all processes, and ratios do not change when each mask is counted several times.
:class:`MaskViolations`, a count, returns the largest count of the processes.
"""

from lightning_nm.metrics.history import MaskFlipRate, MaskOscillation
from lightning_nm.metrics.mask_metrics import (
    GradientSNR,
    KeptMagnitude,
    MaskDensity,
    MaskOverlap,
    MaskViolations,
)

__all__ = [
    "GradientSNR",
    "KeptMagnitude",
    "MaskDensity",
    "MaskFlipRate",
    "MaskOscillation",
    "MaskOverlap",
    "MaskViolations",
]
