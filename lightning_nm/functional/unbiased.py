"""Unbiased N:M estimators of a tensor: random N:M tensors whose expectation is the tensor.

An estimator that keeps entry i of a block with probability ``p_i`` gives it the value ``x_i / p_i``; its variance is
``sum x_i^2 (1 / p_i - 1)``. Systematic sampling realises any probabilities with one random number a block.

The arithmetic is written over planes, tensors that hold one entry of every block: a compiler fuses them into one pass,
and on a CPU chunks of them stay in cache. Masks are floats, 0 or 1, because on a CPU a product with one is many times
faster than a select, and as exact as long as everything is finite. Where that is not known, ``careful`` code selects.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_nm.functional.masks import check_blocks, memory_order, pieces, wide_dtype
from lightning_nm.pattern import NMPattern, PatternLike

# Entries handled at a time: on a CPU, per thread, ten planes of each fit its cache; elsewhere it only bounds memory.
_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 25

Planes: TypeAlias = list[Tensor]
"""M tensors of one shape: the first entries of all blocks, the second entries, ..."""


def mvue_probabilities(x: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    """Give every entry the probability of survival at which an unbiased N:M estimator has the least variance.

    ``p_i = min(1, |x_i| / V)`` with the level V of the block such that ``sum p = min(N, nonzeros)``. In closed form,
    with magnitudes ``a_1 >= a_2 >= ...``: the k largest have ``p = 1``, where k is the smallest number with ``(N - k)
    a_(k+1) <= a_(k+1) + ... + a_M``, and V is that sum over ``N - k``.

    Args:
        x: Any shape, any floating dtype, any strides.
        pattern: What :meth:`NMPattern.parse` reads, for example ``"2:4"``.
        dim: The axis along which the blocks lie; its size must be a multiple of M.

    Returns:
        A tensor of the shape of ``x``, float64 for a float64 ``x`` and float32 otherwise, without autograd history.
        A zero has probability 0; a block with a NaN or an infinity is all NaN.

    Raises:
        TypeError: If ``x`` is not of a floating dtype. Other errors are those of :func:`nm_mask`.

    Example:
        >>> mvue_probabilities(torch.tensor([9.0, -1.0, 2.0, -1.0]), "2:4").tolist()
        [1.0, 0.25, 0.5, 0.25]

    Source: Chmiel et al., arXiv:2203.10991, as :func:`mvue`, for 1:2 and 2:4.
    """
    pattern = NMPattern.parse(pattern)
    # This checks the arguments, as for the estimators; probabilities need no random numbers.
    no_numbers = _uniform(x, pattern, dim, (0,), None, None)
    function = partial(_probabilities, n=pattern.n)
    return _map_blocks(function, x, pattern, dim, no_numbers, wide_dtype(x))


def mvue(
    x: Tensor,
    pattern: PatternLike,
    dim: int = -1,
    *,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a sample of the unbiased N:M estimator of least variance.

    ``y_i = x_i / p_i`` where entry i survives, else 0, with p of :func:`mvue_probabilities`. The entries lie in order
    along a line, entry i taking up ``p_i`` of it; those survive into whose parts one of ``u, u + 1, ...`` falls.
    ``E[y] = x``, up to the rounding of the arithmetic and the resolution of u (2^-24 of V, for a float32 u).

    Args:
        x: Any shape, any floating dtype, any strides. Half dtypes are computed in float32 and rounded once.
        pattern: What :meth:`NMPattern.parse` reads.
        dim: The axis along which the blocks lie.
        uniform: One number in [0, 1) per block: the shape of ``x`` with the size of ``dim`` divided by M.
        generator: What ``uniform`` is drawn from where it is not given; torch's default generator if None.

    Returns:
        A tensor of the shape and dtype of ``x``, without autograd history. Each block has exactly N nonzeros, and one
        of at most N nonzeros comes back bit for bit (a zero as +0). A block with a NaN or an infinity has N NaNs. A
        value beyond the range of the dtype is infinite.

    Raises:
        TypeError: As :func:`mvue_probabilities`.
        ValueError: In the same cases, and if ``uniform`` has another shape, or both ``uniform`` and ``generator``
            are given.

    Example:
        >>> mvue(torch.tensor([9.0, -1.0, 2.0, -1.0]), "2:4", uniform=torch.tensor([0.5])).tolist()
        [9.0, 0.0, 4.0, 0.0]

    Source: Chmiel et al., ICLR 2023, arXiv:2203.10991, for 1:2 and 2:4; Madow, "On the theory of systematic sampling,
    II", 1949, doi:10.1214/aoms/1177729988, for sampling with given probabilities.
    """
    pattern = NMPattern.parse(pattern)
    numbers = _uniform(x, pattern, dim, (), uniform, generator).unsqueeze(0)
    function = partial(_sample, n=pattern.n)
    return _map_blocks(function, x, pattern, dim, numbers, x.dtype)


