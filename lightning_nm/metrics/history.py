"""Metrics that compare masks with those of the previous update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional import pack_mask, unpack_mask
from lightning_nm.functional.mask_statistics import FLIP_RATE, OSCILLATION, check_tensors
from lightning_nm.metrics.layer_metric import Layers, RatioMetric, by_name

# What the keys of stored masks begin with in a state_dict: `memory.<layer>.shape` and `memory.<layer>.bits`.
_KEY = "memory."


class MaskHistory(RatioMetric):
    """A metric that stores each layer's packed mask until the next update, one bit per entry.

    The masks are no state of torchmetrics: ``reset`` clears the sums and keeps the masks, so that no flip is missed
    when Lightning resets a metric at the end of an epoch, and processes exchange only the sums. The masks follow the
    metric's device, are copied and pickled with it, and are in its ``state_dict`` after ``persistent(True)``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # By layer: the mask's shape; its bits, and what else the metric remembers, packed, uint8 [rows, bytes].
        self._memory: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._before_forward: dict[str, Any] | None = None

    def compare(self, packed: Tensor, rows: Tensor | None, entries: int) -> Tensor:
        """Add the changes of a layer of so many entries since its last rows, if any, and return its new rows.

        The old rows must not be changed in place: ``forward`` may restore them.
        """
        raise NotImplementedError

    def update(self, masks: Layers) -> None:
        """Compare bool masks with the last ones of the same names and shapes, and store them."""
        layers = by_name(masks)
        # All masks are checked before one is compared: nothing changes if an error is raised.
        for name, mask in layers.items():
            check_tensors({"mask": mask}, name)
            shape = tuple(mask.shape)
            # A new name is compared with its own shape, and passes.
            known = self._memory.get(name, (shape,))[0]
            if known != shape:
                raise ValueError(
                    f"the mask of layer '{name}' has shape {shape}, but had {known} before: name layers apart, or "
                    "call forget()"
                )
        for name, mask in layers.items():
            _, before = self._memory.get(name, (None, None))
            rows = self.compare(pack_mask(mask), before, mask.numel())
            self._memory[name] = (tuple(mask.shape), rows)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Update, and return the value of this update only: the changes since the previous update."""
        # A copy of the dict is enough: rows are replaced, and never written to.
        self._before_forward = dict(self._memory)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._before_forward = None

    def reset(self) -> None:
        """Clear the sums and keep the masks for the next update."""
        super().reset()
        # Where forward() synchronizes, torchmetrics updates, resets and updates again: the second update must see the
        # same change.
        if self._before_forward is not None:
            self._memory = dict(self._before_forward)

    def forget(self) -> None:
        """Clear the sums and the masks: the next update is the first."""
        self.reset()  # before the masks are cleared: it may restore them
        self._memory = {}

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> torch.nn.Module:
        # torchmetrics moves the states here, as torch moves buffers. Only the device concerns packed bits: a change of
        # dtype, which `fn` may be, would break them.
        module = super()._apply(fn, exclude_state)
        for name, (shape, rows) in self._memory.items():
            self._memory[name] = (shape, rows.to(self.device))
        return module

    def state_dict(  # type: ignore[override]  # torchmetrics' signature
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the sums, and for each layer the shape and the bits of its mask, where they are persistent."""
        destination = super().state_dict(destination, prefix, keep_vars)
        if any(self._persistent.values()):
            for name, (shape, rows) in self._memory.items():
                key = f"{prefix}{_KEY}{name}"
                # The bits fill whole bytes, so they do not tell the number of entries.
                destination[f"{key}.shape"] = torch.tensor(shape, dtype=torch.int64)
                destination[f"{key}.bits"] = rows.clone()
        return destination

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # torch would report the keys of masks, which are no states, as unexpected.
        start = prefix + _KEY
        saved = {
            key.removeprefix(start): state_dict.pop(key)
            for key in list(state_dict)
            if key.startswith(start)
        }
        # Without its sums, the metric was not persistent: it keeps the masks that it has.
        if any(prefix + key in state_dict for key in self._defaults):
            self._memory = {}
            for key, rows in saved.items():
                # Names of layers have dots, too: the last one ends the name.
                name, _, part = key.rpartition(".")
                if part == "bits":
                    shape = tuple(saved[f"{name}.shape"].tolist())
                    self._memory[name] = (shape, rows.to(self.device, copy=True))
        super()._load_from_state_dict(state_dict, prefix, *args)


class MaskFlipRate(MaskHistory):
    r"""Fraction of mask entries that updates changed, a mean over updates: :math:`\sum_t \|m_t - m_{t-1}\|_1 / (T D)`.

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

    def compare(self, packed: Tensor, rows: Tensor | None, entries: int) -> Tensor:
        """Count the flips."""
        if rows is not None:
            # Bits that only fill up the last byte are cut off.
            flips = unpack_mask(packed ^ rows[0], [entries])
            self.add([(flips.count_nonzero(), entries)])
        return packed.unsqueeze(0)


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

    def compare(self, packed: Tensor, rows: Tensor | None, entries: int) -> Tensor:
        """Count the flips of entries that flipped before."""
        if rows is None:
            return torch.stack([packed, torch.zeros_like(packed)])  # no entry flipped yet
        before, flipped = rows
        # Eight entries a byte: a bit of `flips` is 1 where the entry changed.
        flips = packed ^ before
        flips_back = unpack_mask(flips & flipped, [entries])
        self.add([(flips_back.count_nonzero(), entries)])
        return torch.stack([packed, flipped | flips])
