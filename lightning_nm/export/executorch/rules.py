"""Which quantised weights Vela, the compiler for Ethos-U, stores as 2:4 sparse.

The rules are those of Vela's weight encoder (ethos-u-vela 5.1, Apache-2.0), and the tests compare them with what it
does: at least two zeros in every four consecutive entries along the input depth
of each kernel tap, no entry of -128, and an operator that is a convolution or a matrix product with a constant weight,
but no depthwise convolution.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

FOUR = 4  # entries of a block of the NPU
ZEROS = 2  # of them that are zero at least


def reason_of_weight(weight: Tensor) -> str:
    """Why Vela does not store a quantised weight as 2:4; empty if it can.

    ``min over blocks b of four along dim 1 of #{j in b : w[j] == 0} >= 2``, where the last block of a depth that is no
    multiple of 4 is filled with zeros.

    Args:
        weight: int8 of shape ``[out, in / groups, *kernel]``, of a convolution or a matrix.

    Example:
        >>> import torch
        >>> reason_of_weight(torch.tensor([[3, 0, 0, -7]], dtype=torch.int8))
        ''
        >>> reason_of_weight(torch.tensor([[3, 1, 0, -7]], dtype=torch.int8))
        '1 of 1 blocks of 4 along the input depth have fewer than 2 zeros'
    """
    if int(weight.min()) < -127:
        return "it has entries of -128, which the sparse format cannot hold"
    depth_last = weight.movedim(1, -1)
    rest = -depth_last.shape[-1] % FOUR
    blocks = pad(depth_last, (0, rest)).reshape(-1, FOUR)
    zeros = (blocks == 0).sum(dim=1)
    faults = int((zeros < ZEROS).sum())
    if not faults:
        return ""
    share = f"{faults} of {len(blocks)} blocks of {FOUR} along the input depth"
    reason = f"{share} have fewer than {ZEROS} zeros"
    if rest:
        reason += f"; the depth {depth_last.shape[-1]} is no multiple of {FOUR}"
    return reason
