"""Statistics of masks and gradient estimates.

Each is a :class:`Ratio` of two sums, which add up over layers, updates and processes. Nothing here waits for a device.
Results are float32 tensors without axes and without autograd history, divided in float64. Masks are bool tensors, and
all tensors of a call have one shape, any shape; other tensors raise TypeError or ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nm.functional.masks import _check_blocks
from lightning_nm.functional.pattern import NMPattern, PatternLike


class Ratio(NamedTuple):
    """A statistic as the quotient of two sums.

    Args:
        empty: The value where the second sum is zero.
        root: Whether the statistic is the root of the quotient.
    """

    empty: float
    root: bool = False

    def exact(self, part: Tensor | float, whole: Tensor | float) -> Tensor:
        """Return the statistic in float64."""
        part = torch.as_tensor(part, dtype=torch.float64)
        whole = torch.as_tensor(whole, dtype=torch.float64, device=part.device)
        value = part / whole
        if self.root:
            value = value.sqrt()
        return torch.where(whole == 0, self.empty, value)

    def __call__(self, part: Tensor | float, whole: Tensor | float) -> Tensor:
        """Return the statistic in float32, divided in float64."""
        return self.exact(part, whole).float()


DENSITY = Ratio(torch.nan)
FLIP_RATE = Ratio(0.0)
OVERLAP = Ratio(1.0)
KEPT_MAGNITUDE = Ratio(1.0)
OSCILLATION = Ratio(0.0)
GRADIENT_SNR = Ratio(torch.inf, root=True)


def mask_density(tensor: Tensor) -> Tensor:
    """Share of the entries that are not zero: ``#{j : x[j] != 0} / #x``, in [0, 1]; NaN without entries.

    Args:
        tensor: A bool mask, or values of any dtype. A NaN is a nonzero, ``-0`` is not.

    Example:
        >>> mask_density(torch.tensor([True, False, False, True]))
        tensor(0.5000)
    """
    return DENSITY(*density_counts(tensor))


def mask_flip_rate(before: Tensor, after: Tensor) -> Tensor:
    r"""Share of the entries that an update of a mask changed: :math:`\|m_t - m_{t-1}\|_1 / D`, in [0, 1]; 0 if D is 0.

    With exactly N of M kept, half of the flips are pruned entries and half are regrown ones.

    Args:
        before: Bool mask.
        after: Bool mask of that shape.

    Raises:
        TypeError: If one of them is not a bool tensor.
        ValueError: If their shapes differ.

    Example:
        >>> mask_flip_rate(torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False]))
        tensor(0.5000)

    Source: Hu et al., ICML 2024, arXiv:2404.01847. Without the division it is the sparse architecture divergence of
    Zhou et al., ICLR 2021, arXiv:2102.04010.
    """
    check_masks({"before": before, "after": after})
    return FLIP_RATE(torch.count_nonzero(before ^ after), before.numel())


def mask_overlap(forward: Tensor, backward: Tensor) -> Tensor:
    r"""Share of the forward mask's entries that the backward mask also keeps: :math:`|F \cap B| / |F|`, in [0, 1].

    It is 1 if the forward mask keeps nothing. Below 1, dX is computed from fewer weights than Y, and differs from the
    gradient of the sparse model. Masks and errors are as in :func:`mask_flip_rate`.

    Example:
        >>> mask_overlap(torch.tensor([True, True, False, False]), torch.tensor([True, False, False, False]))
        tensor(0.5000)
    """
    return OVERLAP(*overlap_counts(forward, backward))


def kept_magnitude(weight: Tensor, mask: Tensor) -> Tensor:
    r"""Share of a weight's magnitude that a mask keeps: :math:`\sum_{j \in m} |W_j| / \sum_j |W_j|`, in [0, 1].

    It is 1 if all weights are zero, NaN if one is NaN or infinite.

    Args:
        weight: Any floating dtype; the sums are float64.
        mask: Bool mask of that shape.

    Raises:
        TypeError: If the mask is not a bool tensor or the weight not of a floating dtype.
        ValueError: If their shapes differ.

    Example:
        >>> kept_magnitude(torch.tensor([3.0, -4.0, 2.0, -1.0]), torch.tensor([True, True, False, False]))
        tensor(0.7000)
    """
    return KEPT_MAGNITUDE(*magnitude_sums(weight, mask))


def mask_oscillation(masks: Iterable[Tensor]) -> Tensor:
    r"""How often entries flip back, per entry and update.

    .. math:: \frac{1}{T D} \sum_{t=1}^{T} \sum_k [m_{t,k} \ne m_{t-1,k}] \, [\exists s < t: m_{s,k} \ne m_{s-1,k}]

    Each flip of an entry but the first counts. The result, in [0, 1], is at most the flip rate averaged over the same
    updates; their ratio is the share of flips that undo an earlier one. It is 0 if there is nothing to compare.

    Args:
        masks: :math:`m_0, m_1, ..., m_T` in the order of time, bool tensors of one shape.

    Raises:
        TypeError: If one of them is not a bool tensor.
        ValueError: If there is none, or their shapes differ.

    Example:
        >>> went, came = torch.tensor([True, False]), torch.tensor([False, True])
        >>> mask_oscillation([went, came]), mask_oscillation([went, came, went])
        (tensor(0.), tensor(0.5000))

    Source: Nagel et al., ICML 2022, arXiv:2203.11086, for rounded weights; here for masks, with the plain mean in place
    of a moving one.
    """
    history = iter(masks)
    before = next(history, None)
    if before is None:
        raise ValueError("no masks were given: pass the masks of one weight in the order of time")
    check_masks({"masks[0]": before})
    flipped = torch.zeros_like(before)
    returns = torch.zeros((), dtype=torch.int64, device=before.device)
    entries = 0
    for step, after in enumerate(history, 1):
        check_masks({f"masks[{step - 1}]": before, f"masks[{step}]": after})
        flips = before ^ after
        returns = returns + torch.count_nonzero(flips & flipped)
        entries += after.numel()
        flipped = flipped | flips
        before = after
    return OSCILLATION(returns, entries)


def gradient_snr(exact: Tensor, estimate: Tensor) -> Tensor:
    r"""Signal-to-noise ratio of a gradient estimate: :math:`\|G\|_2 / \|\hat G - G\|_2`, not in decibels.

    It cannot tell bias from noise. It is infinite if there is no error, NaN if a gradient holds NaN or an infinity.

    Args:
        exact: G, any floating dtype. Half dtypes are subtracted in float32; the norms are float64.
        estimate: The estimate of G, of that shape.

    Raises:
        TypeError: If one of them is not of a floating dtype.
        ValueError: If their shapes differ.

    Example:
        >>> gradient_snr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0]))
        tensor(2.5000)
    """
    return GRADIENT_SNR(*gradient_energies(exact, estimate))


def mask_margin(weight: Tensor, mask: Tensor, pattern: PatternLike, dim: int = -1) -> Tensor:
    r"""Gap between the last kept and the first dropped weight of a block, relative to the larger of them.

    .. math:: \frac{a - b}{\max(a, b)}, \quad a = \min_{j \in m} |W_j|, \quad b = \max_{j \notin m} |W_j|

    Near 0 a magnitude mask is about to change. Below 0 the mask drops a larger weight than it keeps, as masks do that
    also hold along `out` or that do not move. It is 1 where the dropped weights are zero.

    Args:
        weight: Any floating dtype; computed in float32, or in float64 if that is its dtype.
        mask: Bool mask of that shape; True keeps.
        pattern: What :meth:`NMPattern.parse` reads; of it, M alone matters.
        dim: The axis along which the blocks lie; its size must be a multiple of M.

    Returns:
        Margins in [-1, 1], of the weight's shape with M times fewer entries along ``dim``; float32 or float64. 0 where
        both weights are zero; NaN for a block that keeps or drops all of its weights, or holds a NaN.

    Raises:
        TypeError: If the mask is not a bool tensor or the weight not of a floating dtype.
        ValueError: If their shapes differ, or M does not divide ``weight.shape[dim]``.

    Example:
        >>> mask_margin(torch.tensor([4.0, -2.0, 1.5, 0.5]), torch.tensor([True, True, False, False]), "2:4")
        tensor([0.2500])
    """
    pattern = NMPattern.parse(pattern)
    _check_weight(weight, mask)
    axis = _check_blocks(weight, pattern, dim)
    wide = torch.promote_types(weight.dtype, torch.float32)
    magnitude = weight.detach().to(wide).abs().unflatten(axis, (-1, pattern.m))
    mask = mask.unflatten(axis, (-1, pattern.m))
    nan = torch.isnan(magnitude).any(axis + 1)
    kept = torch.where(mask, magnitude, torch.inf).amin(axis + 1)
    dropped = torch.where(mask, -torch.inf, magnitude).amax(axis + 1)
    larger = torch.maximum(kept, dropped)
    margin = torch.where(larger == 0, 0, (kept - dropped) / larger)
    # A block without kept or without dropped entries has no gap.
    one_sided = mask.all(axis + 1) | ~mask.any(axis + 1)
    return torch.where(one_sided | nan, torch.nan, margin)


def density_counts(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the number of nonzeros and of entries."""
    return torch.count_nonzero(tensor.detach()), tensor.numel()


