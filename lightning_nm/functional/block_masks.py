"""Masks of blocks without side effects, for compilers and for large blocks; :mod:`.masks` chooses among them."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from lightning_nm.pattern import NMPattern


def unrolled_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Compare pair by pair without side effects: a compiler fuses this into one pass without a reduction."""
    entries = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m)).unbind(-1)
    ranks = [torch.zeros_like(entry, dtype=torch.int32) for entry in entries]
    for i, j in combinations(range(pattern.m), 2):
        won = (entries[i] >= entries[j]) | entries[j].isnan()
        ranks[i] = ranks[i] + ~won
        ranks[j] = ranks[j] + won
    return torch.stack([rank < pattern.n for rank in ranks], -1).flatten(-2).movedim(-1, dim)


def broadcast_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Compare all pairs in one expression without side effects: a compiler need not store them."""
    blocks = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m))
    mine, other = blocks.unsqueeze(-1), blocks.unsqueeze(-2)
    index = torch.arange(pattern.m, device=scores.device)
    beaten_by_earlier = (other >= mine) | mine.isnan()
    beaten_by_later = (other > mine) | (mine.isnan() & ~other.isnan())
    rank = torch.where(index < index.unsqueeze(-1), beaten_by_earlier, beaten_by_later).sum(-1)
    return (rank < pattern.n).flatten(-2).movedim(-1, dim)


def sorted_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Mark the first N of a stable descending sort."""
    blocks = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m))
    # A sort takes NaN for the largest. Ascending, the negated numbers come first, and 0 - x makes one zero of the two.
    floating = scores.is_floating_point()
    order = (0 - blocks if floating else blocks).argsort(dim=-1, stable=True, descending=not floating)
    mask = torch.zeros(blocks.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, order[..., : pattern.n], True).flatten(-2).movedim(-1, dim)
