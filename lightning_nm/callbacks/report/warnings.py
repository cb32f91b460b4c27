"""Warnings of a fit in which masks do less than their user may expect."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn

from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.phases import finished_phases
from lightning_nm.training.start import told_as_dense


def warn_at_start(sparsifier: NMSparsifier, *, continues: bool) -> None:
    """Warn of layers that are not trained and, in a resumed training, of phases that ended before it."""
    # A new training has only just begun its phases.
    if continues:
        for phase in finished_phases(sparsifier.selection.layers):
            rank_zero_warn(
                f"{phase}; for another training with phases of its own, make a new callback"
            )
    if not sparsifier.layers:
        frozen = [layer.name for layer in sparsifier.selection.frozen]
        names = ", ".join(frozen[:8])
        if len(frozen) > 8:
            names += f" and {len(frozen) - 8} more"
        advice = (
            "Each is masked when it is unfrozen and in an optimizer; frozen='mask' masks them now"
        )
        if not any(layer.spec.method.trains_weight for layer in sparsifier.selection.frozen):
            advice = (
                "Give an optimizer their weights, frozen or not: it trains what the method owns"
            )
        rank_zero_warn(f"no layer is masked yet: no optimizer trains {names}. {advice}")
    if sparsifier.trained_dense:
        rank_zero_warn(told_as_dense(sparsifier.trained_dense))
    # Layers that `include` names are masked although they are frozen.
    if sparsifier.unowned:
        rank_zero_warn(
            f"no optimizer trains these masked layers, so their masks stand still: {sparsifier.unowned}"
        )


def warn_of_replaced(sparsifier: NMSparsifier) -> None:
    """Warn of layers whose module was replaced since the masks were chosen."""
    replaced = sparsifier.selection.replaced(sparsifier.model)
    if replaced:
        rank_zero_warn(
            f"these layers are no longer in the model, and what replaced them stays dense in this fit: {replaced}. "
            "Replace modules before the fit starts, for example in setup()"
        )


def warn_after_first_batch(sparsifier: NMSparsifier) -> None:
    """Warn of masked layers that the first batch did not call, or called with too few tokens for the estimator."""
    # The calls of modules are counted, so a product that reads a module's weight otherwise is not seen.
    if sparsifier.unseen:
        rank_zero_warn(
            f"these masked layers were not called in the first batch: {sparsifier.unseen}. If other code reads "
            "their weights directly, it reads dense ones: name the layers in `exclude`"
        )
    if sparsifier.short_of_tokens:
        rank_zero_warn(
            "the first batch had fewer tokens than one block of the gradient estimator, so nothing is gained: "
            f"{sparsifier.short_of_tokens}. Use larger batches, a smaller M, or a rule with `grad_estimator: null`"
        )
