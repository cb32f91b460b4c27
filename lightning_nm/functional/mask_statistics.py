"""Statistics of masks and gradient estimates.

Each is a :class:`Ratio` of two sums, which add up over layers, updates and processes. Nothing here waits for a device.
Results are float32 tensors without axes and without autograd history, divided in float64. Masks are bool tensors, and
all tensors of a call have one shape, any shape; other tensors raise TypeError or ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_nm.functional.masks import check_blocks, wide_dtype
from lightning_nm.pattern import PatternLike

NamedTensors: TypeAlias = Mapping[str, Tensor]
"""Arguments by the names that errors give them."""


class Ratio(NamedTuple):
    """A statistic as the quotient of two sums.

    Args:
        empty: The value where the second sum is zero.
        root: Whether the statistic is the root of the quotient.

    Example:
        >>> share = Ratio(empty=1.0)
        >>> share(1, 4), share(0, 0)
        (tensor(0.2500), tensor(1.))
    """

    empty: float
    root: bool = False

    def exact(self, part: Tensor | float, whole: Tensor | float) -> Tensor:
        """Return the statistic in float64."""
        # Counts beyond 2**24 would lose their last digits in float32.
        wide = torch.float64
        part = torch.as_tensor(part, dtype=wide)
        whole = torch.as_tensor(whole, dtype=wide, device=part.device)
        value = part / whole
        if self.root:
            value = value.sqrt()
        # A select and not a branch: reading `whole` would wait for the device.
        return torch.where(whole == 0, self.empty, value)

    def __call__(self, part: Tensor | float, whole: Tensor | float) -> Tensor:
        """Return the statistic in float32, divided in float64."""
        value = self.exact(part, whole)
        return value.float()


# What a statistic is worth where there is nothing to divide by: no entries, no kept entries, no magnitude, no error.
DENSITY = Ratio(empty=torch.nan)
FLIP_RATE = Ratio(empty=0.0)
OVERLAP = Ratio(empty=1.0)
KEPT_MAGNITUDE = Ratio(empty=1.0)
OSCILLATION = Ratio(empty=0.0)
GRADIENT_SNR = Ratio(empty=torch.inf, root=True)


def mask_density(tensor: Tensor) -> Tensor:
    """Return the fraction of the entries that are not zero: ``#{j : x[j] != 0} / #x``, in [0, 1]; NaN without entries.

    Args:
        tensor: A bool mask, or values of any dtype. A NaN is a nonzero, ``-0`` is not.

    Example:
        >>> mask_density(torch.tensor([True, False, False, True]))
        tensor(0.5000)
    """
    return DENSITY(*density_counts(tensor))


def mask_flip_rate(before: Tensor, after: Tensor) -> Tensor:
    r"""Return the fraction of the entries that an update of a mask changed, in [0, 1]; 0 without entries.

    .. math:: \|m_t - m_{t-1}\|_1 / D

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
    check_tensors({"before": before, "after": after})
    flips = torch.count_nonzero(before ^ after)
    return FLIP_RATE(flips, before.numel())


def mask_overlap(forward: Tensor, backward: Tensor) -> Tensor:
    r"""Return the fraction of the forward mask's entries that the backward mask also keeps, :math:`|F \cap B| / |F|`.

    It is 1 if the forward mask keeps nothing. Below 1, dX is computed from fewer weights than Y, and differs from the
    gradient of the sparse model. Masks and errors are as in :func:`mask_flip_rate`.

    Example:
        >>> mask_overlap(torch.tensor([True, True, False, False]), torch.tensor([True, False, False, False]))
        tensor(0.5000)
    """
    return OVERLAP(*overlap_counts(forward, backward))


def kept_magnitude(weight: Tensor, mask: Tensor) -> Tensor:
    r"""Return the fraction of a weight's magnitude that a mask keeps: :math:`\sum_{j \in m} |W_j| / \sum_j |W_j|`.

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
    r"""Return how often entries flip back, per entry and update.

    .. math:: \frac{1}{T D} \sum_{t=1}^{T} \sum_k [m_{t,k} \ne m_{t-1,k}] \, [\exists s < t: m_{s,k} \ne m_{s-1,k}]

    Each flip of an entry but the first counts. The result, in [0, 1], is at most the flip rate averaged over the same
    updates; their ratio is the fraction of flips that undo an earlier one. It is 0 if there is nothing to compare.

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
    check_tensors({"masks[0]": before})
    flipped = torch.zeros_like(before)  # where an entry ever flipped
    returns = torch.zeros((), dtype=torch.int64, device=before.device)
    entries = 0
    for step, after in enumerate(history, 1):
        check_tensors({f"masks[{step - 1}]": before, f"masks[{step}]": after})
        flips = before ^ after
        # A flip of an entry that flipped before takes it back.
        flips_back = flips & flipped
        returns = returns + torch.count_nonzero(flips_back)
        entries += after.numel()
        flipped = flipped | flips
        before = after
    return OSCILLATION(returns, entries)


