"""A trial of a kernel: its product of random operands checked against the dense one, and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_nm.functional import nm_mask, nm_prune
from lightning_nm.functional.mask_bits import FORWARD_BIT
from lightning_nm.kernels.api import Algorithm, Convolution, GemmKernel, GemmKey, MaskedMatrix
from lightning_nm.kernels.operands import TOKENS, permuted_columns
from lightning_nm.kernels.router.timing import Timer, copies_past_cache, rotated

TOLERANCE = 1e-2
"""Largest relative Frobenius difference of two 16-bit products. Rounding both results to bfloat16 makes 2.3e-3, and the
dense one may round partial sums, too. A kernel that loses one value in 5000 exceeds it."""

TOLERANCE_FLOAT32 = 1e-4
"""The same for wider dtypes: sums of a million terms in another order differ by less than 1e-5."""

REPEATS = 3
"""How often a product must have the same bits if deterministic algorithms are requested."""


def check(kernel: GemmKernel, key: GemmKey) -> str:
    """Compare a kernel's product of random operands with the dense one: ``|P - D|_F / |D|_F < 1e-2``.

    For dtypes of more than 16 bits the limit is 1e-4.
    Under ``torch.use_deterministic_algorithms(True)`` it is repeated, always to the same bits.

    Returns:
        What is wrong; empty if nothing is. Exceptions of the kernel pass through.
    """
    with _no_autocast():
        matrix, dense = _operands(key, _generator(key))
        expected = _product(GemmKernel(), key, matrix, dense)
        packable, kept = matrix.clone(), dense.clone()
        packed = _packed(kernel, key, packable)
        result = _product(kernel, key, packed, dense)
        if not torch.equal(dense, kept) or not torch.equal(packable, matrix):
            return "changes its operands"
        second = _product(kernel, key, packed, dense)
        if result.data_ptr() == second.data_ptr():
            return "returns the same memory for two products"
        if (result.shape, result.dtype) != (expected.shape, expected.dtype):
            return f"returns {tuple(result.shape)} {result.dtype}, not {tuple(expected.shape)} {expected.dtype}"
        if key.sparsity == "outputs":
            mask = _needed(key).bits.bool()
            if reason := _difference(torch.where(mask, result, 0), torch.where(mask, expected, 0)):
                return reason
        elif reason := _difference(result, expected):
            return reason
        if torch.are_deterministic_algorithms_enabled():
            repeats = [
                _product(kernel, key, _packed(kernel, key, matrix), dense)
                for _ in range(REPEATS - 1)
            ]
            bits = [
                product.contiguous().view(torch.uint8) for product in (result, second, *repeats)
            ]
            if not all(torch.equal(each, bits[0]) for each in bits):
                return "gives other bits when it is repeated, and deterministic algorithms are asked for"
    return ""


def check_bias(kernel: GemmKernel, key: GemmKey) -> str:
    """Compare a kernel's product with a bias with the dense one; return what is wrong."""
    with _no_autocast():
        generator = _generator(key)
        matrix, dense = _operands(key, generator)
        bias = 10 * torch.randn(key.rows, dtype=key.dtype, device=key.device, generator=generator)
        result = kernel.linear(_packed(kernel, key, matrix), dense, bias)
        return _difference(result, GemmKernel().linear(matrix, dense, bias))


def _difference(result: Tensor, expected: Tensor) -> str:
    dtype = torch.promote_types(expected.dtype, torch.float32)
    norms = torch.stack(
        [torch.linalg.vector_norm(t, dtype=dtype) for t in (result - expected, expected)]
    )
    difference, norm = norms.tolist()
    error = difference / norm
    most = TOLERANCE if expected.itemsize <= 2 else TOLERANCE_FLOAT32
    if not error < most:  # true of NaN
        return f"wrong by {error:.2g} of the dense product, not less than {most:g}"
    return ""


def dense_ms(key: GemmKey, timer: Timer) -> float:
    """Milliseconds of the dense product of the N:M operand as the layer has it."""
    with _no_autocast():
        matrices, others = _copies(key)
        return _milliseconds(
            timer, key, lambda a, b: _product(GemmKernel(), key, a, b), matrices, others
        )


