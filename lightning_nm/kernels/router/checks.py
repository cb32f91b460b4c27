"""A trial of a kernel: its product of random operands checked against the dense one, and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_nm.functional import nm_mask, nm_prune
from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.kernels.api import (
    Convolution,
    GemmKernel,
    GemmKey,
    GemmName,
    MaskedMatrix,
)
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

    For dtypes of more than 16 bits the limit is 1e-4; a kernel may have one of its own.
    Under ``torch.use_deterministic_algorithms(True)`` it is repeated, always to the same bits.

    Returns:
        What is wrong; empty if nothing is. Exceptions of the kernel pass through.
    """
    with _no_autocast():
        matrix, dense = _operands(key, _generator(key))
        expected = _product(GemmKernel(), key, matrix, dense)
        matrix_copy = matrix.clone()
        dense_copy = dense.clone()
        packed = _packed(kernel, key, matrix_copy)
        result = _product(kernel, key, packed, dense)
        if not torch.equal(dense, dense_copy) or not torch.equal(matrix_copy, matrix):
            return "changes its operands"
        # The first result still exists: a kernel that has one buffer for all would overwrite it in training.
        second = _product(kernel, key, packed, dense)
        if result.data_ptr() == second.data_ptr():
            return "returns the same memory for two products"
        if result.shape != expected.shape or result.dtype != expected.dtype:
            return f"returns {tuple(result.shape)} {result.dtype}, not {tuple(expected.shape)} {expected.dtype}"
        compared = result
        if key.sparsity == "outputs":
            # The kernel may return anything at the other entries.
            mask = _needed(key).bits.bool()
            compared = torch.where(mask, result, 0)
            expected = torch.where(mask, expected, 0)
        reason = _difference(compared, expected, kernel.tolerance)
        if reason:
            return reason
        if torch.are_deterministic_algorithms_enabled():
            products = [result, second]
            for _ in range(REPEATS - 1):
                # Packed anew: the packing has to be deterministic, too.
                products.append(_product(kernel, key, _packed(kernel, key, matrix), dense))
            # Bytes are compared, because a NaN does not equal itself and -0 equals +0.
            bits = [product.contiguous().view(torch.uint8) for product in products]
            if not all(torch.equal(each, bits[0]) for each in bits):
                return "gives other bits when it is repeated, and deterministic algorithms are asked for"
    return ""


def check_bias(kernel: GemmKernel, key: GemmKey) -> str:
    """Compare a kernel's product with a bias with the dense one, in a test of a kernel; return what is wrong."""
    with _no_autocast():
        generator = _generator(key)
        matrix, dense = _operands(key, generator)
        # Large, so that a bias that is left out exceeds the tolerance.
        bias = 10 * _random(key, (key.rows,), generator)
        result = kernel.linear(_packed(kernel, key, matrix), dense, bias)
        expected = GemmKernel().linear(matrix, dense, bias)
        return _difference(result, expected, kernel.tolerance)


def _difference(result: Tensor, expected: Tensor, most: float | None) -> str:
    """Return why a product is wrong, from its relative Frobenius difference; empty if it is right."""
    # Norms of 16-bit tensors would overflow float16, and lose their small terms in bfloat16.
    dtype = torch.promote_types(expected.dtype, torch.float32)
    difference = torch.linalg.vector_norm(result - expected, dtype=dtype)
    norm = torch.linalg.vector_norm(expected, dtype=dtype)
    # Stacked, so that the device is waited for once; divided in double precision.
    difference_value, norm_value = torch.stack([difference, norm]).tolist()
    error = difference_value / norm_value
    if most is None:
        most = TOLERANCE if expected.itemsize <= 2 else TOLERANCE_FLOAT32
    if not error < most:  # true of NaN
        return f"wrong by {error:.2g} of the dense product, not less than {most:g}"
    return ""


def dense_ms(key: GemmKey, timer: Timer) -> float:
    """Milliseconds of the dense product of the N:M operand as the layer has it."""
    with _no_autocast():
        matrices, others = _copies(key)
        # The reference takes a matrix as its packed form.
        dense_product = partial(_product, GemmKernel(), key)
        return _milliseconds(timer, key, dense_product, matrices, others)


