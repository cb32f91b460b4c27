"""Prepares the operands of sparse GEMMs, masked, permuted or estimated, in one pass over the input.

Each function has two implementations: torch operations, which run everywhere and define the result, and a Triton
kernel for CUDA tensors, used if Triton is installed. Both round the same in the same order, so the results have the
same bits (except for signs of NaNs). ``TRITON_INTERPRET=1`` runs the Triton kernels on the CPU, slowly, and
``LIGHTNING_NM_TRITON=0`` leaves all to torch.

Operands of another dtype than stated raise a TypeError, those of another shape, layout or device a ValueError.
Results are contiguous and have no autograd history.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from lightning_nm.functional import counter_uniform, mvue
from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.functional.select import masked
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.pattern import NMPattern, PatternLike

TOKENS = 16
"""The tokens of a sparse wgrad are padded to a multiple of this: cuSPARSELt's rule for half types."""

# float64 and the 8-bit types take torch operations.
_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def masked_operand(
    weight: Tensor,
    marks: Tensor,
    dtype: torch.dtype,
    bit: int = FORWARD_BIT,
    permutation: Tensor | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Mask a weight for a GEMM: ``R[o, i] = W[p, i]`` with ``p = permutation[o]`` where the bit is set, else +0.

    Never -0, which some compressors take for a nonzero (NVIDIA/cutlass#2110). The forward GEMM takes the result
    itself, dgrad takes it transposed.

    Args:
        weight: W ``[out, in]``, any floating dtype and strides.
        marks: Mask bits, see :mod:`lightning_nm.functional.mask_storage`, uint8 ``[out, in]``, with the strides of W.
        dtype: Floating dtype of the result.
        bit: The bit of the mask.
        permutation: Order of the rows of W, int64 ``[out]``, each row once; ``None`` leaves them. Its values are not
            checked: on a GPU that would synchronise.
        transposed: Whether to return the transposed matrix, ``[in, out]``.

    Example::

        >>> masked_operand(torch.tensor([[-1.0, 2.0]]), torch.tensor([[2, 3]], dtype=torch.uint8), torch.float32)
        tensor([[0., 2.]])
    """
    _check_weight(weight, marks, dtype, permutation)
    # The Triton module has functions of the same arguments.
    kernels = _kernels_for(weight, dtype)
    compute = masked_reference if kernels is None else kernels.masked
    result: Tensor = compute(weight.detach(), marks, dtype, bit, permutation, transposed)
    return result


def masked_reference(
    weight: Tensor,
    mask_bits: Tensor,
    dtype: torch.dtype,
    bit: int,
    permutation: Tensor | None,
    transposed: bool,
) -> Tensor:
    """Compute :func:`masked_operand` by torch operations, from checked arguments."""
    mask = (mask_bits & bit).ne(0)
    result = masked(weight, mask).to(dtype)
    # The rows of W_B are output channels, which dgrad sums over in the order of R, see `permuted_columns`.
    if permutation is not None:
        result = result[permutation]
    if transposed:
        result = result.t()
    return result.contiguous()


def permuted_columns(grad: Tensor, permutation: Tensor) -> Tensor:
    """Permute the columns of an output gradient: ``R[t, o] = dY[t, permutation[o]]``, ``dX = R W_B[permutation]``.

    Args:
        grad: dY ``[tokens, out]``, contiguous, any floating dtype, as R.
        permutation: int64 ``[out]``, each column once, as for :func:`masked_operand`.

    Example::

        >>> permuted_columns(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([2, 0, 1]))
        tensor([[3., 1., 2.]])

    Source: Zhang et al., "Bi-directional Masks for Efficient N:M Sparse Training", ICML 2023, arXiv:2302.06058.
    """
    _check_grad(grad)
    _check_order("permutation", permutation, grad.shape[1], grad.device)
    kernels = _kernels_for(grad, grad.dtype)
    compute = permuted_columns_reference if kernels is None else kernels.permuted_columns
    result: Tensor = compute(grad.detach(), permutation)
    return result


def permuted_columns_reference(grad: Tensor, permutation: Tensor) -> Tensor:
    """Compute :func:`permuted_columns` by torch operations, from checked arguments."""
    return grad.index_select(1, permutation)


def mvue_transposed(
    grad: Tensor, seed: Tensor, pattern: PatternLike = "2:4", *, gather: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Draw the unbiased N:M estimate of an output gradient along its tokens, transposed for the wgrad GEMM.

    ``R[o, t] = E(dY)[t, o]`` with E as ``MVUE(pattern).estimate`` draws it from this seed:
    :func:`lightning_nm.functional.mvue` of blocks of M tokens, where the block of tokens ``M b, ..., M b + M - 1`` of
    column o takes the number ``b * out + o`` of :func:`lightning_nm.functional.counter_uniform`. The tokens are padded
    with zeros, which no estimate keeps, to a multiple of 16.

    Args:
        grad: dY ``[tokens, out]``, as for :func:`permuted_columns`. Half dtypes are computed in float32 and
            rounded once.
        seed: Four words in int64, from :func:`lightning_nm.functional.fold_seed`.
        pattern: N:M pattern along the tokens; M must divide 16.
        gather: A permutation for dgrad: the same launch also computes ``permuted_columns(grad, gather)``, so dY is
            read once.

    Returns:
        ``[out, tokens rounded up to a multiple of 16]`` of the dtype of ``grad``; blocks with a NaN or an infinity have
        N NaNs. And the permuted gradient, ``None`` without ``gather``.

    Example::

        >>> from lightning_nm.functional import fold_seed
        >>> grad = torch.tensor([[5.0], [0.0], [-3.0], [0.0]])
        >>> estimate, _ = mvue_transposed(grad, fold_seed(0))
        >>> estimate[0, :5].tolist()
        [5.0, 0.0, -3.0, 0.0, 0.0]

    Source: Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", ICLR 2023,
    arXiv:2203.10991.
    """
    pattern = NMPattern.parse(pattern)
    _check_grad(grad)
    # Padding to whole blocks of the pattern and to the hardware's multiple is then the same padding.
    if TOKENS % pattern.m:
        raise ValueError(
            f"tokens are padded to a multiple of {TOKENS}, which blocks of {pattern} do not divide"
        )
    if seed.dtype != torch.int64 or seed.shape != (4,):
        raise ValueError(
            f"a seed is four words of int64, see fold_seed; got {seed.dtype} {tuple(seed.shape)}"
        )
    _check_order("gather", gather, grad.shape[1], grad.device)
    kernels = _kernels_for(grad, grad.dtype)
    compute = mvue_transposed_reference if kernels is None else kernels.mvue_transposed
    result: tuple[Tensor, Tensor | None] = compute(grad.detach(), seed, pattern, gather)
    return result


def mvue_transposed_reference(
    grad: Tensor, seed: Tensor, pattern: NMPattern, gather: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`mvue_transposed` by torch operations, from checked arguments."""
    tokens, out = grad.shape
    # Not by `pad`, which in torch 2.6 takes no matrix without columns.
    padding = grad.new_zeros(-tokens % TOKENS, out)
    padded = torch.cat([grad, padding])  # [padded tokens, out]
    # One random number for each block of M tokens of one column.
    blocks = len(padded) // pattern.m
    uniform = counter_uniform(blocks * out, seed, device=grad.device)
    estimate = mvue(padded, pattern, 0, uniform=uniform.view(blocks, out))
    transposed = estimate.t().contiguous()  # [out, padded tokens]
    return transposed, None if gather is None else permuted_columns_reference(grad, gather)


def _check_matrix(name: str, matrix: Tensor) -> None:
    if not matrix.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype; got {matrix.dtype}")
    if matrix.dim() != 2:
        raise ValueError(f"{name} must be a matrix; got {tuple(matrix.shape)}")


def _check_grad(grad: Tensor) -> None:
    _check_matrix("grad", grad)
    if not grad.is_contiguous():
        raise ValueError(f"grad must be contiguous; got {_layout(grad)}: call .contiguous()")


def _check_weight(
    weight: Tensor, mask_bits: Tensor, dtype: torch.dtype, permutation: Tensor | None
) -> None:
    """Refuse a weight and mask bits that the Triton kernel, which reads both by the weight's strides, would misread."""
    _check_matrix("weight", weight)
    if not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype} cannot hold weights: pass a floating dtype")
    if mask_bits.dtype != torch.uint8:
        raise TypeError(f"marks are bytes of two bits; got {mask_bits.dtype}")
    if not _same_layout(weight, mask_bits):
        raise ValueError(
            f"marks must have the layout of the weight, {_layout(weight)}; got {_layout(mask_bits)}: transpose both or "
            "neither"
        )
    _check_order("permutation", permutation, weight.shape[0], weight.device)


def _same_layout(matrix: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape, device and order of entries in memory."""
    if matrix.shape != other.shape or matrix.device != other.device:
        return False
    strides = zip(matrix.shape, matrix.stride(), other.stride(), strict=True)
    # torch sets the stride of a dimension of size 1 to anything.
    return all(size <= 1 or one == two for size, one, two in strides)


def _check_order(name: str, order: Tensor | None, size: int, device: torch.device) -> None:
    """Refuse a permutation of another dtype, size or device; its values are not read, which would synchronise."""
    if order is None:
        return
    if order.dtype != torch.int64:
        raise TypeError(f"{name} must be int64; got {order.dtype}")
    if order.shape != (size,) or order.device != device or not order.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous and hold {size} indices on {device}; got {_layout(order)}"
        )


def _layout(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} on {tensor.device} with strides {tensor.stride()}"


def in_one_pass(matrix: Tensor) -> bool:
    """Whether the functions of this module take a matrix in one pass, by a kernel, if its dtype stays."""
    return _kernels_for(matrix, matrix.dtype) is not None


def _kernels_for(matrix: Tensor, dtype: torch.dtype) -> ModuleType | None:
    """The Triton kernels, if they can be used; Inductor compiles the torch operations into its own."""
    # Inductor compiles the torch operations into kernels of its own, and an empty matrix needs none.
    if torch.compiler.is_compiling() or not matrix.numel():
        return None
    if matrix.dtype not in _TRITON_DTYPES or dtype not in _TRITON_DTYPES:
        return None
    return triton_kernels() if triton_use.runs_on(matrix.device) else None


def triton_kernels() -> ModuleType | None:
    """Import the Triton kernels when they are first needed; ``None`` without Triton, or if they are switched off."""
    return None if triton_use.unavailable() else triton_use.kernels("operands_triton")