def sparse_ms(kernel: GemmKernel, key: GemmKey, timer: Timer) -> tuple[float, float]:
    """Milliseconds of a kernel's product, permuting the dense matrix included, and of packing the sparse operand once.

    Packing is from the mask on, as if the mask had moved. Where outputs are sparse nothing is packed for the product.
    The operand of a kernel for N:M matrices is contiguous, so transposed where the layer packs a transposed one. Like
    the dense product's, the times include neither masking nor drawing.
    """
    with _no_autocast():
        product = time_product(kernel, key, timer)
        if key.sparsity == "outputs":
            return product, 0.0
        if key.gemm == "wgrad":
            return product, _milliseconds(
                timer, key, kernel.pack, [m.contiguous() for m in _copies(key)[0]]
            )
        operands = [_masked(key, matrix, _order(key, kernel)) for matrix in _copies(key)[0]]
        for operand in operands:
            operand.dense()  # made once: making it is masking
        return product, _milliseconds(
            timer, key, lambda each: kernel.pack_masked(each, kernel.layout(each)), operands
        )


def time_product(kernel: GemmKernel, key: GemmKey, timer: Timer) -> float:
    """Milliseconds of a kernel's product alone: the first time of :func:`sparse_ms`."""
    with _no_autocast():
        matrices, others = _copies(key)
        packs = [_packed(kernel, key, matrix) for matrix in matrices]
        order = _order(key, kernel)

        def product_of(packed: Tensor, dense: Tensor) -> Tensor:
            return _product(
                kernel, key, packed, dense if order is None else permuted_columns(dense, order)
            )

        return _milliseconds(timer, key, product_of, packs, others)


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Neither autograd nor autocast."""
    with (
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _generator(key: GemmKey) -> torch.Generator:
    return torch.Generator(key.device).manual_seed(0)


def _matrix(key: GemmKey, generator: torch.Generator) -> Tensor:
    """A random ``A [rows, depth]``, sparse as the key says, with the strides of W or dY; of a convolution W or dY."""
    if key.conv is not None:
        return _conv_matrix(key, key.conv, generator)
    axis, m = (0 if key.sparsity == "masked" else 1), key.pattern.m
    shape = [size + -size % m * (axis == i) for i, size in enumerate((key.rows, key.depth))]
    matrix = torch.randn(shape, dtype=key.dtype, device=key.device, generator=generator)
    if key.sparsity != "outputs":
        matrix = nm_prune(matrix, key.pattern, axis)
    matrix = matrix[: key.rows, : key.depth]
    if key.gemm == "wgrad" and key.sparsity == "n:m":  # estimates have padded tokens
        matrix = pad(matrix, (0, -key.depth % TOKENS))
    return matrix.contiguous() if key.gemm == "forward" else matrix.t().contiguous().t()


def _conv_matrix(key: GemmKey, conv: Convolution, generator: torch.Generator) -> Tensor:
    """A random ``W [out, in / groups * taps]``, N:M by rows, or for wgrad dY."""
    if key.gemm == "wgrad":
        shape: tuple[int, ...] = (key.images, conv.outputs, *conv.positions)
        return torch.randn(shape, dtype=key.dtype, device=key.device, generator=generator)
    out, *rest = conv.weight_shape
    depth = math.prod(rest)
    matrix = torch.randn(
        out, depth + -depth % key.pattern.m, dtype=key.dtype, device=key.device, generator=generator
    )
    return nm_prune(matrix, key.pattern, 1)[:, :depth].contiguous()


def _dense(key: GemmKey, generator: torch.Generator) -> Tensor:
    if key.conv is not None:
        conv, backward = key.conv, key.gemm == "dgrad"
        channels, size = (conv.outputs, conv.positions) if backward else (conv.inputs, conv.size)
        return torch.randn(
            key.images, channels, *size, dtype=key.dtype, device=key.device, generator=generator
        )
    shape = (key.depth, key.columns) if key.gemm == "wgrad" else (key.columns, key.depth)
    return torch.randn(shape, dtype=key.dtype, device=key.device, generator=generator)


def _operands(key: GemmKey, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _matrix(key, generator), _dense(key, generator)


def _copies(key: GemmKey) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of both operands that do not stay in the cache."""
    generator, device = _generator(key), torch.device(key.device)
    matrices, others = (
        [
            make(key, generator)
            for _ in range(copies_past_cache(rows * key.depth * key.dtype.itemsize, device))
        ]
        for make, rows in ((_matrix, key.rows), (_dense, key.columns))
    )
    return matrices, others


