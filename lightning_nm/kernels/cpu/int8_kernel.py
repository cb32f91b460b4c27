"""The kernel of int8 weights on CPUs, for packed layers alone."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.functional.int8 import quantise_weight
from lightning_nm.functional.masks import nm_mask
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.kernels.api import GemmKernel, GemmKey, MaskedMatrix
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.cpu.int8 import Int8Layout
from lightning_nm.kernels.cpu.kernels import Packed
from lightning_nm.kernels.cpu.library import DTYPES, LINEAR

INSTRUCTIONS = ("baseline", "AVX2", "AVX-512 with VBMI and VNNI")
"""What the library has int8 products for, by its numbers."""


class CpuInt8Kernel(GemmKernel):
    """Products of a weight in int8 that is N:M along its depth with tokens that it rounds to int8.

    Sums are exact in 32 bits, so all instruction sets and numbers of threads give the same bits; the rounding of
    weights and tokens is that of :mod:`lightning_nm.functional.int8`. For inference: training never takes it.
    """

    name = "cpu-int8"
    device_type = "cpu"
    tolerance = 0.04
    """Of rounding both sides to 127 steps of their largest value."""

    def probe(self, device: torch.device) -> str:
        """Return why the kernel does not work: another device, no library, or a small product that is wrong."""
        if device.type != "cpu":
            return f"it is for CPUs, not {device.type}"
        return library.unavailable() or self._self_check()

    def supports(self, key: GemmKey) -> str:
        """Return why a product cannot run; empty if it can."""
        return self.static_reason(key)

    def static_reason(self, key: GemmKey) -> str:
        """Return why no CPU runs a product: its dtype, its sizes, or blocks that do not fit registers."""
        if key.dtype not in DTYPES:
            return f"{key.dtype} is not one of its dtypes, {', '.join(map(str, DTYPES))}"
        if 0 in (key.rows, key.depth, key.columns):
            return f"the product {key} is empty"
        if key.gemm != "forward":
            return "it is for inference"
        return Int8Layout.reason_against(key.rows, key.depth, key.pattern)

    def pack_masked(self, matrix: MaskedMatrix, layout: None) -> Packed:
        """Round a weight to int8, and lay it out."""
        if matrix.pattern is None:
            raise ValueError(f"{self.name} takes a mask of a pattern")
        return packed_int8(matrix.dense(), matrix.pattern)

    def linear(self, packed: Packed, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x A^T + bias``: ``x [tokens, depth]``, ``bias [rows]``, result ``[tokens, rows]``.

        All are contiguous, in float32 or bfloat16.
        """
        layout, values = packed
        if not isinstance(layout, Int8Layout) or values is None:
            raise ValueError(f"{self.name} takes an Int8Layout, not a {type(layout).__name__}")
        tokens = len(x)
        library.check_operand(x, (tokens, layout.depth))
        if bias is not None:
            library.check_operand(bias, (layout.rows,), x.dtype)
        y = x.new_empty(tokens, layout.rows)
        dense = library.operands(layout.rows, layout.depth, tokens, x, y, bias)
        library.run(library.load().nm_int8_product, LINEAR, dense, layout.operand(values))
        return y

    def _self_check(self) -> str:
        """Compare small products of integers with float64 ones, which are exact."""
        generator = torch.Generator().manual_seed(0)
        # A tile that is not whole, a block that is not, and tokens that leave some over.
        rows, depth, tokens = 40, 96, 11
        for pattern in (NMPattern(2, 4), NMPattern(1, 16), NMPattern(1, 32)):
            # Integers of which the largest is 127 are rounded to themselves.
            x = torch.randint(-127, 128, (tokens, depth), generator=generator).float()
            x[:, 0] = 127
            mask = nm_mask(torch.rand(rows, depth, generator=generator), pattern)
            weight = torch.randint(-127, 128, mask.shape, generator=generator).float() * mask
            weight.scatter_(1, mask.int().argmax(1, keepdim=True), 127)
            found = self.linear(packed_int8(weight, pattern), x)
            if not torch.equal(found.double(), x.double() @ weight.double().t()):
                return f"its linear product in {pattern} is wrong on this CPU"
        return ""


def packed_int8(weight: Tensor, pattern: NMPattern) -> Packed:
    """Round a weight ``[rows, depth]`` that is N:M along its depth to int8, and lay it out."""
    integers, scale = quantise_weight(weight)
    blocks_rbm = integers.view(len(weight), -1, pattern.m)
    mask_rbm = nm_mask(blocks_rbm.abs(), pattern)
    places = torch.arange(pattern.m, dtype=torch.uint8).expand_as(blocks_rbm)
    shape = (*blocks_rbm.shape[:2], pattern.n)
    values, positions = blocks_rbm[mask_rbm].view(shape), places[mask_rbm].view(shape)
    return Packed(*Int8Layout.of(values, positions, scale, weight.shape[1], pattern))


def instructions() -> str:
    """The instruction set that int8 products take on this CPU."""
    return INSTRUCTIONS[library.load().nm_int8_level(library.level())]
