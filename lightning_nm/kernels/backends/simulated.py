"""A software model of 2:4 hardware: the packed form and the rules of shapes, on any device, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lightning_nm.kernels.backends.two_four import TwoFourKernel, packed_width, two_four_violation

# For each set of nonzeros of a group, bit j standing for entry j: the two positions that are stored, in order. Where
# there are fewer nonzeros the lowest other positions fill up; where there are more, all but the first two are lost.
_POSITIONS = [sorted(sorted(range(4), key=lambda entry: not bits >> entry & 1)[:2]) for bits in range(16)]


def compress(matrix: Tensor) -> Tensor:
    """Pack a 2:4 matrix into one tensor: in each row, first the values, then their positions.

    Of each group of four the two stored values take the row's first ``depth / 2`` columns. Then comes a row of 4-bit
    codes, ``first + 4 * second`` for the stored positions ``first < second``, the first group's in the lower half of
    the first byte, filled up with zeros to whole words of the matrix's dtype. The order of these bits is ours; the
    sizes are the hardware's. As on the hardware, nothing is pruned by rank: a group's third and fourth nonzero are
    lost. A NaN is a nonzero and ``-0`` is not.

    Args:
        matrix: ``[rows, depth]``, `depth` a multiple of 8, of a floating dtype of at least 16 bits.

    Returns:
        A tensor ``[rows, packed_width(depth)]`` of the same dtype. Its last columns are bits, not numbers: it may be
        copied and moved, not cast.

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
    """Undo :func:`compress`: the matrix ``[rows, depth]`` with ``+0`` wherever no value is stored.

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
    """Products as 2:4 hardware makes them, in software: slower than dense, and equal to it.

    The packed matrix is what multiplies, so that whatever does not fit 2:4 shows on every machine. It takes what
    the hardware takes, and float32 and float64 besides. Its result is the dense product of the unpacked matrix: an
    infinite entry of the dense operand makes NaN of a pruned weight, as in the dense product.
    """

    name = "simulated"
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack with :func:`compress`, but refuse a group of more than two nonzeros.

        Raises:
            ValueError: If the matrix is not 2:4. The hardware would drop values in silence.
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
