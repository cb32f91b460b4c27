"""Weights in int8 with a scale for each output, and GEMMs with inputs that are rounded to int8 for each token.

All rounding is to nearest even, and integers are -127 to 127, so that both signs have the same range.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
"""The largest absolute value of an integer."""

INT8_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of weights whose values may be int8: those of the inputs that int8 GEMMs take."""

LEAST_SCALE = 2.0**-100
MOST_SCALE = 2.0**100
"""The range of scales: the product of an integer that is not 0 and a scale is a normal number."""

MOST_TERMS = 2**31 // LARGEST**2
"""Products of two integers whose sum fits 32 bits whatever they are."""


def quantise_weight(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round the rows of a weight to int8, each with a scale of its own.

    ``scale = max |row| / 127``, at least ``2^-100``; ``integer = nearest(row / scale)``. So an entry changes by at most
    half the scale, and zeros stay zeros.

    Args:
        weight: ``[rows, ...]``, float32 or bfloat16.
        scale: That of a weight which :func:`dequantise_weight` made: its integers are found again, for rounding to
            bfloat16 moves it by less than half a step.

    Returns:
        int8 of the same shape, and float32 scales ``[rows]``.

    Raises:
        ValueError: If an entry is NaN or infinite, or larger than ``127 * 2^100``.

    Example:
        >>> integers, scales = quantise_weight(torch.tensor([[0.0, 2.0, -1.0], [0.0, 0.0, 0.0]]))
        >>> integers.tolist()
        [[0, 127, -64], [0, 0, 0]]
    """
    rows = weight.detach().float().flatten(1)
    largest = rows.abs().amax(1)
    # True of NaN as well.
    if not bool((largest <= LARGEST * MOST_SCALE).all()):
        raise ValueError(
            f"a weight with NaN, infinity or entries above {LARGEST * MOST_SCALE:.3g} cannot be rounded to int8"
        )
    if scale is None:
        scale = (largest / LARGEST).clamp(min=LEAST_SCALE)
    integers = (rows / scale[:, None]).round().clamp(-LARGEST, LARGEST)
    return integers.to(torch.int8).view(weight.shape), scale


def dequantise_weight(integers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``integers * scale`` of each row in a dtype: what :func:`quantise_weight` stands for.

    Args:
        integers: int8 ``[rows, ...]``.
        scale: float32 ``[rows]``.
        dtype: Of the result.

    Example:
        >>> dequantise_weight(torch.tensor([[127, -64]], dtype=torch.int8), torch.tensor([0.5]), torch.float32)
        tensor([[ 63.5000, -32.0000]])
    """
    rows = integers.float().flatten(1) * scale[:, None]
    return rows.to(dtype).view(integers.shape)


def fake_quantise_weight(weight: Tensor, mask: Tensor | None = None, axes: int = 1) -> Tensor:
    """Return a weight whose kept entries are rounded as :func:`quantise_weight` rounds the masked one.

    ``scale * nearest(W / scale)`` where the mask is true, with ``scale = max |kept of a row| / 127``; W elsewhere.

    Args:
        weight: ``[rows, ...]``, float32 or bfloat16.
        mask: Bool, of the same shape; by default all are kept.
        axes: How many axes are those of the rows: 2 for ``[experts, out, in]``.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        ValueError: If a kept entry is NaN, infinite or too large.

    Example:
        >>> weight, mask = torch.tensor([[127.0, 0.6, 300.0]]), torch.tensor([[True, True, False]])
        >>> fake_quantise_weight(weight, mask)
        tensor([[127.,   1., 300.]])
    """
    kept = weight if mask is None else torch.where(mask, weight, 0)
    rows = kept.flatten(0, axes - 1)
    rounded = dequantise_weight(*quantise_weight(rows), weight.dtype).view(weight.shape)
    return rounded if mask is None else torch.where(mask, rounded, weight)


def fake_quantise_tokens(x: Tensor) -> Tensor:
    """Return ``[..., depth]`` rounded as :func:`quantise_tokens` rounds tokens; its gradient is that of x.

    Example:
        >>> fake_quantise_tokens(torch.tensor([[127.0, 0.6]]))
        tensor([[127.,   1.]])
    """
    with torch.no_grad():
        integers, scale = quantise_tokens(x.reshape(-1, x.shape[-1]))
        rounded = dequantise_weight(integers, scale, x.dtype).view(x.shape)
    # The difference is 0: it adds nothing but its gradient.
    return rounded + (x - x.detach())


def check_quantised(integers: Tensor, scale: Tensor) -> None:
    """Refuse integers and scales that :func:`quantise_weight` does not make, by a ``ValueError``."""
    if integers.dtype != torch.int8 or scale.dtype != torch.float32:
        raise ValueError(
            f"int8 values with float32 scales are needed, not {integers.dtype} with {scale.dtype}"
        )
    if scale.shape != (len(integers),):
        raise ValueError(
            f"{len(integers)} rows have {len(integers)} scales, not {tuple(scale.shape)}"
        )
    # Without its own branch the least of no values would be an error.
    if integers.numel() and int(integers.min()) < -LARGEST:
        raise ValueError("an int8 value is -128: they are -127 to 127")
    in_range = (scale >= LEAST_SCALE) & (scale <= MOST_SCALE)
    if not bool(in_range.all()):
        raise ValueError("a scale is not between 2^-100 and 2^100")


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each token to int8, as the int8 GEMMs do: ``nearest(x * 127 / max |x|)``.

    The scale is ``max |x| / 127``.

    A token that holds NaN or infinity has the integers 0 and the scale NaN.

    Args:
        x: ``[tokens, depth]``, float32 or bfloat16.

    Returns:
        int8 of the same shape, and float32 scales ``[tokens]``.

    Example:
        >>> integers, scale = quantise_tokens(torch.tensor([[1.0, -0.25, 0.0]]))
        >>> integers.tolist()
        [[127, -32, 0]]
    """
    tokens = x.float()
    largest = tokens.abs().amax(-1)
    finite = largest.isfinite()
    # A number divided by a tensor would be a product with its reciprocal, which is rounded twice.
    quotient = torch.full_like(largest, LARGEST) / largest
    # Of a token that is zero, or nearly, it is infinite.
    inverse = quotient.clamp(max=torch.finfo(torch.float32).max)
    integers = torch.where(finite[:, None], tokens * inverse[:, None], 0).round()
    scale = torch.where(finite, largest / LARGEST, torch.nan)
    return integers.to(torch.int8), scale


def conv_patches(
    x: Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return what each output position of a convolution reads, ``[groups, images, *positions, in / groups, *taps]``.

    It is a view of the padded input.

    Args:
        x: ``[images, in, *sizes]``.
        taps: Of each spatial dimension, as the others.
        stride: As of :func:`torch.nn.functional.conv2d`.
        padding: As well.
        dilation: As well.
        groups: As well.
    """
    # F.pad counts dimensions from the last.
    x = F.pad(x, [zeros for both in reversed(padding) for zeros in (both, both)])
    for axis, (size, step, distance) in enumerate(zip(taps, stride, dilation, strict=True), 2):
        x = x.unfold(axis, distance * (size - 1) + 1, step)[..., ::distance]
    # [images, in, *positions, *taps] -> [groups, images, *positions, in / groups, *taps]
    return x.unflatten(1, (groups, -1)).movedim((1, 2), (0, 2 + len(taps)))
