"""N:M masks by magnitude or any other score, and checks that a tensor is N:M.

One rule: an entry is kept if fewer than N entries of its block beat it. The larger score beats the smaller one,
the lower index wins a tie, and a NaN loses to every number. Comparing all pairs of a block needs no sort: for a
distance ``d`` one elementwise comparison ranks the pairs ``(j, j + d)`` of all blocks at once.

Shapes in comments: B blocks of M entries, and I entries inside, between two neighbours of a block in memory (I is 1
where a block is consecutive). P is the number of pairs of a block, ``M (M - 1) / 2``.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import NamedTuple

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

# Largest M of the ranks by a matrix product, which multiplies P times for every entry.
_MAX_PRODUCT_M = 8

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
    return _top_n_mask(scores, pattern, dim, magnitude=False)


def magnitude_mask(weight: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    """Keep the N largest magnitudes of every block of M: :func:`nm_mask` of ``|weight|``, which is never stored whole.

    Arguments, result and errors are those of :func:`nm_mask`.

    Example:
        >>> magnitude_mask(torch.tensor([0.1, -2.0, -0.3, 1.0]), "2:4").int().tolist()
        [0, 1, 0, 1]
    """
    return _top_n_mask(weight, pattern, dim, magnitude=True)


def backward_mask(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: PatternLike,
    permutation: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    r"""Mask the weight of the input-gradient GEMM: a subset of the forward mask, N:M along the permuted output axis.

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
    pattern = _parse(pattern)
    check_output_blocks(weight, forward_mask, pattern, groups)
    magnitudes = weight.detach().abs()
    if forward_mask is not None:
        magnitudes = masked(magnitudes, forward_mask)
    magnitudes = magnitudes.flatten(1).contiguous()  # [out, K]
    if permutation is None:
        mask = _top_n_mask(magnitudes, pattern, 0, magnitude=False)
    else:
        permutation = checked_permutation(permutation, weight, groups)
        mask = torch.empty_like(magnitudes, dtype=torch.bool)
        # Position i holds row permutation[i]: the assignment takes every row back to its place.
        mask[permutation] = _top_n_mask(magnitudes[permutation], pattern, 0, magnitude=False)
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
    mask = magnitude_mask(x, pattern, dim)
    return torch.where(mask, x, 0)


def is_nm(tensor: Tensor, pattern: PatternLike, dim: int = -1) -> bool:
    """Tell whether every block holds at most N nonzeros: whether :func:`count_violations` is 0.

    Example:
        >>> is_nm(torch.tensor([0.0, 1.0, 0.0, 2.0]), "2:4"), is_nm(torch.ones(4), "2:4")
        (True, False)
    """
    violations = count_violations(tensor, pattern, dim)
    return int(violations) == 0


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
    is_nonzero = tensor.detach().bool()
    blocks = is_nonzero.unflatten(dim, (-1, pattern.m))
    nonzeros = blocks.sum(dim + 1, dtype=torch.int32)
    violates = nonzeros > pattern.n
    return violates.sum()


def check_output_blocks(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: NMPattern,
    groups: int,
) -> None:
    """Refuse a weight along whose output axis no blocks lie, and a forward mask of another shape or dtype."""
    shape = tuple(weight.shape)
    if len(shape) < 2:
        raise ValueError(
            f"weight of shape {shape} has no input axis: pass [out, in] or [out, in, ...]"
        )
    out = shape[0]
    if groups < 1 or out % groups:
        raise ValueError(
            f"groups={groups} does not split {out} output rows into equal runs: pass the layer's groups"
        )
    size = out // groups
    if size % pattern.m:
        raise ValueError(
            f"{out} output rows in {groups} group(s) are {size} rows each, not a multiple of M={pattern.m}: keep this "
            "layer's input gradient dense, or choose another M"
        )
    if forward_mask is None:
        return
    mask_shape = tuple(forward_mask.shape)
    if mask_shape != shape or forward_mask.dtype != torch.bool:
        raise ValueError(
            f"forward_mask is {forward_mask.dtype} {mask_shape}: pass booleans of the shape of the weight, {shape}"
        )


