"""Backward masks that follow the forward mask, and the search for the row permutation that lets them keep the most.

The input gradient ``dX = dY W`` contracts the output axis, so its weight must be N:M along ``out``. Bi-Mask takes blocks of
M rows after a permutation of the rows, and keeps at most N entries of every block and column of the forward-masked weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_nm.functional.masks import nm_mask
from lightning_nm.pattern import NMPattern

Search: TypeAlias = Literal["swap", "random"]
"""How :func:`search_permutation` searches."""
Criterion: TypeAlias = Literal["retained", "eligible", "l1"]
"""What :func:`search_permutation` maximises."""

_LEVELS = 4  # thresholds that stand for the magnitudes in the directed search by "l1"
_TILE = 256  # blocks that exchange rows in one assignment; the cost of a round is linear in it
_CACHE = 2**17  # elements that one step of the scoring works on: its temporaries stay in the second-level cache


def backward_mask(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: NMPattern,
    permutation: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    r"""Mask of the weight for the input-gradient GEMM: a subset of the forward mask, N:M along the permuted output axis.

    .. math:: B = F \wedge P^{-1} \, \mathrm{top}_{N:M}(|P (F \odot W)|)

    where :math:`P` permutes the rows and ``top`` keeps the N largest of every M consecutive rows per column, ties to the
    lower row position.

    Args:
        weight: ``[out, ...]``, floating point; every column of ``weight.flatten(1)`` is treated alone.
        forward_mask: Boolean, the shape of ``weight``. None keeps every entry.
        pattern: The N:M pattern.
        permutation: ``[out]`` int64, the original row at every position. None is the identity.
        groups: Equal runs of output rows that blocks and permutation must not cross (grouped convolutions).

    Returns:
        Boolean, the shape of ``weight``.

    Raises:
        ValueError: If ``out / groups`` is not a multiple of M, or the permutation is none or crosses groups.

    Example::

        >>> weight = torch.tensor([[4.0], [3.0], [2.0], [1.0]])
        >>> backward_mask(weight, None, NMPattern(1, 2)).flatten().tolist()
        [True, False, True, False]
        >>> backward_mask(weight, None, NMPattern(1, 2), torch.tensor([0, 3, 1, 2])).flatten().tolist()
        [True, True, False, False]

    Source: Zhang et al., Bi-directional Masks for Efficient N:M Sparse Training, ICML 2023, arXiv:2302.06058.
    """
    values = _table(weight, forward_mask, pattern, "l1", groups)
    if permutation is None:
        mask = nm_mask(values, pattern, dim=0)
    else:
        permutation = _checked(permutation, weight, groups)
        mask = torch.empty_like(values, dtype=torch.bool)
        mask[permutation] = nm_mask(values[permutation], pattern, dim=0)
    mask = mask.view(weight.shape)
    return mask if forward_mask is None else mask & forward_mask


@torch.no_grad()
def permutation_score(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: NMPattern,
    permutation: Tensor | None,
    *,
    criterion: Criterion = "retained",
    groups: int = 1,
) -> float:
    r"""What the backward mask keeps of the forward-masked weight ``V`` under a permutation of the rows.

    A block is M consecutive permuted rows of one column. Summed over blocks: ``"retained"`` is
    :math:`\min(\mathrm{nnz}, N)`, ``"eligible"`` is :math:`[\mathrm{nnz} \le N]`, ``"l1"`` is the sum of the N largest
    :math:`|V|`.

    Args:
        weight: ``[out, ...]``, floating point.
        forward_mask: Boolean, the shape of ``weight``. None keeps every entry.
        pattern: The N:M pattern.
        permutation: ``[out]`` int64, the original row at every position. None is the identity.
        criterion: What is summed.
        groups: Equal runs of output rows that the permutation must not cross.

    Raises:
        ValueError: If the criterion is unknown, ``out / groups`` is not a multiple of M, or the permutation is none.

    Example::

        >>> weight = torch.tensor([[4.0], [3.0], [0.0], [1.0]])
        >>> permutation_score(weight, None, NMPattern(1, 2), None)
        2.0
        >>> permutation_score(weight, None, NMPattern(1, 2), None, criterion="l1")
        5.0

    Source: Zhang et al., Bi-directional Masks for Efficient N:M Sparse Training, ICML 2023, arXiv:2302.06058.
    """
    _choice("criterion", criterion, get_args(Criterion))
    table = _table(weight, forward_mask, pattern, criterion, groups)
    return float(_scores(table, _checked(permutation, weight, groups)[None], pattern, criterion)[0])


@torch.no_grad()
def search_permutation(
    weight: Tensor,
    forward_mask: Tensor | None,
    pattern: NMPattern,
    *,
    search: Search = "swap",
    candidates: int = 100,
    criterion: Criterion = "retained",
    initial: Tensor | None = None,
    groups: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Permutation of the output rows under which the backward mask keeps most; never worse than the initial one.

    .. math:: p^* = \arg\max_p \sum_{\text{blocks}} \min(\mathrm{nnz}(V_p), N), \qquad V = F \odot W

    for ``criterion="retained"``; :func:`permutation_score` gives the others. ``"random"`` is the paper's: the best of
    random permutations (and of the initial one). ``"swap"`` exchanges rows between blocks. It takes one row out of every
    block. What a row costs in a block is then linear in the row: the number of its nonzeros in columns where the rest of
    the block holds N already. One GEMM gives the cost of every row in every block, and an assignment of rows to blocks
    that costs less than the present one is taken. For ``"l1"`` the same is done on thresholded magnitudes.

    Args:
        weight: ``[out, ...]``, floating point; conv weights are flattened to ``[out, K]``.
        forward_mask: Boolean, the shape of ``weight``. None keeps every entry.
        pattern: The N:M pattern.
        search: ``"swap"`` or ``"random"``.
        candidates: Effort: the number of random permutations, or as many swap rounds as cost about the same time.
            ``"swap"`` stops earlier when rounds stop to help.
        criterion: ``"retained"`` (the authors' code), ``"eligible"`` (the paper's wording) or ``"l1"`` (magnitude).
        initial: ``[out]`` int64, where the search starts, such as the permutation now in use. None is the identity.
        groups: Equal runs of output rows that the permutation does not cross.
        generator: Source of randomness. None is torch's global CPU generator.

    Returns:
        ``[out]`` int64 on the device of ``weight``: the original row at every position.

    Raises:
        ValueError: If an option is unknown, ``candidates < 1``, ``out / groups`` is not a multiple of M, or ``initial``
            is not a permutation or crosses groups.

    Example::

        >>> weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 4.0]])
        >>> permutation = search_permutation(weight, None, NMPattern(1, 2))
        >>> permutation_score(weight, None, NMPattern(1, 2), permutation)  # 2.0 before
        4.0

    Source: ``"random"`` is Zhang et al., Bi-directional Masks for Efficient N:M Sparse Training, ICML 2023,
    arXiv:2302.06058. ``"swap"`` is this package's.
    """
    _choice("search", search, get_args(Search))
    _choice("criterion", criterion, get_args(Criterion))
    if candidates < 1:
        raise ValueError(f"candidates={candidates}: the search needs at least one, for example candidates=100")
    table = _table(weight, forward_mask, pattern, criterion, groups)
    start = _checked(initial, weight, groups)
    if table.numel() == 0 or len(start) == groups * pattern.m:  # one block a group: every permutation scores the same
        return start
    if search == "random":
        return _random_search(table, pattern, start, candidates, criterion, groups, generator)
    rounds = max(1, candidates * (pattern.m + 4) // 260)  # measured: about the time of the random candidates, or less
    with torch.autocast(table.device.type, enabled=False):
        found = _swap_search(table, pattern, start, rounds, criterion, groups, generator)
    if criterion == "l1":  # searched on thresholds that only approximate the magnitudes
        before, after = _scores(table, torch.stack([start, found]), pattern, criterion).tolist()
        return found if after > before else start
    return found


# Checks ---------------------------------------------------------------------------------------------------------------


def _choice(name: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, options))}")


