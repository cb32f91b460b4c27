"""One-shot pruning of a weight by what its layer's inputs are, as Wanda and SparseGPT do."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.functional.masks import nm_mask
from lightning_nm.functional.pattern import NMPattern, PatternLike

_BLOCK = 128  # columns whose corrections of later columns are applied at once


def wanda_mask(weight: Tensor, input_norms: Tensor, pattern: PatternLike) -> Tensor:
    r"""Keep the entries of largest ``|W_ij| * ||X_j||_2``.

    Source: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", arXiv 2306.11695.

    Args:
        weight: ``[out, in]``, real. Scores are computed in the wider dtype of ``weight`` and ``input_norms``, and in
            float32 at least.
        input_norms: ``[in]``, the Euclidean norm of each input feature over the calibration tokens.
        pattern: What :meth:`NMPattern.parse` reads; blocks lie along `in`.

    Returns:
        A bool tensor ``[out, in]``.

    Raises:
        ValueError: If the shapes do not fit.

    Example:
        >>> wanda_mask(torch.tensor([[3.0, -2.0]]), torch.tensor([1.0, 2.0]), "1:2").tolist()
        [[False, True]]
    """
    if weight.dim() != 2 or input_norms.shape != weight.shape[1:]:
        raise ValueError(
            f"input norms {tuple(input_norms.shape)} do not belong to a weight {tuple(weight.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(weight.dtype, input_norms.dtype), torch.float32)
    scores = weight.to(dtype).abs() * input_norms.to(dtype)
    return nm_mask(scores, pattern, dim=1)


@torch.no_grad()
def sparsegpt(
    weight: Tensor, moment: Tensor, pattern: PatternLike, damping: float = 0.01
) -> Tensor:
    r"""Prune a weight column by column, and correct the later columns for each error.

    The output error of a row w is :math:`(w - \hat w) H (w - \hat w)^T` with :math:`H = X^T X`. With
    :math:`C_j = (H_{j:, j:})^{-1}`, the inverse for the columns from j on, the M columns of a block keep the N entries
    of largest :math:`w_j^2 / (C_j)_{00}`, as they are when the block begins. A column that is pruned then moves the
    others by :math:`w_{j:} \leftarrow w_{j:} - w_j (C_j)_0 / (C_j)_{00}`.

    Source: Frantar and Alistarh, "SparseGPT", arXiv 2301.00774.

    Args:
        weight: ``[out, in]``, floating point.
        moment: ``[in, in]``, H up to a factor, symmetric.
        pattern: What :meth:`NMPattern.parse` reads; blocks lie along `in`.
        damping: Share of the mean of H's diagonal that is added to the diagonal.

    Returns:
        The N:M weight, of the dtype of ``weight``. Input features that were always zero get zeros.

    Raises:
        ValueError: If the shapes or the pattern do not fit, H holds a value that is not finite, or is not positive
            definite with this damping.
    """
    pattern = NMPattern.parse(pattern)
    if weight.dim() != 2 or moment.shape != (weight.shape[1], weight.shape[1]):
        raise ValueError(
            f"second moments {tuple(moment.shape)} do not belong to a weight {tuple(weight.shape)}"
        )
    if weight.shape[1] % pattern.m:
        raise ValueError(f"in = {weight.shape[1]} is not a multiple of M = {pattern.m}")
    if not bool(moment.isfinite().all()):
        raise ValueError("the second moments of the inputs hold values that are not finite")
    dead = moment.diagonal() == 0
    work = weight.double().masked_fill(dead, 0.0)
    damped = moment.double().clone()
    size = damped.diagonal()[~dead].mean() if not bool(dead.all()) else damped.new_ones(())
    damped.diagonal().add_(torch.where(dead, size, damping * size))
    factor, fault = torch.linalg.cholesky_ex(damped)
    if not int(fault):
        # Row j of the upper factor of the inverse is (C_j)_0 / sqrt((C_j)_00).
        factor, fault = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    if int(fault):
        raise ValueError(
            f"the second moments are not positive definite with damping={damping}: raise it"
        )
    step = pattern.m * max(1, _BLOCK // pattern.m)
    columns = weight.shape[1]
    for start in range(0, columns, step):
        end = min(start + step, columns)
        errors = work.new_empty(len(work), end - start)
        for j in range(start, end):
            if j % pattern.m == 0:
                block = slice(j, j + pattern.m)
                kept = nm_mask((work[:, block] / factor.diagonal()[block]).abs(), pattern, dim=1)
            pruned = torch.where(kept[:, j % pattern.m], 0.0, work[:, j])
            errors[:, j - start] = pruned / factor[j, j]
            work[:, j + 1 : end] -= errors[:, j - start, None] * factor[j, j + 1 : end]
            work[:, j] -= pruned
        work[:, end:] -= errors @ factor[start:end, end:]
    # Rounding to the weight's dtype cannot make a zero nonzero.
    return work.to(weight.dtype)