def sparse_ms(kernel: GemmKernel, key: GemmKey, timer: Timer) -> tuple[float, float]:
    """Milliseconds of a kernel's product, permuting the dense matrix included, and of packing the sparse operand once.

    Packing is from the mask on, as if the mask had moved. Where outputs are sparse nothing is packed for the product.
    The operand of a kernel for N:M matrices is contiguous, so transposed where the layer packs a transposed one. Like
    the dense product's, the times include neither masking nor drawing.
    """
    with _no_autocast():
        product_ms = time_product(kernel, key, timer)
        if key.sparsity == "outputs":
            return product_ms, 0.0
        matrices, _ = _copies(key)
        if key.packs_each_time:
            # What is drawn anew for each product has no mask to lay out.
            contiguous = [matrix.contiguous() for matrix in matrices]
            return product_ms, _milliseconds(timer, key, kernel.pack, contiguous)
        operands = [_masked(key, matrix, _order(key, kernel)) for matrix in matrices]
        for operand in operands:
            operand.dense()  # made once: making it is masking

        def pack(operand: MaskedMatrix) -> Any:
            return kernel.pack_masked(operand, kernel.layout(operand))

        return product_ms, _milliseconds(timer, key, pack, operands)


def time_product(kernel: GemmKernel, key: GemmKey, timer: Timer) -> float:
    """Milliseconds of a kernel's product alone: the first time of :func:`sparse_ms`."""
    with _no_autocast():
        matrices, others = _copies(key)
        packs = [_packed(kernel, key, matrix) for matrix in matrices]
        order = _order(key, kernel)

        def product(packed: Any, dense: Tensor) -> Tensor:
            # Training permutes dY for each product, so it is part of the time.
            if order is not None:
                dense = permuted_columns(dense, order)
            return _product(kernel, key, packed, dense)

        return _milliseconds(timer, key, product, packs, others)


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Switch off autograd and autocast: the caller may be a forward pass under both."""
    with (
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _generator(key: GemmKey) -> torch.Generator:
    """A generator of its own on the device of a product: the random numbers of the training stay as they are."""
    return torch.Generator(key.device).manual_seed(0)


def _random(key: GemmKey, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=key.dtype, device=key.device, generator=generator)


def _matrix(key: GemmKey, generator: torch.Generator) -> Tensor:
    """A random ``A [rows, depth]``, sparse as the key says, with the strides of W or dY; of a convolution W or dY."""
    if key.conv is not None:
        return _conv_matrix(key, key.conv, generator)
    axis = 0 if key.sparsity == "masked" else 1
    shape = [key.rows, key.depth]
    shape[axis] += -shape[axis] % key.pattern.m  # whole blocks, the last one is cut below
    matrix = _random(key, shape, generator)
    if key.sparsity != "outputs":
        matrix = nm_prune(matrix, key.pattern, axis)
    matrix = matrix[: key.rows, : key.depth]
    if key.gemm == "wgrad" and key.sparsity == "n:m":  # estimates have padded tokens
        matrix = pad(matrix, (0, -key.depth % TOKENS))
    if key.gemm == "forward":
        return matrix.contiguous()
    # W^T of dgrad and dY^T of wgrad are transposed views of what lies in memory.
    return matrix.t().contiguous().t()


def _conv_matrix(key: GemmKey, conv: Convolution, generator: torch.Generator) -> Tensor:
    """A random ``W [out, in / groups * taps]``, N:M by rows, or for wgrad dY."""
    if key.gemm == "wgrad":
        return _random(key, (key.images, conv.outputs, *conv.positions), generator)
    out, *fan_in = conv.weight_shape
    depth = math.prod(fan_in)
    padded_depth = depth + -depth % key.pattern.m
    # Whole blocks are drawn and pruned; the last one is cut.
    matrix = _random(key, (out, padded_depth), generator)
    pruned = nm_prune(matrix, key.pattern, 1)
    return pruned[:, :depth].contiguous()


def _dense(key: GemmKey, generator: torch.Generator) -> Tensor:
    """A random dense operand: x, or dY for dgrad."""
    shape: tuple[int, ...]
    if key.conv is not None:
        if key.gemm == "dgrad":
            shape = (key.images, key.conv.outputs, *key.conv.positions)
        else:
            shape = (key.images, key.conv.inputs, *key.conv.size)
    elif key.gemm == "wgrad":
        shape = (key.depth, key.columns)  # B of `A B`
    else:
        shape = (key.columns, key.depth)  # x of `x A^T`
    return _random(key, shape, generator)


def _operands(key: GemmKey, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    matrix = _matrix(key, generator)
    dense = _dense(key, generator)
    return matrix, dense


def _copies(key: GemmKey) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of both operands that do not stay in the cache: as in training, they are read from memory."""
    generator = _generator(key)
    device = torch.device(key.device)
    depth_bytes = key.depth * key.dtype.itemsize
    matrix_count = copies_past_cache(key.rows * depth_bytes, device)
    other_count = copies_past_cache(key.columns * depth_bytes, device)
    matrices = [_matrix(key, generator) for _ in range(matrix_count)]
    others = [_dense(key, generator) for _ in range(other_count)]
    return matrices, others


