"""Soft masks along the filters and the kernel positions of a weight, which let large weights count for more."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_nm.functional.pattern import NMPattern, PatternLike


def axis_thresholds(weight: Tensor, pattern: PatternLike) -> list[Tensor]:
    r"""Return the magnitudes above which the weights of each filter, and of each kernel position, count for more.

    Of the n weights of a filter, :math:`k = \lfloor n (M - N) / M \rfloor` lie below its threshold, which is the mean
    of the k-th and the next smallest magnitude; likewise of all weights at a kernel position.

    Args:
        weight: ``[out, in, *taps]``.
        pattern: What :meth:`NMPattern.parse` reads.

    Returns:
        The thresholds of the filters, ``[out, 1, ...]``, and, if there are several taps, those of the positions,
        ``[1, 1, *taps]``, in float32 or wider.

    Example:
        >>> axis_thresholds(torch.tensor([[1.0, -2.0, 5.0, 4.0]]), "2:4")[0].tolist()
        [[3.0]]

    Source: Xiang et al., MaxQ: Multi-Axis Query for N:M Sparsity Network, CVPR 2024, arXiv:2312.07061.
    """
    pattern = NMPattern.parse(pattern)
    magnitudes = weight.detach().abs()
    magnitudes = magnitudes.to(torch.promote_types(magnitudes.dtype, torch.float32))
    out, _, *taps = magnitudes.shape
    filters = _threshold(magnitudes.flatten(1), pattern)
    found = [filters.view(out, *[1] * (magnitudes.dim() - 1))]
    if magnitudes[0, 0].numel() > 1:
        by_position = magnitudes.flatten(2).flatten(0, 1).t()  # [taps, out * in]
        positions = _threshold(by_position, pattern)
        found.append(positions.view(1, 1, *taps))
    return found


def _threshold(magnitudes: Tensor, pattern: NMPattern) -> Tensor:
    """The threshold of each row."""
    size = magnitudes.shape[1]
    below = size * (pattern.m - pattern.n) // pattern.m
    # On a GPU a selection is refused where torch is asked for deterministic algorithms.
    neighbours = _by_selection if magnitudes.is_cpu else _by_sorting
    return neighbours(magnitudes, below).mean(1)


def _by_sorting(magnitudes: Tensor, below: int) -> Tensor:
    """The ``below``-th smallest number of each row and the next one; the smallest alone if ``below`` is 0."""
    ranked = magnitudes.sort(dim=1).values
    return ranked[:, max(below - 1, 0) : below + 1]


def _by_selection(magnitudes: Tensor, below: int) -> Tensor:
    """The same in less than half the time on a CPU."""
    ranks = (below, below + 1) if below else (1,)
    return torch.stack([magnitudes.kthvalue(rank, dim=1).values for rank in ranks], dim=1)


def soft_factor(weight: Tensor, thresholds: Sequence[Tensor], temperature: float) -> Tensor:
    r"""Return what each weight is multiplied by: :math:`1 + \sum_a [|w| > \theta_a]\, \sigma((|w| - \theta_a) / \tau)`.

    Args:
        weight: ``[out, in, *taps]``.
        thresholds: :math:`\theta_a` for each axis a, of shapes that broadcast: see :func:`axis_thresholds`.
        temperature: :math:`\tau`.

    Returns:
        From 1 to one more than the number of axes, of the weight's shape and the thresholds' dtype.

    Example:
        >>> soft_factor(torch.tensor([[1.0, -9.0]]), [torch.tensor([[3.0]])], 0.01).tolist()
        [[1.0, 2.0]]
    """
    factor = torch.ones((), dtype=thresholds[0].dtype, device=weight.device)
    magnitudes = weight.abs().to(factor.dtype)
    for threshold in thresholds:
        above = magnitudes - threshold
        factor = factor + torch.where(above > 0, torch.sigmoid(above / temperature), 0)
    return factor


RAMPS = ("linear", "cubic", "cos", "exp")
_EXPONENT = 1.5  # of "exp": the code's 0.05 for each of 30 epochs


def share_left(ramp: str, progress: float) -> float:
    """Return the share of blocks that are not pruned yet at a point of the ramp, from 0 to 1.

    ``"linear"``: ``1 - p``; ``"cubic"``: ``(1 - p)^3``; ``"cos"``: ``cos(p pi / 2)``; ``"exp"``: ``1 - (1 - e^-1.5p) /
    (1 - e^-1.5)``.

    Example:
        >>> share_left("linear", 0.25), share_left("cubic", 0.5), share_left("exp", 1.0)
        (0.75, 0.125, 0.0)
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress == 1:
        return 0.0
    if ramp == "cos":
        return math.cos(progress * math.pi / 2)
    if ramp == "exp":
        return 1 - math.expm1(-_EXPONENT * progress) / math.expm1(-_EXPONENT)
    return (1 - progress) ** (3 if ramp == "cubic" else 1)
