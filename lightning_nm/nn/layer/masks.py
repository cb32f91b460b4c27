"""The masks of one weight, and how they moved."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional.mask_storage import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.nn.layer.memory import memory_state

# Numbers for all masks of the process: masks that replace others never have their number.
_generations = count(1)

_MASK_PARTS = frozenset({"bits", "has_forward", "has_backward", "permutation"})


class LayerMasks:
    """The forward and the backward mask, each one bit of a byte per entry of the weight.

    The bits are one input of a compiled graph and are written in place, so that new masks need no new graph. Where
    processes shard the weight, each holds all of its masks.
    """

    generation: int
    """A new number of this process whenever a part of the masks is assigned or a method here writes to it."""

    def __init__(self) -> None:
        self.bits: Tensor | None = None  # uint8, of the weight's shape; None without masks
        self.has_forward = False  # whether the forward weight is masked
        self.has_backward = False
        """Whether the backward weight has a mask of its own; otherwise dgrad uses the forward weight."""
        self.permutation: Tensor | None = None
        """int64 ``[out]``: the order of the output rows in which the backward mask is N:M."""
        self.backward_density: float | None = None
        """Share of the weight that the backward mask keeps, when last measured."""
        # What `density` measured, and the generation of the masks that it belongs to.
        self._density: tuple[int, float] | None = None
        # Forward mask bits that the last update changed, int64 without axes.
        self.flips: Tensor | None = None
        # Forward mask bits that all updates together changed.
        self.total_flips: Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _MASK_PARTS:
            self.generation = next(_generations)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, whose masks may differ from the original's from now on."""
        self.__dict__.update(state)
        self.generation = next(_generations)

    @property
    def state(self) -> Hashable:
        """A value that no other state of any masks of this process has: what is derived from masks is kept with it.

        It also differs after a write to the bits or the permutation from outside, if torch counts the write.
        """
        return self.generation, tuple(memory_state(tensor) for tensor in self.tensors())

    @property
    def density(self) -> float:
        """Share of the weight that the forward mask keeps, 1 without one.

        It is measured once for each move of the masks, and then waits for the device.
        """
        if self.bits is None or not self.has_forward:
            return 1.0
        if self._density is None or self._density[0] != self.generation:
            kept = torch.count_nonzero(self.bits & FORWARD_BIT)
            self._density = (self.generation, int(kept) / self.bits.numel())
        return self._density[1]

    def tensors(self) -> list[Tensor]:
        """What the masks are made of."""
        return [tensor for tensor in (self.bits, self.permutation) if tensor is not None]

    @property
    def forward(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when the forward weight is not masked."""
        if self.bits is None or not self.has_forward:
            return None
        return _as_bool(self.bits & FORWARD_BIT)

    @property
    def forward_view(self) -> Tensor | None:
        """:attr:`forward` for use at once: it may share memory with ``bits``, which change when the masks move."""
        if self.bits is None or not self.has_forward:
            return None
        if self.has_backward:
            return _as_bool(self.bits & FORWARD_BIT)
        # The forward bit is the only one, so that the bytes are 0 and 1.
        return _as_bool(self.bits)

    @property
    def backward(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when dgrad uses the forward weight."""
        if self.bits is None or not self.has_backward:
            return None
        return (self.bits & BACKWARD_BIT).ne(0)

    def set(
        self, forward: Tensor | None, backward: Tensor | None, like: Tensor | None = None
    ) -> None:
        """Move the masks in place and count the forward bits that changed.

        Args:
            forward: Bool mask, or ``None`` for a dense forward weight.
            backward: Bool mask, or ``None`` when dgrad uses the forward weight.
            like: The bits take its memory order, so that one pass reads a weight and its bits; ``None``: row-major.
        """
        self.has_forward = forward is not None
        self.has_backward = backward is not None
        if forward is None and backward is None:
            self.bits = None
            self.flips = None
            return
        if forward is None:
            assert backward is not None
            forward = torch.ones_like(backward)
        bits = forward.to(torch.uint8)
        if backward is not None:
            bits += backward.to(torch.uint8) * BACKWARD_BIT
        if self.bits is None:
            memory_order = bits.contiguous() if like is None else like
            self.bits = torch.empty_like(memory_order, dtype=torch.uint8).copy_(bits)
            self.flips = torch.zeros((), dtype=torch.int64, device=bits.device)
        else:
            self.flips = torch.count_nonzero((self.bits ^ bits) & FORWARD_BIT)
            self.bits.copy_(bits)
        # A new tensor, because `flips` may be read on its own.
        before = torch.zeros_like(self.flips) if self.total_flips is None else self.total_flips
        self.total_flips = before + self.flips

    def count_moved(self, flips: int) -> None:
        """Count forward bits that were changed in place, in :attr:`bits`."""
        assert self.bits is not None
        self.flips = torch.tensor(flips, dtype=torch.int64, device=self.bits.device)
        before = torch.zeros_like(self.flips) if self.total_flips is None else self.total_flips
        self.total_flips = before + self.flips
        self.generation = next(_generations)

    def set_backward(self, backward: Tensor) -> None:
        """Move the backward mask alone; the forward mask and its counts of changes stay."""
        assert self.bits is not None
        self.has_backward = True
        self.bits.copy_((self.bits & FORWARD_BIT) + backward.to(torch.uint8) * BACKWARD_BIT)

    def set_permutation(self, permutation: Tensor | None) -> None:
        """Set the order of the output rows; in place where there is one."""
        if self.permutation is None or permutation is None:
            self.permutation = permutation
        else:
            self.permutation.copy_(permutation)
            self.generation = next(_generations)

    def measure_backward(self, backward: Tensor) -> None:
        """Measure :attr:`backward_density`; reading it waits for the device."""
        self.backward_density = int(backward.sum()) / backward.numel()

    def load(
        self, flips: int, total_flips: int, backward_density: float | None, device: torch.device
    ) -> None:
        """Set saved counts."""
        self.flips = torch.tensor(flips, dtype=torch.int64, device=device)
        self.total_flips = torch.tensor(total_flips, dtype=torch.int64, device=device)
        self.backward_density = backward_density

    def with_bits(self, bits: Tensor | None) -> LayerMasks:
        """Other masks with the bits of a part of the weight; nothing else is shared."""
        part = LayerMasks()
        part.bits = bits
        part.has_forward = self.has_forward
        part.has_backward = self.has_backward
        part.permutation = self.permutation
        return part

    def of_group(self, group: int, size: int) -> LayerMasks:
        """The masks of one group of `size` output rows, where dimension 0 of the weight counts groups; views."""
        part = self.with_bits(None if self.bits is None else self.bits[group])
        if self.permutation is not None:
            # No permutation crosses groups: the rows of one are counted from its own first row.
            first = group * size
            part.permutation = self.permutation[first : first + size] - first
        return part

    def to(self, device: torch.device) -> None:
        """Move every tensor to a device."""
        for name in ("bits", "permutation", "flips", "total_flips"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != device:
                setattr(self, name, tensor.to(device))


def _as_bool(bits: Tensor) -> Tensor:
    """Bytes 0 and 1 as bool; a view only in eager code: what Inductor makes of a view, no C++ compiler takes."""
    return bits.ne(0) if torch.compiler.is_compiling() else bits.view(torch.bool)
