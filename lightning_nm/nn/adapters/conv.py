"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_nm.nn.adapters.base import Adapter, WeightSpec, register_adapter
from lightning_nm.nn.ops import nm_conv


class _NMConv(Adapter):
    role = "convolution"
    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """One weight, its output rows in the convolution's groups."""
        yield WeightSpec("weight", "flat" if conv_layout == "flat" else "plain", module.groups)

    @classmethod
    def macs(cls, module: Any, parameter: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        """``batch * positions * out * in / groups * taps``."""
        return output.numel() * math.prod(module.weight.shape[1:])

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with W_F."""
        conv: Any = self
        spatial = self.weight.dim() - 2
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
        y = nm_conv(
            x,
            self.weight,
            self.bias,
            self.nm_layers["weight"],
            conv.stride,
            tuple(left for left, _ in sides),
            conv.dilation,
            conv.groups,
        )
        return y.squeeze(0) if unbatched else y


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
