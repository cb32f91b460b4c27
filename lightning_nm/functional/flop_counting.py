"""The one rule by which the multiply-adds of N:M training are counted.

A linear or convolutional layer has three GEMMs in a training step, each of F multiply-adds where it is dense: forward
``Y = X W^T``, dgrad ``dX = dY W`` (gradient of the input) and wgrad ``dW = dY^T X`` (gradient of the weight).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FlopsKind = Literal["arithmetic", "paper", "eligible"]
"""How the density of a GEMM is counted; the rule is the same, the :class:`GemmDensity` of a layer differs.

``"arithmetic"``: multiply-adds whose operand is nonzero and whose output is needed. ``"paper"``: the accounting of
the N:M papers. ``"eligible"``: GEMMs with an operand that is N:M along the contraction axis, which is what sparse
tensor cores need.
"""


@dataclass(frozen=True)
class GemmDensity:
    """Fraction of a layer's dense multiply-adds that each of its three training GEMMs still does; the default is dense.

    Args:
        forward: ``c_F`` of ``Y = X W^T``, in [0, 1].
        dgrad: ``c_D`` of ``dX = dY W``, in [0, 1].
        wgrad: ``c_G`` of ``dW = dY^T X``, in [0, 1].

    Raises:
        ValueError: If a fraction is not within [0, 1].

    Example:
        >>> GemmDensity(forward=0.5)
        GemmDensity(forward=0.5, dgrad=1.0, wgrad=1.0)
    """

    forward: float = 1.0
    dgrad: float = 1.0
    wgrad: float = 1.0

    def __post_init__(self) -> None:
        for name, fraction in vars(self).items():
            if not 0 <= fraction <= 1:
                raise ValueError(
                    f"{name}={fraction!r} is not a fraction of a dense GEMM: pass a number from 0 to 1"
                )


def train_flops(dense_forward: float, density: GemmDensity) -> float:
    """Count the multiply-adds of a training step of a linear or convolutional layer: ``F (c_F + c_D + c_G)``.

    Args:
        dense_forward: ``F``, those of the dense forward GEMM. Mask updates and permutations cost nothing, as in the
            papers.
        density: The fractions ``c_F``, ``c_D`` and ``c_G`` of the three GEMMs; dense training is ``3 F``.

    Raises:
        ValueError: If ``dense_forward`` is negative or not finite.

    Example:
        >>> train_flops(1000, GemmDensity(forward=0.5, dgrad=0.5))
        2000.0
    """
    if not 0 <= dense_forward < float("inf"):
        raise ValueError(
            f"dense_forward={dense_forward!r} does not count multiply-adds: pass a finite number from 0"
        )
    return dense_forward * (density.forward + density.dgrad + density.wgrad)


def train_flops_ratio(layers: Iterable[tuple[float, GemmDensity]]) -> float:
    r"""Divide the multiply-adds of a training step by those of dense training.

    .. math:: \frac{\sum F (c_F + c_D + c_G)}{\sum 3 F}

    Args:
        layers: ``F`` and the fractions of each layer, also of those that stay dense.

    Raises:
        ValueError: If the layers have no multiply-adds at all.

    Example:
        The factors of the papers' accounting at 2:4, 1:4 and 1:16, of SR-STE (Zhou et al., arXiv 2102.04010), which
        makes only the forward GEMM sparse, and of Bi-Mask (Zhang et al., arXiv 2302.06058), which adds dgrad::

        >>> densities = (2 / 4, 1 / 4, 1 / 16)
        >>> [f"{train_flops_ratio([(1.0, GemmDensity(r, 1, 1))]):.3f}" for r in densities]
        ['0.833', '0.750', '0.688']
        >>> [f"{train_flops_ratio([(1.0, GemmDensity(r, r, 1))]):.3f}" for r in densities]
        ['0.667', '0.500', '0.375']
    """
    sparse = dense = 0.0
    for dense_forward, density in layers:
        sparse += train_flops(dense_forward, density)
        dense += 3 * dense_forward  # forward, dgrad and wgrad have equally many
    if dense == 0:
        raise ValueError(
            "no multiply-adds to compare: pass at least one layer whose dense forward GEMM is not empty"
        )
    return sparse / dense