def approx_mvue(
    x: Tensor,
    pattern: PatternLike = "2:4",
    dim: int = -1,
    *,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a sample of the unbiased 2:4 estimator by two successive draws, at less than twice the least variance.

    With ``a = |x|`` and ``S = sum a``: draw i with probability ``a_i / S``, then j among the others with ``a_j / (S -
    a_i)``. Both survive, as ``x_i / p_i`` with ``p_i = a_i / S + sum_{k != i} (a_k / S) a_i / (S - a_k)``. The
    result, the errors and the source are those of :func:`mvue`.

    Args:
        x: Any shape, any floating dtype, any strides.
        pattern: ``"2:4"``, the only pattern this estimator is defined for.
        dim: The axis along which the blocks lie.
        uniform: Two numbers in [0, 1) per block: ``[2, ...]``, then the shape of ``x`` with a quarter of ``dim``.
        generator: What ``uniform`` is drawn from where it is not given.

    Raises:
        ValueError: If the pattern is not 2:4, and as :func:`mvue`.

    Example:
        >>> approx_mvue(torch.tensor([3.0, 3.0, -3.0, 3.0]), uniform=torch.tensor([[0.6], [0.2]])).tolist()
        [6.0, 0.0, -6.0, 0.0]
    """
    pattern = NMPattern.parse(pattern)
    if pattern != NMPattern(2, 4):
        raise ValueError(
            f"approx_mvue is defined for 2:4, not for {pattern}: use mvue, which takes any pattern"
        )
    numbers = _uniform(x, pattern, dim, (2,), uniform, generator)
    return _map_blocks(_sample_two_of_four, x, pattern, dim, numbers, x.dtype)


def _uniform(
    x: Tensor,
    pattern: NMPattern,
    dim: int,
    rows: tuple[int, ...],
    uniform: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Check the arguments; return the random numbers, given or drawn: ``[*rows, *blocks]``."""
    # torch 2.6 cannot trace the tensor's own is_floating_point() in a backward pass.
    if not x.dtype.is_floating_point:
        raise TypeError(
            f"an unbiased estimator of a tensor of {x.dtype} would have to round: pass a floating dtype"
        )
    _, dim = check_blocks(x, pattern, dim)
    blocks = x.shape[dim] // pattern.m
    shape = (*rows, *x.shape[:dim], blocks, *x.shape[dim + 1 :])
    dtype = wide_dtype(x)
    if uniform is None:
        return torch.rand(shape, generator=generator, dtype=dtype, device=x.device)
    if generator is not None:
        raise ValueError(
            "uniform and generator are two sources of the same numbers: pass one of them"
        )
    if uniform.shape != shape:
        raise ValueError(
            f"uniform has shape {tuple(uniform.shape)}, but blocks of {pattern} along dim={dim} need {shape}"
        )
    return uniform.detach().to(dtype)


def _map_blocks(
    function: Callable[[Planes, Tensor, bool], Planes],
    x: Tensor,
    pattern: NMPattern,
    dim: int,
    uniform: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Apply ``function(planes of x, random numbers, careful)``, which returns planes, to all blocks along ``dim``."""
    x = x.detach()
    dim = dim % x.dim()
    m = pattern.m
    wide = wide_dtype(x)
    if torch.compiler.is_compiling():
        # One expression for all blocks, which the compiler fuses; nothing may be read, hence careful.
        entry_axis = dim + 1
        planes = x.to(wide).unflatten(dim, (-1, m)).unbind(entry_axis)
        results = function(list(planes), uniform, True)
        blocks = torch.stack(results, entry_axis)
        return blocks.flatten(dim, entry_axis).to(dtype)
    order, inverse_order = memory_order(x)
    dense = x.permute(order)
    result = torch.empty(dense.shape, dtype=dtype, device=x.device)
    # A fake tensor has no values, and reading stalls an accelerator.
    readable = x.device.type == "cpu" and type(dense) is Tensor
    if x.numel():
        # [B, M, I]: I entries lie between two neighbours of a block in memory.
        inner = dense.shape[order.index(dim) + 1 :].numel()
        x_bmi = dense.reshape(-1, m, inner)
        # The random numbers have one axis more, in front: [rows, B, I].
        number_order = [0, *(axis + 1 for axis in order)]
        numbers_rbi = uniform.permute(number_order).reshape(len(uniform), len(x_bmi), inner)
        parts = (x_bmi, numbers_rbi.transpose(0, 1), result.view(-1, m, inner))
        for piece_bmi, numbers_bri, to_bmi in pieces((_CHUNK, _DEVICE_CHUNK), *parts):
            planes_mbi = torch.stack([plane.to(wide) for plane in piece_bmi.unbind(1)])
            careful = True
            if readable:
                # A small sum of all magnitudes shows that everything is finite and no sum of a block overflows.
                careful = not bool(planes_mbi.abs().sum() < torch.finfo(wide).max / 4)
            results = function(list(planes_mbi), numbers_bri.transpose(0, 1), careful)
            for to_bi, result_bi in zip(to_bmi.unbind(1), results, strict=True):
                to_bi.copy_(result_bi)
    return result.permute(inverse_order)


class _Saturated(NamedTuple):
    """What is left to be drawn once the entries with p = 1 are taken."""

    exact: Planes  # 1 where p = 1
    live: Planes  # 1 where an entry is nonzero and may be drawn
    part: Planes  # the magnitudes of those that may be drawn, perhaps scaled
    reach: Planes  # their cumulative sums, the last one being the block's total
    due: Tensor  # how many are to be drawn
    level: Tensor  # V, the magnitude of what is drawn


def _saturate(magnitudes: Planes, n: int, careful: bool) -> _Saturated:
    """Take the entries that exceed the level ``total / due`` of their block, until none does."""
    live = [_positive(entry) for entry in magnitudes]
    nonzeros = reduce(torch.add, live)
    # All of a block with at most N nonzeros is kept, and nothing is left to be drawn.
    few = (nonzeros <= n).to(nonzeros.dtype)
    due = n - n * few
    exact = [few * entry for entry in live]
    tail = magnitudes
    # A round takes at least one entry, or none exceeds the level. N - 1 rounds are enough: where only one is due, the
    # level is the total, which no entry exceeds.
    for _ in range(n - 1):
        part, _ = _scale(tail, careful)
        total = reduce(torch.add, part)
        # Above the level, entry > total / due; the product avoids dividing by 0.
        over = [_less(total, due * entry) for entry in part]
        taken = reduce(torch.add, over)
        if not careful and not taken.any():
            break
        due = due - taken
        exact = list(map(torch.add, exact, over))
        tail = _without(tail, over)
    part, unit = _scale(tail, careful)
    reach = list(accumulate(part, torch.add))
    if n > 1:  # entries may have left the tail
        live = [_positive(entry) for entry in tail]
    level = reach[-1] / due.clamp(min=1) / unit
    return _Saturated(exact, live, part, reach, due, level)


def _without(entries: Planes, taken: Planes) -> Planes:
    """Return the entries with zeros in place of those that were taken: x - x * 1 is 0."""
    left = []
    for entry, hit in zip(entries, taken, strict=True):
        left.append(torch.addcmul(entry, entry, hit, value=-1))
    return left


def _probabilities(planes: Planes, _: Tensor, careful: bool, n: int) -> Planes:
    """Compute :func:`mvue_probabilities` of planes."""
    magnitudes, broken = _clean(planes, careful)
    blocks = _saturate(magnitudes, n, careful)
    total = blocks.reach[-1]
    result = []
    for part, exact in zip(blocks.part, blocks.exact, strict=True):
        # Nothing is due where few entries are nonzero, and all of those are exact.
        p = part / total * blocks.due
        # 0 / 0 in a block without anything left to be drawn.
        p = p.clamp(max=1).nan_to_num(nan=0.0)
        p = torch.where(exact > 0, 1, p)
        if broken is not None:
            p = torch.where(broken, torch.nan, p)
        result.append(p)
    return result


def _sample(planes: Planes, uniform: Tensor, careful: bool, n: int) -> Planes:
    """Draw the sample of :func:`mvue` of planes, with one random number per block."""
    magnitudes, broken = _clean(planes, careful)
    blocks = _saturate(magnitudes, n, careful)
    due = blocks.due
    total = blocks.reach[-1]
    taken = torch.zeros_like(due)
    # How many of the entries seen so far must have been taken for those to come to suffice.
    wanted = due - reduce(torch.add, blocks.live)
    result = []
    for i, (live, reach) in enumerate(zip(blocks.live, blocks.reach, strict=True)):
        # How many of u, u + 1, ... lie below the end of this entry's part, due at most. A sum u + j would be rounded.
        end = reach / total * due
        whole = end.floor()
        count = whole + _less(uniform[0], end - whole)
        # Rounding may put two of them into one part, and one beyond the last nonzero: what exceeds one goes to the next
        # entry, and the last entries are taken if as many are due as are left.
        wanted = wanted + live
        needed = torch.maximum(count, wanted)
        take = _less(taken, needed) * live
        taken = taken + take
        exact = blocks.exact[i]
        x = planes[i]
        drawn = _assemble(x, magnitudes[i], exact, take, blocks.level, broken)
        result.append(drawn)
    return result


def _sample_two_of_four(planes: Planes, uniform: Tensor, careful: bool) -> Planes:
    """Draw the sample of :func:`approx_mvue` of planes, with two random numbers per block."""
    magnitudes, broken = _clean(planes, careful)
    live = [_positive(entry) for entry in magnitudes]
    nonzeros = reduce(torch.add, live)
    # All of a block with at most two nonzeros is kept.
    few = (nonzeros <= 2).to(nonzeros.dtype)
    a, unit = _scale(magnitudes, careful)
    first, total = _draw(a, uniform[0])
    rest = _without(a, first)
    second, _ = _draw(rest, uniform[1])
    # S - a_k as a sum of the others: a difference would cancel where one entry is most of the block.
    low = a[0] + a[1]
    high = a[2] + a[3]
    others = [
        a[1] + high,
        a[0] + high,
        a[3] + low,
        a[2] + low,
    ]
    # The clamps only keep 0 / 0 out: nothing lies between 0 and the least subnormal number, and a p below the smallest
    # normal number is beyond the resolution of any draw.
    limits = torch.finfo(total.dtype)
    smallest_normal = limits.tiny
    least_subnormal = limits.tiny * limits.eps
    others = [entry.clamp(min=least_subnormal) for entry in others]
    fraction = [entry / total.clamp(min=least_subnormal) for entry in a]
    result = []
    for i, x in enumerate(planes):
        # p_i = a_i / S + sum_{k != i} (a_k / S) a_i / (S - a_k)
        p = fraction[i]
        for k in range(4):
            if k != i:
                p = p + fraction[k] * (a[i] / others[k])
        exact = few * live[i]
        take = (first[i] + second[i]) * (1 - few)
        value = a[i] / p.clamp(min=smallest_normal) / unit
        drawn = _assemble(x, magnitudes[i], exact, take, value, broken)
        result.append(drawn)
    return result


def _draw(weights: Planes, uniform: Tensor) -> tuple[Planes, Tensor]:
    """Mark one entry of every block, drawn in proportion to its weight, and return the blocks' totals."""
    reach = list(accumulate(weights, torch.add))
    total = reach[-1]
    below = [_less(uniform, end / total) for end in reach]
    # The number lies in the part of an entry if it is below the part's end, but not below the end of the one before.
    hits = below[:1]
    for before, after in pairwise(below):
        hits.append(after - before)
    return hits, total


def _clean(planes: Planes, careful: bool) -> tuple[Planes, Tensor | None]:
    """Return the magnitudes, with ones for all of a block that is not finite, and which blocks these are."""
    magnitudes = [plane.abs() for plane in planes]
    if not careful:
        return magnitudes, None
    largest = reduce(torch.maximum, magnitudes)
    # Negated, because a NaN is not below either.
    broken = ~(largest < torch.inf)
    cleaned = [torch.where(broken, 1, magnitude) for magnitude in magnitudes]
    return cleaned, broken


def _scale(magnitudes: Planes, careful: bool) -> tuple[Planes, Tensor | float]:
    """Scale blocks whose sum might overflow by a power of two; return the scaled magnitudes and the scales."""
    if not careful:
        return magnitudes, 1.0
    # A power of two scales without rounding. M entries of this fraction of the range add up to less than half of it.
    room = 2.0 ** -(2 * len(magnitudes)).bit_length()
    largest = reduce(torch.maximum, magnitudes)
    limit = torch.finfo(largest.dtype).max * room
    is_large = largest > limit
    unit = torch.where(is_large, room, 1.0).to(largest.dtype)
    scaled = [magnitude * unit for magnitude in magnitudes]
    return scaled, unit


def _assemble(
    x: Tensor,
    magnitude: Tensor,
    exact: Tensor,
    take: Tensor,
    value: Tensor,
    broken: Tensor | None,
) -> Tensor:
    """Return x where exact, sign(x) times the value where taken, and +0 elsewhere."""
    if broken is None:
        size = torch.addcmul(magnitude * exact, value, take)
        # Adding zero makes +0 of the -0 that a negative sign makes of 0.
        return size * x.sign() + 0.0
    # Products with a value that is not finite would be NaN: select.
    signed = torch.copysign(value, x)
    drawn = torch.where(broken, torch.nan, signed)
    sampled = torch.where(take > 0, drawn, 0)
    return torch.where(exact > 0, x, sampled)


def _positive(x: Tensor) -> Tensor:
    """Return 1 where x > 0, else 0, in the dtype of x."""
    return _less(x.new_zeros(()), x)


def _less(x: Tensor, y: Tensor) -> Tensor:
    """Return 1 where x < y, else 0, in the dtype of y."""
    if torch.compiler.is_compiling():
        return (x < y).to(y.dtype)
    # On a CPU many times faster than a comparison into bool.
    return torch.lt(x, y, out=torch.empty_like(y))
