"""Int8 products whose rounding is known: what their tests and ``make sanitize`` share."""

from typing import NamedTuple

import torch

from lightning_nm import NMPattern
from lightning_nm.functional import quantise_tokens, quantise_weight
from lightning_nm.functional.int8 import conv_patches
from lightning_nm.kernels.cpu import CpuInt8Kernel
from lightning_nm.kernels.cpu.int8 import packed_int8
from tests.support.cpu_products import at_level, pattern_mask


class Int8Case(NamedTuple):
    """A weight and inputs of integers times powers of two, which are rounded to themselves, and the exact product."""

    weight: torch.Tensor
    pattern: NMPattern
    x: torch.Tensor
    bias: torch.Tensor | None
    exact: torch.Tensor  # float64


def int8_case(rows, blocks, tokens, pattern, dtype, bias, seed):
    """Random operands of a depth of `blocks` blocks, at most 256 entries and one block."""
    generator = torch.Generator().manual_seed(seed)
    pattern = NMPattern.parse(pattern)
    depth = min(blocks, 1 + 256 // pattern.m) * pattern.m

    def integers(*shape):
        found = torch.randint(-127, 128, shape, generator=generator).float()
        # The largest of a row is 127, so that the scale is a power of two.
        found.scatter_(1, found.abs().argmax(1, keepdim=True), 127)
        return found * 2.0 ** torch.randint(-3, 4, (shape[0], 1), generator=generator)

    mask = pattern_mask(rows, depth, pattern, generator)
    weight = torch.where(mask, torch.randint(-127, 128, mask.shape, generator=generator), 0).float()
    first = mask.int().argmax(1, keepdim=True)
    weight.scatter_(1, first, 127)
    weight *= 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    x = integers(tokens, depth)
    own_bias = torch.randint(-50, 51, (rows,), generator=generator).float() if bias else None
    exact = x.double() @ weight.double().t()
    if own_bias is not None:
        exact = exact + own_bias.double()
        own_bias = own_bias.to(dtype)
    return Int8Case(weight.to(dtype), pattern, x.to(dtype), own_bias, exact)


def compare_int8(case, levels):
    """The product at every level, and of the twin, with the exact one, rounded once."""
    integers, scale = quantise_weight(case.weight)
    assert torch.equal(integers.float() * scale[:, None], case.weight.float())
    packed = packed_int8(case.weight, case.pattern)
    expected = case.exact.float().to(case.x.dtype)
    assert torch.equal(int8_linear(case.x, integers, scale, case.bias), expected)
    for level in levels:
        with at_level(level):
            found = CpuInt8Kernel().linear(packed, case.x, case.bias)
        assert torch.equal(found, expected), level


def int8_linear(x, integers, scale, bias=None):
    """``x W^T + bias`` with W in int8 and the tokens rounded to int8: what the CPU kernel computes, by torch alone.

    ``sum(integers * x8) * (scale * scale_of_token) + bias``; the sum is exact.
    """
    x8, scale_of_token = quantise_tokens(x)
    sums = x8.long() @ integers.long().t()  # [tokens, rows]
    y = sums.float() * (scale * scale_of_token[:, None])
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def int8_conv2d(x, integers, scale, bias, stride, padding, dilation, groups):
    """The convolution of x with W in int8, by torch alone: :func:`int8_linear` of what each output position reads."""
    patches = conv_patches(x, integers.shape[2:], stride, padding, dilation, groups).flatten(4)
    biases = [None] * groups if bias is None else bias.chunk(groups)
    outputs = [
        int8_linear(read.flatten(0, -2), of_group.flatten(1), scale_of_group, bias_of_group)
        for read, of_group, scale_of_group, bias_of_group in zip(
            patches, integers.chunk(groups), scale.chunk(groups), biases, strict=True
        )
    ]
    y = torch.cat(outputs, 1).view(*patches.shape[1:-1], -1)  # [images, *positions, out]
    return y.movedim(-1, 1).contiguous()