def overlap_counts(forward: Tensor, backward: Tensor, layer: str = "") -> tuple[Tensor, Tensor]:
    """Return the entries that both masks keep, and those that the forward mask keeps."""
    check_masks({"forward": forward, "backward": backward}, layer)
    return torch.count_nonzero(forward & backward), torch.count_nonzero(forward)


def magnitude_sums(weight: Tensor, mask: Tensor, layer: str = "") -> tuple[Tensor, Tensor]:
    """Return the sum of kept and of all magnitudes, in float64."""
    _check_weight(weight, mask, layer)
    kept = torch.where(mask, weight.detach(), 0)
    return magnitude_sum(kept), magnitude_sum(weight)


def magnitude_sum(weight: Tensor) -> Tensor:
    """Return the sum of all magnitudes, in float64."""
    return weight.detach().abs().sum(dtype=torch.float64)


def gradient_energies(exact: Tensor, estimate: Tensor, layer: str = "") -> tuple[Tensor, Tensor]:
    """Return the sum of squares of the gradient and of the estimate's error, in float64."""
    gradients = {"exact": exact, "estimate": estimate}
    _check_floating(gradients, layer)
    _check_shapes(gradients, layer)
    common = torch.promote_types(exact.dtype, estimate.dtype)
    wide = torch.promote_types(common, torch.float32)
    exact = exact.detach().to(wide)
    error = estimate.detach().to(wide) - exact
    return _energy(exact), _energy(error)


