"""Int8 products whose rounding is known: what their tests and ``make sanitize`` share."""

from typing import NamedTuple

import torch

from lightning_nm import NMPattern
from lightning_nm.functional import int8_linear, quantise_weight
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
