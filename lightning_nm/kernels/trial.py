"""One kernel tried on one product: is it right, and how long does it take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_nm.functional import nm_prune
from lightning_nm.kernels.api import GemmKernel, GemmKey
from lightning_nm.kernels.operands import TOKENS, permuted_columns
from lightning_nm.kernels.timing import Timer, copies_past_cache, rotated

TOLERANCE = 1e-2
"""Largest relative Frobenius difference of two 16-bit products. Rounding both results to bfloat16 makes 2.3e-3, and the
dense one may round partial sums, too; a kernel that loses one value in 5000 shows."""

REPEATS = 3
"""How often a product must come out with the same bits where deterministic algorithms are asked for."""


def check(kernel: GemmKernel, key: GemmKey) -> str:
    """Compare a kernel's product of random operands with the dense one, ``|P - D|_F / |D|_F < 1e-2``.

    Under ``torch.use_deterministic_algorithms(True)`` it is packed and made three times more, always to the same bits.

    Returns:
        What is wrong; empty if nothing is. Whatever the kernel raises passes through.
    """
    with _aside():
        generator = torch.Generator(key.device).manual_seed(0)
        matrix, dense = _matrix(key, generator), _dense(key, generator)
        expected = _product(GemmKernel(), key, matrix, dense)
        packable, kept = matrix.contiguous(), dense.clone()
        packed = kernel.pack(packable)
        result = _product(kernel, key, packed, dense)
        if not torch.equal(dense, kept) or not torch.equal(packable, matrix):
            return "changes its operands"
        second = _product(kernel, key, packed, dense)
        if result.data_ptr() == second.data_ptr():
            return "returns the same memory for two products"
        if (result.shape, result.dtype) != (expected.shape, expected.dtype):
            return f"returns {tuple(result.shape)} {result.dtype}, not {tuple(expected.shape)} {expected.dtype}"
        dtype = torch.promote_types(key.dtype, torch.float32)
        norms = torch.stack([torch.linalg.vector_norm(t, dtype=dtype) for t in (result - expected, expected)])
        difference, norm = norms.tolist()
        error = difference / norm
        if not error < TOLERANCE:  # true of NaN
            return f"wrong by {error:.2g} of the dense product, not less than {TOLERANCE:g}"
        if torch.are_deterministic_algorithms_enabled():
            repeats = [_product(kernel, key, _packed(kernel, matrix), dense) for _ in range(REPEATS - 1)]
            bits = [product.contiguous().view(torch.uint8) for product in (result, second, *repeats)]
            if not all(torch.equal(each, bits[0]) for each in bits):
                return "gives other bits when it is repeated, and deterministic algorithms are asked for"
    return ""


def dense_ms(key: GemmKey, timer: Timer) -> float:
    """Milliseconds of the dense product of the N:M operand as the layer has it."""
    with _aside():
        matrices, others = _copies(key)
        return _milliseconds(timer, key, lambda a, b: _product(GemmKernel(), key, a, b), matrices, others)


def sparse_ms(kernel: GemmKernel, key: GemmKey, timer: Timer) -> tuple[float, float]:
    """Milliseconds of a kernel's product, permuting the dense matrix included, and of packing the N:M operand once.

    What makes the operands writes them as kernels pack them, transposed where that is so: as the dense product, this
    includes neither masking nor drawing.
    """
    with _aside():
        matrices, others = _copies(key)
        matrices = [matrix.contiguous() for matrix in matrices]
        packs = [kernel.pack(matrix) for matrix in matrices]
        order = None
        if key.permuted:
            order = torch.randperm(key.depth, generator=torch.Generator().manual_seed(0)).to(key.device)

        def product_of(packed: Tensor, dense: Tensor) -> Tensor:
            return _product(kernel, key, packed, dense if order is None else permuted_columns(dense, order))

        product = _milliseconds(timer, key, product_of, packs, others)
        return product, _milliseconds(timer, key, kernel.pack, matrices)


@contextmanager
def _aside() -> Iterator[None]:
    """Neither recorded by autograd nor cast by autocast."""
    with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def _matrix(key: GemmKey, generator: torch.Generator) -> Tensor:
    """``A [rows, depth]`` of random numbers, N:M, lying in memory as the layer has it: W and dY, so A^T but in forward.

    A block that the depth cuts off is N:M as well.
    """
    whole = -(-key.depth // key.pattern.m) * key.pattern.m
    matrix = torch.randn(key.rows, whole, dtype=key.dtype, device=key.device, generator=generator)
    matrix = nm_prune(matrix, key.pattern)[:, : key.depth]
    if key.gemm == "wgrad":  # as an estimate's tokens are
        matrix = pad(matrix, (0, -key.depth % TOKENS))
    return matrix.contiguous() if key.gemm == "forward" else matrix.t().contiguous().t()


def _dense(key: GemmKey, generator: torch.Generator) -> Tensor:
    shape = (key.depth, key.columns) if key.gemm == "wgrad" else (key.columns, key.depth)
    return torch.randn(shape, dtype=key.dtype, device=key.device, generator=generator)


def _copies(key: GemmKey) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator(key.device).manual_seed(0)
    device = torch.device(key.device)
    matrices, others = (
        [make(key, generator) for _ in range(copies_past_cache(rows * key.depth * key.dtype.itemsize, device))]
        for make, rows in ((_matrix, key.rows), (_dense, key.columns))
    )
    return matrices, others


def _packed(kernel: GemmKernel, matrix: Tensor) -> Tensor:
    return kernel.pack(matrix.contiguous())


def _product(kernel: GemmKernel, key: GemmKey, packed: Tensor, dense: Tensor) -> Tensor:
    return kernel.matmul(packed, dense) if key.gemm == "wgrad" else kernel.linear(packed, dense)


def _milliseconds(timer: Timer, key: GemmKey, function: Callable[..., Tensor], *operands: Sequence[Tensor]) -> float:
    return 1e3 * timer.time(rotated(function, *operands), torch.device(key.device))
