"""Backward masks that follow the forward mask, and the search for the row permutation that lets them keep the most.

The input gradient ``dX = dY W`` contracts the output axis, so its weight must be N:M along ``out``. Bi-Mask permutes
the rows, takes blocks of M rows, and keeps at most N entries per block and column of the forward-masked weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Generator, Tensor

from lightning_nm.functional.masks import check_output_blocks, checked_permutation
from lightning_nm.functional.pattern import NMPattern, PatternLike

Search: TypeAlias = Literal["swap", "random", "redraw"]
"""How :func:`search_permutation` searches."""
Criterion: TypeAlias = Literal["retained", "eligible", "l1"]
"""What :func:`search_permutation` maximises."""

_LEVELS = 4  # thresholds that stand for the magnitudes while "swap" searches by "l1"
_TILE = 256  # blocks that exchange rows in one assignment: the cost of a round is linear in it, the gain grows slowly
_CACHE = (
    2**17
)  # elements that one step of the scoring works on, so that its temporaries stay in the cache


@torch.no_grad()
def permutation_score(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: PatternLike,
    permutation: Tensor | None,
    *,
    criterion: Criterion = "retained",
    groups: int = 1,
) -> float:
    r"""What the backward mask keeps of the forward-masked weight V under a permutation of the rows.

    The sum over blocks (M consecutive permuted rows of one column) of ``min(nnz, N)`` for ``"retained"``, of
    ``nnz <= N`` for ``"eligible"``, and of the N largest ``|V|`` for ``"l1"``.

    Args:
        weight: ``[out, ...]``, real.
        forward_mask: Boolean, the shape of ``weight``. None keeps every entry.
        pattern: What :meth:`NMPattern.parse` reads, for example ``"2:4"``.
        permutation: Integers ``[out]``, the original row at every position. None is the identity.
        criterion: What is summed. ``"l1"`` is summed in float32 within a block, in float64 over blocks.
        groups: Equal runs of output rows that the permutation must not cross.

    Raises:
        ValueError: As :func:`search_permutation`.

    Example:
        >>> weight = torch.tensor([[4.0], [3.0], [0.0], [1.0]])
        >>> [permutation_score(weight, None, "1:2", None, criterion=c) for c in ("retained", "eligible", "l1")]
        [2.0, 1.0, 5.0]

    Source: Zhang et al., ICML 2023, arXiv:2302.06058.
    """
    problem = _problem(weight, forward_mask, pattern, criterion, groups)
    permutation = checked_permutation(permutation, weight, groups)
    return float(_scores(problem, permutation[None])[0])


@torch.no_grad()
def search_permutation(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: PatternLike,
    *,
    search: Search = "swap",
    candidates: int = 100,
    criterion: Criterion = "retained",
    initial: Tensor | None = None,
    groups: int = 1,
    generator: Generator | None = None,
) -> Tensor:
    r"""Permutation of the output rows under which the backward mask keeps most.

    ``argmax_p sum over blocks of min(nnz(V[p]), N)``, or another criterion of :func:`permutation_score`. ``"random"``
    takes the best of random permutations and the initial one, ``"redraw"`` of random ones alone: only it can be worse
    than the initial one. Of equal ones the first is taken. ``"swap"`` takes one row out of every block. Its cost in a
    block is then linear in the row: its nonzeros in columns where the rest of the block has N already. So one GEMM
    tells the cost of every row in every block, and rows change places if that lowers the sum.

    Args:
        weight: ``[out, ...]``, real; read as ``[out, K]``.
        forward_mask: Boolean, the shape of ``weight``. None keeps every entry.
        pattern: What :meth:`NMPattern.parse` reads, for example ``"2:4"``.
        search: ``"swap"``, ``"random"`` or ``"redraw"``.
        candidates: How many random permutations, or as many rounds of swaps as take about the same time on layers of
            512 rows and more. ``"swap"`` stops when rounds no longer help.
        criterion: ``"retained"`` (the authors' code), ``"eligible"`` (the paper's wording) or ``"l1"`` (magnitude).
        initial: Integers ``[out]``, where the search starts, such as the permutation in use. None is the identity.
        groups: Equal runs of output rows that the permutation does not cross.
        generator: Source of randomness. None is torch's global CPU generator.

    Returns:
        int64 ``[out]`` on the device of ``weight``: the original row at every position.

    Raises:
        ValueError: If an option is unknown, ``candidates < 1``, M does not divide ``out / groups``, or ``initial`` is
            not a permutation or crosses groups.

    Example:
        >>> weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 4.0]])
        >>> permutation = search_permutation(weight, None, "1:2")
        >>> [permutation_score(weight, None, "1:2", p) for p in (None, permutation)]
        [2.0, 4.0]

    Source: ``"redraw"`` is the code of Zhang et al., ICML 2023, arXiv:2302.06058; ``"swap"`` is this package's.
    """
    _choice("search", search, get_args(Search))
    if candidates < 1:
        raise ValueError(
            f"candidates={candidates}: the search needs at least one, for example candidates=100"
        )
    problem = _problem(weight, forward_mask, pattern, criterion, groups)
    start = checked_permutation(initial, weight, groups)
    one_block_a_group = len(start) == groups * problem.pattern.m  # all permutations score the same
    if problem.table.numel() == 0 or one_block_a_group:
        return start
    if search == "random":
        return _best_of(problem, start, candidates, generator)
    if search == "redraw":
        return _best_of(problem, None, candidates, generator)
    rounds = max(1, candidates * (problem.pattern.m + 4) // 260)  # measured
    with torch.autocast(start.device.type, enabled=False):
        found = _swap(problem, start, rounds, generator)
    if criterion == "l1":  # searched on thresholds that only approximate the magnitudes
        before, after = _scores(problem, torch.stack([start, found])).tolist()
        return found if after > before else start
    return found


class _Problem(NamedTuple):
    table: Tensor  # contiguous [out, K]: |V| for "l1", else whether V is nonzero
    pattern: NMPattern
    criterion: Criterion
    groups: int


def _choice(name: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        raise ValueError(
            f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, options))}"
        )


def _problem(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: PatternLike,
    criterion: Criterion,
    groups: int,
) -> _Problem:
    pattern = NMPattern.parse(pattern)
    _choice("criterion", criterion, get_args(Criterion))
    check_output_blocks(weight, forward_mask, pattern, groups)
    weight = weight.detach()
    if criterion == "l1":
        table = weight.abs()
        if forward_mask is not None:
            table = table.where(forward_mask, 0)
    else:
        table = weight.bool()
        if forward_mask is not None:
            table = table & forward_mask
    return _Problem(table.flatten(1).contiguous(), pattern, criterion, groups)


def _first_rows(rows: Tensor, groups: int) -> Tensor:
    """The number of the first row of every group, ``[groups, 1]``."""
    return torch.arange(0, len(rows), len(rows) // groups, device=rows.device)[:, None]


def _shuffles(count: int, size: int, generator: Generator | None, device: torch.device) -> Tensor:
    """``[count, size]`` random permutations, drawn on the generator's device (CPU if None): alike on every device."""
    source = generator.device if generator is not None else torch.device("cpu")
    if size > 256:  # one by one is faster than sorting
        drawn = [torch.randperm(size, generator=generator, device=source) for _ in range(count)]
        return torch.stack(drawn).to(device)
    return torch.rand(count, size, generator=generator, device=source).argsort(1).to(device)