def checked_permutation(permutation: Tensor | None, weight: Tensor, groups: int) -> Tensor:
    """Return a copy of a permutation that keeps to its groups (None: the identity), int64 on the weight's device."""
    count = len(weight)
    identity = torch.arange(count, dtype=torch.int64, device=weight.device)
    if permutation is None:
        return identity
    # The caller may change its own tensor later.
    rows = permutation.to(weight.device, torch.int64, copy=True)
    # Floating numbers are refused although they might round to a permutation.
    if permutation.is_floating_point() or not torch.equal(rows.sort().values, identity):
        raise ValueError(
            f"permutation {permutation.dtype} {tuple(permutation.shape)} must name each row 0..{count - 1} once: pass "
            f"integers such as torch.randperm({count}), or None for the identity"
        )
    size = count // groups
    is_crossing = rows // size != identity // size
    crossing = is_crossing.nonzero()
    if len(crossing):
        position = int(crossing[0])
        row = int(rows[position])
        raise ValueError(
            f"permutation puts row {row} at position {position}, out of its group of {size} rows: permute within "
            "groups, or pass groups=1 if the layer is not grouped"
        )
    return rows


def _parse(pattern: PatternLike) -> NMPattern:
    """Parse a pattern; an :class:`NMPattern` comes back without a call, which counts in a training step."""
    if isinstance(pattern, NMPattern):
        return pattern
    return NMPattern.parse(pattern)


def _check_blocks(tensor: Tensor, pattern: NMPattern, dim: int) -> int:
    """Return ``dim`` counted from the front, or explain why no blocks lie along it."""
    shape = tuple(tensor.shape)
    if not shape:
        raise ValueError(
            f"a tensor without axes has no blocks of {pattern}: pass a tensor of at least one axis"
        )
    axes = len(shape)
    if not -axes <= dim < axes:
        raise IndexError(
            f"dim={dim} is not an axis of a tensor of shape {shape}: pass {-axes} to {axes - 1}"
        )
    size = shape[dim]
    if size % pattern.m:
        raise ValueError(
            f"shape {shape} cannot be cut into blocks of {pattern}: M={pattern.m} does not divide size {size} of "
            f"dim={dim}; choose another pattern or dim, name the layer in `exclude`, or pad that axis with -inf"
        )
    return dim % axes


def _comparable(scores: Tensor) -> Tensor:
    """Widen the floating dtypes under two bytes, which have no comparisons; the cast keeps order and ties."""
    # torch 2.6 cannot trace the tensor's own is_floating_point() in a backward pass.
    dtype = scores.dtype
    if dtype.is_floating_point and dtype.itemsize < 2:
        return scores.float()
    return scores


def _top_n_mask(scores: Tensor, pattern: PatternLike, dim: int, magnitude: bool) -> Tensor:
    """Choose how to compute :func:`nm_mask`: eager in chunks, traced as one expression, or by a sort if M is large."""
    pattern = _parse(pattern)
    dim = _check_blocks(scores, pattern, dim)
    scores = _comparable(scores.detach())
    if scores.numel() == 0:
        return torch.empty_like(scores, dtype=torch.bool)
    by_sort = pattern.m > _MAX_PAIRWISE_M
    if not by_sort and not torch.compiler.is_compiling():
        return _chunked_mask(scores, pattern, dim, magnitude)
    if magnitude:
        scores = scores.abs()
    if by_sort:
        return sorted_mask(scores, pattern, dim)
    if pattern.m <= _MAX_STRIDED_M:
        return unrolled_mask(scores, pattern, dim)
    # Unrolled, the pairs of a long block would make a graph that takes long to compile.
    return broadcast_mask(scores, pattern, dim)


def _chunked_mask(scores: Tensor, pattern: NMPattern, dim: int, magnitude: bool) -> Tensor:
    """Run the all-pairs comparison over chunks of whole blocks, in the memory order of ``scores``."""
    # A transposed or channels-last tensor is dense in another order of its axes: there, nothing needs to be copied.
    strides = scores.stride()
    order = sorted(range(scores.dim()), key=strides.__getitem__, reverse=True)
    inverse_order = [order.index(axis) for axis in range(scores.dim())]
    dense = scores.permute(order)
    inner = dense.shape[order.index(dim) + 1 :].numel()
    blocks_bmi = dense.reshape(-1, pattern.m, inner)
    mask_bmi = None
    if _are_few(blocks_bmi, pattern):
        mask_bmi = _ranked_at_once(blocks_bmi.abs() if magnitude else blocks_bmi, pattern)
    if mask_bmi is None:
        mask_bmi = _ranked_in_chunks(blocks_bmi, pattern, magnitude)
    return mask_bmi.view(dense.shape).permute(inverse_order)


