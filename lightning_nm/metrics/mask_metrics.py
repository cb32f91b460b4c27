"""Metrics of single masks, weights and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional import count_violations
from lightning_nm.functional.mask_statistics import (
    DENSITY,
    GRADIENT_SNR,
    KEPT_MAGNITUDE,
    OVERLAP,
    density_counts,
    gradient_energies,
    magnitude_sums,
    overlap_counts,
)
from lightning_nm.metrics.layer_metric import Layers, NMMetric, RatioMetric, by_name, pairs
from lightning_nm.pattern import NMPattern, PatternLike


class MaskDensity(RatioMetric):
    r"""Fraction of entries that masks keep, over layers and updates: :math:`\sum_i \#\{x_i \ne 0\} / \sum_i \#x_i`.

    ``update(masks)`` takes masks, or values whose nonzeros are counted. The functional form is :func:`mask_density`.

    Example:
        >>> density = MaskDensity()
        >>> density.update({"0": torch.tensor([True, False, False, True]), "1": torch.tensor([1.0, 0.0, 0.0, 0.0])})
        >>> density.compute()
        tensor(0.3750)
    """

    higher_is_better = None  # the pattern decides
    ratio = DENSITY
    sums = ("nonzeros", "entries")

    def update(self, masks: Layers) -> None:
        """Count the nonzeros of masks or values."""
        self.add(density_counts(mask) for mask in by_name(masks).values())


class MaskOverlap(RatioMetric):
    r"""Fraction of the forward masks' entries that backward masks keep: :math:`\sum_i |F_i \cap B_i| / \sum_i |F_i|`.

    ``update(masks, backward_masks)`` takes bool masks. Errors are those of the functional form, :func:`mask_overlap`.

    Example:
        >>> overlap = MaskOverlap()
        >>> overlap.update(torch.tensor([True, True, False, False]), torch.tensor([True, False, False, False]))
        >>> overlap.compute()
        tensor(0.5000)
    """

    higher_is_better = True
    ratio = OVERLAP
    sums = ("both", "forward_entries")

    def update(self, masks: Layers, backward_masks: Layers) -> None:
        """Count the common entries."""
        self.add(overlap_counts(*pair) for pair in pairs(masks, backward_masks))


class KeptMagnitude(RatioMetric):
    r"""Fraction of the magnitude of all weights that their masks keep: :math:`\sum_{j \in m} |W_j| / \sum_j |W_j|`.

    ``update(weights, masks)`` takes weights of any floating dtype and bool masks. After a NaN or an infinity the result
    is NaN until the next reset. Errors are those of the functional form, :func:`kept_magnitude`.

    Example:
        >>> kept = KeptMagnitude()
        >>> kept.update(torch.tensor([3.0, -4.0, 2.0, -1.0]), torch.tensor([True, True, False, False]))
        >>> kept.compute()
        tensor(0.7000)
    """

    higher_is_better = True
    ratio = KEPT_MAGNITUDE
    sums = ("kept", "total")
    sum_dtype = torch.float64

    def update(self, weights: Layers, masks: Layers) -> None:
        """Add magnitudes."""
        self.add(magnitude_sums(*pair) for pair in pairs(weights, masks))


class GradientSNR(RatioMetric):
    r"""Norm of the exact gradients over the norm of the estimates' errors; not in decibels.

    .. math:: \sqrt{\sum_i \|G_i\|^2 / \sum_i \|\hat G_i - G_i\|^2}

    All gradients count as one long vector, as in ``nm/grad_snr``. ``update(exact, estimate)`` takes gradients of any
    floating dtype. After a NaN or an infinity the result is NaN until the next reset. Errors are those of the
    functional form, :func:`gradient_snr`.

    Example:
        >>> snr = GradientSNR()
        >>> snr.update(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0]))
        >>> snr.compute()
        tensor(2.5000)
    """

    higher_is_better = True
    plot_upper_bound = None  # infinite for an exact estimate
    ratio = GRADIENT_SNR
    sums = ("signal", "error")
    sum_dtype = torch.float64

    def update(self, exact: Layers, estimate: Layers) -> None:
        """Add squared norms."""
        self.add(gradient_energies(*pair) for pair in pairs(exact, estimate))


class MaskViolations(NMMetric):
    """Number of blocks of M that hold more than N nonzeros, over all layers and updates.

    ``update(masks)`` takes masks, or values whose nonzeros are counted. Errors are those of the functional form,
    :func:`count_violations`. The result is int64, the largest count of the processes, whose masks are equal. As counts
    add up over updates, ``forward`` needs the full state and updates twice, and ``merge_state`` is refused.

    Args:
        pattern: Any form that :meth:`NMPattern.parse` reads; use one metric per pattern.
        dim: The axis along which the blocks lie.
        kwargs: Arguments of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: If the pattern cannot be read.

    Example:
        >>> violations = MaskViolations("2:4")
        >>> violations.update(torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]))
        >>> violations.compute()
        tensor(1)
    """

    higher_is_better = False
    # Otherwise forward() would merge the states by `max`, which is for processes: counts of updates add up.
    full_state_update = True
    plot_upper_bound = None

    violations: Tensor

    def __init__(self, pattern: PatternLike, dim: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pattern = NMPattern.parse(pattern)
        self.dim = dim
        # The masks of all processes are equal: a sum over them would count every block several times.
        self.add_state(
            "violations", default=torch.tensor(0, dtype=torch.int64), dist_reduce_fx="max"
        )
        # A MetricCollection updates only one of several metrics whose states are equal after the first update.
        blocks = torch.tensor([self.pattern.n, self.pattern.m, dim], dtype=torch.int64)
        self.add_state("blocks", default=blocks, dist_reduce_fx="max")

    def update(self, masks: Layers) -> None:
        """Count the blocks of masks or values that break the pattern."""
        violations = self.violations
        for name, mask in by_name(masks).items():
            try:
                violations = violations + count_violations(mask, self.pattern, self.dim)
            except (ValueError, IndexError) as error:
                # A lone tensor has no name.
                where = f"layer '{name}': " if name else ""
                raise type(error)(f"{where}{error}") from None
        # Assigned once, at the end: nothing changes if a layer raises an error.
        self.violations = violations

    def compute(self) -> Tensor:
        """Return the count."""
        return self.violations