def _table(
    weight: Tensor, forward_mask: Tensor | None, pattern: NMPattern, criterion: Criterion, groups: int
) -> Tensor:
    """What the criterion looks at, ``[out, K]``: ``|V|`` for "l1", else ``V != 0``; after checking that blocks fit."""
    if weight.ndim < 2:
        raise ValueError(f"weight of shape {tuple(weight.shape)} has no input axis: pass [out, in] or [out, in, ...]")
    out = weight.shape[0]
    if groups < 1 or out % groups:
        raise ValueError(
            f"groups={groups} does not divide the {out} output rows into equal runs: pass the layer's groups"
        )
    if out // groups % pattern.m:
        raise ValueError(
            f"{out} output rows in {groups} group(s) leave {out // groups} rows a group, not a multiple of M={pattern.m}: "
            f"leave the input gradient of this layer dense or choose a pattern whose M divides {out // groups}"
        )
    if forward_mask is not None:
        if forward_mask.shape != weight.shape or forward_mask.dtype != torch.bool:
            raise ValueError(
                f"forward_mask is {forward_mask.dtype} {tuple(forward_mask.shape)}: pass a boolean mask of the weight's "
                f"shape {tuple(weight.shape)}, such as nm_mask(weight.abs(), pattern)"
            )
    if criterion == "l1":
        table = weight.detach().abs() if forward_mask is None else torch.where(forward_mask, weight.detach().abs(), 0)
    else:
        table = weight.bool() if forward_mask is None else weight.bool() & forward_mask
    return table.flatten(1).contiguous()