def _best_of(
    problem: _Problem,
    initial: Tensor | None,
    candidates: int,
    generator: Generator | None,
) -> Tensor:
    rows = problem.table
    size = len(rows) // problem.groups
    best = rows.new_empty(0, len(rows), dtype=torch.int64) if initial is None else initial[None]
    for done in range(0, candidates, 1000):  # bounds memory
        count = min(1000, candidates - done)
        drawn = _shuffles(count * problem.groups, size, generator, rows.device).view(
            count, -1, size
        )
        drawn += _first_rows(rows, problem.groups)
        permutations = torch.cat([best, drawn.view(count, -1)])
        first_best = _scores(problem, permutations).argmax()
        best = permutations[first_best][None]
    return best[0]


def _scores(problem: _Problem, permutations: Tensor) -> Tensor:
    """Criterion of ``[count, out]`` permutations, ``[count]``: int64, or float64 for "l1"."""
    table, pattern, criterion, _ = problem
    if table.numel() == 0:
        return permutations.new_zeros(len(permutations))
    if criterion != "l1":
        words = _pack(table)
        parts = permutations.split(max(1, _CACHE // words.numel()))
        counts = torch.cat([_bit_scores(words, part, pattern, criterion) for part in parts])
        if criterion == "retained":
            return counts
        blocks = table.numel() // pattern.m
        return blocks - counts
    if table.dtype != torch.float64:
        table = table.float()
    scores = torch.zeros(len(permutations), dtype=torch.float64, device=table.device)
    for columns in table.split(max(1, _CACHE // len(table)), dim=1):
        columns = columns.contiguous()
        step = max(1, _CACHE // columns.numel())
        for part, score in zip(permutations.split(step), scores.split(step), strict=True):
            slots = _slots(columns, part, pattern.m)
            kept = _top(slots, pattern.n, torch.maximum, torch.minimum)
            of_blocks = reduce(torch.add, kept).view(len(part), -1)
            score += of_blocks.sum(1, dtype=torch.float64)
    return scores


def _slots(table: Tensor, permutations: Tensor, m: int) -> tuple[Tensor, ...]:
    """M tensors ``[count * blocks, columns]``: the first rows of all blocks, the second rows, ..."""
    rows = permutations.reshape(-1, m).t().reshape(-1)
    return table.index_select(0, rows).view(m, -1, table.shape[1]).unbind()


def _top(
    rows: Sequence[Tensor],
    n: int,
    high: Callable[..., Tensor],
    low: Callable[..., Tensor],
) -> list[Tensor]:
    """The n largest of the rows, elementwise, in order, by insertion: maximum and minimum, or OR and AND for bits."""
    top: list[Tensor] = []
    for row in rows:
        for k, held in enumerate(top):
            top[k] = high(held, row)
            if k < n - 1:
                row = low(held, row)
        if len(top) < n:
            top.append(row)
    return top


def _pack(bits: Tensor) -> Tensor:
    """Boolean ``[out, K]`` as ``[out, ceil(K / 64)]`` words of 64 bits; which bit is where is of no concern."""
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 64))
    octets = padded.view(torch.uint8).view(len(bits), -1, 8)
    packed = octets[..., 0].clone()
    for k in range(1, 8):
        packed |= octets[..., k] << k
    return packed.view(torch.int64)


def _bit_scores(
    words: Tensor,
    permutations: Tensor,
    pattern: NMPattern,
    criterion: Criterion,
) -> Tensor:
    """Retained entries, or blocks not eligible, of each permutation: a block's k-th largest bit says nnz >= k."""
    slots = _slots(words, permutations, pattern.m)
    if criterion == "eligible":  # a block with N + 1 nonzeros or more is not
        planes = _top(slots, pattern.n + 1, torch.bitwise_or, torch.bitwise_and)[-1:]
    else:
        planes = _top(slots, pattern.n, torch.bitwise_or, torch.bitwise_and)
    count = len(permutations)
    length = planes[0].numel() // count
    scores = permutations.new_zeros(count)
    for i in range(
        0, len(planes), 3
    ):  # no field overflows: 3 planes of 4 ones fill a nibble with 12, 8 bytes make 192
        nibbles = reduce(torch.add, map(_nibble_counts, planes[i : i + 3]))
        octets = _add_neighbours(nibbles, 4, 0x0F0F0F0F0F0F0F0F)
        octets = octets.view(count, math.gcd(length, 8), -1).sum(1)
        total = _add_neighbours(octets, 8, 0x00FF00FF00FF00FF)
        scores += (
            total.mul_(0x0001000100010001).bitwise_right_shift_(48).sum(1)
        )  # top 16 bits: the four fields' sum
    return scores


def _add_neighbours(fields: Tensor, width: int, lower: int) -> Tensor:
    """Sums of neighbouring fields of so many bits; ``lower`` has the bits of every second field."""
    upper = (fields >> width).bitwise_and_(lower)
    return (fields & lower).add_(upper)


def _nibble_counts(words: Tensor) -> Tensor:
    """Ones in every 4 bits of 64-bit words, in place: neighbouring bits are added up, then neighbouring pairs."""
    shifted = (words >> 1).bitwise_and_(0x5555555555555555)
    words -= shifted
    torch.bitwise_right_shift(words, 2, out=shifted)
    return words.bitwise_and_(0x3333333333333333).add_(shifted.bitwise_and_(0x3333333333333333))


def _swap(problem: _Problem, start: Tensor, rounds: int, generator: Generator | None) -> Tensor:
    """Rounds that take the row in one slot out of every block and put these rows back where they cost less."""
    table = problem.table
    n = problem.pattern.n
    m = problem.pattern.m
    device = start.device
    if problem.criterion == "l1":
        # the N largest |v| add up to the integral over u of min(#(|v| > u), N): "retained", at a few thresholds u
        table, worth = _thresholded(table)
    ones = table.view(torch.uint8) if m < 256 else table.int()
    columns = ones.shape[1]
    rows = start.view(-1, m).clone()  # [blocks, M]
    count = ones.index_select(0, rows[:, 0])  # nonzeros of every block and column
    for slot in range(1, m):
        count += ones.index_select(0, rows[:, slot])

    per_group = len(rows) // problem.groups
    tiles = math.ceil(per_group / _TILE)
    tile = per_group // tiles
    used = tile * tiles  # of every group; the blocks after them sit the round out
    stay = torch.arange(tile, device=device)
    # tiles are contiguous: over all groups, or within one group if blocks are left over
    if used == per_group:
        runs = [(0, len(rows))]
    else:
        runs = [(begin, begin + used) for begin in range(0, len(rows), per_group)]
    at_once = tile * max(1, 8 * _CACHE // (tile * columns))  # bounds memory
    spans = []
    for begin, end in runs:
        for first in range(begin, end, at_once):
            spans.append((first, min(first + at_once, end)))
    idle = 0
    for step in range(rounds):
        slot = step % m
        if step and slot == 0:  # let other rows meet
            rows = rows.gather(1, _shuffles(len(rows), m, generator, device))
        if tiles > 1:  # let other blocks meet
            shuffled = _shuffles(problem.groups, per_group, generator, device) + _first_rows(
                rows, problem.groups
            )
            blocks = shuffled.view(-1)
            rows = rows[blocks]
            count = count.index_select(0, blocks)
        gained = False
        for first, last in spans:
            moving = rows[first:last, slot]
            taken = ones.index_select(0, moving)
            rest = count[first:last].sub_(taken)  # in place: the count of the others
            # where one nonzero more is lost, or makes the block ineligible
            full = (
                rest == n if problem.criterion == "eligible" else rest.clamp(n - 1, n).sub_(n - 1)
            )
            price = full * worth if problem.criterion == "l1" else full.float()
            # of 0 and 1 with sums below 2**24: exact, whatever the matmul precision; with "l1" nearly so
            price_tbc = price.view(-1, tile, columns)  # tiles, blocks, columns
            taken_trc = taken.float().view(-1, tile, columns)  # tiles, rows, columns
            cost = price_tbc @ taken_trc.transpose(1, 2)
            order = _assign(cost)
            before = cost.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64)
            after = cost.gather(2, order[..., None]).sum((1, 2), dtype=torch.float64)
            better = after < before
            if not better.all():
                order = torch.where(better[:, None], order, _exchange(cost))
            if not torch.equal(order, stay.expand_as(order)):
                gained = True
            moving = moving.reshape(-1, tile).gather(1, order).view(-1)
            rows[first:last, slot] = moving
            rest += ones.index_select(0, moving)
        idle = 0 if gained else idle + 1
        if idle == 4 * m * m:  # most likely all M * M pairs of rows of any two blocks have met
            break
    return rows.view(-1)


def _thresholded(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Boolean ``[out, levels * K]`` and its columns' worth: |v| is about the sum of the worth of its true entries."""
    magnitudes = magnitudes.float()  # comparing in half would round the thresholds
    sample = magnitudes.flatten()[:: magnitudes.numel() // 2**16 + 1]
    sample = sample[sample > 0]
    probabilities = torch.arange(2 * _LEVELS, device=sample.device) / (2 * _LEVELS)
    marks = sample.quantile(probabilities) if len(sample) else torch.zeros_like(probabilities)
    marks[0] = 0  # threshold, value, threshold, value, ...
    worth = marks[1::2].diff(prepend=marks[:1]).repeat_interleave(magnitudes.shape[1])
    return torch.cat([magnitudes > threshold for threshold in marks[::2]], dim=1), worth


def _assign(cost: Tensor) -> Tensor:
    """Assignments of low, almost lowest cost: for ``[tiles, size, size]`` the column of every row, ``[tiles, size]``.

    Two Sinkhorn steps price rows and columns so that few rows want the same column. Pairs that are best in their row
    and in their column are matched, three times over, and what is left in order.
    """
    count, size = cost.shape[:2]
    cost = cost - cost.mean(2, keepdim=True)
    cost -= cost.mean(1, keepdim=True)
    scale = torch.linalg.vector_norm(cost) / cost.numel() ** 0.5
    plan = cost.mul_(-4 / scale.clamp(min=1e-30)).clamp_(-30, 30).exp_()
    columns = plan.new_ones(count, size, 1)
    for _ in range(2):
        lines = (plan @ columns).reciprocal_()
        columns = (plan.transpose(1, 2) @ lines).reciprocal_()
    plan *= lines
    plan *= columns.transpose(1, 2)

    index = torch.arange(size, device=cost.device).expand(count, size)
    none = torch.full_like(index, size)
    column, row = none, none  # of every row, of every column; size while it has none
    for _ in range(3):
        best, choice = plan.max(2)
        best_of_column = plan.amax(1).gather(1, choice)
        mutual = (best >= best_of_column) & (best > 0)
        suitor = torch.where(mutual, index, none)
        winner = none.scatter_reduce(1, choice, suitor, "amin")  # one of equals
        column = torch.where(winner.gather(1, choice) == index, choice, column)
        row = torch.minimum(row, winner)
        plan *= (column == size).float()[..., None]
        plan *= (row == size).float()[:, None]
    # sorting puts the free ones first, as many rows as columns
    free_rows = column.argsort(dim=1, descending=True, stable=True)
    free_columns = row.argsort(dim=1, descending=True, stable=True)
    in_order = torch.empty_like(index).scatter_(1, free_rows, free_columns)
    return torch.where(column == size, in_order, column)


def _exchange(cost: Tensor) -> Tensor:
    """Like :func:`_assign`, but never worse than staying: rows that gain most from each other change places."""
    index = torch.arange(cost.shape[1], device=cost.device).expand(cost.shape[:2])
    order = index
    for _ in range(4):
        moved = cost.gather(2, order[:, None].expand_as(cost))
        moved = moved - moved.diagonal(dim1=1, dim2=2)[..., None]
        gain, partner = (moved + moved.transpose(1, 2)).min(2)
        mutual = (gain < 0) & (partner.gather(1, partner) == index)
        exchanged = torch.where(mutual, partner, index)
        order = order.gather(1, exchanged)
    return order
