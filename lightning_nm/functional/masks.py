"""N:M masks by magnitude or any other score, and checks that a tensor is N:M.

One rule: an entry is kept if fewer than N entries of its block beat it. The larger score beats the smaller one,
the lower index wins a tie, and a NaN loses to every number. Comparing all pairs of a block needs no sort: for a
distance ``d`` one elementwise comparison ranks the pairs ``(j, j + d)`` of all blocks at once.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.functional.select import masked

# Up to this M, comparing each pair where it lies in memory beats gathering the entries first.
_MAX_STRIDED_M = 8
_MAX_PAIRWISE_M = 64  # beyond, a sort is faster than all pairs

# Up to so many pairs on a CPU, ranks by a matrix product take a third of the calls of comparing distance by distance.
# Where blocks lie in consecutive memory, gathering the pairs pays for fewer.
_FEW_PAIRS = 1 << 18
_FEW_CONSECUTIVE_PAIRS = 1 << 16

# Entries handled at a time: on a CPU, per thread, the temporaries fit its cache; elsewhere it only bounds them.
_STRIDED_CHUNK = 1 << 18
_GATHERED_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 25


def nm_mask(scores: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    """Keep the N largest scores of every block of M consecutive entries along one axis.

    ``mask[j] = #{k in block(j) : s[k] > s[j], or s[k] = s[j] and k < j} < N``, with NaN below everything, even -inf:
    a block always keeps exactly N entries, and a NaN never displaces a number.

    Args:
        scores: Any shape, any real dtype, any strides. Pass ``weight.abs()`` for a mask by magnitude.
        pattern: What :meth:`NMPattern.parse` reads, for example ``"2:4"``.
        dim: The axis along which the blocks lie; its size must be a multiple of M.

    Returns:
        A bool tensor of the shape of ``scores``, in its memory order, without autograd history.

    Raises:
        ValueError: If ``scores`` has no axes or M does not divide ``scores.shape[dim]``.
        IndexError: If ``scores`` has no axis ``dim``.

    Example:
        >>> nm_mask(torch.tensor([3.0, 1.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.0]), "2:4").int().tolist()
        [1, 0, 1, 0, 1, 1, 0, 0]
    """
    return _mask(scores, pattern, dim, magnitude=False)


def magnitude_mask(weight: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    """Keep the N largest magnitudes of every block of M: :func:`nm_mask` of ``|weight|``, which is never stored whole.

    Arguments, result and errors are those of :func:`nm_mask`.

    Example:
        >>> magnitude_mask(torch.tensor([0.1, -2.0, -0.3, 1.0]), "2:4").int().tolist()
        [0, 1, 0, 1]
    """
    return _mask(weight, pattern, dim, magnitude=True)


def backward_mask(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: PatternLike,
    permutation: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    r"""Mask of the weight in the input-gradient GEMM: a subset of the forward mask, N:M along the permuted output axis.

    ``B = F & P^-1 top(|P (F * W)|)``: P permutes the rows, and top keeps the N largest of every M consecutive rows per
    column, ties to the lower row position.

    Args:
        weight: ``[out, ...]``, real; read as ``[out, K]``, every column alone.
        forward_mask: Boolean, the shape of ``weight``. None keeps every entry.
        pattern: What :meth:`NMPattern.parse` reads, for example ``"2:4"``.
        permutation: Integers ``[out]``, the original row at every position. None is the identity.
        groups: Equal runs of output rows that blocks and permutation must not cross (grouped convolutions).

    Returns:
        Boolean, the shape of ``weight``.

    Raises:
        ValueError: If M does not divide ``out / groups``, or ``permutation`` is not one or crosses groups.

    Example:
        >>> weight = torch.tensor([[4.0], [3.0], [2.0], [1.0]])
        >>> backward_mask(weight, None, "1:2").flatten().tolist()
        [True, False, True, False]
        >>> backward_mask(weight, None, "1:2", torch.tensor([0, 3, 1, 2])).flatten().tolist()
        [True, True, False, False]

    Source: Zhang et al., Bi-directional Masks for Efficient N:M Sparse Training, ICML 2023, arXiv:2302.06058.
    """
    pattern = pattern if isinstance(pattern, NMPattern) else NMPattern.parse(pattern)
    check_output_blocks(weight, forward_mask, pattern, groups)
    magnitudes = weight.detach().abs()
    if forward_mask is not None:
        magnitudes = masked(magnitudes, forward_mask)
    magnitudes = magnitudes.flatten(1).contiguous()
    if permutation is None:
        mask = _mask(magnitudes, pattern, 0, magnitude=False)
    else:
        permutation = checked_permutation(permutation, weight, groups)
        mask = torch.empty_like(magnitudes, dtype=torch.bool)
        mask[permutation] = _mask(magnitudes[permutation], pattern, 0, magnitude=False)
    mask = mask.view(weight.shape)
    # A block may be filled up with entries that the forward mask prunes.
    if forward_mask is not None:
        mask = mask & forward_mask
    return mask


def nm_prune(x: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    """Zero all but the N entries of largest magnitude of every block of M.

    ``y = x where nm_mask(|x|), else 0``, of the shape and dtype of ``x``; a select and not a product: a pruned entry is
    ``+0``, never ``-0`` or NaN. Gradients reach the kept entries. Arguments and errors are those of :func:`nm_mask`.

    Example:
        >>> nm_prune(torch.tensor([0.1, -2.0, -0.3, 1.0]), "2:4").tolist()
        [0.0, -2.0, 0.0, 1.0]
    """
    return torch.where(magnitude_mask(x, pattern, dim), x, 0)


def is_nm(tensor: Tensor, pattern: PatternLike, dim: int = -1) -> bool:
    """Tell whether every block holds at most N nonzeros: whether :func:`count_violations` is 0.

    Example:
        >>> is_nm(torch.tensor([0.0, 1.0, 0.0, 2.0]), "2:4"), is_nm(torch.ones(4), "2:4")
        (True, False)
    """
    return int(count_violations(tensor, pattern, dim)) == 0


def count_violations(tensor: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    """Count the blocks of M consecutive entries that hold more than N nonzeros.

    ``#{blocks b : #{j in b : x[j] != 0} > N}``, an int64 tensor without axes on the tensor's device; reading it waits
    for the device. The other arguments and the errors are those of :func:`nm_mask`.

    Args:
        tensor: Values or a bool mask, of any shape; a NaN is a nonzero, ``-0`` is not.
        pattern: What :meth:`NMPattern.parse` reads.
        dim: The axis along which the blocks lie.

    Example:
        >>> int(count_violations(torch.tensor([1, 1, 1, 0, 0, 0, 0, 1]), "2:4"))
        1
    """
    pattern = NMPattern.parse(pattern)
    dim = _check_blocks(tensor, pattern, dim)
    blocks = tensor.detach().bool().unflatten(dim, (-1, pattern.m))
    nonzeros = blocks.sum(dim + 1, dtype=torch.int32)
    return (nonzeros > pattern.n).sum()


def check_output_blocks(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: NMPattern,
    groups: int,
) -> None:
    """Refuse a weight along whose output axis no blocks lie, and a forward mask of another shape or dtype."""
    if weight.ndim < 2:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} has no input axis: pass [out, in] or [out, in, ...]"
        )
    out = weight.shape[0]
    if groups < 1 or out % groups:
        raise ValueError(
            f"groups={groups} does not split {out} output rows into equal runs: pass the layer's groups"
        )
    if out // groups % pattern.m:
        rows = f"{out} output rows in {groups} group(s) are {out // groups} rows each, not a multiple of M={pattern.m}"
        raise ValueError(f"{rows}: keep this layer's input gradient dense, or choose another M")
    if forward_mask is not None and (
        forward_mask.shape != weight.shape or forward_mask.dtype != torch.bool
    ):
        given = f"{forward_mask.dtype} {tuple(forward_mask.shape)}"
        raise ValueError(
            f"forward_mask is {given}: pass booleans of the shape of the weight, {tuple(weight.shape)}"
        )


def checked_permutation(permutation: Tensor | None, weight: Tensor, groups: int) -> Tensor:
    """A copy of the permutation (None: the identity) as int64 on the weight's device."""
    rows = torch.arange(len(weight), device=weight.device)
    if permutation is None:
        return rows
    held = permutation.to(weight.device, torch.int64, copy=True)
    if permutation.is_floating_point() or not torch.equal(held.sort().values, rows):
        named = f"permutation {permutation.dtype} {tuple(permutation.shape)} must name each row 0..{len(rows) - 1} once"
        raise ValueError(
            f"{named}: pass integers such as torch.randperm({len(rows)}), or None for the identity"
        )
    size = len(rows) // groups
    crossing = (held // size != rows // size).nonzero()
    if len(crossing):
        at = int(crossing[0])
        moved = f"permutation puts row {int(held[at])} at position {at}, out of its group of {size} rows"
        raise ValueError(
            f"{moved}: permute within groups, or pass groups=1 if the layer is not grouped"
        )
    return held


def _check_blocks(tensor: Tensor, pattern: NMPattern, dim: int) -> int:
    """Return ``dim`` counted from the front, or explain why no blocks lie along it."""
    shape = tuple(tensor.shape)
    if not shape:
        raise ValueError(
            f"a tensor without axes has no blocks of {pattern}: pass a tensor of at least one axis"
        )
    last = len(shape) - 1
    if not ~last <= dim <= last:
        raise IndexError(
            f"dim={dim} is not an axis of a tensor of shape {shape}: pass {~last} to {last}"
        )
    if shape[dim] % pattern.m:
        raise ValueError(
            f"shape {shape} cannot be cut into blocks of {pattern}: M={pattern.m} does not divide size {shape[dim]} of "
            f"dim={dim}; choose another pattern or dim, name the layer in `exclude`, or pad that axis with -inf"
        )
    return dim % len(shape)


def _comparable(scores: Tensor) -> Tensor:
    """Widen the floating dtypes under two bytes, which have no comparisons; the cast keeps order and ties."""
    dtype = (
        scores.dtype
    )  # torch 2.6 cannot trace the tensor's own is_floating_point() in a backward pass
    if dtype.is_floating_point and dtype.itemsize < 2:
        return scores.float()
    return scores


def _mask(scores: Tensor, pattern: PatternLike, dim: int, magnitude: bool) -> Tensor:
    pattern = pattern if isinstance(pattern, NMPattern) else NMPattern.parse(pattern)
    dim = _check_blocks(scores, pattern, dim)
    scores = _comparable(scores.detach())
    if scores.numel() == 0:
        return torch.empty_like(scores, dtype=torch.bool)
    if pattern.m > _MAX_PAIRWISE_M:
        return sorted_mask(scores.abs() if magnitude else scores, pattern, dim)
    if torch.compiler.is_compiling():
        if magnitude:
            scores = scores.abs()
        # Unrolled, the pairs of a long block would make a graph that takes long to compile.
        traced = unrolled_mask if pattern.m <= _MAX_STRIDED_M else broadcast_mask
        return traced(scores, pattern, dim)
    return _chunked_mask(scores, pattern, dim, magnitude)


def _chunked_mask(scores: Tensor, pattern: NMPattern, dim: int, magnitude: bool) -> Tensor:
    """Run the all-pairs comparison over chunks of whole blocks, in the memory order of ``scores``."""
    # A transposed or channels-last tensor is dense in another order of its axes: there, nothing needs to be copied.
    order = sorted(range(scores.dim()), key=scores.stride().__getitem__, reverse=True)
    dense = scores.permute(order)
    inner = dense.shape[order.index(dim) + 1 :].numel()
    blocks = dense.reshape(-1, pattern.m, inner)
    if _are_few(blocks, pattern):
        found = _ranked_at_once(blocks.abs() if magnitude else blocks, pattern)
        if found is not None:
            return found.view(dense.shape).permute(
                [order.index(axis) for axis in range(scores.dim())]
            )
    mask = torch.empty(blocks.shape, dtype=torch.bool, device=scores.device)
    strided = inner == 1 and pattern.m <= _MAX_STRIDED_M
    per_thread = _STRIDED_CHUNK if strided else _GATHERED_CHUNK
    chunk = per_thread * torch.get_num_threads() if scores.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // (pattern.m * inner))
    keep: _Strided | _Gathered | None = None
    for part, kept in zip(blocks.split(step), mask.view(torch.uint8).split(step), strict=True):
        if keep is None or keep.size != len(part):  # the first chunk, and a shorter last one
            keep = (_Strided if strided else _Gathered)(part, pattern)
        found = keep(part.abs() if magnitude else part)
        for entry, row in zip(kept.unbind(1), found.unbind(0), strict=True):
            entry.copy_(row)
    return mask.view(dense.shape).permute([order.index(axis) for axis in range(scores.dim())])


def unrolled_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Compare pair by pair without side effects: a compiler fuses this into one pass without a reduction."""
    entries = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m)).unbind(-1)
    ranks = [torch.zeros_like(entry, dtype=torch.int32) for entry in entries]
    for i, j in combinations(range(pattern.m), 2):
        won = (entries[i] >= entries[j]) | entries[j].isnan()
        ranks[i] = ranks[i] + ~won
        ranks[j] = ranks[j] + won
    kept = torch.stack([rank < pattern.n for rank in ranks], -1)
    return kept.flatten(-2).movedim(-1, dim)


def broadcast_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Compare all pairs in one expression without side effects: a compiler need not store them."""
    blocks = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m))
    mine = blocks.unsqueeze(-1)
    other = blocks.unsqueeze(-2)
    index = torch.arange(pattern.m, device=scores.device)
    beaten_by_earlier = (other >= mine) | mine.isnan()
    beaten_by_later = (other > mine) | (mine.isnan() & ~other.isnan())
    rank = torch.where(index < index.unsqueeze(-1), beaten_by_earlier, beaten_by_later).sum(-1)
    return (rank < pattern.n).flatten(-2).movedim(-1, dim)


