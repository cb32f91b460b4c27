"""Int8 GEMMs by the library and by torch: what their tests and ``make sanitize`` share."""

from typing import NamedTuple

import torch

from lightning_nm import NMPattern
from lightning_nm.functional import quantise_tokens, quantise_weight
from lightning_nm.functional.int8 import conv_patches
from lightning_nm.kernels.cpu import CpuInt8Kernel
from lightning_nm.kernels.cpu.int8_kernel import packed_int8, rows_linear
from tests.support.cpu_products import DTYPES, pattern_mask


class Int8Case(NamedTuple):
    """A weight that is N:M along its depth, and what it is multiplied by."""

    weight: torch.Tensor
    pattern: NMPattern
    x: torch.Tensor
    bias: torch.Tensor | None


def int8_case(rows, blocks, tokens, pattern, dtype=torch.float32, bias=True, size=1.0, seed=0):
    """Random operands of a depth of `blocks` blocks, at most 256 entries and one block."""
    generator = torch.Generator().manual_seed(seed)
    pattern = NMPattern.parse(pattern)
    depth = min(blocks, 1 + 256 // pattern.m) * pattern.m
    mask = pattern_mask(rows, depth, pattern, generator)
    weight, x, own_bias = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, depth), (tokens, depth), (rows,))
    )
    return Int8Case(torch.where(mask, weight, 0), pattern, size * x, own_bias if bias else None)


def random_int8(draw):
    """A case of any size."""
    m = draw.choice([2, 4, 8, 16, 32, 64])
    return int8_case(
        draw.randint(1, draw.choice([20, 80])),
        draw.randint(1, 40),
        draw.randint(0, draw.choice([5, 80, 150])),
        f"{draw.randint(1, m - 1)}:{m}",
        draw.choice(DTYPES),
        draw.random() < 0.5,
        draw.choice([0, 1e-38, 1e-3, 1, 1e4]),
        draw.randrange(1000),
    )


def compare_int8(case):
    """The GEMM of the library with that of the twin, bit for bit: it is returned."""
    packed = packed_int8(case.weight, case.pattern)
    found = CpuInt8Kernel().linear(packed, case.x, case.bias)
    twin = int8_linear(case.x, *quantise_weight(case.weight), case.bias)
    torch.testing.assert_close(found, twin, rtol=0, atol=0, equal_nan=True)
    return [found]


class RowsCase(NamedTuple):
    """A dense matrix in int8, its scales, and what it is multiplied by."""

    values: torch.Tensor
    scale: torch.Tensor
    x: torch.Tensor
    bias: torch.Tensor | None


def random_rows(draw):
    """A dense matrix of any size."""
    rows, depth, tokens = draw.randint(1, 40), draw.randint(1, 300), draw.randint(0, 9)
    dtype, size = draw.choice(DTYPES), draw.choice([0.0, 1e-30, 1.0, 1e30])
    generator = torch.Generator().manual_seed(draw.randrange(1000))
    return RowsCase(
        torch.randint(-127, 128, (rows, depth), generator=generator, dtype=torch.int8),
        torch.rand(rows, generator=generator) + 0.01,
        (size * torch.randn(tokens, depth, generator=generator)).to(dtype),
        torch.randn(rows, generator=generator).to(dtype) if draw.random() < 0.5 else None,
    )


def compare_rows(case):
    """The GEMM of a dense matrix with the sums of 16-bit tokens, bit for bit, and as near as half a step of them."""
    values, scale, x, bias = case
    found = rows_linear(values, scale, x, bias)
    largest = x.float().abs().amax(1)
    inverse = (torch.full_like(largest, 32767) / largest).clamp(max=torch.finfo(torch.float32).max)
    integers = (x.float() * inverse[:, None]).round()
    y = (integers.long() @ values.long().t()).float() * (scale * (largest / 32767)[:, None])
    assert torch.equal(found, (y if bias is None else y + bias.float()).to(x.dtype))
    exact = x.double() @ (values.double() * scale.double()[:, None]).t()
    if bias is not None:
        exact = exact + bias.double()
    half_step = largest.double()[:, None] / 32767 * 0.501
    bound = half_step * (values.double().abs().sum(1) * scale.double())
    rest = torch.finfo(x.dtype).eps * exact.abs() + 1e-6 * bound * 32767 + 1e-37 * len(values[0])
    assert ((found.double() - exact).abs() <= bound + rest).all()
    return [found]


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
