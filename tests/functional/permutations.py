"""Random problems of permutations, and their masks and scores by brute force."""

from typing import get_args

import numpy as np
import torch
from hypothesis import strategies as st

from lightning_nm.functional.permutation import Criterion, Search
from lightning_nm.pattern import NMPattern

PATTERNS = ["1:2", "2:4", "3:4", "1:4", "3:5", "2:8", "4:8", "7:8", "1:16", "8:16"]
CRITERIA = get_args(Criterion)
SEARCHES = get_args(Search)


def weights(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forward(weight: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Any mask with about half of the entries; backward masks do not need N:M of the forward mask."""
    return torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def within_groups(out: int, groups: int, seed: int = 0) -> torch.Tensor:
    generator, size = torch.Generator().manual_seed(seed), out // groups
    return torch.cat([torch.randperm(size, generator=generator) + g * size for g in range(groups)])


def brute_mask(
    weight: torch.Tensor, mask: torch.Tensor | None, n: int, m: int, order: list[int]
) -> torch.Tensor:
    values = weight.double().flatten(1).numpy()
    allowed = np.ones(values.shape, dtype=bool) if mask is None else mask.flatten(1).numpy()
    kept = np.zeros(values.shape, dtype=bool)
    for first in range(0, len(order), m):
        for column in range(values.shape[1]):
            block = [
                (-abs(values[row, column]) * allowed[row, column], at)
                for at, row in enumerate(order)
            ][first:][:m]
            for _, at in sorted(block)[:n]:
                kept[order[at], column] = True
    return torch.from_numpy(kept & allowed).view(weight.shape)


def brute_score(
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    n: int,
    m: int,
    order: torch.Tensor,
    criterion: str,
) -> float:
    values = weight.double().abs() if mask is None else weight.double().abs() * mask
    blocks = values.flatten(1)[order].view(-1, m, values[0].numel()).numpy()
    nonzeros = (blocks > 0).sum(1)
    if criterion == "l1":
        return float(np.sort(blocks, axis=1)[:, m - n :].sum())
    return float(
        np.minimum(nonzeros, n).sum() if criterion == "retained" else (nonzeros <= n).sum()
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, NMPattern, int]:
    pattern = NMPattern.parse(draw(st.sampled_from(PATTERNS)))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    shape = (
        draw(st.integers(1, 5)) * groups * pattern.m,
        *draw(st.sampled_from([(1,), (7,), (70,), (3, 2, 2)])),
    )
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
    weight = weights(*shape, seed=draw(st.integers(0, 99)), dtype=dtype)
    if draw(st.booleans()):  # ties and zeros
        weight = weight.round()
    return weight, draw(st.sampled_from([None, forward(weight)])), pattern, groups


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
