"""Packed weights of experts, ``[experts, out, in]`` or ``[experts, in, out]``: each expert is a matrix of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_nm.nn.packed.tensor import PackedTensor, Role
from lightning_nm.nn.packed.weight import PackedWeight
from lightning_nm.nn.weight import Layout


class PackedExperts(PackedWeight):
    """The weight of several experts: each is held as a :class:`PackedWeight` of two axes.

    The state dict has ``values`` and ``positions`` of the whole weight, and ``scales`` in int8, as files have.

    Attributes:
        parts: The weight of each expert, ``[out, in]`` or ``[in, out]``.
    """

    parts: tuple[PackedWeight, ...] = ()

    def lay_out(self) -> None:
        """Divide the weight into those of the experts, and hold each in the layout of a kernel if there is one."""
        if self.values is None or self.device.type == "meta":
            return
        weight_eab = self.packed().unpack()
        transposed = self.role == "experts-transposed"
        layout = Layout.TRANSPOSED if transposed else Layout.PLAIN
        role: Role = "transposed" if transposed else "linear"
        parts = []
        for number, weight_ab in enumerate(weight_eab):
            scales = None if self.scales is None else self.scales[number]
            tensor = PackedTensor.of(
                weight_ab, self.pattern, layout, int8=self.is_int8, scales=scales
            )
            name = f"{self.name}[{number}]"
            parts.append(PackedWeight(tensor, name, role, self.kernels, self.budget))
        self.parts = tuple(parts)
        self.train(self.training)
        self.values = self.positions = None

    def _take(self, packed: PackedTensor) -> None:
        self.parts = ()
        super()._take(packed)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The tensors that are held."""
        if not self.parts:
            return super().buffers(recurse)
        return (tensor for part in self.parts for tensor in part.buffers())

    @property
    def form(self) -> str:
        """What is held for the experts, each form once."""
        if not self.parts:
            return super().form
        return ", ".join(dict.fromkeys(part.form for part in self.parts))

    def unpack(self) -> Tensor:
        """The dense weight, a new tensor."""
        if not self.parts:
            return super().unpack()
        return torch.stack([part.unpack() for part in self.parts])

    def measure(self, tokens: int) -> None:
        """In ``"auto"``, choose for products of so many tokens with each expert."""
        for part in self.parts:
            part.measure(tokens)

    def train(self, mode: bool = True) -> PackedExperts:
        """Set the mode of the experts' weights, too."""
        super().train(mode)
        for part in self.parts:
            part.train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": ()}