def _checked(permutation: Tensor | None, weight: Tensor, groups: int) -> Tensor:
    """The permutation (identity for None) as a fresh tensor on the weight's device, after checking it."""
    out = weight.shape[0]
    rows = torch.arange(out, device=weight.device)
    if permutation is None:
        return rows
    if permutation.shape != (out,) or permutation.is_floating_point() or permutation.dtype == torch.bool:
        raise ValueError(
            f"permutation is {permutation.dtype} {tuple(permutation.shape)}: pass {out} row numbers, int64 [{out}]"
        )
    permutation = permutation.to(weight.device, torch.int64, copy=True)
    if not torch.equal(permutation.sort().values, rows):
        raise ValueError(f"permutation does not hold every row 0..{out - 1} once: pass torch.randperm({out}) or None")
    size = out // groups
    crossing = permutation.div(size, rounding_mode="floor") != rows.div(size, rounding_mode="floor")
    if crossing.any():
        position = int(crossing.nonzero()[0])
        raise ValueError(
            f"permutation moves row {int(permutation[position])} to position {position}, out of its group of {size} rows: "
            f"permute within each of the {groups} groups, or pass groups=1 for an ungrouped layer"
        )
    return permutation


# Exact scores ---------------------------------------------------------------------------------------------------------


def _scores(table: Tensor, permutations: Tensor, pattern: NMPattern, criterion: Criterion) -> Tensor:
    """Criterion of ``[count, out]`` permutations, ``[count]``: int64, or float64 for "l1"."""
    if criterion == "l1":
        return _l1_scores(table, permutations, pattern)
    words = _pack(table)
    scores = torch.cat([_bit_scores(words, part, pattern, criterion) for part in permutations.split(_at_a_time(words))])
    return table.numel() // pattern.m - scores if criterion == "eligible" else scores


