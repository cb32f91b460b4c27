"""Base classes of the metrics, and arguments that are one layer or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_nm.functional.mask_statistics import Ratio

if TYPE_CHECKING:  # only plots need matplotlib
    from matplotlib.axes import Axes

Layers: TypeAlias = Tensor | Mapping[str, Tensor]
"""The tensor of one layer, or those of several layers by name."""


class NMMetric(Metric):
    """Base class of the metrics: a statistic between 0 and 1, unless a subclass says otherwise."""

    # Class attributes of torchmetrics. full_state_update=False: forward() computes the value of the batch alone and
    # merges the states, instead of updating twice.
    is_differentiable = False
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound: float | None = 1.0

    def plot(
        self,
        val: Tensor | Sequence[Tensor] | None = None,
        ax: Axes | None = None,
    ) -> tuple[Any, Any]:
        """Plot values in the order of time, ``compute()`` by default; return the figure, None with ``ax``, and axes."""
        return self._plot(val, ax)


class RatioMetric(NMMetric):
    """A ratio of two sums over layers, updates and processes; subclasses define the class attributes and ``update``.

    Example:
        >>> from lightning_nm.functional.mask_statistics import DENSITY
        >>> class Density(RatioMetric):
        ...     ratio = DENSITY
        ...     sums = ("nonzeros", "entries")
        ...     def update(self, masks):
        ...         self.add((mask.count_nonzero(), mask.numel()) for mask in by_name(masks).values())
        >>> density = Density()
        >>> density.update(torch.tensor([True, False]))
        >>> density.compute()
        tensor(0.5000)
    """

    ratio: Ratio
    sums: tuple[str, str]
    """Names of the two states, numerator first."""
    sum_dtype = torch.int64
    """Dtype of the sums: int64 for counts, which stay exact, float64 for magnitudes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.sums:
            zero = torch.zeros((), dtype=self.sum_dtype)
            # Summed over processes. Masks are equal on all of them, so both sums of their ratios grow by one factor.
            self.add_state(name, default=zero, dist_reduce_fx="sum")

    def add(self, parts: Iterable[tuple[Tensor | int, Tensor | int]]) -> None:
        """Add pairs to the two sums; nothing is added if an error is raised.

        Sums are not changed in place: one that was reset in inference mode may be updated outside of it.
        """
        totals = [getattr(self, name) for name in self.sums]
        # `parts` may be a generator that checks as it goes, and raises at a later layer.
        for part in parts:
            totals = [total + value for total, value in zip(totals, part, strict=True)]
        for name, total in zip(self.sums, totals, strict=True):
            setattr(self, name, total)

    def compute(self) -> Tensor:
        """Return the ratio, float32 and without axes."""
        return self.ratio(*[getattr(self, name) for name in self.sums])


def by_name(layers: Layers) -> Mapping[str, Tensor]:
    """Return layers by name; a lone tensor has the empty name. Refuse all else by a TypeError."""
    if isinstance(layers, Tensor):
        return {"": layers}
    if not isinstance(layers, Mapping):
        raise TypeError(
            f"{type(layers).__name__} given: pass the tensor of one layer, or a dict of tensors by name"
        )
    for name, tensor in layers.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"layer '{name}' has {tensor!r} in place of a tensor: leave out layers without masks"
            )
    return layers


def pairs(one: Layers, other: Layers) -> list[tuple[Tensor, Tensor, str]]:
    """Return the two tensors and the name of each layer. Refuse different layers by a ValueError."""
    first = by_name(one)
    second = by_name(other)
    if first.keys() != second.keys():
        names = ", ".join(map(repr, first.keys() ^ second.keys()))
        raise ValueError(
            f"both arguments name the same layers, or are two tensors: only one of them has {names}"
        )
    return [(tensor, second[name], name) for name, tensor in first.items()]
