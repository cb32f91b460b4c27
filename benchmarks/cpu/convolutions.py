"""The three GEMMs of masked convolutions next to torch's, float32 and bfloat16."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.timing import interleaved
from lightning_nm.functional import nm_mask
from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.kernels.api import Convolution, MaskedMatrix
from lightning_nm.kernels.cpu import CpuCsrKernel
from lightning_nm.pattern import NMPattern

SHAPES = [
    (Convolution(64, 64, (28, 28), (3, 3), (1, 1), (1, 1)), 32),
    (Convolution(256, 256, (14, 14), (3, 3), (1, 1), (1, 1)), 32),
    (Convolution(64, 128, (28, 28), (3, 3), (2, 2), (1, 1)), 32),
    (Convolution(64, 64, (112, 112), (3, 3), (1, 1), (1, 1)), 4),
]
"""Geometries and images of a batch."""


def measure_convolution(
    conv: Convolution, images: int, pattern: str, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    """Median milliseconds of forward, dgrad and wgrad at kept entries, torch's and ours, and the gain of the three."""
    torch.manual_seed(0)
    parsed, kernel = NMPattern.parse(pattern), CpuCsrKernel()
    latent = torch.randn(conv.outputs, conv.inputs // conv.groups, *conv.kernel)
    mask = nm_mask(latent.abs(), parsed, dim=1)
    weight = torch.where(mask, latent, 0).to(dtype)
    rest = (conv.stride, conv.padding, conv.dilation, conv.groups)
    x = torch.randn(images, conv.inputs, *conv.size).to(dtype)
    grad = torch.randn_like(F.conv2d(x, weight, None, *rest))
    bits = mask.flatten(1).view(torch.uint8)
    matrix = MaskedMatrix(
        latent.flatten(1), bits, FORWARD_BIT, parsed, dtype, None, lambda: weight.flatten(1)
    )
    layout = kernel.layout(matrix)
    packed = kernel.pack_masked(matrix, layout)

    def backward(wanted: list[bool]) -> object:
        return torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0, 0],
            conv.groups,
            wanted,
        )

    calls = {
        "forward": (lambda: F.conv2d(x, weight, None, *rest), lambda: kernel.conv(packed, x, conv)),
        "dgrad": (
            lambda: backward([True, False, False]),
            lambda: kernel.conv_input(packed, grad, conv),
        ),
        "wgrad": (
            lambda: backward([False, True, False]),
            lambda: kernel.conv_sampled(layout, grad, x, conv),
        ),
    }
    seconds = interleaved([call for pair in calls.values() for call in pair], repeats)
    ms = [1e3 * statistics.median(times) for times in seconds]
    found: dict[str, Any] = {name: tuple(ms[2 * i : 2 * i + 2]) for i, name in enumerate(calls)}
    taps, size = "x".join(map(str, conv.kernel)), "x".join(map(str, conv.size))
    shape = (
        f"{conv.inputs} -> {conv.outputs}, {taps}, stride {conv.stride[0]}, {size}, {images} images"
    )
    return {"shape": shape, "pattern": pattern, **found, "gain": sum(ms[::2]) / sum(ms[1::2])}
