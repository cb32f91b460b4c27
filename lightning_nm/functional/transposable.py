"""Transposable N:M masks: every M x M tile keeps exactly N entries in every row and in every column.

One mask then serves the forward GEMM, which contracts the rows, and the input-gradient GEMM, which contracts the
columns. Which entries of a tile keep most magnitude is a transportation problem with capacities 0 and 1. Up to M = 4 a
table holds all its solutions; beyond, shortest augmenting paths solve it, for many tiles at once:

1. Magnitudes become integers. Sums are exact from here on, so that neither rounding nor the order of a reduction, and
   with it the chunk a tile is in, can change a result.
2. Every column j gets a price v_j, and every row keeps its N largest ``w_ij - v_j``. Whatever the prices, no other mask
   with the same column counts keeps more: the sum of the prices paid is the same for all of them.
3. Where a column has too many entries and another one too few, entries move along the path of columns that gains most
   or loses least. That keeps the property of step 2, and once all columns have N entries it is optimality.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import torch
from torch import Tensor

from lightning_nm.functional.masks import nm_mask
from lightning_nm.functional.pattern import NMPattern, PatternLike

# Up to this M all masks of a tile are tried: 90 for 2:4; for 2:5 it would be 2,040.
_MAX_TABLE_M = 4
_CHUNK = (
    1 << 18
)  # entries solved at a time on a CPU, per thread: the temporaries nearly fit its cache
_DEVICE_CHUNK = (
    1 << 24
)  # likewise elsewhere, to bound the temporaries: 90 / 16 float64 per entry for the table
# Passes over rows and columns that set the prices; more of them leave fewer augmenting paths.
_PRICE_ROUNDS = 8
_NEVER = -(1 << 29)  # the gain from an entry that is not there; an int32 holds the sum of four


def transposable_mask(weight: Tensor, pattern: PatternLike, groups: int = 1) -> Tensor:
    r"""Mask that is N:M along ``in`` and along ``out`` and keeps as much magnitude as such a mask can.

    ``argmax_S sum(S * |W|)`` over the binary S whose M x M tiles of ``[out, in]`` hold exactly N ones in every row and
    in every column; for a convolution, for each kernel tap alone. The optimum is exact up to the rounding of
    magnitudes to multiples of at most ``2**-26 M`` of the tile's largest one. Which of several optimal masks is
    returned depends on the tile's values alone.

    Args:
        weight: ``[out, in, *taps]``, any real dtype, any strides. A NaN counts as less than 0; as many infinities are
            kept as possible.
        pattern: What :meth:`NMPattern.parse` reads, for example ``"2:4"``.
        groups: Equal runs of output rows that no tile may cross (grouped convolutions); ``in`` is that of one group.

    Returns:
        A contiguous bool tensor of the shape of ``weight``, without autograd history.

    Raises:
        ValueError: If ``weight`` has fewer than two axes, or M does not divide ``in`` and ``out / groups``.

    Example:
        >>> weight = torch.tensor([[9, 8, 0, 0], [9, 8, 7, 0], [6, 2, 3, 4], [1, 1, 1, 1]])
        >>> transposable_mask(weight, "2:4").int().tolist()
        [[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]]

    Source: the masks are those of Hubara et al., NeurIPS 2021, arXiv:2102.08124. Scoring all 90 masks of 2:4 is Hu et
    al., ICML 2024, arXiv:2404.01847. Alternating between the rows and the columns of all tiles at once is the idea of
    TSENOR, NeurIPS 2025, arXiv:2505.23949, which has entropic scaling where this has exact steps on the dual.
    """
    pattern = NMPattern.parse(pattern)
    _check_tiles(weight, pattern, groups)
    weight = weight.detach()
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    if weight.numel() == 0:
        return mask
    rows, columns = (size // pattern.m for size in weight.shape[:2])
    tiles = weight.reshape(rows, pattern.m, columns, pattern.m, -1)
    found = mask.view(tiles.shape)
    table = None
    if pattern.m <= _MAX_TABLE_M:
        table = _masks_of_a_tile(pattern).to(weight.device)
    chunk = _CHUNK * torch.get_num_threads() if weight.device.type == "cpu" else _DEVICE_CHUNK
    # Pieces of whole rows of tiles, or of one if that is already too much.
    step_rows = max(1, chunk // tiles[0].numel())
    step_columns = columns if step_rows > 1 else max(1, chunk // tiles[0, :, 0].numel())
    for some, some_found in zip(tiles.split(step_rows), found.split(step_rows), strict=True):
        pieces = zip(
            some.split(step_columns, dim=2), some_found.split(step_columns, dim=2), strict=True
        )
        for piece, piece_found in pieces:
            # [M, M, tiles]: an operation on the same entry of all tiles runs over consecutive memory
            spread = piece.permute(1, 3, 0, 2, 4)
            values = _integers(spread.reshape(pattern.m, pattern.m, -1), pattern)
            best = _by_paths(values, pattern) if table is None else _by_table(values, table)
            piece_found.permute(1, 3, 0, 2, 4).copy_(best.view(spread.shape))
    return mask


def _check_tiles(weight: Tensor, pattern: NMPattern, groups: int) -> None:
    shape = tuple(weight.shape)
    if len(shape) < 2:
        raise ValueError(
            f"weight of shape {shape} has no tiles of {pattern}: pass [out, in] or [out, in, *taps]"
        )
    if groups < 1 or shape[0] % groups:
        raise ValueError(
            f"groups={groups} does not split {shape[0]} output rows into equal runs: pass the layer's"
        )
    for name, size in (("in", shape[1]), ("out", shape[0] // groups)):
        if size % pattern.m:
            per_group = f" in each of {groups} groups" if name == "out" and groups > 1 else ""
            raise ValueError(
                f"shape {shape} has no tiles of {pattern}: M={pattern.m} does not divide the size {size} of `{name}`"
                f"{per_group}; choose another pattern, name the layer in `exclude`, or use a mask of one axis (nm_mask)"
            )


def _integers(tiles: Tensor, pattern: NMPattern) -> Tensor:
    """Magnitudes of tiles [M, M, B] as int32 from 0 to ``2**28 / M``; -1 for NaN.

    The unit is a power of two per tile, so that numbers of few bits stay what they are. An infinity is worth more than
    all finite entries together that a mask could keep in its place.
    """
    top = 28 - pattern.m.bit_length()  # M losses add up to less than half of `_NEVER`
    magnitudes = (
        tiles.double().abs()
    )  # neither a denormal float32 nor the integer -2**31 is in trouble
    nan = magnitudes.isnan()
    infinite = magnitudes.isinf()
    magnitudes.masked_fill_(nan | infinite, 0)
    exponents = magnitudes.amax((0, 1)).frexp().exponent
    room = (pattern.n * pattern.m).bit_length()
    bits = torch.where(infinite.any((0, 1)), top - room, top)
    shift = bits - exponents.long()
    first = shift.clamp(max=1000)
    for part in (first, shift - first):  # one factor could overflow for float64
        exponent_bits = (part + 1023) << 52
        magnitudes *= exponent_bits.view(
            torch.float64
        )  # 2 ** part, without the rounding that a power may have
    values = magnitudes.round_().int()
    values.masked_fill_(infinite, 1 << top)
    return values.masked_fill_(nan, -1)


def _masks_of_a_tile(pattern: NMPattern) -> Tensor:
    """Boolean [masks, M, M]: all with N ones in every row and column, in lexicographic order of the rows' choices."""
    m = pattern.m
    rows = [
        [column in chosen for column in range(m)] for chosen in combinations(range(m), pattern.n)
    ]
    masks = []
    for mask in product(rows, repeat=m):
        column_counts = map(sum, zip(*mask, strict=True))
        if all(count == pattern.n for count in column_counts):
            masks.append(mask)
    return torch.tensor(masks)


