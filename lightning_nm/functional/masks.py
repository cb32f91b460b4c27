"""N:M masks by magnitude or any other score, and checks that a tensor is N:M.

One rule: an entry is kept if fewer than N entries of its block beat it. The larger score beats the smaller one,
the lower index wins a tie, and a NaN loses to every number.

On CPUs the C library ranks the entries. A compiler gets all comparisons of a short block as one expression, which it
fuses. What is left, tensors on other devices and CPUs without the library, takes the same expression for short blocks,
and a sort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from lightning_nm.functional.select import masked
from lightning_nm.pattern import NMPattern, PatternLike

# Beyond, unrolled pairs take long to compile, and a sort is faster where nothing fuses them.
_MAX_UNROLLED_M = 8
_MAX_COMPILED_M = 16

by_library: Callable[[Tensor, int, bool], Tensor | None] | None = None
"""The mask of blocks ``[B, M, I]`` by the library of CPU kernels, which sets this when it is imported; it returns
``None`` where it cannot be used."""


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
    pattern = NMPattern.parse(pattern)
    check_output_blocks(weight, pattern, groups, forward_mask)
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
    pattern, dim = check_blocks(tensor, pattern, dim)
    is_nonzero = tensor.detach().bool()
    blocks = is_nonzero.unflatten(dim, (-1, pattern.m))
    nonzeros = blocks.sum(dim + 1, dtype=torch.int32)
    violates = nonzeros > pattern.n
    return violates.sum()


def check_output_blocks(
    weight: Tensor, pattern: NMPattern, groups: int, forward_mask: Tensor | None = None
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
            f"shape {shape}: {out} output rows in {groups} group(s) are {size} rows each, not a multiple of "
            f"M={pattern.m}: choose another pattern, name the layer in `exclude`, or keep its input gradient dense"
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
    identity = indices(count, weight)
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


def check_blocks(tensor: Tensor, pattern: PatternLike, dim: int) -> tuple[NMPattern, int]:
    """Return the pattern, and ``dim`` counted from the front, or explain why no blocks lie along it."""
    pattern = NMPattern.parse(pattern)
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
    return pattern, dim % axes


def _comparable(scores: Tensor) -> Tensor:
    """Widen the floating dtypes under two bytes, which have no comparisons; the cast keeps order and ties."""
    # torch 2.6 cannot trace the tensor's own is_floating_point() in a backward pass.
    dtype = scores.dtype
    if dtype.is_floating_point and dtype.itemsize < 2:
        return scores.float()
    return scores


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype that holds the values of all tensors, at least float32, as half precision makes ties."""
    return torch.float64 if torch.float64 in [x.dtype for x in tensors] else torch.float32


def indices(count: int, like: Tensor) -> Tensor:
    """Return the numbers from 0 on, int64 ``[count]`` on the device of a tensor."""
    return torch.arange(count, dtype=torch.int64, device=like.device)


def memory_order(x: Tensor) -> tuple[list[int], list[int]]:
    """Return the axes in the order in which they lie in memory, the outermost first, and the way back.

    A transposed or channels-last tensor is dense in that order: there, nothing needs to be copied.
    """
    order = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
    return order, [order.index(axis) for axis in range(x.dim())]


def pieces(entries: tuple[int, int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors ``[B, ..., I, ...]`` into pieces along their axes 0 and 2, whose sizes are equal in all of them.

    ``entries`` bounds those of the first tensor's pieces: on a CPU per thread, so that temporaries stay in its cache,
    and on other devices, whose memory it bounds.
    """
    first = tensors[0]
    per_thread, on_device = entries
    bound = per_thread * torch.get_num_threads() if first.device.type == "cpu" else on_device
    inner = first.shape[2]
    at_once = max(1, bound // first[0, :, 0].numel())
    # Whole rows, or parts of one if that is already too much.
    height = max(1, at_once // inner)
    width = min(at_once, inner)
    for rows in zip(*(tensor.split(height) for tensor in tensors), strict=True):
        yield from zip(*(tensor.split(width, 2) for tensor in rows), strict=True)


def largest(
    rows: Sequence[Tensor],
    n: int,
    high: Callable[..., Tensor] = torch.maximum,
    low: Callable[..., Tensor] = torch.minimum,
) -> list[Tensor]:
    """Return the n largest of the rows, elementwise, in order: a network that inserts one row after the other.

    ``high`` and ``low`` are maximum and minimum, or OR and AND for bits.
    """
    top: list[Tensor] = []
    for row in rows:
        # The larger stays in its place, and the smaller goes on to the next one.
        for k, held in enumerate(top):
            top[k] = high(held, row)
            if k < n - 1:
                row = low(held, row)
        if len(top) < n:
            top.append(row)
    return top


def _top_n_mask(scores: Tensor, pattern: PatternLike, dim: int, magnitude: bool) -> Tensor:
    """Choose how to compute :func:`nm_mask`: traced as one expression, else by the library, all pairs or a sort."""
    pattern, dim = check_blocks(scores, pattern, dim)
    scores = _comparable(scores.detach())
    if scores.numel() == 0:
        return torch.empty_like(scores, dtype=torch.bool)
    is_compiling = torch.compiler.is_compiling()
    longest = _MAX_COMPILED_M if is_compiling else _MAX_UNROLLED_M
    rank = unrolled_mask if pattern.m <= longest else sorted_mask
    if is_compiling:
        return rank(scores.abs() if magnitude else scores, pattern, dim)
    order, inverse_order = memory_order(scores)
    dense = scores.permute(order)
    # I entries lie inside, between two neighbours of a block in memory.
    inner = dense.shape[order.index(dim) + 1 :].numel()
    blocks_bmi = dense.reshape(-1, pattern.m, inner)
    mask_bmi = by_library(blocks_bmi, pattern.n, magnitude) if by_library else None
    if mask_bmi is None:
        if magnitude:
            blocks_bmi = blocks_bmi.abs()
        mask_bmi = rank(blocks_bmi, pattern, 1).contiguous()
    return mask_bmi.view(dense.shape).permute(inverse_order)


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
