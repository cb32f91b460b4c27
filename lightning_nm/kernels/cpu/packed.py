"""The kept entries of a weight's blocks and their dense form on CPUs, in one pass each way.

Entries are moved as bits, whatever their dtype, so the results are those of torch's ``scatter`` and ``gather``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.kernels.cpu import library

_SIZES = (1, 2, 4, 8)  # bytes of an entry


def spread(values: Tensor, positions: Tensor, m: int) -> Tensor | None:
    """Return blocks ``[blocks, M]`` with these values at these positions and zeros elsewhere.

    Args:
        values: ``[..., N]``.
        positions: uint8 of the same shape, below M.
        m: M.

    Returns:
        A new tensor, or ``None`` where the library cannot be used.
    """
    if not _runs(values, positions):
        return None
    values = values.contiguous()
    dense_bm = values.new_empty(positions.numel() // positions.shape[-1], m)
    _move(values, positions, dense_bm, spreads=True)
    return dense_bm


def collect(blocks_bm: Tensor, positions: Tensor) -> Tensor | None:
    """Return the entries of blocks ``[blocks, M]`` at positions ``[..., N]``; undoes :func:`spread`.

    Returns:
        A new tensor of the shape of the positions, or ``None`` where the library cannot be used.
    """
    if not _runs(blocks_bm, positions):
        return None
    blocks_bm = blocks_bm.contiguous()
    values = blocks_bm.new_empty(positions.shape)
    _move(values, positions, blocks_bm, spreads=False)
    return values


def _move(values: Tensor, positions: Tensor, dense_bm: Tensor, *, spreads: bool) -> None:
    blocks, m = dense_bm.shape
    library.load().nm_packed_move(
        library.parallel() or library.ffi.NULL,
        library.threads(),
        spreads,
        values.element_size(),
        library.address(positions),
        blocks,
        positions.shape[-1],
        m,
        library.address(values),
        library.address(dense_bm),
    )


def _runs(values: Tensor, positions: Tensor) -> bool:
    if torch.compiler.is_compiling() or library.unavailable():
        return False
    is_plain = library.is_plain(values) and library.is_plain(positions)
    return is_plain and positions.is_contiguous() and values.element_size() in _SIZES
