"""Masks and weights that are soft: continuous pruning, decays towards N:M, and random choices that can be learned.

Each section is one paper's; the methods of these papers are in :mod:`lightning_nm.methods`.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from lightning_nm.functional.masks import check_blocks, magnitude_mask
from lightning_nm.functional.random import counter_uniform
from lightning_nm.pattern import NMPattern, PatternLike

# --------------------------------------------------------------------------------------------------------- S-STE


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
    pattern, dim = check_blocks(x, pattern, dim)
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


# -------------------------------------------------------------------------- patterns of a block: LBC, MaskLogits

MOST_PATTERNS = 256
"""The largest number of patterns of a block that is enumerated; 4:8 has 70, 2:16 has 120 and 8:16 has 12870."""


def block_patterns(pattern: PatternLike) -> Tensor:
    """Return all C(M, N) ways to keep N of the M entries of a block, in lexicographic order of the kept positions.

    Args:
        pattern: What :meth:`NMPattern.parse` reads, for example ``"2:4"``.

    Returns:
        A bool tensor ``[C(M, N), M]`` on the CPU.

    Raises:
        ValueError: If there are more than :data:`MOST_PATTERNS`.

    Example:
        >>> block_patterns("2:4").int().tolist()[:3]
        [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    """
    pattern = NMPattern.parse(pattern)
    count = math.comb(pattern.m, pattern.n)
    if count > MOST_PATTERNS:
        per_weight = count / pattern.m
        raise ValueError(
            f"a block of {pattern} has C({pattern.m}, {pattern.n}) = {count} patterns, and each takes a number in "
            f"every block, {per_weight:.0f} for each weight; at most {MOST_PATTERNS} are enumerated: use a smaller M, "
            "such as 2:4, 4:8 or 1:16, or another method"
        )
    kept = torch.zeros(count, pattern.m, dtype=torch.bool)
    for row, positions in zip(kept, combinations(range(pattern.m), pattern.n), strict=True):
        row[list(positions)] = True
    return kept


# ------------------------------------------------------------------------------------------------------- MaskLLM

# Half the distance of two numbers of counter_uniform(): it takes the place of 0, whose logarithm is not finite.
_SMALLEST = 2.0**-25


def gumbel_noise(count: int, seed: Tensor) -> Tensor:
    """Draw from the standard Gumbel distribution: ``-log(-log u)`` of :func:`counter_uniform`'s numbers.

    Args:
        count: How many numbers.
        seed: Four words, from :func:`fold_seed`; the numbers are made on its device.

    Returns:
        A float32 tensor [count].

    Example:
        >>> from lightning_nm.functional import fold_seed
        >>> round(float(gumbel_noise(10_000, fold_seed(0)).mean()), 1)  # Euler's constant is 0.577
        0.6
    """
    uniform = counter_uniform(count, seed).clamp(min=_SMALLEST)
    return -torch.log(-torch.log(uniform))


def normal_noise(count: int, seed: Tensor) -> Tensor:
    """Draw from the standard normal distribution, by Box and Muller; see :func:`gumbel_noise`.

    Example:
        >>> from lightning_nm.functional import fold_seed
        >>> round(float(normal_noise(10_000, fold_seed(0)).std()), 1)
        1.0
    """
    radius, angle = counter_uniform(2 * count, seed).view(2, count).unbind()
    # 1 - u is in (0, 1].
    return torch.sqrt(-2 * torch.log(1 - radius)) * torch.cos(2 * math.pi * angle)