def gradient_snr(exact: Tensor, estimate: Tensor) -> Tensor:
    r"""Return the signal-to-noise ratio of a gradient estimate: :math:`\|G\|_2 / \|\hat G - G\|_2`, not in decibels.

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
    r"""Return the gap between the last kept and the first dropped weight of a block, relative to the larger of them.

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
    check_tensors({"mask": mask}, floating={"weight": weight})
    pattern, block_axis = check_blocks(weight, pattern, dim)
    entry_axis = block_axis + 1  # of the tensors that are cut into blocks
    magnitude = weight.detach().to(wide_dtype(weight)).abs()
    magnitude = magnitude.unflatten(block_axis, (-1, pattern.m))
    mask = mask.unflatten(block_axis, (-1, pattern.m))
    nan = torch.isnan(magnitude).any(entry_axis)
    # The infinities stand for entries of the other kind, which are never chosen.
    kept = torch.where(mask, magnitude, torch.inf).amin(entry_axis)
    dropped = torch.where(mask, -torch.inf, magnitude).amax(entry_axis)
    larger = torch.maximum(kept, dropped)
    gap = kept - dropped
    margin = torch.where(larger == 0, 0, gap / larger)
    # A block without kept or without dropped entries has no gap.
    none_dropped = mask.all(entry_axis)
    none_kept = ~mask.any(entry_axis)
    one_sided = none_dropped | none_kept
    return torch.where(one_sided | nan, torch.nan, margin)


def density_counts(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the number of nonzeros and of entries."""
    nonzeros = torch.count_nonzero(tensor.detach())
    return nonzeros, tensor.numel()


def overlap_counts(forward: Tensor, backward: Tensor, layer: str = "") -> tuple[Tensor, Tensor]:
    """Return the entries that both masks keep, and those that the forward mask keeps."""
    check_tensors({"forward": forward, "backward": backward}, layer)
    both = torch.count_nonzero(forward & backward)
    forward_entries = torch.count_nonzero(forward)
    return both, forward_entries


def magnitude_sums(weight: Tensor, mask: Tensor, layer: str = "") -> tuple[Tensor, Tensor]:
    """Return the sum of kept and of all magnitudes, in float64."""
    check_tensors({"mask": mask}, layer, {"weight": weight})
    # A select and not a product: a pruned NaN does not count as kept.
    kept = torch.where(mask, weight.detach(), 0)
    return magnitude_sum(kept), magnitude_sum(weight)


def magnitude_sum(weight: Tensor) -> Tensor:
    """Return the sum of all magnitudes, in float64."""
    return weight.detach().abs().sum(dtype=torch.float64)


def gradient_energies(exact: Tensor, estimate: Tensor, layer: str = "") -> tuple[Tensor, Tensor]:
    """Return the sum of squares of the gradient and of the estimate's error, in float64."""
    check_tensors({}, layer, {"exact": exact, "estimate": estimate})
    wide = wide_dtype(exact, estimate)
    exact = exact.detach().to(wide)
    # In half precision the difference of close gradients would be rounded.
    estimate = estimate.detach().to(wide)
    error = estimate - exact
    return _energy(exact), _energy(error)


def _energy(x: Tensor) -> Tensor:
    """Return the sum of squares in float64."""
    # The norm converts as it reads: no copy of x in float64 is made.
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def check_tensors(
    masks: NamedTensors, layer: str = "", floating: NamedTensors | None = None
) -> None:
    """Refuse masks that are not bool, other tensors that are not floating, and different shapes, by their names."""
    where = f" of layer '{layer}'" if layer else ""  # a lone tensor has none
    for name, mask in masks.items():
        # Not even uint8: of other dtypes, & and ^ are not those of sets.
        if mask.dtype != torch.bool:
            raise TypeError(
                f"{name}{where} is {mask.dtype}, and a mask is a bool tensor: pass `{name} != 0`"
            )
    tensors = {**(floating or {}), **masks}
    first, *_ = tensors
    for name, tensor in tensors.items():
        if name not in masks and not tensor.is_floating_point():
            raise TypeError(f"{name}{where} is {tensor.dtype}: pass a tensor of a floating dtype")
        if tensor.shape != tensors[first].shape:
            raise ValueError(
                f"{first}{where} has shape {tuple(tensors[first].shape)} and {name} has shape {tuple(tensor.shape)}: "
                "pass one shape"
            )
