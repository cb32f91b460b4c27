"""Warnings after the first batch."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn

from lightning_nm.sparsifier import NMSparsifier


def warn_after_first_batch(sparsifier: NMSparsifier) -> None:
    """Warn of masked layers that the first batch did not call, or called with too few tokens for the estimator.

    Args:
        sparsifier: The sparsifier, before its first :meth:`~lightning_nm.NMSparsifier.step`.
    """
    if sparsifier.unseen:
        rank_zero_warn(
            f"these masked layers were not called in the first batch: {sparsifier.unseen}. If other code reads "
            "their weights directly, it reads dense ones: name the layers in `exclude`"
        )
    if sparsifier.short_of_tokens:
        rank_zero_warn(
            "the first batch had fewer tokens than one block of the gradient estimator, so it is padded with "
            f"zeros and nothing is gained: {sparsifier.short_of_tokens}. Use larger batches, a smaller M for "
            "the gradients, or a rule with `grad_estimator: null` for these layers"
        )
