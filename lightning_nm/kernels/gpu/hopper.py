"""The packed form that cuSPARSELt gives 2:4 matrices of 16 bits on Hopper, and a faster way to make it.

The library documents no packed form. This one was read from what it wrote on an H200 (cuSPARSELt 0.8.0): for matrices
of 64 x 64 to 1024 x 64 and 128 x 1024 entries, with two, one and no nonzeros in a group, :func:`compress` gives the
same bits. The library packs at 0.15 TB/s there, where a copy runs at 4 TB/s (``benchmarks/results/gpu``), which costs
more than most 2:4 GEMMs gain.

No device is trusted to have this form: :class:`~lightning_nm.kernels.gpu.probe.DeviceProbe` compares it with the
library's own, bit for bit, before the first use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nm.kernels.gpu import triton_use
from lightning_nm.kernels.gpu.two_four import packed_width

TILE = 64
"""Divides rows and depth of the matrix: the positions are stored in tiles of 64 x 64 entries."""


def may_pack(device: torch.device) -> bool:
    """Return whether the Triton kernel runs on a device that may have this form: Hopper, or an interpreter."""
    if not triton_use.runs_on(device):
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device) == (9, 0)


def compress(matrix: Tensor) -> Tensor:
    """Pack a 2:4 matrix: the two values of all groups of four in their order, then a 4-bit code for each group.

    The code is ``first + 4 * second``, for the places ``first < second`` of the two values in their group. Nonzeros
    are counted by their bits, so -0 is one. A group with one nonzero stores it with the zero at place 3; if it lies at
    place 3 itself, or there is none, the first place is 2.

    Codes come in tiles of 64 rows and 16 groups, in row-major order. Within a tile, with row ``r`` and group ``g`` in
    bits, the number of a code is ``g3 r5 r4 r2 r1 r0 g1 g0 g2 r3``, from the highest bit to the lowest. So a 16-bit
    word holds the codes of rows r and r + 8 and of groups g and g + 4.

    Args:
        matrix: ``[rows, depth]`` of a 16-bit dtype, contiguous; 64 divides both sizes. A third nonzero of a group would
            be lost.

    Returns:
        A tensor ``[rows, 9/16 depth]`` of the same dtype.
    """
    if triton_use.runs_on(matrix.device):
        packed: Tensor = triton_use.kernels("hopper_triton").compress(matrix)
        return packed
    return compress_reference(matrix)


def compress_reference(matrix: Tensor) -> Tensor:
    """Compute :func:`compress` by torch operations."""
    rows, depth = matrix.shape
    groups = matrix.view(torch.int16).unflatten(1, (-1, 4))  # [rows, groups, 4]
    is_nonzero = groups != 0
    # Later assignments win: the place of the first nonzero, or 2 where places 0 and 1 are zero.
    first = torch.full(groups.shape[:2], 2, dtype=torch.int64, device=matrix.device)
    first[is_nonzero[..., 1]] = 1
    first[is_nonzero[..., 0]] = 0
    # 3, unless the group's second nonzero lies before it: a single one is stored with the zero at 3.
    second = torch.full_like(first, 3)
    second[is_nonzero[..., 1] & (first < 1) & ~is_nonzero[..., 3]] = 1
    second[is_nonzero[..., 2] & (first < 2) & ~is_nonzero[..., 3]] = 2
    values = groups.gather(2, torch.stack((first, second), 2)).flatten()

    codes = first + 4 * second
    # rows: tile, r5 r4, r3, r2 r1 r0; groups: tile, g3, g2, g1 g0
    codes = codes.view(rows // TILE, 4, 2, 8, depth // TILE, 2, 2, 4)
    # The tile, then the bits from the highest to the lowest. The last two, g2 and r3, number the four codes of a word.
    in_words = codes.permute(0, 4, 5, 1, 3, 7, 6, 2).reshape(-1, 4)
    place_in_word = torch.tensor([1, 16, 256, 4096], dtype=torch.int64, device=matrix.device)
    # The cast keeps the low 16 bits, so a sum beyond 2^15 becomes the negative number of the same bits.
    words = (in_words * place_in_word).sum(1).to(torch.int16)
    return (
        torch.cat((values, words)).view(matrix.dtype).view(rows, packed_width(depth, matrix.dtype))
    )
