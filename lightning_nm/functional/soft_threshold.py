"""Pruning that is continuous: magnitudes lose the block's threshold instead of being cut off at it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.functional.masks import _check_blocks, magnitude_mask
from lightning_nm.functional.pattern import NMPattern, PatternLike


def soft_threshold_nm(
    x: Tensor, pattern: PatternLike, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    r"""Shrink every block of M towards zero until at most N entries are left.

    :math:`S(x)_i = \mathrm{sign}(x_i) \max(|x_i| - t, 0)`, where t is the (M-N)-th smallest magnitude of the block,
    which is the largest one that the N:M mask prunes. S is continuous: where two magnitudes change places, both are 0.
    Entries that tie with t become 0, so a block may keep fewer than N. What is 0 is ``+0``. A NaN is no number that
    could be kept: it becomes 0, and with it its block if more than M - N entries of that are NaN.

    Args:
        x: Any shape, floating point.
        pattern: What :meth:`NMPattern.parse` reads.
        dim: The axis along which the blocks lie; its size must be a multiple of M.
        mask: Bool, of the shape of ``x``, N:M along ``dim``: the entries that may be kept. t is then the largest
            magnitude outside of it. By default :func:`magnitude_mask` of ``x``, which is the definition above.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: If M does not divide ``x.shape[dim]``, or ``mask`` has another shape.
        IndexError: If ``x`` has no axis ``dim``.

    Example:
        >>> soft_threshold_nm(torch.tensor([1.0, -3.0, 0.5, 2.5, 2.0, 2.0, -2.0, 0.0]), "2:4").tolist()
        [0.0, -2.0, 0.0, 1.5, 0.0, 0.0, 0.0, 0.0]

    Source: Hu et al., S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training, NeurIPS 2024,
    arXiv:2409.09099.
    """
    pattern = NMPattern.parse(pattern)
    dim = _check_blocks(x, pattern, dim)
    if mask is None:
        mask = magnitude_mask(x, pattern, dim)
    elif mask.shape != x.shape:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} for a tensor of shape {tuple(x.shape)}: they must be equal"
        )
    magnitudes = x.abs()
    pruned = torch.where(mask, 0, magnitudes).nan_to_num(nan=0.0, posinf=torch.inf)
    # [..., B, 1, ...]: one threshold for the M entries of each of the B blocks along `dim`.
    thresholds = pruned.unflatten(dim, (-1, pattern.m)).amax(dim + 1, keepdim=True)
    shrunk = magnitudes.unflatten(dim, (-1, pattern.m)) - thresholds
    shrunk = shrunk.flatten(dim, dim + 1)
    # A mask of other weights may allow an entry that is smaller than its block's threshold.
    is_left = mask & (shrunk > 0)
    return torch.where(is_left, torch.copysign(shrunk, x), 0)


def least_squares_scale(x: Tensor, y: Tensor) -> Tensor:
    r"""The factor by which ``y`` comes closest to ``x``: :math:`\langle x, y \rangle / \langle y, y \rangle`.

    It minimizes :math:`\| x - \beta y \|`. The sums are in float64, the result in the dtype of ``y``, at least float32
    and without axes; 1 where ``y`` is zero.

    Args:
        x: Any shape.
        y: Of the same shape.

    Example:
        >>> float(least_squares_scale(torch.tensor([2.0, 5.0]), torch.tensor([0.0, 2.0])))
        2.5
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    # Not every device has float64.
    summed = torch.float32 if y.device.type == "mps" else torch.float64
    product = (x.to(summed) * y.to(summed)).sum()
    square = y.to(summed).square().sum()
    scale = torch.where(square > 0, product / square, 1)
    return scale.to(dtype)
