"""Backward masks that follow the forward mask, and the search for the row permutation that lets them keep the most.

The input gradient ``dX = dY W`` contracts the output axis, so its weight must be N:M along ``out``. Bi-Mask permutes
the rows, takes blocks of M rows, and keeps at most N entries per block and column of the forward-masked weight.

A permutation holds the original row at every position: position ``b M + s`` is slot s of block b. In shapes, K is the
number of columns, T that of tiles (runs of blocks that exchange rows with each other) and B that of a tile's blocks.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor

from lightning_nm.functional.mask_storage import pack_mask
from lightning_nm.functional.masks import check_output_blocks, checked_permutation, indices, largest
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.spelling import check_option

Search: TypeAlias = Literal["swap", "random", "redraw"]
"""How :func:`search_permutation` searches."""
Criterion: TypeAlias = Literal["retained", "eligible", "l1"]
"""What :func:`search_permutation` maximises."""

# Thresholds that stand for the magnitudes while "swap" searches by "l1".
_LEVELS = 4

# Blocks that exchange rows in one assignment: the cost of a round is linear in it, the gain grows slowly.
_TILE = 256

# Elements that one step of the scoring works on, so that its temporaries stay in the cache.
_CACHE = 2**17

# Random permutations that are scored at a time, which bounds memory.
_DRAWN_AT_ONCE = 1000

# Up to this size, one sort draws many permutations faster than one call for each.
_MAX_SORTED_SIZE = 256


def permutation_score(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: PatternLike,
    permutation: Tensor | None,
    *,
    criterion: Criterion = "retained",
    groups: int = 1,
) -> float:
    r"""Compute what the backward mask keeps of the forward-masked weight V under a permutation of the rows.

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
    scores = _scores(problem, permutation.unsqueeze(0))
    return float(scores[0])


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
    r"""Search for the permutation of the output rows under which the backward mask keeps most.

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
    check_option("search", search, Search)
    if candidates < 1:
        raise ValueError(
            f"candidates={candidates}: the search needs at least one, for example candidates=100"
        )
    problem = _problem(weight, forward_mask, pattern, criterion, groups)
    start = checked_permutation(initial, weight, groups)
    one_block_a_group = len(start) == groups * problem.pattern.m  # all permutations score the same
    if problem.table.numel() == 0 or one_block_a_group:
        return start
    if search != "swap":
        # A redraw leaves the initial permutation out.
        competing = start.unsqueeze(0) if search == "random" else start.new_empty(0, len(start))
        return _best_of(problem, competing, candidates, generator)
    # As many rounds as take the time of the candidates, as measured.
    rounds = max(1, candidates * (problem.pattern.m + 4) // 260)
    # The costs need the precision of float32.
    with torch.autocast(start.device.type, enabled=False):
        found = _swap(problem, start, rounds, generator)
    if criterion == "l1":
        # The search worked on thresholds that only approximate the magnitudes: it may have become worse.
        before, after = _scores(problem, torch.stack([start, found])).tolist()
        if after <= before:
            return start
    return found


class _Problem(NamedTuple):
    """What is searched: the entries that count, and how."""

    table: Tensor  # contiguous [out, K]: |V| for "l1", else whether V is nonzero
    pattern: NMPattern
    criterion: Criterion
    groups: int


def _problem(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: PatternLike,
    criterion: Criterion,
    groups: int,
) -> _Problem:
    """Check the arguments, and make the table of what is summed."""
    pattern = NMPattern.parse(pattern)
    check_option("criterion", criterion, Criterion)
    check_output_blocks(weight, pattern, groups, forward_mask)
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


def _shuffles(count: int, size: int, generator: Generator | None, device: torch.device) -> Tensor:
    """Draw ``[count, size]`` random permutations, on the generator's device (CPU if None): alike on every device."""
    source = generator.device if generator is not None else torch.device("cpu")
    if size > _MAX_SORTED_SIZE:
        drawn = [torch.randperm(size, generator=generator, device=source) for _ in range(count)]
        return torch.stack(drawn).to(device)
    keys = torch.rand(count, size, generator=generator, dtype=torch.float32, device=source)
    return keys.argsort(1).to(device)


