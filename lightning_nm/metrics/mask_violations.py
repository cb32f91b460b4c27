"""Blocks that hold more than N nonzeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional import count_violations
from lightning_nm.metrics.base import Layers, NMMetric, by_name
from lightning_nm.pattern import NMPattern, PatternLike


class MaskViolations(NMMetric):
    """Number of blocks of M that hold more than N nonzeros, over all layers and updates.

    ``update(masks)`` takes masks, or values whose nonzeros are counted; a tensor or a dict by layer name. ``compute()``
    returns an int64 number. The functional form is :func:`count_violations`. Use one metric per pattern.

    Processes have equal masks, so the result is the largest of their counts. As counts add up over updates,
    ``forward`` needs the full state and updates twice, and ``merge_state`` is refused.

    Args:
        pattern: Any form that :meth:`NMPattern.parse` reads.
        dim: The axis along which the blocks lie.
        kwargs: Arguments of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: If the pattern cannot be read; on update, if M does not divide the size of the axis.
        IndexError: On update, if there is no such axis.

    Example::

        >>> import torch
        >>> violations = MaskViolations("2:4")
        >>> violations.update(torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]))
        >>> violations.compute()
        tensor(1)
    """

    higher_is_better = False
    full_state_update = True
    plot_upper_bound = None

    violations: Tensor

    def __init__(self, pattern: PatternLike, dim: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pattern = NMPattern.parse(pattern)
        self.dim = dim
        self.add_state("violations", default=torch.tensor(0), dist_reduce_fx="max")
        # A MetricCollection updates only one of several metrics whose states are equal after the first update.
        self.add_state("blocks", default=torch.tensor([self.pattern.n, self.pattern.m, dim]), dist_reduce_fx="max")

    def update(self, masks: Layers) -> None:
        """Count the blocks of masks or values that break the pattern."""
        violations = self.violations
        for name, mask in by_name(masks).items():
            try:
                violations = violations + count_violations(mask, self.pattern, self.dim)
            except (ValueError, IndexError) as error:
                raise type(error)(f"layer '{name}': {error}" if name else str(error)) from None
        self.violations = violations

    def compute(self) -> Tensor:
        """Return the count."""
        return self.violations
