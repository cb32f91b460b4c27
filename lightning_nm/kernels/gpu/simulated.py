"""A software model of 2:4 hardware in torch operations, with its packed form and its rules of shapes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lightning_nm.kernels.gpu.two_four import TwoFourKernel, packed_width, two_four_violation

# For each set of nonzeros of a group, as bits: the two stored positions, in order. Other positions, the lowest first,
# fill up if there are fewer nonzeros; the third and fourth nonzero are lost.
_POSITIONS = [
    sorted(sorted(range(4), key=lambda entry: not bits >> entry & 1)[:2]) for bits in range(16)
]


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
    groups = matrix.unflatten(1, (-1, 4))
    nonzero = groups != 0
    bits = (nonzero * torch.tensor([1, 2, 4, 8], device=matrix.device)).sum(2)
    positions = torch.tensor(_POSITIONS, device=matrix.device)[bits]
    values = torch.where(nonzero, groups, 0).gather(2, positions).flatten(1)
    codes = (positions[..., 0] + 4 * positions[..., 1]).to(torch.uint8)
    packed_codes = codes[:, 0::2] | codes[:, 1::2] << 4
    filled = pad(packed_codes, (0, -packed_codes.shape[1] % matrix.itemsize))
    return torch.cat((values, filled.view(matrix.dtype)), 1)


def expand(packed: Tensor, depth: int) -> Tensor:
    """Undo :func:`compress`: the matrix ``[rows, depth]``, ``+0`` at entries that are not stored.

    Example::

        >>> expand(compress(torch.tensor([[0.0, 1.0, 0.0, 2.0, 3.0, 0.0, 0.0, -0.0]])), 8).tolist()
        [[0.0, 1.0, 0.0, 2.0, 3.0, 0.0, 0.0, 0.0]]
    """
    values, words = packed.split((depth // 2, packed_width(depth, packed.dtype) - depth // 2), 1)
    packed_codes = words.contiguous().view(torch.uint8)[:, : depth // 8]
    codes = torch.stack((packed_codes & 15, packed_codes >> 4), 2).flatten(1)
    positions = torch.stack((codes & 3, codes >> 2), 2).long()
    groups = packed.new_zeros(len(packed), depth // 4, 4)
    return groups.scatter_(2, positions, values.unflatten(1, (-1, 2))).flatten(1)


class SimulatedSparseKernel(TwoFourKernel):
    """Products of 2:4 hardware in software, for tests on any machine: slower than dense products, and equal to them.

    It takes what the hardware takes, and float32 and float64. The result is the dense product of the unpacked matrix:
    as there, a pruned weight times infinity is NaN.
    """

    name = "simulated"
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack with :func:`compress`.

        Raises:
            ValueError: If the matrix is not 2:4; the hardware would drop values silently.
        """
        if violation := two_four_violation(matrix != 0):
            raise ValueError(
                f"{self.name}: a matrix of shape {tuple(matrix.shape)} is not 2:4 along its last axis, {violation}: "
                "prune it first, for example with `nm_prune`"
            )
        return compress(matrix)

    def sparse_linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x A^T + bias``: ``x [tokens, depth]``, result ``[tokens, rows]``."""
        return linear(x, expand(packed, x.shape[1]), bias)

    def sparse_matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """``A B``: ``B [depth, columns]``, result ``[rows, columns]``."""
        return expand(packed, len(matrix)) @ matrix
