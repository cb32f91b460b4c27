"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_nm.nn.adapters.adapter import Adapter, Args, Kwargs, WeightSpec, register_adapter
from lightning_nm.nn.products import nm_conv
from lightning_nm.nn.weight import Layout


class _NMConv(Adapter):
    """What the convolutions of all dimensions have in common."""

    role = "convolution"
    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """Yield one weight, its output rows in the convolution's groups."""
        layout = Layout.FLAT if conv_layout == "flat" else Layout.PLAIN
        yield WeightSpec("weight", layout, module.groups)

    @classmethod
    def macs(cls, module: Any, parameter: str, args: Args, kwargs: Kwargs, output: Any) -> int:
        """Return ``batch * positions * out * in / groups * taps``."""
        return (
            output.numel() * (module.in_channels // module.groups) * math.prod(module.kernel_size)
        )

    @classmethod
    def inputs(cls, module: Any, parameter: str, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """Return the patches of the input for each group, ``[batch x positions, in / groups * taps]``."""
        from lightning_nm.functional.int8 import conv_patches  # for calibration alone

        (x,) = (*args, *kwargs.values())
        taps = module.kernel_size
        x, padding, _ = padded_input(module, x)
        patches = conv_patches(x, taps, module.stride, padding, module.dilation, module.groups)
        # From [groups, images, *positions, in / groups, *taps]: the last sizes are the columns of a row of the weight.
        tokens = patches.flatten(2 + len(taps)).flatten(1, -2)  # [groups, tokens, in]
        return list(tokens)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with W_F."""
        conv: Any = self  # the attributes are those of torch's class
        x, padding, unbatched = padded_input(conv, input)
        y = nm_conv(
            x,
            self.weight,
            self.bias,
            self.nm_layers["weight"],
            conv.stride,
            padding,
            conv.dilation,
            conv.groups,
        )
        return y.squeeze(0) if unbatched else y


def padded_input(conv: Any, input: Tensor) -> tuple[Tensor, tuple[int, ...], bool]:
    """Return the input of a convolution's GEMM, padded as far as the GEMM does not pad it.

    Args:
        conv: The convolution.
        input: With or without a batch.

    Returns:
        The input with a batch, padded where equal zeros on both sides do not do it; those zeros per spatial dimension;
        and whether the input had no batch.
    """
    spatial = len(conv.kernel_size)
    unbatched = input.dim() == spatial + 1
    if not unbatched and input.dim() != spatial + 2:
        raise RuntimeError(
            f"expected {spatial + 1}-d (unbatched) or {spatial + 2}-d input, got {list(input.shape)}"
        )
    x = input.unsqueeze(0) if unbatched else input
    # (before, after) for each spatial dimension
    # torch takes padding as numbers or by one of two names.
    if conv.padding == "same":
        totals = [d * (taps - 1) for d, taps in zip(conv.dilation, conv.kernel_size, strict=True)]
        # An even number of taps needs one more after than before.
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        numbers = (0,) * spatial if conv.padding == "valid" else conv.padding
        sides = [(zeros, zeros) for zeros in numbers]
    if conv.padding_mode != "zeros" or any(before != after for before, after in sides):
        # As torch does: the input is padded first. F.pad counts dimensions from the last.
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, [zeros for both in reversed(sides) for zeros in both], mode=mode)
        sides = [(0, 0)] * spatial
    return x, tuple(before for before, _ in sides), unbatched


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
