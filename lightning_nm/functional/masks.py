"""N:M masks by magnitude or any other score, and checks that a tensor is N:M.

One rule: an entry is kept if fewer than N entries of its block beat it. The larger score beats the smaller one,
the lower index wins a tie, and a NaN loses to every number. Comparing all pairs of a block needs no sort: for a
distance ``d`` one elementwise comparison settles the pairs ``(j, j + d)`` of all blocks at once.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from lightning_nm.pattern import NMPattern, PatternLike

# Entries handled at a time. On a CPU the temporaries of a chunk must fit the cache; on an accelerator launches cost
# more than memory traffic, and the limit only bounds the temporaries.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 25

# All pairs are quadratic in M, so that a sort wins in the end.
_MAX_PAIRWISE_M = 64

# Blocks whose ranks, one byte an entry, fill one integer. The shifts below take the first entry for the lowest byte.
_WORDS = {2: torch.int16, 4: torch.int32} if sys.byteorder == "little" else {}


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

    Example::

        >>> import torch
        >>> nm_mask(torch.tensor([3.0, 1.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.0]), "2:4").int().tolist()
        [1, 0, 1, 0, 1, 1, 0, 0]
    """
    pattern = NMPattern.parse(pattern)
    dim = _check_blocks(scores, pattern, dim)
    scores = _comparable(scores.detach())
    if scores.numel() == 0:
        return torch.empty_like(scores, dtype=torch.bool)
    if pattern.m > _MAX_PAIRWISE_M:
        return _sorted_mask(scores, pattern, dim)
    if torch.compiler.is_compiling():
        return _broadcast_mask(scores, pattern, dim)
    return _chunked_mask(scores, pattern, dim)