def _ranked_in_chunks(blocks_bmi: Tensor, pattern: NMPattern, magnitude: bool) -> Tensor:
    """Return the mask of blocks ``[B, M, I]``, of some blocks after the other."""
    inner = blocks_bmi.shape[2]
    strided = inner == 1 and pattern.m <= _MAX_STRIDED_M
    if blocks_bmi.device.type == "cpu":
        per_thread = _STRIDED_CHUNK if strided else _GATHERED_CHUNK
        chunk = per_thread * torch.get_num_threads()
    else:
        chunk = _DEVICE_CHUNK
    step = max(1, chunk // (pattern.m * inner))
    mask_bmi = torch.empty(blocks_bmi.shape, dtype=torch.bool, device=blocks_bmi.device)
    # The same memory as uint8, the dtype in which the chunks are ranked: a copy need not convert.
    bytes_bmi = mask_bmi.view(torch.uint8)
    kind = _Strided if strided else _Gathered
    keep_top_n: _Strided | _Gathered | None = None
    for part_bmi, kept_bmi in zip(blocks_bmi.split(step), bytes_bmi.split(step), strict=True):
        # The temporaries serve all chunks but a shorter last one.
        if keep_top_n is None or keep_top_n.size != len(part_bmi):
            keep_top_n = kind(part_bmi, pattern)
        # The magnitudes have no name: they are freed, and their memory is used for the next chunk.
        found_mbi = keep_top_n(part_bmi.abs() if magnitude else part_bmi)
        for kept_bi, found_bi in zip(kept_bmi.unbind(1), found_mbi.unbind(0), strict=True):
            kept_bi.copy_(found_bi)
    return mask_bmi


def unrolled_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Compare pair by pair without side effects: a compiler fuses this into one pass without a reduction."""
    blocks = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m))  # [..., blocks, M]
    entries = blocks.unbind(-1)
    ranks = [torch.zeros_like(entry, dtype=torch.int32) for entry in entries]
    for i, j in combinations(range(pattern.m), 2):
        # i < j: a tie is won by i, and so is a comparison with NaN.
        won = (entries[i] >= entries[j]) | entries[j].isnan()
        ranks[i] = ranks[i] + ~won
        ranks[j] = ranks[j] + won
    kept = torch.stack([rank < pattern.n for rank in ranks], -1)
    return kept.flatten(-2).movedim(-1, dim)


def broadcast_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Compare all pairs in one expression without side effects: a compiler need not store them."""
    blocks = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m))  # [..., blocks, M]
    # [..., blocks, M, M]: row i is entry i, and column k the one it is compared with.
    mine = blocks.unsqueeze(-1)
    other = blocks.unsqueeze(-2)
    index = torch.arange(pattern.m, dtype=torch.int64, device=scores.device)
    is_earlier = index < index.unsqueeze(-1)
    # An earlier entry wins ties, also between two NaN.
    beaten_by_earlier = (other >= mine) | mine.isnan()
    beaten_by_later = (other > mine) | (mine.isnan() & ~other.isnan())
    beaten = torch.where(is_earlier, beaten_by_earlier, beaten_by_later)
    rank = beaten.sum(-1)
    kept = rank < pattern.n
    return kept.flatten(-2).movedim(-1, dim)


