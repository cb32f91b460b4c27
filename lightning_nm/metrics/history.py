"""Metrics that compare masks with those of the previous update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional import pack_mask
from lightning_nm.functional.mask_storage import count_bits
from lightning_nm.functional.statistics import FLIP_RATE, OSCILLATION, check_masks
from lightning_nm.metrics.base import Layers, RatioMetric, by_name

_KEY = "memory."


class MaskHistory(RatioMetric):
    """A metric that stores each layer's packed mask until the next update, one bit per entry.

    The masks are no state of torchmetrics: ``reset`` clears the sums and keeps the masks, so that no flip is missed
    when Lightning resets a metric at the end of an epoch, and processes exchange only the sums. The masks follow the
    metric's device, are copied and pickled with it, and are in its ``state_dict`` after ``persistent(True)``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._memory: dict[
            str, tuple[tuple[int, ...], Tensor]
        ] = {}  # by layer: the mask's shape; packed rows
        self._before_forward: dict[str, tuple[tuple[int, ...], Tensor]] | None = None

    def compare(self, packed: Tensor, rows: Tensor, entries: int) -> Tensor:
        """Add the changes of a layer of so many entries; return new rows, as ``forward`` may restore the old ones."""
        raise NotImplementedError

    def remember(self, packed: Tensor) -> Tensor:
        """Return the rows of the first mask of a layer, uint8 ``[rows, bytes]``."""
        return packed.unsqueeze(0)

    def update(self, masks: Layers) -> None:
        """Compare bool masks with the last ones of the same names and shapes, and store them."""
        layers = by_name(masks)
        for name, mask in layers.items():
            check_masks({"mask": mask}, name)
            shape = tuple(mask.shape)
            if name in self._memory and self._memory[name][0] != shape:
                shapes = f"has shape {shape}, but had {self._memory[name][0]} before"
                raise ValueError(
                    f"the mask of layer '{name}' {shapes}: name layers apart, or call forget()"
                )
        for name, mask in layers.items():
            packed = pack_mask(mask)
            if name in self._memory:
                _, known = self._memory[name]
                rows = self.compare(packed, known, mask.numel())
            else:
                rows = self.remember(packed)
            self._memory[name] = tuple(mask.shape), rows

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Update, and return the value of this update only: the changes since the previous update."""
        self._before_forward = dict(self._memory)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._before_forward = None

    def reset(self) -> None:
        """Clear the sums and keep the masks for the next update."""
        super().reset()
        if self._before_forward is not None:  # torchmetrics' second update must see the same change
            self._memory = dict(self._before_forward)

    def forget(self) -> None:
        """Clear the sums and the masks: the next update is the first."""
        self.reset()
        self._memory = {}

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> torch.nn.Module:
        module = super()._apply(fn, exclude_state)
        self._memory = {
            name: (shape, rows.to(self.device)) for name, (shape, rows) in self._memory.items()
        }
        return module

    def state_dict(  # type: ignore[override]  # torchmetrics' signature
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the sums, and for each layer the shape and the bits of its mask, where they are persistent."""
        destination = super().state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if any(self._persistent.values()):
            for name, (shape, rows) in self._memory.items():
                destination[f"{prefix}{_KEY}{name}.shape"] = torch.tensor(shape, dtype=torch.int64)
                destination[f"{prefix}{_KEY}{name}.bits"] = rows.clone()
        return destination

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = prefix + _KEY
        saved = {}
        for key in list(state_dict):
            if key.startswith(start):
                saved[key.removeprefix(start)] = state_dict.pop(key)
        if any(
            prefix + key in state_dict for key in self._defaults
        ):  # else they were not persistent
            memory = {}
            for key, bits in saved.items():
                if key.endswith(".bits"):
                    name = key.removesuffix(".bits")
                    shape = saved[f"{name}.shape"]
                    memory[name] = (tuple(shape.tolist()), bits.to(self.device))
            self._memory = memory
        super()._load_from_state_dict(state_dict, prefix, *args)


class MaskFlipRate(MaskHistory):
    r"""Share of mask entries that an update changed, averaged over updates: :math:`\sum_t \|m_t - m_{t-1}\|_1 / (T D)`.

    ``update(masks)`` compares each bool mask with the last one of its layer: update once per mask update. ``forward``
    returns the changes since the previous update. ``reset`` clears the average and keeps the masks; :meth:`forget`
    clears both. Source and errors are those of the functional form, :func:`mask_flip_rate`.

    Example:
        >>> flip_rate = MaskFlipRate()
        >>> flip_rate.update({"encoder": torch.tensor([True, True, False, False])})
        >>> flip_rate.update({"encoder": torch.tensor([True, False, True, False])})
        >>> flip_rate.compute()
        tensor(0.5000)
    """

    higher_is_better = None
    ratio = FLIP_RATE
    sums = ("flips", "compared")

    def compare(self, packed: Tensor, rows: Tensor, entries: int) -> Tensor:
        """Count the flips."""
        self.add([(count_bits(packed ^ rows[0]), entries)])
        return self.remember(packed)


class MaskOscillation(MaskHistory):
    r"""How often entries flip back, per entry and update: flips of entries that flipped before.

    .. math:: \frac{1}{T D} \sum_{t=1}^{T} \sum_k [m_{t,k} \ne m_{t-1,k}] \, [\exists s < t: m_{s,k} \ne m_{s-1,k}]

    The metric stores two bits per entry: the mask, and whether the entry ever flipped. :class:`MaskFlipRate` describes
    ``update``, ``forward``, ``reset`` and :meth:`forget`. Source and errors are those of the functional form,
    :func:`mask_oscillation`.

    Example:
        >>> first, second = torch.tensor([True, False]), torch.tensor([False, True])
        >>> oscillation = MaskOscillation()
        >>> for mask in (first, second, first):
        ...     oscillation.update(mask)
        >>> oscillation.compute()
        tensor(0.5000)
    """

    higher_is_better = False
    ratio = OSCILLATION
    sums = ("returns", "compared")

    def remember(self, packed: Tensor) -> Tensor:
        """Return the mask, and that no entry flipped yet."""
        return torch.stack([packed, torch.zeros_like(packed)])

    def compare(self, packed: Tensor, rows: Tensor, entries: int) -> Tensor:
        """Count the flips of entries that flipped before."""
        before, flipped = rows
        flips = packed ^ before
        self.add([(count_bits(flips & flipped), entries)])
        return torch.stack([packed, flipped | flips])
