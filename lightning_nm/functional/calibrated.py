"""One-shot pruning of a weight by what its layer's inputs are, as Wanda and SparseGPT do."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.functional.masks import check_blocks, nm_mask, wide_dtype
from lightning_nm.pattern import PatternLike

# Columns whose corrections of all later columns are applied at once, by one matrix product.
_COLUMNS_AT_ONCE = 128


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
        norms_shape = tuple(input_norms.shape)
        raise ValueError(
            f"input norms {norms_shape} do not belong to a weight {tuple(weight.shape)}"
        )
    wide = wide_dtype(weight, input_norms)
    scores_oi = weight.to(wide).abs() * input_norms.to(wide)
    return nm_mask(scores_oi, pattern, dim=1)


@torch.no_grad()
def sparsegpt(
    weight: Tensor,
    moment: Tensor,
    pattern: PatternLike,
    damping: float = 0.01,
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
        damping: Fraction of the mean of H's diagonal that is added to the diagonal.

    Returns:
        The N:M weight, of the dtype of ``weight``. Input features that were always zero get zeros.

    Raises:
        ValueError: If the shapes or the pattern do not fit, H holds a value that is not finite, or is not positive
            definite with this damping.
    """
    if weight.dim() != 2 or moment.shape != 2 * weight.shape[1:]:
        raise ValueError(
            f"second moments {tuple(moment.shape)} do not belong to a weight {tuple(weight.shape)}"
        )
    pattern, _ = check_blocks(weight, pattern, 1)
    columns = weight.shape[1]
    if not bool(moment.isfinite().all()):
        raise ValueError("the second moments of the inputs hold values that are not finite")
    # A feature that was always zero has no influence on the output: its weights are pruned at no error.
    dead_i = moment.diagonal() == 0
    work_oi = weight.double().masked_fill(dead_i, 0.0)
    factor_ii = _inverse_factor(moment, dead_i, damping)
    diagonal_i = factor_ii.diagonal()

    m = pattern.m
    blocks_at_once = max(1, _COLUMNS_AT_ONCE // m)
    step = m * blocks_at_once
    for start in range(0, columns, step):
        end = min(start + step, columns)
        errors_oj = work_oi.new_empty(len(work_oi), end - start)
        for j in range(start, end):
            place = j % m
            if place == 0:
                # The block begins: its mask is chosen from what the corrections so far have made of it.
                block = slice(j, j + m)
                saliency_om = (work_oi[:, block] / diagonal_i[block]).abs()
                kept_om = nm_mask(saliency_om, pattern, dim=1)
            column_o = work_oi[:, j]
            pruned_o = torch.where(kept_om[:, place], 0.0, column_o)
            error_o = pruned_o / factor_ii[j, j]
            errors_oj[:, j - start] = error_o
            # Only the columns of this step are corrected at once.
            later = slice(j + 1, end)
            work_oi[:, later] -= error_o[:, None] * factor_ii[j, later]
            column_o -= pruned_o  # in place: column_o is a view of work_oi
        # The columns beyond it are corrected for all of its errors by one GEMM.
        work_oi[:, end:] -= errors_oj @ factor_ii[start:end, end:]
    # Rounding to the weight's dtype cannot make a zero nonzero.
    return work_oi.to(weight.dtype)


def _inverse_factor(moment: Tensor, dead_i: Tensor, damping: float) -> Tensor:
    r"""Return the upper Cholesky factor of the inverse of the damped H, float64 ``[in, in]``.

    Its row j is :math:`(C_j)_0 / \sqrt{(C_j)_{00}}`: all that the columns from j on need to know of H.
    """
    damped_ii = moment.double().clone()
    diagonal_i = damped_ii.diagonal()
    if bool(dead_i.all()):
        mean = damped_ii.new_ones(())
    else:
        mean = diagonal_i[~dead_i].mean()
    # A zero on the diagonal would make H singular: such a feature gets the mean itself.
    diagonal_i.add_(torch.where(dead_i, mean, damping * mean))
    # cholesky_ex reports a failure as a number other than 0 instead of raising.
    lower_ii, fault = torch.linalg.cholesky_ex(damped_ii)
    if not int(fault):
        inverse_ii = torch.cholesky_inverse(lower_ii)
        upper_ii, fault = torch.linalg.cholesky_ex(inverse_ii, upper=True)
    if int(fault):
        raise ValueError(
            f"the second moments are not positive definite with damping={damping}: raise it"
        )
    return upper_ii