def nm_prune(x: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    """Zero all but the N entries of largest magnitude of every block of M.

    ``y = x where nm_mask(|x|), else 0``; a select and not a product: a pruned entry is ``+0``, never ``-0`` or NaN.

    Args:
        x: Any shape and real dtype. Gradients reach the entries that are kept.
        pattern: What :meth:`NMPattern.parse` reads.
        dim: The axis along which the blocks lie; its size must be a multiple of M.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: If ``x`` has no axes or M does not divide ``x.shape[dim]``.
        IndexError: If ``x`` has no axis ``dim``.

    Example::

        >>> import torch
        >>> nm_prune(torch.tensor([0.1, -2.0, -0.3, 1.0]), "2:4").tolist()
        [0.0, -2.0, 0.0, 1.0]
    """
    return torch.where(nm_mask(x.detach().abs(), pattern, dim), x, 0)


def is_nm(tensor: Tensor, pattern: PatternLike, dim: int = -1) -> bool:
    """Tell whether every block of M consecutive entries holds at most N nonzeros.

    ``all over blocks b: #{j in b : x[j] != 0} <= N``; a NaN is a nonzero, ``-0`` is not.

    Args:
        tensor: Values or a bool mask, of any shape.
        pattern: What :meth:`NMPattern.parse` reads.
        dim: The axis along which the blocks lie; its size must be a multiple of M.

    Raises:
        ValueError: If ``tensor`` has no axes or M does not divide ``tensor.shape[dim]``.
        IndexError: If ``tensor`` has no axis ``dim``.

    Example::

        >>> import torch
        >>> is_nm(torch.tensor([0.0, 1.0, 0.0, 2.0]), "2:4"), is_nm(torch.ones(4), "2:4")
        (True, False)
    """
    return int(count_violations(tensor, pattern, dim)) == 0


def count_violations(tensor: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    """Count the blocks of M consecutive entries that hold more than N nonzeros.

    ``#{blocks b : #{j in b : x[j] != 0} > N}``; a NaN is a nonzero, ``-0`` is not.

    Args:
        tensor: Values or a bool mask, of any shape.
        pattern: What :meth:`NMPattern.parse` reads.
        dim: The axis along which the blocks lie; its size must be a multiple of M.

    Returns:
        An int64 tensor without axes, on the device of ``tensor``: reading it is the caller's synchronisation.

    Raises:
        ValueError: If ``tensor`` has no axes or M does not divide ``tensor.shape[dim]``.
        IndexError: If ``tensor`` has no axis ``dim``.

    Example::

        >>> import torch
        >>> int(count_violations(torch.tensor([1, 1, 1, 0, 0, 0, 0, 1]), "2:4"))
        1
    """
    pattern = NMPattern.parse(pattern)
    dim = _check_blocks(tensor, pattern, dim)
    nonzeros = tensor.detach().bool().unflatten(dim, (-1, pattern.m)).sum(dim + 1, dtype=torch.int32)
    return (nonzeros > pattern.n).sum()


def _check_blocks(tensor: Tensor, pattern: NMPattern, dim: int) -> int:
    """Return ``dim`` counted from the front, or explain why no blocks lie along it."""
    shape = tuple(tensor.shape)
    if not shape:
        raise ValueError(f"a tensor without axes has no blocks of {pattern}: pass a tensor of at least one axis")
    last = len(shape) - 1
    if not ~last <= dim <= last:
        raise IndexError(f"dim={dim} is not an axis of a tensor of shape {shape}: pass {~last} to {last}")
    if shape[dim] % pattern.m:
        raise ValueError(
            f"shape {shape} cannot be cut into blocks of {pattern}: M={pattern.m} does not divide the size "
            f"{shape[dim]} of dim={dim}; choose another pattern or dim, keep the tensor dense (a layer: name it in "
            "`exclude`), or pad that axis with scores of -inf"
        )
    return dim % len(shape)


def _comparable(scores: Tensor) -> Tensor:
    """Widen the floating dtypes under two bytes, which have no comparisons; the cast keeps order and ties."""
    return scores.float() if scores.is_floating_point() and scores.itemsize < 2 else scores


def _chunked_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Run the all-pairs comparison over chunks of whole blocks, in the memory order of ``scores``."""
    # A transposed or channels-last tensor is dense in another order of its axes: there, nothing needs to be copied.
    order = sorted(range(scores.dim()), key=lambda axis: scores.stride()[axis], reverse=True)
    dense = scores.permute(order)
    inner = dense.shape[order.index(dim) + 1 :].numel()
    blocks = dense.reshape(-1, pattern.m, inner)
    mask = torch.empty(blocks.shape, dtype=torch.bool, device=scores.device)
    ranks = mask.view(torch.uint8)
    chunk = _CPU_CHUNK if scores.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // (pattern.m * inner))
    keep = _keep_words if inner == 1 and pattern.m in _WORDS else _keep_rows
    for start in range(0, blocks.shape[0], step):
        keep(blocks[start : start + step], ranks[start : start + step], pattern)
    return mask.view(dense.shape).permute([order.index(axis) for axis in range(scores.dim())])


def _keep_words(blocks: Tensor, out: Tensor, pattern: NMPattern) -> None:
    """Write the mask of ``blocks`` [B, M, 1] to ``out`` (uint8), the ranks of a block being the bytes of an integer.

    Neighbours at distance d are compared across the whole flat chunk, and a bit mask drops the pairs that straddle
    blocks. Adding ``won << 8 d`` and subtracting ``won`` then moves the ranks of all losers and winners at once; no
    byte carries into the next, as a rank stays in 0..M-1.
    """
    n, m = pattern.n, pattern.m
    scores = _wide(blocks.flatten())
    verdict = torch.empty_like(scores)
    won = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    nan = _nan_bytes(scores)
    ranks = out.view(-1).view(_WORDS[m])
    ranks.fill_(_word(range(m - 1, -1, -1)))
    for d in range(1, m):
        _beats(scores[:-d], scores[d:], verdict[:-d], won[:-d], None if nan is None else nan[d:])
        ranks.add_(won.view(_WORDS[m]) & _word([1] * (m - d) + [0] * d), alpha=256**d - 1)
    out.lt_(n)


def _keep_rows(blocks: Tensor, out: Tensor, pattern: NMPattern) -> None:
    """Write the mask of ``blocks`` [B, M, I] to ``out`` (uint8), with the M entries of a block in M contiguous rows."""
    n, m = pattern.n, pattern.m
    scores = _wide(torch.stack(blocks.unbind(1)))
    nan = _nan_bytes(scores)
    if n == 1 and nan is None:
        kept = _first_largest(scores)
    else:
        verdict = torch.empty_like(scores)
        won = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
        # Whoever comes first is taken to lose to all that follow, until it is seen to win.
        ranks = torch.arange(m - 1, -1, -1, dtype=torch.uint8, device=scores.device)
        ranks = ranks.view(m, 1, 1).repeat(1, *scores.shape[1:])
        for d in range(1, m):
            _beats(scores[:-d], scores[d:], verdict[d:], won[d:], None if nan is None else nan[d:])
            ranks[d:] += won[d:]
            ranks[:-d] -= won[d:]
        kept = ranks.lt_(n)
    for entry, row in zip(out.unbind(1), kept.unbind(0), strict=True):
        entry.copy_(row)


def _first_largest(scores: Tensor) -> Tensor:
    """Mark, as uint8, the first of the largest entries along dim 0; ``scores`` [M, ...] holds no NaN."""
    largest = scores.amax(0)
    hits = torch.eq(scores, largest, out=torch.empty_like(scores)).to(torch.uint8)
    free = torch.ones_like(hits[0])
    for hit in hits:
        hit &= free
        free ^= hit
    return hits


def _beats(first: Tensor, second: Tensor, verdict: Tensor, won: Tensor, second_is_nan: Tensor | None) -> None:
    """Write to ``won`` (uint8) whether the earlier entry of each pair beats the later one.

    A comparison into its own dtype followed by a narrowing copy is several times faster on a CPU than one into bool.
    """
    won.copy_(torch.ge(first, second, out=verdict))
    if second_is_nan is not None:
        won |= second_is_nan


def _nan_bytes(scores: Tensor) -> Tensor | None:
    """Mark the NaNs, as uint8, or return None if a cheap test shows that there are none."""
    if not scores.is_floating_point():
        return None
    # Reading a value would stall an accelerator, and a fake tensor has none. A sum of inf and -inf only costs time.
    plain = type(scores) is Tensor and scores.device.type == "cpu"
    if plain and not scores.sum().isnan():
        return None
    return scores.isnan().view(torch.uint8)


def _wide(scores: Tensor) -> Tensor:
    """Widen half dtypes, whose comparisons are slow on a CPU; the cast keeps order and ties."""
    half = scores.is_floating_point() and scores.itemsize < 4
    return scores.float() if half and scores.device.type == "cpu" else scores


def _word(entries: range | list[int]) -> int:
    """Pack one byte per entry into an integer, the first entry in the lowest byte."""
    return int.from_bytes(bytes(entries), "little")


def _broadcast_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Compare all pairs in one expression: a compiler fuses it into a single kernel."""
    blocks = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m))
    mine, other = blocks.unsqueeze(-1), blocks.unsqueeze(-2)
    index = torch.arange(pattern.m, device=scores.device)
    other_first = index < index.unsqueeze(-1)
    if scores.is_floating_point():
        beaten_late = (other > mine) | (mine.isnan() & ~other.isnan())
        beaten_early = (other >= mine) | mine.isnan()
    else:
        beaten_late, beaten_early = other > mine, other >= mine
    rank = torch.where(other_first, beaten_early, beaten_late).sum(-1)
    return (rank < pattern.n).flatten(-2).movedim(-1, dim)


def _sorted_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Mark the first N of a stable descending sort."""
    blocks = scores.movedim(dim, -1).unflatten(-1, (-1, pattern.m))
    # A sort takes NaN for the largest. Ascending, the negated numbers come first, and 0 - x makes one zero of the two.
    floating = scores.is_floating_point()
    order = (0 - blocks if floating else blocks).argsort(dim=-1, stable=True, descending=not floating)
    mask = torch.zeros(blocks.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, order[..., : pattern.n], True).flatten(-2).movedim(-1, dim)


def _nm_mask_reference(scores: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    """Do what :func:`nm_mask` does by one stable sort: what the tests compare every other path with."""
    pattern = NMPattern.parse(pattern)
    return _sorted_mask(_comparable(scores.detach()), pattern, _check_blocks(scores, pattern, dim))