def _masked(key: GemmKey, matrix: Tensor, order: Tensor | None = None) -> MaskedMatrix:
    """A matrix and its nonzeros as the mask; with an order, a matrix that is `matrix` in that order."""
    dense = matrix.contiguous()
    values = matrix
    if order is not None:
        values = matrix.t()[order.argsort()].t()
    bits = values.ne(0).view(torch.uint8)
    return MaskedMatrix(
        values=values,
        bits=bits,
        bit=FORWARD_BIT,
        pattern=key.pattern,
        dtype=key.dtype,
        order=order,
        dense=lambda: dense,
    )


def _order(key: GemmKey, kernel: GemmKernel) -> Tensor | None:
    """The permutation of a permuted product, for a kernel that takes it."""
    if not (key.permuted and kernel.ordered):
        return None
    # Drawn on the CPU, so every call and every device has the same one.
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(key.depth, generator=generator).to(key.device)


def _needed(key: GemmKey) -> MaskedMatrix:
    """A matrix whose mask is the needed outputs of a product."""
    width = key.columns + -key.columns % key.pattern.m  # whole blocks
    scores = torch.rand(
        key.rows, width, dtype=torch.float32, device=key.device, generator=_generator(key)
    )
    mask = nm_mask(scores, key.pattern)[:, : key.columns].contiguous()
    return _masked(key, mask.to(key.dtype))


def _packed(kernel: GemmKernel, key: GemmKey, matrix: Tensor) -> Any:
    """What :func:`_product` takes of a matrix; where outputs are sparse, a pair of the mask's layout and dY."""
    if key.sparsity == "outputs":
        layout = kernel.layout(_needed(key))
        # The matrix is dY^T, but dY itself of a convolution.
        grad = matrix.t().contiguous() if key.conv is None else matrix
        return layout, grad
    if key.packs_each_time:  # which no operand of a convolution is
        return kernel.pack(matrix.contiguous())
    masked = _masked(key, matrix, _order(key, kernel))
    return kernel.pack_masked(masked, kernel.layout(masked))


def _product(kernel: GemmKernel, key: GemmKey, packed: Any, dense: Tensor) -> Tensor:
    """The product of what :func:`_packed` returned, or for the reference of the matrix itself."""
    if key.conv is not None:
        return _conv_product(kernel, key.gemm, key.conv, packed, dense)
    if key.gemm != "wgrad":
        return kernel.linear(packed, dense)
    if key.sparsity == "outputs" and isinstance(packed, tuple):
        layout, grad = packed
        return kernel.sampled(layout, grad, dense)
    return kernel.matmul(packed, dense)


def _conv_product(
    kernel: GemmKernel, gemm: GemmName, conv: Convolution, packed: Any, dense: Tensor
) -> Tensor:
    if gemm == "forward":
        return kernel.conv(packed, dense, conv)
    if gemm == "dgrad":
        return kernel.conv_input(packed, dense, conv)
    if isinstance(packed, tuple):
        layout, grad = packed
        return kernel.conv_sampled(layout, grad, dense, conv)
    return kernel.conv_sampled(None, packed, dense, conv)


def time_packed(kernel: GemmKernel, key: GemmKey, packed: Any, timer: Timer) -> float:
    """Milliseconds of a kernel's forward product with an operand that is packed already; no other one is made."""
    with _no_autocast():
        dense = _dense(key, _generator(key))
        product = partial(_product, kernel, key, packed)
        return _milliseconds(timer, key, product, [dense])


def _milliseconds(
    timer: Timer, key: GemmKey, function: Callable[..., Any], *operands: Sequence[Any]
) -> float:
    """Milliseconds of one call of a function with the next copy of each operand in turn."""
    call = rotated(function, *operands)
    return 1e3 * timer.time(call, torch.device(key.device))
