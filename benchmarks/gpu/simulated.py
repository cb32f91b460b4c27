"""A software model of 2:4 hardware in torch operations, with its packed form and its rules of shapes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lightning_nm.kernels.gpu.two_four import TwoFourKernel, packed_width, two_four_violation

_GROUP = 4
"""Entries of a group, of which two are stored."""


def _stored_positions(nonzero_bits: int) -> list[int]:
    """The two stored positions of a group, in ascending order; bit `p` says whether the entry at `p` is a nonzero."""
    nonzeros = []
    zeros = []
    for position in range(_GROUP):
        if nonzero_bits >> position & 1:
            nonzeros.append(position)
        else:
            zeros.append(position)
    # The lowest zeros fill up if there are fewer than two nonzeros; the third and fourth nonzero are lost.
    stored = (nonzeros + zeros)[:2]
    return sorted(stored)


_POSITIONS = [_stored_positions(bits) for bits in range(1 << _GROUP)]
"""By the bits of a group's nonzeros: the two stored positions."""


def compress(matrix: Tensor) -> Tensor:
    """Pack a 2:4 matrix into one tensor: in each row, first the values, then their positions.

    Two values of each group of four take the row's first ``depth / 2`` columns. Then come 4-bit codes, ``first + 4 *
    second`` for the stored positions ``first < second``, the first group's in the lower half of the first byte, padded
    to whole words of the dtype. The sizes are the hardware's, the order of the bits is not. As on the hardware, a
    group's third and fourth nonzero are lost. A NaN is a nonzero, ``-0`` is not.

    Args:
        matrix: ``[rows, depth]``, `depth` a multiple of 8, of a floating dtype of at least 16 bits.

    Returns:
        A tensor ``[rows, packed_width(depth)]`` of the same dtype. Its last columns are bits: it must not be cast.

    Example::

        >>> packed = compress(torch.tensor([[0.0, 1.0, 0.0, 2.0, 3.0, 0.0, 0.0, 0.0]]))
        >>> packed[:, :4].tolist(), f"{int(packed.view(torch.uint8)[0, 16]):08b}"
        ([[1.0, 2.0, 3.0, 0.0]], '01001101')
    """
    device = matrix.device
    groups = matrix.unflatten(1, (-1, _GROUP))  # [rows, groups, 4]
    nonzero = groups != 0
    weight_of_bit = torch.tensor([1, 2, 4, 8], dtype=torch.int64, device=device)
    bits = (nonzero * weight_of_bit).sum(2)  # [rows, groups]
    positions = torch.tensor(_POSITIONS, dtype=torch.int64, device=device)[
        bits
    ]  # [rows, groups, 2]
    # A zero is stored as +0, also where the matrix has -0.
    kept = torch.where(nonzero, groups, 0)
    values = kept.gather(2, positions).flatten(1)  # [rows, depth / 2]
    first = positions[..., 0]
    second = positions[..., 1]
    codes = (first + 4 * second).to(torch.uint8)  # [rows, groups], 4 bits each
    lower_half = codes[:, 0::2]
    upper_half = codes[:, 1::2]
    packed_codes = lower_half | upper_half << 4  # [rows, groups / 2]
    # The bytes are viewed as the dtype, so they have to fill whole words.
    missing = -packed_codes.shape[1] % matrix.itemsize
    words = pad(packed_codes, (0, missing)).view(matrix.dtype)
    return torch.cat((values, words), 1)


def expand(packed: Tensor, depth: int) -> Tensor:
    """Undo :func:`compress`: the matrix ``[rows, depth]``, ``+0`` at entries that are not stored.

    Example::

        >>> expand(compress(torch.tensor([[0.0, 1.0, 0.0, 2.0, 3.0, 0.0, 0.0, -0.0]])), 8).tolist()
        [[0.0, 1.0, 0.0, 2.0, 3.0, 0.0, 0.0, 0.0]]
    """
    rows = len(packed)
    value_count = depth // 2
    group_count = depth // _GROUP
    word_count = packed_width(depth, packed.dtype) - value_count
    values, words = packed.split((value_count, word_count), 1)
    # Two codes in a byte; the bytes after them fill the last word.
    packed_codes = words.contiguous().view(torch.uint8)[:, : group_count // 2]
    lower_half = packed_codes & 15
    upper_half = packed_codes >> 4
    codes = torch.stack((lower_half, upper_half), 2).flatten(1)  # [rows, groups]
    first = codes & 3
    second = codes >> 2
    positions = torch.stack((first, second), 2).long()  # [rows, groups, 2]
    groups = packed.new_zeros(rows, group_count, _GROUP)
    groups.scatter_(2, positions, values.unflatten(1, (-1, 2)))
    return groups.flatten(1)


class SimulatedSparseKernel(TwoFourKernel):
    """GEMMs of 2:4 hardware in software, for tests on any machine: slower than dense GEMMs, and equal to them.

    It takes what the hardware takes, and float32 and float64. The result is the dense GEMM of the unpacked matrix:
    as there, a pruned weight times infinity is NaN.

    Example::

        >>> kernel = SimulatedSparseKernel()
        >>> packed = kernel.pack(torch.eye(16, 32))
        >>> packed.shape, kernel.linear(packed, torch.ones(8, 32)).sum().item()
        (torch.Size([16, 17]), 128.0)
    """

    name = "simulated"
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

    def probe(self, device: torch.device) -> str:
        """It works everywhere."""
        return ""

    def multiple(self, device: torch.device) -> int:
        """Return that of the hardware for 16-bit types."""
        return 16

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack with :func:`compress`.

        Raises:
            ValueError: If the matrix is not 2:4; the hardware would drop values silently.
        """
        violation = two_four_violation(matrix != 0)
        if violation:
            raise ValueError(
                f"{self.name}: a matrix of shape {tuple(matrix.shape)} is not 2:4 along its last axis, {violation}: "
                "prune it first, for example with `nm_prune`"
            )
        return compress(matrix)

    def sparse_linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x A^T + bias``: ``x [tokens, depth]``, result ``[tokens, rows]``."""
        return linear(x, expand(packed, x.shape[1]), bias)

    def sparse_matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """Compute ``A B``: ``B [depth, columns]``, result ``[rows, columns]``."""
        return expand(packed, len(matrix)) @ matrix