def sorted_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Mark the first N of a stable descending sort."""
    blocks = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m))  # [..., blocks, M]
    # A sort takes NaN for the largest. Ascending, the negated numbers come first, and 0 - x makes one zero of the two.
    if scores.dtype.is_floating_point:
        order = (0 - blocks).argsort(dim=-1, stable=True)
    else:
        order = blocks.argsort(dim=-1, stable=True, descending=True)
    first_n = order[..., : pattern.n]
    mask = torch.zeros(blocks.shape, dtype=torch.bool, device=scores.device)
    mask.scatter_(-1, first_n, True)
    return mask.flatten(-2).movedim(-1, dim)


def _are_few(blocks_bmi: Tensor, pattern: NMPattern) -> bool:
    """Whether blocks ``[B, M, I]`` are so small that the number of calls decides how long their ranks take."""
    consecutive = blocks_bmi.shape[2] == 1
    limit = _FEW_CONSECUTIVE_PAIRS if consecutive else _FEW_PAIRS
    pairs = blocks_bmi.numel() * (pattern.m - 1) // 2
    plain = type(blocks_bmi) is Tensor and blocks_bmi.device.type == "cpu"
    return (
        plain
        and blocks_bmi.is_floating_point()
        and blocks_bmi.itemsize <= 4
        and pattern.m <= _MAX_PRODUCT_M
        and pairs <= limit
    )


def _ranked_at_once(blocks_bmi: Tensor, pattern: NMPattern) -> Tensor | None:
    """Return the mask of blocks ``[B, M, I]``: one call compares all pairs, and a matrix product sums the ranks.

    ``rank = start + signs @ won`` holds small integers, which every precision of a product represents exactly. Returns
    ``None`` where there may be a NaN.
    """
    first_p, second_p, signs_mp, start_m1 = _pairs(pattern.m)
    size, m, inner = blocks_bmi.shape
    # [M, R] with R = B I: a row holds one entry of every block.
    scores_mr = _wide(blocks_bmi).transpose(0, 1).reshape(m, -1)
    # A sum shows it in one pass; inf - inf is NaN too, and only costs the slower path.
    if scores_mr.sum().isnan():
        return None
    won_pr = scores_mr.index_select(0, first_p)
    # On a CPU a comparison into its own dtype is several times faster than one into bool.
    torch.ge(won_pr, scores_mr.index_select(0, second_p), out=won_pr)
    ranks_mr = torch.addmm(start_m1, signs_mp, won_pr)
    kept_mr = ranks_mr.lt(pattern.n)
    kept_mbi = kept_mr.view(m, size, inner)
    return kept_mbi.transpose(0, 1).contiguous()


class _Pairs(NamedTuple):
    first: Tensor  # [P], the earlier place of every pair
    second: Tensor  # [P], the later one
    signs: (
        Tensor  # [M, P], how the rank of every place changes with a pair that its first entry wins
    )
    start: Tensor  # [M, 1], the ranks as long as no first entry wins


@cache
def _pairs(m: int) -> _Pairs:
    """Return all pairs of places in a block, and how they make up the ranks.

    As long as no pair is won, each entry loses to all that follow it. A pair that is won takes one from the rank of its
    first entry and adds one to that of its second.
    """
    pairs = list(combinations(range(m), 2))
    # The tables outlive the call: made in inference mode, they could not be used outside of it.
    with torch.inference_mode(False):
        first, second = torch.tensor(pairs, dtype=torch.int64, device="cpu").unbind(1)
        places_m1 = torch.arange(m, dtype=torch.int64, device="cpu").unsqueeze(1)
        gains = (places_m1 == second).float()
        losses = (places_m1 == first).float()
        start = (m - 1 - places_m1).float()
        return _Pairs(first, second, gains - losses, start)


class _Strided:
    """Compares the entries of blocks ``[B, M, I]`` pair by pair, where they lie; holds the temporaries of one size."""

    def __init__(self, blocks_bmi: Tensor, pattern: NMPattern) -> None:
        self.pattern = pattern
        self.size = len(blocks_bmi)
        self.start_m11, self.ranks_mbi = _start_ranks(blocks_bmi)
        self.won_bi = torch.empty_like(self.ranks_mbi[0], dtype=torch.bool)

    def __call__(self, blocks_bmi: Tensor) -> Tensor:
        """Return the mask, as uint8 ``[M, B, I]``; the next call overwrites it."""
        blocks_bmi = _wide(blocks_bmi)
        nan_bmi = _find_nan(blocks_bmi)
        entries = blocks_bmi.unbind(1)
        ranks = self.ranks_mbi.copy_(self.start_m11).unbind(0)
        won_bi = self.won_bi
        won_bytes_bi = won_bi.view(torch.uint8)
        for i, j in combinations(range(self.pattern.m), 2):
            # The earlier entry wins a tie, and against NaN.
            torch.ge(entries[i], entries[j], out=won_bi)
            if nan_bmi is not None:
                won_bi |= nan_bmi[:, j]
            ranks[i].sub_(won_bytes_bi)
            ranks[j].add_(won_bytes_bi)
        return self.ranks_mbi.lt_(self.pattern.n)


class _Distance(NamedTuple):
    """Views of the temporaries of :class:`_Gathered` for all pairs of rows at a distance d, ``[M - d, B, I]`` each."""

    first: Tensor  # scores of rows 0, 1, ...
    second: Tensor  # scores of rows d, d + 1, ...
    verdict: Tensor  # the result of the comparison, in the dtype of the scores
    won: Tensor  # the same as uint8
    first_rank: Tensor
    second_rank: Tensor


class _Gathered:
    """Gathers the M entries of blocks ``[B, M, I]`` into M rows, and compares all rows at a distance d at once."""

    def __init__(self, blocks_bmi: Tensor, pattern: NMPattern) -> None:
        self.pattern = pattern
        self.size = len(blocks_bmi)
        self.start_m11, self.ranks_mbi = _start_ranks(blocks_bmi)
        dtype = _wide(blocks_bmi[:0]).dtype
        self.scores_mbi = torch.empty_like(self.ranks_mbi, dtype=dtype)
        # On a CPU a comparison into its own dtype and a narrowing copy are several times faster than one into bool.
        verdict_mbi = torch.empty_like(self.scores_mbi)
        won_mbi = torch.empty_like(self.ranks_mbi)
        # Many views of small tensors: making them once for all chunks is worth it.
        self.distances = []
        for d in range(1, pattern.m):
            views = _Distance(
                first=self.scores_mbi[:-d],
                second=self.scores_mbi[d:],
                verdict=verdict_mbi[d:],
                won=won_mbi[d:],
                first_rank=self.ranks_mbi[:-d],
                second_rank=self.ranks_mbi[d:],
            )
            self.distances.append(views)

    def __call__(self, blocks_bmi: Tensor) -> Tensor:
        """Return the mask, as uint8 ``[M, B, I]``; the next call overwrites it."""
        torch.stack(blocks_bmi.unbind(1), out=self.scores_mbi)
        nan_mbi = _find_nan(self.scores_mbi)
        if self.pattern.n == 1 and nan_mbi is None:
            return _first_largest(self.scores_mbi)
        self.ranks_mbi.copy_(self.start_m11)
        for d, views in enumerate(self.distances, start=1):
            torch.ge(views.first, views.second, out=views.verdict)
            views.won.copy_(views.verdict)
            if nan_mbi is not None:
                # The earlier entry also wins against NaN. In place: no field is assigned.
                views.won.bitwise_or_(nan_mbi[d:])
            views.first_rank.sub_(views.won)
            views.second_rank.add_(views.won)
        return self.ranks_mbi.lt_(self.pattern.n)


def _start_ranks(blocks_bmi: Tensor) -> tuple[Tensor, Tensor]:
    """Return the initial ranks ``[M, 1, 1]``, each entry losing to all that follow it, and room for all, ``[M, B, I]``.

    uint8 holds every rank, which is below ``_MAX_PAIRWISE_M``.
    """
    size, m, inner = blocks_bmi.shape
    device = blocks_bmi.device
    start_m = torch.arange(m - 1, -1, -1, dtype=torch.uint8, device=device)
    ranks_mbi = torch.empty(m, size, inner, dtype=torch.uint8, device=device)
    return start_m.view(m, 1, 1), ranks_mbi


def _first_largest(scores_mbi: Tensor) -> Tensor:
    """Mark, as uint8, the first of the largest entries along dim 0 of scores that hold no NaN."""
    largest_bi = scores_mbi.amax(0)
    # Into its own dtype, as in _Gathered.
    is_largest = torch.eq(scores_mbi, largest_bi, out=torch.empty_like(scores_mbi))
    hits_mbi = is_largest.to(torch.uint8)
    # 1 as long as the block has no hit yet.
    free_bi = torch.ones_like(hits_mbi[0])
    for hit_bi in hits_mbi:
        hit_bi &= free_bi
        free_bi ^= hit_bi
    return hits_mbi


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