def _by_table(values: Tensor, table: Tensor) -> Tensor:
    """The best mask for every tile of values [M, M, B], by trying all; the first of equals."""
    scores = (
        table.view(len(table), -1).double() @ values.flatten(0, 1).double()
    )  # exact: sums of integers
    return table[scores.max(0).indices].permute(1, 2, 0)


def _by_paths(values: Tensor, pattern: NMPattern) -> Tensor:
    """The best mask for every tile of values [M, M, B]."""
    mask = _rows_alone(values - _prices(values, pattern), pattern)
    unsettled = _unbalanced(mask, pattern)
    values = values.index_select(2, unsettled)
    some = mask.index_select(2, unsettled)
    for _ in range(
        pattern.n * pattern.m
    ):  # enough: every round takes one surplus entry from every tile left
        if len(unsettled) == 0:
            break
        _augment(values, some, pattern)
        mask.index_copy_(2, unsettled, some)
        left = _unbalanced(some, pattern)
        unsettled = unsettled.index_select(0, left)
        values = values.index_select(2, left)
        some = some.index_select(2, left)
    return mask


def _unbalanced(mask: Tensor, pattern: NMPattern) -> Tensor:
    """The numbers of the tiles of ``mask [M, M, B]`` with a column that does not have N entries."""
    wrong = mask.sum(0) != pattern.n
    return wrong.any(0).nonzero().squeeze(1)