def _masked(key: GemmKey, matrix: Tensor, order: Tensor | None = None) -> MaskedMatrix:
    """A matrix and its nonzeros as the mask; with an order, a matrix that is `matrix` in that order."""
    dense = matrix.contiguous()
    values = matrix if order is None else matrix.t()[order.argsort()].t()
    bits = values.ne(0).view(torch.uint8)
    return MaskedMatrix(values, bits, FORWARD_BIT, key.pattern, key.dtype, order, lambda: dense)


def _order(key: GemmKey, kernel: GemmKernel) -> Tensor | None:
    """The permutation of a permuted product, for a kernel that takes it."""
    if not (key.permuted and kernel.ordered):
        return None
    return torch.randperm(key.depth, generator=torch.Generator().manual_seed(0)).to(key.device)


def _needed(key: GemmKey) -> MaskedMatrix:
    """A matrix whose mask is the needed outputs of a product."""
    width = key.columns + -key.columns % key.pattern.m
    scores = torch.rand(key.rows, width, device=key.device, generator=_generator(key))
    mask = nm_mask(scores, key.pattern)[:, : key.columns].contiguous()
    return _masked(key, mask.to(key.dtype))


def _packed(kernel: GemmKernel, key: GemmKey, matrix: Tensor) -> Any:
    if key.sparsity == "outputs":
        return kernel.layout(_needed(key)), matrix.t().contiguous() if key.conv is None else matrix
    if key.gemm == "wgrad":  # estimated, which a convolution is not
        return kernel.pack(matrix.contiguous())
    masked = _masked(key, matrix, _order(key, kernel))
    return kernel.pack_masked(masked, kernel.layout(masked))


def _product(kernel: GemmKernel, key: GemmKey, packed: Any, dense: Tensor) -> Tensor:
    if key.conv is not None:
        if key.gemm == "wgrad":
            layout, grad = packed if isinstance(packed, tuple) else (None, packed)
            return kernel.conv_sampled(layout, grad, dense, key.conv)
        return (kernel.conv if key.gemm == "forward" else kernel.conv_input)(
            packed, dense, key.conv
        )
    if key.gemm != "wgrad":
        return kernel.linear(packed, dense)
    if key.sparsity == "outputs" and isinstance(packed, tuple):
        layout, grad = packed
        return kernel.sampled(layout, grad, dense)
    return kernel.matmul(packed, dense)


def time_packed(kernel: GemmKernel, key: GemmKey, packed: Any, timer: Timer) -> float:
    """Milliseconds of a kernel's forward product with an operand that is packed already; no other one is made."""
    with _no_autocast():
        dense = _dense(key, _generator(key))
        return _milliseconds(timer, key, lambda x: _product(kernel, key, packed, x), [dense])


def proposed_algorithms(kernel: GemmKernel, key: GemmKey) -> Sequence[Algorithm]:
    """Algorithms that a kernel proposes for a product."""
    if (
        type(kernel).algorithms is GemmKernel.algorithms
    ):  # it has no choice of them: operands need not be made
        return ()
    with _no_autocast():
        matrix, dense = _operands(key, _generator(key))
        return kernel.algorithms(key.gemm, _packed(kernel, key, matrix), dense)


def _milliseconds(
    timer: Timer, key: GemmKey, function: Callable[..., Any], *operands: Sequence[Any]
) -> float:
    return 1e3 * timer.time(rotated(function, *operands), torch.device(key.device))
