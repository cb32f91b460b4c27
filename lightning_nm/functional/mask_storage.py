"""Bool masks in one bit an entry, the form in which checkpoints hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# A layer has both of its masks in one uint8 tensor of the weight's shape: these bits of each byte.
FORWARD_BIT = 1  # set where the forward mask keeps the entry: W_F[i] = W[i]
BACKWARD_BIT = 2  # the same of W_B, in layers with a backward mask


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a bool mask into bytes, eight entries each, in row-major order with the first entry in the lowest bit.

    ``packed[i] = sum_j mask.flatten()[8 i + j] << j``, as ``numpy.packbits(mask, bitorder="little")`` does.

    Args:
        mask: A bool tensor of any shape, on any device.

    Returns:
        A uint8 tensor ``[ceil(mask.numel() / 8)]`` on the device of ``mask``.

    Raises:
        TypeError: If ``mask`` is not a bool tensor.

    Example:
        >>> pack_mask(torch.tensor([[True, False, False], [True, True, False], [False, False, True]])).tolist()
        [25, 1]
    """
    if mask.dtype != torch.bool:
        raise TypeError(
            f"a mask to pack is a bool tensor, not {mask.dtype}: pass `mask.bool()` if nonzero means kept"
        )
    numel = mask.numel()
    size = (numel + 7) // 8
    # One byte an entry, and zeros up to a whole number of packed bytes.
    entries = torch.zeros(8 * size, dtype=torch.uint8, device=mask.device)
    entries[:numel] = mask.reshape(-1)
    # Eight bytes as one little-endian number: the product brings bit 8 j to bit 56 + j, and no two terms share a bit.
    gathered = entries.view(torch.int64) * 0x0102040810204080
    top_byte = gathered >> 56
    # The shift keeps the sign: the cast drops the bits above the byte.
    return top_byte.to(torch.uint8)


def unpack_mask(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo :func:`pack_mask`: ``mask.flatten()[8 i + j] = (packed[i] >> j) & 1``.

    Args:
        packed: A uint8 tensor ``[ceil(numel / 8)]``, on any device.
        shape: The shape of the mask.

    Returns:
        A bool tensor of that shape on the device of ``packed``.

    Raises:
        TypeError: If ``packed`` is not a uint8 tensor.
        ValueError: If ``packed`` has another size.

    Example:
        >>> unpack_mask(torch.tensor([25, 1], dtype=torch.uint8), (3, 3)).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    if packed.dtype != torch.uint8:
        raise TypeError(
            f"a packed mask is a uint8 tensor, not {packed.dtype}: pass what `pack_mask` returned"
        )
    shape = tuple(shape)
    numel = math.prod(shape)
    size = (numel + 7) // 8
    packed_shape = tuple(packed.shape)
    if packed_shape != (size,):
        raise ValueError(
            f"a packed mask of shape {shape} is {size} bytes along one axis, not {packed_shape}: pass the shape of the "
            "mask that was packed"
        )
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(1) >> shifts) & 1  # [bytes, 8]
    entries = bits.bool().view(-1)
    return entries[:numel].reshape(shape)
