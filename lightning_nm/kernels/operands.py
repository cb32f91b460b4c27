"""What brings operands into the form that GEMMs with sparse operands take: contiguous, in order, one read of the input.

Each function has two implementations: a few torch operations, which run everywhere and define the result, and a Triton
kernel, taken for CUDA tensors wherever Triton is installed. The kernels make the same roundings in the same order, so
that the results are the same bits (but for signs of NaNs). ``TRITON_INTERPRET=1`` takes them on the CPU, too, slowly.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import overload

import torch
from torch import Tensor

from lightning_nm.functional import counter_uniform, mvue
from lightning_nm.functional.mask_bits import BACKWARD_BIT, FORWARD_BIT
from lightning_nm.pattern import NMPattern, PatternLike

TOKENS = 16
"""What the tokens of a sparse wgrad must be a multiple of: cuSPARSELt's rule for half types."""

_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def masked_forward(weight: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask a weight for the forward GEMM: ``W_F[o, i] = W[o, i]`` where the forward bit of the mark is set, else +0.

    Pruned entries are +0, never the -0 that a product with a mask leaves and that some compressors take for a nonzero.

    Args:
        weight: W ``[out, in]``, any floating dtype and strides: a weight that is stored as ``[in, out]`` is given as
            ``weight.t()``.
        marks: The masks as bits, see :mod:`lightning_nm.functional.mask_bits`, uint8 ``[out, in]``, with the strides of
            the weight.
        dtype: Floating dtype of the result.

    Returns:
        W_F ``[out, in]``, contiguous, of ``dtype``, without autograd history.

    Raises:
        TypeError: If ``weight`` or ``dtype`` is not floating, or ``marks`` not uint8.
        ValueError: If ``weight`` is not a matrix, or ``marks`` has another shape, device or other strides.

    Example::

        >>> masked_forward(torch.tensor([[-1.0, 2.0]]), torch.tensor([[2, 3]], dtype=torch.uint8), torch.float32)
        tensor([[0., 2.]])

    Source: NVIDIA/cutlass#2110 on -0.
    """
    _check_weight(weight, marks, dtype, None)
    weight = weight.detach()
    kernels = _kernels_for(weight, dtype)
    if kernels is not None:
        return kernels.masked(weight, marks, dtype, None, forward=True, backward_bit=None)[0]
    return masked_forward_reference(weight, marks, dtype)


def masked_backward(
    weight: Tensor,
    marks: Tensor,
    dtype: torch.dtype,
    permutation: Tensor | None = None,
    *,
    own_backward: bool,
) -> Tensor:
    """Mask a weight for the dgrad GEMM, transposed: ``W_B^T[i, o] = W[p, i]`` with ``p = permutation[o]``, else +0.

    An entry is kept where the backward bit of its mark is set, or the forward bit without a backward mask.

    Args:
        weight: As :func:`masked_forward`'s.
        marks: As :func:`masked_forward`'s.
        dtype: As :func:`masked_forward`'s.
        permutation: Order of the rows of W_B, int64 ``[out]``, each row once; ``None`` leaves them. Its values are not
            checked: on a GPU that would synchronise.
        own_backward: Whether W_B has a mask of its own; otherwise it is W_F.

    Returns:
        W_B^T ``[in, out]``, contiguous, of ``dtype``, without autograd history.

    Raises:
        TypeError: As :func:`masked_forward`, or if ``permutation`` is not int64.
        ValueError: As :func:`masked_forward`, or if ``permutation`` is of another length or device.

    Example::

        >>> marks = torch.tensor([[2, 3]], dtype=torch.uint8)
        >>> masked_backward(torch.tensor([[-1.0, 2.0]]), marks, torch.float32, own_backward=True)
        tensor([[-1.],
                [ 2.]])
    """
    _check_weight(weight, marks, dtype, permutation)
    weight, bit = weight.detach(), BACKWARD_BIT if own_backward else FORWARD_BIT
    kernels = _kernels_for(weight, dtype)
    if kernels is not None:
        return kernels.masked(weight, marks, dtype, permutation, forward=False, backward_bit=bit)[1]
    return masked_backward_reference(weight, marks, dtype, bit, permutation)


def masked_forward_reference(weight: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute :func:`masked_forward` by torch operations, from checked arguments."""
    return _masked(weight, marks, dtype, FORWARD_BIT).contiguous()


def masked_backward_reference(
    weight: Tensor, marks: Tensor, dtype: torch.dtype, backward_bit: int, permutation: Tensor | None
) -> Tensor:
    """Compute :func:`masked_backward` by torch operations, from checked arguments."""
    masked = _masked(weight, marks, dtype, backward_bit)
    return (masked if permutation is None else masked[permutation]).t().contiguous()


def permuted_columns(grad: Tensor, permutation: Tensor) -> Tensor:
    """Bring the columns of an output gradient into the order that a permuted W_B sums over.

    ``R[t, o] = dY[t, permutation[o]]``: ``dX = dY W_B = R W_B[permutation]``. Values are copied, not computed with.

    Args:
        grad: dY ``[tokens, out]``, contiguous, any floating dtype.
        permutation: Order of the columns, int64 ``[out]``. Its values are not checked: on a GPU that would wait for it.

    Returns:
        ``[tokens, out]``, contiguous, of the dtype of ``grad``, without autograd history.

    Raises:
        TypeError: If ``grad`` is not floating or ``permutation`` not int64.
        ValueError: If ``grad`` is not a contiguous matrix, or ``permutation`` is of another length or device.

    Example::

        >>> permuted_columns(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([2, 0, 1])).tolist()
        [[3.0, 1.0, 2.0]]

    Source: Zhang et al., "Bi-directional Masks for Efficient N:M Sparse Training", ICML 2023, arXiv:2302.06058.
    """
    _check_grad(grad)
    _check_order("permutation", permutation, grad.shape[1], grad.device)
    grad = grad.detach()
    kernels = _kernels_for(grad, grad.dtype)
    if kernels is not None:
        return kernels.permuted_columns(grad, permutation)
    return permuted_columns_reference(grad, permutation)


def permuted_columns_reference(grad: Tensor, permutation: Tensor) -> Tensor:
    """Compute :func:`permuted_columns` by torch operations, from checked arguments."""
    return grad.index_select(1, permutation)


@overload
def mvue_transposed(grad: Tensor, seed: Tensor, pattern: PatternLike = ..., *, gather: None = ...) -> Tensor: ...


@overload
def mvue_transposed(
    grad: Tensor, seed: Tensor, pattern: PatternLike = ..., *, gather: Tensor
) -> tuple[Tensor, Tensor]: ...


def mvue_transposed(
    grad: Tensor,
    seed: Tensor,
    pattern: PatternLike = "2:4",
    *,
    gather: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Draw the unbiased N:M estimate of an output gradient along its tokens, transposed for the wgrad GEMM.

    ``R[o, t] = E(dY)[t, o]`` with E as ``MVUE(pattern).estimate`` draws it from this seed:
    :func:`lightning_nm.functional.mvue` of blocks of M tokens, where the block of tokens ``M b, ..., M b + M - 1`` of
    column o takes the number ``b * out + o`` of :func:`lightning_nm.functional.counter_uniform`. The tokens are padded
    with zeros, which no estimate keeps, to a multiple of 16.

    Args:
        grad: dY ``[tokens, out]``, contiguous, any floating dtype. Half dtypes are computed in float32, and rounded
            once.
        seed: Four words in int64, as :func:`lightning_nm.functional.fold_seed` makes them.
        pattern: N:M pattern along the tokens; M must divide 16.
        gather: Order in which the dgrad GEMM takes the columns of dY, int64 ``[out]``: the same launch then makes
            :func:`permuted_columns` of it, so that dY comes from memory once. Its values are not checked.

    Returns:
        ``[out, tokens rounded up to a multiple of 16]``, contiguous, of the dtype of ``grad``, without autograd
        history. Blocks with a NaN or an infinity have N NaNs. With ``gather``, a pair of it and
        ``permuted_columns(grad, gather)``.

    Raises:
        TypeError: If ``grad`` is not floating, or ``gather`` not int64.
        ValueError: If ``grad`` is not a contiguous matrix, ``seed`` not four int64, M does not divide 16, or
            ``gather`` is of another length or device.

    Example::

        >>> from lightning_nm.functional import fold_seed
        >>> grad = torch.tensor([[5.0], [0.0], [-3.0], [0.0]])
        >>> mvue_transposed(grad, fold_seed(0))[0, :5].tolist()
        [5.0, 0.0, -3.0, 0.0, 0.0]

    Source: Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", ICLR 2023,
    arXiv:2203.10991.
    """
    pattern = NMPattern.parse(pattern)
    _check_grad(grad)
    if TOKENS % pattern.m:
        raise ValueError(f"tokens are padded to a multiple of {TOKENS}, which blocks of {pattern} do not divide")
    if seed.dtype != torch.int64 or seed.shape != (4,):
        raise ValueError(f"a seed is four words of int64, see fold_seed; got {seed.dtype} {tuple(seed.shape)}")
    _check_order("gather", gather, grad.shape[1], grad.device)
    grad = grad.detach()
    kernels = _kernels_for(grad, grad.dtype)
    if kernels is not None:
        return kernels.mvue_transposed(grad, seed, pattern, gather)
    estimate = mvue_transposed_reference(grad, seed, pattern)
    return estimate if gather is None else (estimate, permuted_columns_reference(grad, gather))


def mvue_transposed_reference(grad: Tensor, seed: Tensor, pattern: NMPattern) -> Tensor:
    """Compute :func:`mvue_transposed` without ``gather`` by torch operations, from checked arguments."""
    tokens, out = grad.shape
    padded = torch.cat([grad, grad.new_zeros(-tokens % TOKENS, out)])
    blocks = padded.shape[0] // pattern.m
    uniform = counter_uniform(blocks * out, seed, device=grad.device).view(blocks, out)
    return mvue(padded, pattern, 0, uniform=uniform).t().contiguous()


def _masked(weight: Tensor, marks: Tensor, dtype: torch.dtype, bit: int) -> Tensor:
    return torch.where((marks & bit).ne(0), weight, 0).to(dtype)


def _check_matrix(name: str, matrix: Tensor) -> None:
    if not matrix.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype; got {matrix.dtype}")
    if matrix.dim() != 2:
        raise ValueError(f"{name} must be a matrix; got {tuple(matrix.shape)}")


def _check_grad(grad: Tensor) -> None:
    _check_matrix("grad", grad)
    if not grad.is_contiguous():
        shape, strides = tuple(grad.shape), grad.stride()
        raise ValueError(f"grad must be contiguous; got {shape} with strides {strides}: call .contiguous()")


def _check_weight(weight: Tensor, marks: Tensor, dtype: torch.dtype, permutation: Tensor | None) -> None:
    _check_matrix("weight", weight)
    if not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype} cannot hold weights: pass a floating dtype")
    if marks.dtype != torch.uint8:
        raise TypeError(f"marks are bytes of two bits; got {marks.dtype}")
    strides = zip(weight.shape, weight.stride(), marks.stride(), strict=False)
    if (
        marks.shape != weight.shape
        or marks.device != weight.device
        or any(size > 1 and own != other for size, own, other in strides)  # the stride of one row or column is moot
    ):
        raise ValueError(
            f"marks must lie as the weight does, {tuple(weight.shape)} on {weight.device} with strides "
            f"{weight.stride()}; got {tuple(marks.shape)} on {marks.device} with strides {marks.stride()}: "
            "transpose both or neither"
        )
    _check_order("permutation", permutation, weight.shape[0], weight.device)


def _check_order(name: str, order: Tensor | None, size: int, device: torch.device) -> None:
    if order is None:
        return
    if order.dtype != torch.int64:
        raise TypeError(f"{name} must be int64; got {order.dtype}")
    if order.shape != (size,) or order.device != device or not order.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous and hold {size} indices on {device}; got {tuple(order.shape)} on "
            f"{order.device} with strides {order.stride()}"
        )


def in_one_pass(matrix: Tensor) -> bool:
    """Whether the functions of this module make one pass over a matrix, by a kernel, and keep its dtype."""
    return _kernels_for(matrix, matrix.dtype) is not None


def _kernels_for(matrix: Tensor, dtype: torch.dtype) -> ModuleType | None:
    """The Triton kernels, where they can be used; Inductor makes its own of the torch operations."""
    if torch.compiler.is_compiling() or not matrix.numel() or not {matrix.dtype, dtype} <= set(_TRITON_DTYPES):
        return None
    if matrix.device.type != "cuda" and not (matrix.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    return triton_kernels()


@functools.cache
def triton_kernels() -> ModuleType | None:
    """The module of the Triton kernels; ``None`` where Triton is not installed. It is imported when first needed."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return None
    return importlib.import_module("lightning_nm.kernels.operands_triton")
