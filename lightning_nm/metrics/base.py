"""Base classes of the metrics, and arguments that are one layer or several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_nm.functional.statistics import Ratio

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
        >>> from lightning_nm.functional.statistics import DENSITY
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
            self.add_state(name, default=zero, dist_reduce_fx="sum")

    def add(self, parts: Iterable[tuple[Tensor | int, Tensor | int]]) -> None:
        """Add pairs to the two sums; nothing is added if an error is raised.

        Sums are not changed in place: one that was reset in inference mode may be updated outside of it.
        """
        numerator, denominator = self.sums
        numerator_sum = getattr(self, numerator)
        denominator_sum = getattr(self, denominator)
        # `parts` may be a generator that checks as it goes, and raises at a later layer.
        for numerator_part, denominator_part in parts:
            numerator_sum = numerator_sum + numerator_part
            denominator_sum = denominator_sum + denominator_part
        setattr(self, numerator, numerator_sum)
        setattr(self, denominator, denominator_sum)

    def compute(self) -> Tensor:
        """Return the ratio, float32 and without axes."""
        numerator, denominator = self.sums
        return self.ratio(getattr(self, numerator), getattr(self, denominator))


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


def pairs(one: Layers, other: Layers) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Return an iterator over the two tensors and the name of each layer. Refuse different layers by a ValueError."""
    first = by_name(one)
    second = by_name(other)
    if first.keys() != second.keys():
        unmatched = first.keys() ^ second.keys()
        names = ", ".join(repr(name) for name in unmatched)
        raise ValueError(
            f"both arguments name the same layers, or are two tensors: only one of them has {names}"
        )
    # A generator expression and not `yield`: the check above runs when the function is called.
    return ((tensor, second[name], name) for name, tensor in first.items())
