"""The base class of the metrics, and arguments that are one layer or several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric

if TYPE_CHECKING:  # plots alone need matplotlib
    from matplotlib.axes import Axes

Layers: TypeAlias = Tensor | Mapping[str, Tensor]
"""The tensor of one layer, or those of several layers by name."""


class NMMetric(Metric):
    """A statistic between 0 and 1 made of sums, which add up over updates, layers and processes."""

    is_differentiable = False
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound: float | None = 1.0

    def add_sum(self, name: str, dtype: torch.dtype = torch.int64) -> None:
        """Add a state that starts at 0 and is summed over processes.

        The classes rebind their sums instead of adding in place: a sum that was reset in inference mode may be updated
        outside of it.
        """
        self.add_state(name, default=torch.zeros((), dtype=dtype), dist_reduce_fx="sum")

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Axes | None = None) -> tuple[Any, Any]:
        """Plot one value, or several in the order of time.

        Args:
            val: A value of ``forward`` or ``compute``, or a list of values; by default ``compute()``.
            ax: The axes to plot into; by default those of a new figure.

        Returns:
            The figure, ``None`` if `ax` was given, and the axes.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        return self._plot(val, ax)


def by_name(layers: Layers) -> Mapping[str, Tensor]:
    """Return layers by name; a lone tensor has the empty name.

    Raises:
        TypeError: If the argument is neither a tensor nor a mapping of tensors.
    """
    if isinstance(layers, Tensor):
        return {"": layers}
    if not isinstance(layers, Mapping):
        raise TypeError(
            f"{type(layers).__name__} given: pass the tensor of one layer, or a dict of tensors by layer name"
        )
    for name, tensor in layers.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"layer '{name}' has {tensor!r} in place of a tensor: leave out layers that are not masked now"
            )
    return layers


def pairs(one: Layers, other: Layers) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Yield the two tensors of each layer, and its name.

    Raises:
        TypeError: If an argument is neither a tensor nor a mapping of tensors.
        ValueError: If they name different layers.
    """
    first, second = by_name(one), by_name(other)
    if first.keys() != second.keys():
        lone = ", ".join(repr(name) for name in first.keys() ^ second.keys())
        raise ValueError(f"both arguments name the same layers, or are two tensors: only one of them has {lone}")
    for name, tensor in first.items():
        yield tensor, second[name], name