def sorted_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Mark the first N of a stable descending sort."""
    blocks = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m))
    # A sort takes NaN for the largest. Ascending, the negated numbers come first, and 0 - x makes one zero of the two.
    if scores.dtype.is_floating_point:
        order = (0 - blocks).argsort(dim=-1, stable=True)
    else:
        order = blocks.argsort(dim=-1, stable=True, descending=True)
    mask = torch.zeros(blocks.shape, dtype=torch.bool, device=scores.device)
    mask.scatter_(-1, order[..., : pattern.n], True)
    return mask.flatten(-2).movedim(-1, dim)


def _are_few(blocks: Tensor, pattern: NMPattern) -> bool:
    """Whether blocks [B, M, I] are so small that the number of calls decides how long their ranks take."""
    consecutive = blocks.shape[2] == 1
    limit = _FEW_CONSECUTIVE_PAIRS if consecutive else _FEW_PAIRS
    pairs = blocks.numel() * (pattern.m - 1) // 2
    plain = type(blocks) is Tensor and blocks.device.type == "cpu"
    return (
        plain
        and blocks.is_floating_point()
        and blocks.itemsize <= 4
        and 1 < pattern.m <= 8
        and pairs <= limit
    )


def _ranked_at_once(blocks: Tensor, pattern: NMPattern) -> Tensor | None:
    """The mask of blocks [B, M, I]: all pairs are compared by one call, and a matrix product sums the ranks.

    ``rank = start + signs @ won`` holds small integers, which every precision of a product represents exactly. Returns
    ``None`` where there may be a NaN.
    """
    first, second, signs, start = _pairs(pattern.m)
    size, m, inner = blocks.shape
    scores_mr = _wide(blocks).transpose(0, 1).reshape(m, -1)
    if scores_mr.sum().isnan():
        return None
    won_pr = scores_mr.index_select(0, first)
    # On a CPU a comparison into its own dtype is several times faster than one into bool.
    torch.ge(won_pr, scores_mr.index_select(0, second), out=won_pr)
    kept_mr = torch.addmm(start, signs, won_pr).lt(pattern.n)
    return kept_mr.view(m, size, inner).transpose(0, 1).contiguous()


@cache
def _pairs(m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All pairs of places in a block: the first ones [P], the second ones [P], signs [M, P] and initial ranks [M, 1].

    As long as no pair is won, each entry loses to all that follow it. A pair that is won takes one from the rank of its
    first entry and adds one to that of its second.
    """
    with torch.inference_mode(False):  # the tables outlive the call
        first, second = torch.tensor(list(combinations(range(m), 2)), device="cpu").unbind(1)
        places = torch.arange(m, device="cpu").unsqueeze(1)
        signs = (places == second).float() - (places == first).float()
        start = (m - 1 - places).float()
    return first, second, signs, start


