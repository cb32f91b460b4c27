"""How far a mask is from changing."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.functional.statistics import check_masks
from lightning_nm.pattern import NMPattern, PatternLike


def mask_margin(weight: Tensor, mask: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    r"""Gap between the last kept and the first dropped weight of a block, relative to the larger of them.

    .. math:: \frac{a - b}{\max(a, b)}, \quad a = \min_{j \in m} |W_j|, \quad b = \max_{j \notin m} |W_j|

    Near 0 a magnitude mask is about to change. Below 0 the mask drops a larger weight than it keeps, as masks do that
    also hold along `out` or that do not move. It is 1 where the dropped weights are zero.

    Args:
        weight: Any floating dtype and shape; float32 is computed with, or float64 if that is its dtype.
        mask: Bool mask of that shape; True keeps.
        pattern: What :meth:`NMPattern.parse` reads; of it, M alone matters.
        dim: The axis along which the blocks lie; its size must be a multiple of M.

    Returns:
        Margins in [-1, 1], of the weight's shape with M times fewer entries along ``dim``; float32 or float64. 0 where
        both weights are zero; NaN for a block that keeps or drops all of its weights, or holds a NaN.

    Raises:
        TypeError: If the mask is not a bool tensor or the weight not of a floating dtype.
        ValueError: If their shapes differ, or M does not divide ``weight.shape[dim]``.

    Example::

        >>> import torch
        >>> weight = torch.tensor([4.0, -2.0, 1.5, 0.5])
        >>> mask_margin(weight, torch.tensor([True, True, False, False]), "2:4")
        tensor([0.2500])
    """
    pattern = NMPattern.parse(pattern)
    check_masks({"mask": mask})
    if not weight.is_floating_point():
        raise TypeError(f"weight is {weight.dtype}: pass a tensor of a floating dtype")
    if weight.shape != mask.shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and mask has shape {tuple(mask.shape)}")
    if not weight.ndim or weight.shape[dim] % pattern.m:
        raise ValueError(f"M = {pattern.m} of {pattern} does not divide axis {dim} of shape {tuple(weight.shape)}")
    axis = dim % weight.ndim
    magnitude = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).abs()
    magnitude, mask = (x.unflatten(axis, (-1, pattern.m)) for x in (magnitude, mask))
    nan = torch.isnan(magnitude).any(axis + 1)
    kept = torch.where(mask, magnitude, torch.inf).amin(axis + 1)
    dropped = torch.where(mask, -torch.inf, magnitude).amax(axis + 1)
    larger = torch.maximum(kept, dropped)
    margin = torch.where(larger == 0, 0, (kept - dropped) / larger)
    whole = mask.all(axis + 1) | ~mask.any(axis + 1)
    return torch.where(whole | nan, torch.nan, margin)
