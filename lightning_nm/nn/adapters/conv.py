"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_nm.nn.adapters.base import Adapter, WeightSpec, register_adapter
from lightning_nm.nn.products.ops import CONVOLUTIONS, nm_conv


class _NMConv(Adapter):
    role = "convolution"
    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """One weight, its output rows in the convolution's groups."""
        yield WeightSpec("weight", "flat" if conv_layout == "flat" else "plain", module.groups)

    @classmethod
    def macs(
        cls, module: Any, parameter: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> int:
        """``batch * positions * out * in / groups * taps``."""
        return output.numel() * math.prod(module.weight.shape[1:])

    @classmethod
    def inputs(
        cls, module: Any, parameter: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """The patches of the input, for each group: a convolution by filters that each copy one entry of a patch."""
        (x,) = (*args, *kwargs.values())
        weight, groups = module.weight, module.groups
        size = math.prod(weight.shape[1:])
        copies = torch.eye(size, dtype=x.dtype, device=x.device).view(size, *weight.shape[1:])
        copies = copies.repeat(groups, *[1] * (weight.dim() - 1))
        x, padding, _ = padded_input(module, x, weight.dim() - 2)
        patches = CONVOLUTIONS[weight.dim() - 3](
            x, copies, None, module.stride, padding, module.dilation, groups
        )
        return list(
            patches.unflatten(1, (groups, size)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)
        )

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with W_F."""
        conv: Any = self
        x, padding, unbatched = padded_input(conv, input, self.weight.dim() - 2)
        layer = self.nm_layers["weight"]
        y = nm_conv(
            x, self.weight, self.bias, layer, conv.stride, padding, conv.dilation, conv.groups
        )
        return y.squeeze(0) if unbatched else y


def padded_input(conv: Any, input: Tensor, spatial: int) -> tuple[Tensor, tuple[int, ...], bool]:
    """The input of a convolution's product.

    Returns:
        The input with a batch, padded where equal zeros on both sides do not do it; those zeros per spatial dimension;
        and whether the input had no batch.
    """
    if input.dim() not in (spatial + 1, spatial + 2):
        raise RuntimeError(
            f"expected {spatial + 1}-d (unbatched) or {spatial + 2}-d input, got {list(input.shape)}"
        )
    unbatched = input.dim() == spatial + 1
    x = input.unsqueeze(0) if unbatched else input
    padding = conv.padding
    if isinstance(padding, str):
        extra = (
            [0] * spatial
            if padding == "valid"
            else [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        )
        sides = [(total // 2, total - total // 2) for total in extra]
    else:
        sides = [(p, p) for p in padding]
    if conv.padding_mode != "zeros" or any(left != right for left, right in sides):
        # As torch does: the input is padded first. F.pad counts dimensions from the last.
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, [p for side in reversed(sides) for p in side], mode=mode)
        sides = [(0, 0)] * spatial
    return x, tuple(left for left, _ in sides), unbatched


@register_adapter
class NMConv1d(_NMConv):
    """``nn.Conv1d``: weight ``[out, in / groups, taps]``."""

    handles = nn.Conv1d


@register_adapter
class NMConv2d(_NMConv):
    """``nn.Conv2d``: weight ``[out, in / groups, height, width]``."""

    handles = nn.Conv2d


@register_adapter
class NMConv3d(_NMConv):
    """``nn.Conv3d``: weight ``[out, in / groups, depth, height, width]``."""

    handles = nn.Conv3d