class _Strided:
    """Compare the entries of blocks [B, M, I] pair by pair, where they lie."""

    def __init__(self, blocks: Tensor, pattern: NMPattern) -> None:
        self.pattern = pattern
        self.size = len(blocks)
        self.start, self.ranks = _start_ranks(blocks)
        self.won = torch.empty_like(self.ranks[0], dtype=torch.bool)

    def __call__(self, blocks: Tensor) -> Tensor:
        """Return the mask, as uint8 ``[M, B, I]``."""
        blocks = _wide(blocks)
        nan = _find_nan(blocks)
        entries = blocks.unbind(1)
        ranks = self.ranks.copy_(self.start).unbind(0)
        for i, j in combinations(range(self.pattern.m), 2):
            torch.ge(entries[i], entries[j], out=self.won)
            if nan is not None:
                self.won |= nan[:, j]
            won = self.won.view(torch.uint8)
            ranks[i].sub_(won)
            ranks[j].add_(won)
        return self.ranks.lt_(self.pattern.n)


class _Gathered:
    """Gather the M entries of blocks [B, M, I] into M rows, and compare all rows at a distance d at once."""

    def __init__(self, blocks: Tensor, pattern: NMPattern) -> None:
        self.pattern = pattern
        self.size = len(blocks)
        self.start, self.ranks = _start_ranks(blocks)
        self.scores = torch.empty_like(self.ranks, dtype=_wide(blocks[:0]).dtype)
        # On a CPU a comparison into its own dtype and a narrowing copy are several times faster than one into bool.
        self.verdict = torch.empty_like(self.scores)
        self.won = torch.empty_like(self.ranks)
        # Many views of small tensors: making them once for all chunks is worth it.
        self.steps = [
            (
                self.scores[:-d],
                self.scores[d:],
                self.verdict[d:],
                self.won[d:],
                self.ranks[:-d],
                self.ranks[d:],
            )
            for d in range(1, pattern.m)
        ]

    def __call__(self, blocks: Tensor) -> Tensor:
        """Return the mask, as uint8 [M, B, I]."""
        torch.stack(blocks.unbind(1), out=self.scores)
        nan = _find_nan(self.scores)
        if self.pattern.n == 1 and nan is None:
            return _first_largest(self.scores)
        self.ranks.copy_(self.start)
        for d, (first, second, verdict, won, first_rank, second_rank) in enumerate(
            self.steps, start=1
        ):
            won.copy_(torch.ge(first, second, out=verdict))
            if nan is not None:
                won |= nan[d:]
            first_rank.sub_(won)
            second_rank.add_(won)
        return self.ranks.lt_(self.pattern.n)


