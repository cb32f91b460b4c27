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

Tiles are ``[M, M, B]``, rows first: an operation on one entry of all tiles then runs over consecutive memory. Names of
local tensors end in their axes: i is a row of a tile, j a column and b the tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_nm.functional.masks import (
    check_blocks,
    check_output_blocks,
    indices,
    largest,
    nm_mask,
    pieces,
)
from lightning_nm.functional.soft import block_patterns
from lightning_nm.pattern import NMPattern, PatternLike

# Up to this M all masks of a tile are tried: 90 for 2:4; for 2:5 it would be 2,040.
_MAX_TABLE_M = 4

# Entries solved at a time on a CPU, per thread: the temporaries nearly fit its cache.
_CHUNK = 1 << 18

# The same elsewhere, to bound the temporaries: 90 / 16 float64 per entry for the table.
_DEVICE_CHUNK = 1 << 24

# Passes over rows and columns that set the prices; more of them leave fewer augmenting paths.
_PRICE_ROUNDS = 8

# The gain from an entry that is not there; an int32 holds the sum of four.
_NEVER = -(1 << 29)


def transposable_mask(weight: Tensor, pattern: PatternLike, groups: int = 1) -> Tensor:
    r"""Return the mask that is N:M along ``in`` and along ``out`` and keeps as much magnitude as such a mask can.

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
    check_output_blocks(weight, pattern, groups)
    check_blocks(weight, pattern, 1)
    weight = weight.detach()
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    if weight.numel() == 0:
        return mask
    m = pattern.m
    rows = weight.shape[0] // m
    columns = weight.shape[1] // m
    tiles = weight.reshape(rows, m, columns, m, -1)  # [rows, M, columns, M, taps]
    mask_tiles = mask.view(tiles.shape)
    table = None
    if m <= _MAX_TABLE_M:
        table = _masks_of_a_tile(pattern).to(weight.device)
    entries_first = (1, 3, 0, 2, 4)  # [M, M, rows, columns, taps]
    for piece, piece_mask in pieces((_CHUNK, _DEVICE_CHUNK), tiles, mask_tiles):
        spread = piece.permute(entries_first)
        values_ijb = _integers(spread.reshape(m, m, -1), pattern)
        if table is None:
            best_ijb = _by_paths(values_ijb, pattern)
        else:
            # The scores of all masks of the table, exact sums of integers; of equals the first is taken.
            scores_tb = table.view(len(table), -1).double() @ values_ijb.flatten(0, 1).double()
            best_ijb = table[scores_tb.max(0).indices].permute(1, 2, 0)
        piece_mask.permute(entries_first).copy_(best_ijb.view(spread.shape))
    return mask


def _integers(tiles: Tensor, pattern: NMPattern) -> Tensor:
    """Return the magnitudes of tiles ``[M, M, B]`` as int32 from 0 to ``2**28 / M``; -1 for NaN.

    The unit is a power of two per tile, so that numbers of few bits stay what they are. An infinity is worth more than
    all finite entries together that a mask could keep in its place.
    """
    top = 28 - pattern.m.bit_length()  # M losses add up to less than half of `_NEVER`
    # In float64, neither a denormal float32 nor the integer -2**31 is in trouble.
    magnitudes = tiles.double().abs()
    nan = magnitudes.isnan()
    infinite = magnitudes.isinf()
    magnitudes.masked_fill_(nan | infinite, 0)
    largest_b = magnitudes.amax((0, 1))
    exponent_b = largest_b.frexp().exponent.long()  # largest < 2**exponent
    # Where there is an infinity, finite entries stay so small that N M of them are worth less.
    room = (pattern.n * pattern.m).bit_length()
    has_infinite_b = infinite.any((0, 1))
    bits_b = torch.where(has_infinite_b, top - room, top)
    shift_b = bits_b - exponent_b
    # Two factors, as one could overflow for float64.
    first_b = shift_b.clamp(max=1000)
    second_b = shift_b - first_b
    for part_b in (first_b, second_b):
        # 2 ** part from its bits (the exponent of a float64 has an offset of 1023 and lies above 52 bits of fraction):
        # without the rounding that a power may have.
        exponent_bits = (part_b + 1023) << 52
        magnitudes *= exponent_bits.view(torch.float64)
    values = magnitudes.round_().int()
    values.masked_fill_(infinite, 1 << top)
    return values.masked_fill_(nan, -1)


def _masks_of_a_tile(pattern: NMPattern) -> Tensor:
    """Return all masks with N ones in every row and column, bool ``[masks, M, M]``.

    They are in lexicographic order of the rows' choices.
    """
    rows = block_patterns(pattern)
    choices = torch.cartesian_prod(
        *[torch.arange(len(rows), dtype=torch.int64)] * pattern.m
    )  # of a pattern for each row
    masks = rows[choices]
    is_balanced = (masks.sum(1) == pattern.n).all(1)
    return masks[is_balanced]


def _by_paths(values_ijb: Tensor, pattern: NMPattern) -> Tensor:
    """Return the best mask for every tile of values ``[M, M, B]``, by prices and augmenting paths."""
    mask_ijb = _rows_alone(values_ijb - _prices(values_ijb, pattern), pattern)
    # The tiles that may have a column without exactly N entries: at first all, then fewer in every round.
    unbalanced = indices(mask_ijb.shape[2], mask_ijb)
    values_iju, mask_iju = values_ijb, mask_ijb
    # N M rounds are enough: every one takes one surplus entry from every tile left.
    for _ in range(pattern.n * pattern.m):
        wrong_ju = mask_iju.sum(0) != pattern.n
        left = wrong_ju.any(0).nonzero().squeeze(1)
        if len(left) == 0:
            break
        unbalanced = unbalanced.index_select(0, left)
        values_iju = values_iju.index_select(2, left)
        mask_iju = mask_iju.index_select(2, left)
        _augment(values_iju, mask_iju, pattern)
        mask_ijb.index_copy_(2, unbalanced, mask_iju)
    return mask_ijb


def _rows_alone(values: Tensor, pattern: NMPattern) -> Tensor:
    """Mark the N largest of every row of values ``[M, M, B]``, whatever the columns get.

    Among equals row i takes the first from column i on, round about: rows that are equal differ in what they keep, and
    a tile of one number is balanced at once.
    """
    m = pattern.m
    index = indices(m, values)
    row = index.unsqueeze(1)
    # Row i of a tile begins at its entry i, since of equals nm_mask keeps the first.
    rotated = row * m + (row + index) % m
    flat_eb = values.flatten(0, 1)
    mask_eb = torch.empty_like(flat_eb, dtype=torch.bool)
    mask_eb[rotated] = nm_mask(flat_eb[rotated], pattern, dim=1)
    return mask_eb.view(values.shape)


def _prices(values: Tensor, pattern: NMPattern) -> Tensor:
    """Return prices ``[M, B]`` of the columns at which about N rows have each of them among their N best.

    Coordinate descent on the dual of the linear program,
    ``min over u, v of sum_i N u_i + sum_j N v_j + sum_ij max(w_ij - u_i - v_j, 0)``: it is lowest in u_i anywhere from
    the N-th to the next largest of ``w_ij - v_j`` over j, and the middle leads furthest.
    """
    prices_jb = torch.zeros_like(values[0])
    for _ in range(_PRICE_ROUNDS):
        row_prices_ib = _margin((values - prices_jb).unbind(1), pattern.n)
        row_prices_i1b = row_prices_ib.unsqueeze(1)
        prices_jb = _margin((values - row_prices_i1b).unbind(0), pattern.n)
    return prices_jb


def _margin(entries: Sequence[Tensor], n: int) -> Tensor:
    """Return the middle between the n-th and the next largest of the entries, elementwise."""
    top = largest(entries, n + 1)
    return (top[n - 1] + top[n]) >> 1


def _augment(values: Tensor, mask: Tensor, pattern: NMPattern) -> None:
    """Move one entry from a column with too many to one with too few, at the least loss, in place.

    Every tile of ``mask`` [M, M, B] has N entries in every row, but not in every column.

    A step from column j to column k exchanges entries in a row i that has one in j and none in k: it gains
    ``w_ik - w_ij``. Bellman and Ford find the path of most gain. There is no cycle that gains, so that a path visits no
    column twice and its parents, which change only for a strict gain, lead back to its start.
    """
    m = pattern.m
    # [M, M, U], for the U tiles that are not balanced yet: what a row gains when it gives or takes an entry.
    give_iju = torch.where(mask, -values, _NEVER)
    take_iku = torch.where(mask, _NEVER, values)
    # What a step from column j to column k gains in the best of the rows.
    gain_jku = give_iju[0].unsqueeze(1) + take_iku[0]
    step_jku = torch.empty_like(gain_jku)  # one buffer for all rows
    for i in range(1, pattern.m):
        torch.add(give_iju[i].unsqueeze(1), take_iku[i], out=step_jku)
        torch.maximum(gain_jku, step_jku, out=gain_jku)
    counts_ju = mask.sum(0, dtype=torch.int32)
    parent_ju, end_1u = _best_paths(gain_jku, counts_ju, pattern)

    # Paths are followed back to where they start.
    column_1u = end_1u
    cells = mask.view(m * m, -1)
    for _ in range(m - 1):
        source_1u = parent_ju.gather(0, column_1u)
        # Where the path has ended already, nothing moves.
        moves_1u = source_1u != column_1u
        given_i1u = _pick(give_iju, source_1u)
        taken_i1u = _pick(take_iku, column_1u)
        gains_i1u = given_i1u + taken_i1u
        row_1u = gains_i1u.max(0).indices
        for flipped_column in (source_1u, column_1u):
            cell_1u = row_1u * m + flipped_column
            flipped = cells.gather(0, cell_1u) ^ moves_1u
            cells.scatter_(0, cell_1u, flipped)
        column_1u = source_1u


def _best_paths(
    gain_jku: Tensor,
    counts_ju: Tensor,
    pattern: NMPattern,
) -> tuple[Tensor, Tensor]:
    """Find the paths of most gain from columns with too many entries to those with too few, by Bellman and Ford.

    Args:
        gain_jku: What a step from column j to column k gains, ``[M, M, U]``.
        counts_ju: Entries of each column, ``[M, U]``.
        pattern: N is the count at which a column is full.

    Returns:
        The column before each column on the path to it, ``[M, U]``: itself where the path starts; and the column at
        which the best path of each tile ends, ``[1, U]``.
    """
    m = len(gain_jku)
    # Paths start at no cost where a column has too many.
    is_start_ju = counts_ju > pattern.n
    total_ju = torch.full_like(counts_ju, 2 * _NEVER)
    total_ju.masked_fill_(is_start_ju, 0)
    index = indices(m, gain_jku)
    parent_ju = index.unsqueeze(1).repeat(1, counts_ju.shape[1])
    for _ in range(m - 1):
        before_ju = total_ju.clone()
        for via in range(m):
            reached_ju = total_ju[via] + gain_jku[via]
            parent_ju.masked_fill_(reached_ju > total_ju, via)
            torch.maximum(total_ju, reached_ju, out=total_ju)
        if torch.equal(before_ju, total_ju):
            break
    # They end where a column has too few.
    is_no_end_ju = counts_ju >= pattern.n
    at_end_ju = total_ju.masked_fill(is_no_end_ju, 4 * _NEVER)
    end_u = at_end_ju.max(0).indices
    return parent_ju, end_u.unsqueeze(0)


def _pick(entries: Tensor, column: Tensor) -> Tensor:
    """Take one column per tile of entries ``[M, M, U]``: ``[M, 1, U]``."""
    index = column.expand(len(entries), 1, -1)
    return entries.gather(1, index)