def _energy(x: Tensor) -> Tensor:
    """Sum of squares in float64, without a copy in it."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def check_masks(masks: Mapping[str, Tensor], layer: str = "") -> None:
    """Refuse masks that are not bool tensors, or of different shapes, by the names they are given."""
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise TypeError(
                f"{name}{_of(layer)} is {mask.dtype}, and a mask is a bool tensor: pass `{name} != 0`"
            )
    _check_shapes(masks, layer)


def _check_shapes(tensors: Mapping[str, Tensor], layer: str = "") -> None:
    first = next(iter(tensors))
    one = tuple(tensors[first].shape)
    for name, tensor in tensors.items():
        other = tuple(tensor.shape)
        if other != one:
            raise ValueError(
                f"{first}{_of(layer)} has shape {one} and {name} has shape {other}: pass one shape"
            )


def _check_floating(tensors: Mapping[str, Tensor], layer: str = "") -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name}{_of(layer)} is {tensor.dtype}: pass a tensor of a floating dtype"
            )


def _check_weight(weight: Tensor, mask: Tensor, layer: str = "") -> None:
    check_masks({"mask": mask}, layer)
    _check_floating({"weight": weight}, layer)
    _check_shapes({"weight": weight, "mask": mask}, layer)


def _of(layer: str) -> str:
    return f" of layer '{layer}'" if layer else ""