def _best_of(
    problem: _Problem,
    best: Tensor,
    candidates: int,
    generator: Generator | None,
) -> Tensor:
    """Return the best of some permutations, ``[count, out]``, and of so many random ones."""
    table = problem.table
    groups = problem.groups
    out = len(table)
    size = out // groups
    for done in range(0, candidates, _DRAWN_AT_ONCE):
        count = min(_DRAWN_AT_ONCE, candidates - done)
        drawn = _shuffles(count * groups, size, generator, table.device).view(count, groups, size)
        # Places within a group become rows of the layer.
        drawn += size * indices(groups, table).unsqueeze(1)
        # The best so far comes first: of equals, argmax returns the first.
        permutations = torch.cat([best, drawn.view(count, out)])
        first_best = _scores(problem, permutations).argmax()
        best = permutations[first_best].unsqueeze(0)
    return best[0]


def _scores(problem: _Problem, permutations: Tensor) -> Tensor:
    """Return the criterion of ``[count, out]`` permutations, ``[count]``: int64, or float64 for "l1"."""
    table, pattern, criterion, _ = problem
    if table.numel() == 0:
        return permutations.new_zeros(len(permutations))
    if criterion == "l1":
        return _magnitude_scores(table, permutations, pattern)
    # Words of 64 bits, [out, ceil(K / 64)].
    padding = -table.shape[1] % 64
    padded = torch.nn.functional.pad(table, (0, padding))
    words = pack_mask(padded).view(torch.int64).view(len(table), -1)
    step = max(1, _CACHE // words.numel())
    parts = permutations.split(step)
    counts = torch.cat([_bit_scores(words, part, pattern, criterion) for part in parts])
    if criterion == "retained":
        return counts
    # The counts are those of the blocks that are not eligible.
    blocks = table.numel() // pattern.m
    return blocks - counts


def _magnitude_scores(table: Tensor, permutations: Tensor, pattern: NMPattern) -> Tensor:
    """Return the "l1" criterion of ``[count, out]`` permutations, float64 ``[count]``."""
    if table.dtype != torch.float64:
        table = table.float()
    scores = torch.zeros(len(permutations), dtype=torch.float64, device=table.device)
    # Some columns at a time, and some permutations of them, such that the temporaries stay in the cache.
    width = max(1, _CACHE // len(table))
    for columns in table.split(width, dim=1):
        columns = columns.contiguous()
        step = max(1, _CACHE // columns.numel())
        for part, score in zip(permutations.split(step), scores.split(step), strict=True):
            slots = _slots(columns, part, pattern.m)
            kept = largest(slots, pattern.n)
            of_blocks = reduce(torch.add, kept)  # [count * blocks, columns]
            of_blocks = of_blocks.view(len(part), -1)
            score += of_blocks.sum(1, dtype=torch.float64)  # a view of scores
    return scores


def _slots(table: Tensor, permutations: Tensor, m: int) -> tuple[Tensor, ...]:
    """Return M tensors ``[count * blocks, columns]``: the first rows of all blocks, the second rows, ..."""
    # Slots outermost: each slot's rows are then consecutive in memory.
    rows = permutations.reshape(-1, m).t().reshape(-1)
    gathered = table.index_select(0, rows)
    return gathered.view(m, -1, table.shape[1]).unbind()


def _bit_scores(
    words: Tensor,
    permutations: Tensor,
    pattern: NMPattern,
    criterion: Criterion,
) -> Tensor:
    """Count the retained entries, or the blocks that are not eligible, of each permutation.

    A block's k-th largest bit says whether it has k nonzeros or more: the ones of the N largest add up to
    ``min(nnz, N)``.
    """
    slots = _slots(words, permutations, pattern.m)
    counts_eligible = criterion == "eligible"
    # A block with N + 1 nonzeros or more is not eligible.
    n = pattern.n + counts_eligible
    planes = largest(slots, n, torch.bitwise_or, torch.bitwise_and)
    if counts_eligible:
        planes = planes[-1:]
    scores = permutations.new_zeros(len(permutations))
    for words in planes:
        # In place: the ones of every two bits, of every four, and of every byte.
        words -= (words >> 1).bitwise_and_(0x5555555555555555)
        upper = (words >> 2).bitwise_and_(0x3333333333333333)
        words = words.bitwise_and_(0x3333333333333333).add_(upper)
        upper = torch.bitwise_right_shift(words, 4, out=upper)
        octets = upper.add_(words).bitwise_and_(0x0F0F0F0F0F0F0F0F)
        # The product brings the sum of all eight bytes to the uppermost one.
        totals = octets.mul_(0x0101010101010101).bitwise_right_shift_(56)
        scores += totals.view(len(permutations), -1).sum(1)
    return scores


def _swap(problem: _Problem, start: Tensor, rounds: int, generator: Generator | None) -> Tensor:
    """Search in rounds that take the row in one slot out of every block and put these rows back where they cost less.

    Every tile of B blocks exchanges rows by one assignment: of the B rows taken out of them to the B free slots.
    """
    table = problem.table
    groups = problem.groups
    n, m = problem.pattern.n, problem.pattern.m
    device = start.device
    worth_k = None
    if problem.criterion == "l1":
        # The N largest |v| add up to the integral over u of min(#(|v| > u), N): "retained", at a few thresholds u.
        table, worth_k = _thresholded(table)
    # Nonzeros of a block and column are counted in the dtype of the ones: bytes hold counts up to 255.
    ones_ok = table.view(torch.uint8) if m < 256 else table.int()
    columns = ones_ok.shape[1]
    rows_bm = start.view(-1, m).clone()  # the row in every slot of every block
    counts_bk = ones_ok.index_select(0, rows_bm[:, 0])  # nonzeros of every block and column
    for slot in range(1, m):
        counts_bk += ones_ok.index_select(0, rows_bm[:, slot])

    per_group = len(rows_bm) // groups
    tiles = math.ceil(per_group / _TILE)  # of every group
    tile = per_group // tiles
    # Tiles are contiguous: over all groups, or within one group if blocks are left over, which sit the round out.
    run = per_group // tile * tile
    distance = per_group
    if run == per_group:
        run = distance = len(rows_bm)
    # The blocks, first and last, that a round handles at a time: whole tiles, within bounded memory.
    at_once = tile * max(1, 8 * _CACHE // (tile * columns))
    spans = [
        (first, min(first + at_once, begin + run))
        for begin in range(0, len(rows_bm), distance)
        for first in range(begin, begin + run, at_once)
    ]
    stay_b = indices(tile, start)
    idle = 0
    for step in range(rounds):
        slot = step % m
        if step and slot == 0:  # let other rows meet
            slots_bm = _shuffles(len(rows_bm), m, generator, device)
            rows_bm = rows_bm.gather(1, slots_bm)
        if tiles > 1:  # let other blocks meet
            shuffled = _shuffles(groups, per_group, generator, device)
            blocks = (shuffled + per_group * indices(groups, start).unsqueeze(1)).view(-1)
            rows_bm = rows_bm[blocks]
            counts_bk = counts_bk.index_select(0, blocks)
        gained = False
        for first, last in spans:
            moving = rows_bm[first:last, slot]
            taken_bk = ones_ok.index_select(0, moving)
            rest_bk = counts_bk[first:last].sub_(taken_bk)  # in place: the count of the others
            # What one nonzero more costs, given those of the other rows: an eligible block that is full is lost, and
            # a nonzero beyond the N that are kept.
            if problem.criterion == "eligible":
                full_bk = rest_bk == n
            else:
                full_bk = rest_bk.clamp(n - 1, n).sub_(n - 1)
            price_bk = full_bk.float() if worth_k is None else full_bk * worth_k
            # Of 0 and 1 with sums below 2**24: exact, whatever the matmul precision; with "l1" nearly so.
            price_tbk = price_bk.view(-1, tile, columns)
            taken_trk = taken_bk.float().view(-1, tile, columns)  # R rows as there are blocks
            cost_tbr = price_tbk @ taken_trk.transpose(1, 2)
            order_tb = _cheaper_order(cost_tbr)
            if not torch.equal(order_tb, stay_b.expand_as(order_tb)):
                gained = True
            moving_tb = moving.reshape(-1, tile)
            moved = moving_tb.gather(1, order_tb).view(-1)
            rows_bm[first:last, slot] = moved
            rest_bk += ones_ok.index_select(0, moved)  # in place: counts_bk is complete again
        idle = 0 if gained else idle + 1
        if idle == 4 * m * m:  # most likely all M * M pairs of rows of any two blocks have met
            break
    return rows_bm.view(-1)


def _cheaper_order(cost_tbr: Tensor) -> Tensor:
    """Return for every slot the row that it gets, ``[T, B]``: by assignment, or by exchanges where that fails."""
    order_tb = _assign(cost_tbr)
    # Every block keeps its row on the diagonal.
    stay_tb = cost_tbr.diagonal(dim1=1, dim2=2)
    before_t = stay_tb.sum(1, dtype=torch.float64)
    move_tb1 = cost_tbr.gather(2, order_tb.unsqueeze(2))
    after_t = move_tb1.sum((1, 2), dtype=torch.float64)
    better_t = after_t < before_t
    if not better_t.all():
        order_tb = torch.where(better_t[:, None], order_tb, _exchange(cost_tbr))
    return order_tb


def _thresholded(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Return booleans ``[out, levels * K]`` and their columns' worth.

    A magnitude is about the sum of the worth of its true entries.
    """
    magnitudes = magnitudes.float()  # comparing in half would round the thresholds
    stride = magnitudes.numel() // 2**16 + 1  # about 65,536 entries are enough
    sample = magnitudes.flatten()[::stride]
    sample = sample[sample > 0]
    # Quantiles in turn: a threshold, the value up to which its step rises, the next threshold, ...
    count = 2 * _LEVELS
    probabilities = torch.arange(count, dtype=torch.float32, device=sample.device) / count
    if len(sample):
        quantiles = sample.quantile(probabilities)
    else:
        quantiles = torch.zeros_like(probabilities)
    quantiles[0] = 0
    thresholds = quantiles[::2]
    values = quantiles[1::2]
    steps = values.diff(prepend=quantiles[:1])
    worth_k = steps.repeat_interleave(magnitudes.shape[1])
    above = [magnitudes > threshold for threshold in thresholds]
    return torch.cat(above, dim=1), worth_k


def _assign(cost: Tensor) -> Tensor:
    """Return assignments of low, almost lowest cost: for ``[T, B, B]`` the column of every row, ``[T, B]``.

    Two Sinkhorn steps price rows and columns so that few rows want the same column. Pairs that are best in their row
    and in their column are matched, three times over, and what is left in order.
    """
    count, size = cost.shape[:2]
    plan = _sinkhorn_plan(cost)
    index = indices(size, cost).expand(count, size)
    none = torch.full_like(index, size)
    column_of_row = none  # size while it has none
    row_of_column = none
    for _ in range(3):
        best, choice = plan.max(2)
        best_of_column = plan.amax(1).gather(1, choice)
        mutual = (best >= best_of_column) & (best > 0)
        # Equal rows may want one column: the first of them gets it.
        suitor = torch.where(mutual, index, none)
        winner = none.scatter_reduce(1, choice, suitor, "amin")
        won = winner.gather(1, choice) == index
        column_of_row = torch.where(won, choice, column_of_row)
        row_of_column = torch.minimum(row_of_column, winner)
        # Matched rows and columns are out of the next round.
        free_row = (column_of_row == size).float()
        free_column = (row_of_column == size).float()
        plan *= free_row[..., None]
        plan *= free_column[:, None]
    # Sorting puts the free ones first, as many rows as columns.
    free_rows = column_of_row.argsort(dim=1, descending=True, stable=True)
    free_columns = row_of_column.argsort(dim=1, descending=True, stable=True)
    in_order = torch.empty_like(index).scatter_(1, free_rows, free_columns)
    return torch.where(column_of_row == size, in_order, column_of_row)


def _sinkhorn_plan(cost: Tensor) -> Tensor:
    """Return weights ``[T, B, B]`` that fall with the cost, scaled by two Sinkhorn steps."""
    count, size = cost.shape[:2]
    cost = cost - cost.mean(2, keepdim=True)
    cost -= cost.mean(1, keepdim=True)
    # Root mean square: the plan does not depend on the unit of the cost.
    scale = torch.linalg.vector_norm(cost) / cost.numel() ** 0.5
    sharpness = -4 / scale.clamp(min=1e-30)
    # The clamp keeps the exponential within float32.
    plan = cost.mul_(sharpness).clamp_(-30, 30).exp_()
    column_scale = plan.new_ones(count, size, 1)
    for _ in range(2):
        row_scale = (plan @ column_scale).reciprocal_()
        column_scale = (plan.transpose(1, 2) @ row_scale).reciprocal_()
    plan *= row_scale
    plan *= column_scale.transpose(1, 2)
    return plan


def _exchange(cost: Tensor) -> Tensor:
    """Return assignments as :func:`_assign` does, but never worse than staying, by exchanges of two rows.

    Rows that gain most from each other change places, four times over.
    """
    count, size = cost.shape[:2]
    index = indices(size, cost).expand(count, size)
    order = index
    for _ in range(4):
        moved = cost.gather(2, order[:, None].expand_as(cost))
        # What each block costs more with the row of each other block than with its own.
        own = moved.diagonal(dim1=1, dim2=2)
        moved = moved - own.unsqueeze(2)
        gain, partner = (moved + moved.transpose(1, 2)).min(2)
        mutual = (gain < 0) & (partner.gather(1, partner) == index)
        exchanged = torch.where(mutual, partner, index)
        order = order.gather(1, exchanged)
    return order
