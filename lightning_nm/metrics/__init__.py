"""What masks and gradient estimates do, as torchmetrics: thin classes over :mod:`lightning_nm.functional`.

A metric is updated with the tensor of one layer, or with those of several layers by name, and describes all entries
that it saw since it was reset, as if they were one tensor. Updates do not wait for a device; ``compute`` does. The
arguments have the same names everywhere, so a ``MetricCollection`` takes ``update(masks=..., backward_masks=...,
weights=...)`` and gives each metric what it needs.

Masks are equal on all processes, and ratios do not change when all of them are counted twice; :class:`MaskViolations`,
a count, is the largest of the processes'.
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
