"""What the passes of :mod:`lightning_nm.kernels.evolution` take and return, whatever runs them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

LONGEST_BLOCK = 32
MOST_STATES = 4
"""Tensors of the optimizer's state that an exchange takes."""


@dataclass(frozen=True)
class EvidenceStep:
    r"""How evidence advances; see :class:`lightning_nm.methods.bame.evidence.Evidence`.

    Attributes:
        unit: A power of two; the old values are U divided by it.
        own_ratio: What the old V of kept entries is multiplied by.
        limit: Old values beyond it in magnitude are set to 0; float32 without axes, as the next two.
        correction: :math:`1 - \beta^t`, of the gradients so far including this one.
        size: r.
        decay: :math:`\beta`.
        epsilon: :math:`\epsilon`.
    """

    unit: float
    own_ratio: float
    limit: Tensor
    correction: Tensor
    size: Tensor
    decay: float
    epsilon: float


@dataclass(frozen=True)
class BlockGrid:
    """Where the blocks of a row-major weight lie, in entries.

    Block ``(o * taps + t) * per_row + c`` has its entry k at
    ``o * out_stride + t * tap_stride + (c * m + k) * in_stride``.
    """

    m: int
    per_row: int
    taps: int
    out_stride: int
    tap_stride: int
    in_stride: int

    @classmethod
    def of(cls, rows: Tensor, m: int) -> BlockGrid | None:
        """The blocks of ``rows [out, in, *taps]``, a view of a row-major tensor; ``None`` where it cannot say that."""
        if m > LONGEST_BLOCK or rows.shape[1] % m or not rows.numel():
            return None
        taps = rows.shape[2:]
        expected = rows.stride(-1) if taps else 0
        # The taps of a convolution must follow each other at one distance.
        for size, stride in zip(reversed(taps), reversed(rows.stride()[2:]), strict=True):
            if stride != expected:
                return None
            expected *= size
        return cls(
            m=m,
            per_row=rows.shape[1] // m,
            taps=math.prod(taps),
            out_stride=rows.stride(0),
            tap_stride=rows.stride(-1) if taps else 0,
            in_stride=rows.stride(1),
        )

    @property
    def in_line(self) -> bool:
        """Whether the blocks follow each other, and the entries of each."""
        return self.taps == 1 and self.in_stride == 1 and self.out_stride == self.per_row * self.m

    def places(self, blocks: Tensor, entries: Tensor) -> Tensor:
        """Where entries of blocks lie in memory, in entries of the weight.

        Args:
            blocks: The number of each block, int64.
            entries: The entry within each block, of the same shape.

        Returns:
            int64 of the same shape.
        """
        row = blocks // self.per_row  # out * taps + tap
        column = blocks % self.per_row * self.m + entries
        out_place = row // self.taps * self.out_stride
        tap_place = row % self.taps * self.tap_stride
        return out_place + tap_place + column * self.in_stride


@dataclass(frozen=True)
class Exchanged:
    """What an exchange did.

    Attributes:
        blocks: Number of blocks that changed.
        held: Number of blocks that did not, though an exchange would raise their score; a tensor where only the
            device knows it.
    """

    blocks: int
    held: int | Tensor


def count_writes(*tensors: Tensor | None) -> None:
    """Let torch count a write to each of these tensors, which a kernel wrote to by their addresses."""
    for tensor in tensors:
        if tensor is not None:
            tensor.detach().view(-1)[:0].zero_()