def _at_a_time(table: Tensor) -> int:
    return max(1, _CACHE // max(table.numel(), 1))


def _top(rows: Sequence[Tensor], n: int, high: Callable[..., Tensor], low: Callable[..., Tensor]) -> list[Tensor]:
    """The n largest of the rows, elementwise and in order, by insertion: maximum and minimum, or OR and AND of bits."""
    top: list[Tensor] = []
    for row in rows:
        for k, held in enumerate(top):
            top[k] = high(held, row)
            if k < n - 1:
                row = low(held, row)
        if len(top) < n:
            top.append(row)
    return top


def _slots(table: Tensor, permutations: Tensor, m: int) -> tuple[Tensor, ...]:
    """M tensors ``[count * blocks, columns]``: the first rows of all blocks, the second rows, ..."""
    index = permutations.reshape(-1, m).t().reshape(-1)
    return table.index_select(0, index).view(m, -1, table.shape[1]).unbind()


def _l1_scores(table: Tensor, permutations: Tensor, pattern: NMPattern) -> Tensor:
    table = table.float() if table.dtype in (torch.float16, torch.bfloat16) else table
    scores = table.new_zeros(len(permutations), dtype=torch.float64)
    for part in table.split(max(1, _CACHE // len(table)), dim=1):
        part = part.contiguous()
        step = _at_a_time(part)
        for i in range(0, len(permutations), step):
            some = permutations[i : i + step]
            top = _top(_slots(part, some, pattern.m), pattern.n, torch.maximum, torch.minimum)
            for kept in top:
                scores[i : i + step] += kept.view(len(some), -1).sum(1, dtype=torch.float64)
    return scores


def _pack(bits: Tensor) -> Tensor:
    """Boolean ``[out, K]`` as ``[out, ceil(K / 64)]`` words of 64 bits; the order of the bits is of no concern here."""
    octets = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 64)).view(torch.uint8).view(len(bits), -1, 8)
    packed = octets[..., 0].clone()
    for k in range(1, 8):
        packed |= octets[..., k] << k
    return packed.view(torch.int64)


def _bit_scores(words: Tensor, permutations: Tensor, pattern: NMPattern, criterion: Criterion) -> Tensor:
    """Retained entries, or blocks that are not eligible, of each permutation.

    The k-th largest bit of a block and column says whether it has at least k nonzeros: "retained" counts the first N of
    these planes, "eligible" looks at plane N + 1.
    """
    n = pattern.n + (criterion == "eligible")
    planes = _top(_slots(words, permutations, pattern.m), n, torch.bitwise_or, torch.bitwise_and)
    planes = planes[-1:] if criterion == "eligible" else planes
    count, length = len(permutations), planes[0].numel() // len(permutations)
    scores = permutations.new_zeros(count)
    for i in range(
        0, len(planes), 3
    ):  # fields must not overflow: 3 planes of 4 ones fill a nibble with 12, 8 bytes of 24 make 192
        total = sum((_nibble_counts(plane) for plane in planes[i + 1 : i + 3]), _nibble_counts(planes[i]))
        total = (total & 0x0F0F0F0F0F0F0F0F).add_((total >> 4).bitwise_and_(0x0F0F0F0F0F0F0F0F))
        total = total.view(count, math.gcd(length, 8), -1).sum(1)
        total = (total & 0x00FF00FF00FF00FF).add_((total >> 8).bitwise_and_(0x00FF00FF00FF00FF))
        scores += total.mul_(0x0001000100010001).bitwise_right_shift_(48).sum(1)  # top 16 bits: all four fields added
    return scores


def _nibble_counts(words: Tensor) -> Tensor:
    """Ones in every 4 bits of 64-bit words, in place: neighbouring bits are added up, then neighbouring pairs."""
    shifted = (words >> 1).bitwise_and_(0x5555555555555555)
    words -= shifted
    torch.bitwise_right_shift(words, 2, out=shifted)
    return words.bitwise_and_(0x3333333333333333).add_(shifted.bitwise_and_(0x3333333333333333))


# Searches -------------------------------------------------------------------------------------------------------------


def _shuffles(count: int, size: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """``[count, size]`` random permutations. Drawn where the generator lives, by default the CPU: alike on all devices."""
    source = generator.device if generator is not None else torch.device("cpu")
    if size > 256:  # one by one is faster than sorting
        rows = [torch.randperm(size, generator=generator, device=source) for _ in range(count)]
        return torch.stack(rows).to(device)
    return torch.rand(count, size, generator=generator, device=source).argsort(1).to(device)


def _random_search(
    table: Tensor,
    pattern: NMPattern,
    start: Tensor,
    candidates: int,
    criterion: Criterion,
    groups: int,
    generator: torch.Generator | None,
) -> Tensor:
    size = len(start) // groups
    drawn = _shuffles(candidates * groups, size, generator, table.device).view(candidates, groups, size)
    drawn += torch.arange(0, len(start), size, device=table.device)[:, None]
    permutations = torch.cat([start[None], drawn.view(candidates, -1)])
    return permutations[_scores(table, permutations, pattern, criterion).argmax()]


def _swap_search(
    table: Tensor,
    pattern: NMPattern,
    start: Tensor,
    rounds: int,
    criterion: Criterion,
    groups: int,
    generator: torch.Generator | None,
) -> Tensor:
    n, m = pattern.n, pattern.m
    if criterion == "l1":
        # sum of the N largest |v| = integral over u of min(#(|v| > u), N): "retained", summed over a few thresholds u
        table, column_weight = _thresholded(table)
    ones = table.view(torch.uint8) if m < 256 else table.int()
    columns = ones.shape[1]

    rows = start.view(-1, m).clone()  # [blocks, M]
    count = ones.index_select(0, rows[:, 0])  # nonzeros of each block and column
    for slot in range(1, m):
        count += ones.index_select(0, rows[:, slot])
    per_group = len(rows) // groups
    tiles = -(-per_group // _TILE)
    tile = per_group // tiles  # blocks that do not fill a tile sit this round out
    in_group = torch.arange(per_group, device=table.device).expand(groups, -1)
    first = torch.arange(0, len(rows), per_group, device=table.device)[:, None]
    at_once = max(1, 8 * _CACHE // (tile * columns))

    idle = 0
    for step in range(rounds):
        slot = step % m
        if step and slot == 0:  # other rows meet
            rows = rows.gather(1, _shuffles(len(rows), m, generator, table.device))
        if tiles > 1:
            in_group = _shuffles(groups, per_group, generator, table.device)
        gained = False
        for blocks in (in_group + first)[:, : tiles * tile].reshape(-1, tile).split(at_once):
            moving = rows[blocks, slot]
            taken = ones.index_select(0, moving.view(-1))
            rest = count.index_select(0, blocks.reshape(-1)).sub_(taken)
            # where one more nonzero costs: the block loses its eligibility, or the entry
            full = rest.eq(n).view(torch.uint8) if criterion == "eligible" else rest.clamp(n - 1, n).sub_(n - 1)
            price = full.float() if criterion != "l1" else full * column_weight
            # 0/1 operands and whole sums: exact in every float32 matmul precision. With the weights of "l1", nearly so
            cost = price.view(-1, tile, columns) @ taken.float().view(-1, tile, columns).transpose(1, 2)
            order = _assign(cost)
            before = cost.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64)
            after = cost.gather(2, order[..., None]).sum((1, 2), dtype=torch.float64)
            better = after < before
            if not better.all():
                order = torch.where(better[:, None], order, _exchange(cost))
            gained = gained or bool((order != torch.arange(tile, device=order.device)).any())
            moving = moving.gather(1, order)
            rows[blocks, slot] = moving
            count.index_copy_(0, blocks.reshape(-1), rest.add_(ones.index_select(0, moving.view(-1))))
        idle = 0 if gained else idle + 1
        if idle >= 4 * m * m:  # all M * M ways in which two blocks give a row each were most likely tried
            break
    return rows.view(-1)


def _thresholded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Boolean ``[out, levels * K]`` and float32 ``[levels * K]``: ``|v|`` is about the weighted sum over its columns."""
    sample = values.flatten()[:: values.numel() // 2**16 + 1].float()
    sample = sample[sample > 0]
    if len(sample) == 0:
        return values > 0, values.new_ones(values.shape[1], dtype=torch.float32)
    quantiles = sample.quantile(torch.arange(2 * _LEVELS, device=values.device) / (2 * _LEVELS))
    edges = [torch.zeros_like(quantiles[0]), *quantiles[2::2]]
    weights = quantiles[1::2].diff(prepend=edges[0][None])
    return torch.cat([values > edge for edge in edges], dim=1), weights.repeat_interleave(values.shape[1])


def _assign(cost: Tensor) -> Tensor:
    """Assignments of low cost, close to the lowest: ``[tiles, n, n]`` to the column of every row, ``[tiles, n]``.

    Two Sinkhorn steps price rows and columns so that few rows want the same column; then each pair that is best in its
    row and in its column is matched, three times over; what is left is matched in order.
    """
    count, size = cost.shape[:2]
    cost = cost - cost.mean(2, keepdim=True)
    cost -= cost.mean(1, keepdim=True)
    scale = torch.linalg.vector_norm(cost) / cost.numel() ** 0.5
    plan = cost.mul_(-4 / scale.clamp(min=1e-30)).clamp_(-30, 30).exp_()
    columns = plan.new_ones(count, size, 1)
    for _ in range(2):
        lines = torch.bmm(plan, columns).reciprocal_()
        columns = torch.bmm(plan.transpose(1, 2), lines).reciprocal_()
    plan *= lines
    plan *= columns.transpose(1, 2)

    index = torch.arange(size, device=cost.device).expand(count, size)
    none = torch.full_like(index, size)
    matched, owner = none, none  # column of every row, row of every column; size: none yet
    for _ in range(3):
        best, choice = plan.max(2)
        mutual = (best >= plan.amax(1).gather(1, choice)) & (best > 0)
        # equal values may leave a column with two suitors: the first wins
        winner = none.scatter_reduce(1, choice, torch.where(mutual, index, size), "amin")
        matched = torch.where(winner.gather(1, choice) == index, choice, matched)
        owner = torch.minimum(owner, winner)
        plan *= (matched == size).float()[..., None]
        plan *= (owner == size).float()[:, None]
    # both sorts put what is free first, and as many are free on either side
    free_rows = torch.argsort(matched, dim=1, descending=True, stable=True)
    free_columns = torch.argsort(owner, dim=1, descending=True, stable=True)
    filled = torch.empty_like(index).scatter_(1, free_rows, free_columns)
    return torch.where(matched == size, filled, matched)


def _exchange(cost: Tensor, passes: int = 4) -> Tensor:
    """Like :func:`_assign`, but never worse than staying: pairs that gain most from each other exchange columns."""
    index = torch.arange(cost.shape[1], device=cost.device).expand(cost.shape[:2])
    order = index
    for _ in range(passes):
        moved = cost.gather(2, order[:, None].expand_as(cost))
        moved = moved - moved.diagonal(dim1=1, dim2=2)[..., None]  # what row i pays for the column of row j
        gain, partner = (moved + moved.transpose(1, 2)).min(2)
        mutual = (gain < 0) & (partner.gather(1, partner) == index)
        order = order.gather(1, torch.where(mutual, partner, index))
    return order