def _rows_alone(values: Tensor, pattern: NMPattern) -> Tensor:
    """The N largest of every row of values [M, M, B]; among equals row i takes the first from column i on, round about.

    Thus rows that are equal differ in what they keep, and a tile of one number is settled at once.
    """
    m = pattern.m
    index = torch.arange(m, device=values.device)
    row = index.unsqueeze(1)
    turned = row * m + (row + index) % m  # row i of a tile begins at its entry i
    back = turned.flatten().argsort()
    flat = values.flatten(0, 1)
    mask = nm_mask(flat[turned], pattern, dim=1)
    return mask.flatten(0, 1)[back].view(values.shape)


def _prices(values: Tensor, pattern: NMPattern) -> Tensor:
    """Prices [M, B] of the columns at which about N rows have each of them among their N best.

    Coordinate descent on the dual of the linear program,
    ``min over u, v of sum_i N u_i + sum_j N v_j + sum_ij max(w_ij - u_i - v_j, 0)``: it is lowest in u_i anywhere from
    the N-th to the next largest of ``w_ij - v_j`` over j, and the middle leads furthest.
    """
    prices = torch.zeros_like(values[0])
    for _ in range(_PRICE_ROUNDS):
        row_prices = _margin((values - prices).unbind(1), pattern.n)
        prices = _margin((values - row_prices.unsqueeze(1)).unbind(0), pattern.n)
    return prices


def _margin(entries: Sequence[Tensor], n: int) -> Tensor:
    """The middle between the n-th and the next largest of the entries, elementwise, by insertion."""
    top: list[Tensor] = []
    for entry in entries:
        for k, held in enumerate(top):
            top[k] = torch.maximum(held, entry)
            if k < n:
                entry = torch.minimum(held, entry)
        if len(top) <= n:
            top.append(entry)
    return (top[n - 1] + top[n]) >> 1


def _augment(values: Tensor, mask: Tensor, pattern: NMPattern) -> None:
    """Move one entry from a column with too many to one with too few, at the least loss, in place.

    Every tile of ``mask`` [M, M, B] has N entries in every row, but not in every column.

    A step from column j to column k exchanges entries in a row i that has one in j and none in k: it gains
    ``w_ik - w_ij``. Bellman and Ford find the path of most gain. There is no cycle that gains, so that a path visits no
    column twice and its parents, which change only for a strict gain, lead back to its start.
    """
    m = pattern.m
    give = torch.where(mask, -values, _NEVER)
    take = torch.where(mask, _NEVER, values)
    gain = give[0].unsqueeze(1) + take[0]
    step = torch.empty_like(gain)
    for i in range(1, m):
        torch.add(give[i].unsqueeze(1), take[i], out=step)
        torch.maximum(gain, step, out=gain)

    counts = mask.sum(0, dtype=torch.int32)
    total = torch.full_like(counts, 2 * _NEVER).masked_fill_(counts > pattern.n, 0)
    parent = torch.arange(m, device=values.device).unsqueeze(1).repeat(1, counts.shape[1])
    for _ in range(m - 1):
        before = total.clone()
        for via in range(m):
            reached = total[via] + gain[via]
            parent.masked_fill_(reached > total, via)
            torch.maximum(total, reached, out=total)
        if torch.equal(before, total):
            break

    # Paths end where a column has too few, and are followed back to where they start.
    ends = total.masked_fill(counts >= pattern.n, 4 * _NEVER)
    column = ends.max(0).indices.unsqueeze(0)
    cells = mask.view(m * m, -1)
    for _ in range(m - 1):
        source = parent.gather(0, column)
        moves = source != column
        gains = _pick(give, source) + _pick(take, column)
        row = gains.max(0).indices
        for end in (source, column):
            cell = row * m + end
            flipped = (
                cells.gather(0, cell) ^ moves
            )  # where the path has ended already, nothing moves
            cells.scatter_(0, cell, flipped)
        column = source


def _pick(entries: Tensor, column: Tensor) -> Tensor:
    """Of entries [M, M, B], one column per tile: [M, 1, B]."""
    return entries.gather(1, column.expand(len(entries), 1, -1))