def _start_ranks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the initial ranks, each entry losing to all that follow it, and room for those of blocks [B, M, I]."""
    size, m, inner = blocks.shape
    start = torch.arange(m - 1, -1, -1, dtype=torch.uint8, device=blocks.device)
    ranks = torch.empty(m, size, inner, dtype=torch.uint8, device=blocks.device)
    return start.view(m, 1, 1), ranks


def _first_largest(scores: Tensor) -> Tensor:
    """Mark, as uint8, the first of the largest entries along dim 0; ``scores`` [M, ...] holds no NaN."""
    largest = scores.amax(0)
    hits = torch.eq(scores, largest, out=torch.empty_like(scores)).to(torch.uint8)
    free = torch.ones_like(hits[0])
    for hit in hits:
        hit &= free
        free ^= hit
    return hits


def _find_nan(scores: Tensor) -> Tensor | None:
    """Mark the NaNs, or return None if a cheap test shows that there are none."""
    if not scores.is_floating_point():
        return None
    # Reading a value would stall an accelerator, and a fake tensor has none. A sum of inf and -inf only costs time.
    plain = type(scores) is Tensor and scores.device.type == "cpu"
    if plain and not scores.sum().isnan():
        return None
    return scores.isnan()


def _wide(scores: Tensor) -> Tensor:
    """Widen half dtypes, whose comparisons are slow on a CPU; the cast keeps order and ties."""
    half = scores.is_floating_point() and scores.itemsize < 4
    if half and scores.device.type == "cpu":
        return scores.float()
    return scores
