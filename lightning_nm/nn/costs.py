"""Which of a layer's three GEMMs are sparse, and their multiply-adds relative to dense ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from lightning_nm.functional import FlopsKind, GemmDensity
from lightning_nm.pattern import NMPattern

if TYPE_CHECKING:  # for the types only
    from lightning_nm.nn.layer import NMLayer


GemmKind = Literal["n:m", "masked", "outputs", "dense", "none"]
"""``"n:m"``: an operand is N:M along the contraction axis. ``"masked"``: an operand has zeros, but not along that axis.
``"outputs"``: the result is needed at kept entries alone. ``"none"``: the wgrad of a frozen weight, which neither this
training nor the dense one runs; it counts as dense."""


class Gemm(NamedTuple):
    """One GEMM, and its multiply-adds relative to the dense GEMM counted in three ways.

    Args:
        kind: What its sparse operand is.
        pattern: The pattern along the contraction axis where the kind is ``"n:m"``, else ``None``.
        reason: Why, in a few words; empty when there is nothing to explain.
        arithmetic: Fraction of multiply-adds whose operand is nonzero and whose output is needed.
        paper: Fraction counted as the N:M training papers count it.
        eligible: Fraction that N:M hardware would execute.
    """

    kind: GemmKind = "dense"
    pattern: NMPattern | None = None
    reason: str = ""
    arithmetic: float = 1.0
    paper: float = 1.0
    eligible: float = 1.0

    @classmethod
    def sparse(cls, pattern: NMPattern, arithmetic: float | None = None) -> Gemm:
        """A GEMM whose operand is N:M along the contraction axis; ``arithmetic``: its fraction of nonzeros, if less."""
        density = pattern.n / pattern.m
        return cls(
            kind="n:m",
            pattern=pattern,
            arithmetic=density if arithmetic is None else arithmetic,
            paper=density,
            eligible=density,
        )

    @property
    def label(self) -> str:
        """The kind for tables: the pattern, ``"masked"``, ``"none"``, or else ``"dense"``."""
        if self.pattern is not None:
            return str(self.pattern)
        # Where outputs are sparse both operands are dense: N:M hardware gains nothing.
        return "dense" if self.kind == "outputs" else self.kind


class Gemms(NamedTuple):
    """The three GEMMs of a layer: ``Y = X W_F^T``, ``dX = dY W_B`` and ``dW = E(dY)^T X``."""

    forward: Gemm
    dgrad: Gemm
    wgrad: Gemm

    def densities(self) -> dict[FlopsKind, GemmDensity]:
        """The fractions of the three GEMMs, in each counting."""
        return {
            kind: GemmDensity(*(getattr(gemm, kind) for gemm in self))
            for kind in get_args(FlopsKind)
        }


_SOFT = "other values than W_F while it trains"


def _forward(layer: NMLayer) -> Gemm:
    spec = layer.spec
    # Nothing is known of the zeros in the weights of such a method: they count as dense.
    if not spec.method.uses_masks:
        return Gemm()
    if not layer.masks.has_forward:
        return Gemm(reason=spec.forward_reason or "dense phase")
    if spec.method.has_training_weight:
        return Gemm(reason=_SOFT)
    pattern = spec.method.current_pattern(layer)
    if pattern is None:
        return _of_kept(layer, "masked", "not N:M yet")
    return Gemm.sparse(pattern)


def _of_kept(layer: NMLayer, kind: GemmKind, reason: str) -> Gemm:
    """A GEMM that is counted by the entries that the forward mask keeps, but is not N:M along the contraction axis."""
    density = kept_share(layer)
    paper = density if layer.spec.method.paper_counts_masked else 1.0
    # `eligible` stays 1: zeros that are not N:M along the contraction axis speed up no N:M hardware.
    return Gemm(kind, reason=reason, arithmetic=density, paper=paper)


def kept_share(layer: NMLayer) -> float:
    """The fraction of entries that the forward mask keeps: that of the pattern, or measured where there is none now."""
    pattern = layer.spec.method.current_pattern(layer)
    return layer.masks.density if pattern is None else pattern.density


def _dgrad(layer: NMLayer) -> Gemm:
    spec = layer.spec
    masks = layer.masks
    method = spec.method
    pattern = method.current_pattern(layer)
    if layer.draws_backward:
        kept = kept_share(layer) if masks.has_forward else 1.0
        # The draw has the layer's own pattern, also while masks narrow to it.
        return Gemm.sparse(spec.pattern, drawn_density(spec.pattern, kept))
    if not method.uses_masks:
        # The reason is of interest only where dgrad would be N:M without it.
        return Gemm(reason="" if spec.dgrad is None else spec.dgrad_reason)
    if masks.has_backward and pattern is not None:
        # A backward mask within the forward one keeps fewer than N in some blocks. Until that is measured, it counts by
        # the pattern.
        return Gemm.sparse(pattern, masks.backward_density)
    if not masks.has_forward:
        return Gemm(reason=spec.dgrad_reason)
    if method.has_training_weight:
        return Gemm(reason=_SOFT)
    if method.transposable and pattern is not None and not spec.dgrad_reason:
        return Gemm.sparse(pattern)
    return _of_kept(layer, "masked", spec.dgrad_reason or "not N:M along out")


def drawn_density(pattern: NMPattern, kept: float) -> float:
    r"""The expected fraction of nonzeros in a draw of W_B: :math:`\mathbb{E}[\min(K, N)] / M` for binomial K.

    A block of M rows of one column has K nonzeros, of which a draw keeps at most N. The rows of a forward mask are
    taken as independent.

    Args:
        pattern: N:M, along `out`.
        kept: The fraction of entries that the forward mask keeps.

    Example:
        >>> drawn_density(NMPattern(2, 4), kept=1.0), drawn_density(NMPattern(2, 4), kept=0.5)
        (0.5, 0.40625)
    """
    expected = 0.0
    for count in range(pattern.m + 1):
        # The forward mask keeps `count` of the M entries of a block.
        chance = math.comb(pattern.m, count) * kept**count * (1 - kept) ** (pattern.m - count)
        expected += chance * min(count, pattern.n)
    return expected / pattern.m


def _wgrad(layer: NMLayer) -> Gemm:
    # Parameters of the method get their gradients by that of the weight.
    if not layer.param.requires_grad and not layer.parameters:
        return Gemm("none", reason="frozen, so no weight gradient")
    method = layer.spec.method
    estimator = layer.spec.estimator
    # What the GEMM is with dY itself.
    exact = Gemm()
    is_masked = method.uses_masks and layer.masks.has_forward
    if is_masked and not method.gradient_at_pruned(layer):
        exact = _of_kept(layer, "outputs", "dW at kept entries alone")
    if estimator is None:
        return exact
    if not layer.progress.estimating:
        reason = f"dense phase; {exact.reason}" if exact.reason else "dense phase"
        return exact._replace(reason=reason)
    pattern = estimator.pattern_of(layer)
    # An estimator without blocks leaves a dense GEMM, with other values.
    estimated = Gemm() if pattern is None else Gemm.sparse(pattern)
    # The estimate leaves out terms of each sum, and sparse outputs leave out whole sums: what is left of the arithmetic
    # multiplies. The count of the papers is the smaller of the two fractions.
    return estimated._replace(
        arithmetic=estimated.arithmetic * exact.arithmetic,
        paper=min(estimated.paper, exact.paper),
    )


def find_gemms(layer: NMLayer) -> Gemms:
    """What the GEMMs of a layer do now."""
    return Gemms(_forward(layer), _dgrad(layer), _wgrad(layer))


def mean_densities(layer: NMLayer) -> dict[FlopsKind, GemmDensity]:
    """What the GEMMs of a layer cost on average over the steps so far; now if there were none."""
    counted = layer.costs.counted
    if not counted:
        return layer.gemms().densities()
    return {
        kind: GemmDensity(*(total / counted for total in sums))
        for kind, sums in layer.costs.spent.items()
    }
