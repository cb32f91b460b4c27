"""What the layers of a packed model hold, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lightning_nm.nn.names import plain_name
from lightning_nm.nn.packed import packed_weights


class HeldWeight(NamedTuple):
    """A weight of a packed layer.

    Attributes:
        name: Its key in the dense state dict.
        pattern: Its pattern.
        form: What is held: ``"packed"`` as in files, the layout of a kernel by the kernel's name, or ``"dense"``.
        bytes: Bytes that are held.
        dense_bytes: Bytes of the dense weight.
    """

    name: str
    pattern: str
    form: str
    bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class PackedSummary:
    """The weights of a packed model's layers; ``str()`` gives a table."""

    weights: tuple[HeldWeight, ...]

    @property
    def bytes(self) -> int:
        """Bytes that all of them hold."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense weights."""
        return sum(weight.dense_bytes for weight in self.weights)

    def __str__(self) -> str:
        total = HeldWeight(f"{len(self.weights)} weights", "", "", self.bytes, self.dense_bytes)
        head = ("weight", "pattern", "held as", "bytes", "of dense")
        rows = [head, *((*each[:3], f"{each.bytes}", _share(each)) for each in (*self.weights, total))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = ([f"{cell:{'>' if i > 2 else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows)
        return "\n".join("  ".join(text).rstrip() for text in texts)


def packed_summary(model: nn.Module) -> PackedSummary:
    """What each packed layer of a model holds now, and its share of the dense weight's memory.

    With ``kernels="auto"`` a layer whose dense product is faster holds the dense weight from then on, see
    :func:`lightning_nm.pack`: look again after the model has run.

    Raises:
        ValueError: If no layer is packed.

    Example::

        >>> import torch
        >>> from lightning_nm import pack
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        >>> model[0].weight.data.zero_()[:, ::16] = 1
        >>> print(packed_summary(pack(model, kernels="reference")))
        weight     pattern  held as  bytes  of dense
        0.weight   1:16     packed     576     0.070
        1 weights                      576     0.070
    """
    found = tuple(
        HeldWeight(plain_name(name), str(weight.pattern), weight.form, weight.nbytes, weight.dense_nbytes)
        for name, weight in packed_weights(model)
    )
    if not found:
        raise ValueError(f"{type(model).__name__} has no packed layer: call lightning_nm.pack(model) first")
    return PackedSummary(found)


def _share(weight: HeldWeight) -> str:
    return f"{weight.bytes / weight.dense_bytes:.3f}"
