"""Warnings of a fit in which masks do less than their user may expect."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_nm.callbacks.lifecycle import Lifecycle, Origin
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


def warn_of_resume(trainer: pl.Trainer, lifecycle: Lifecycle) -> None:
    """Warn of a checkpoint without masks, and of one from which the data do not go on where they were."""
    path = trainer.ckpt_path
    if lifecycle.is_new and lifecycle.steps_before:
        rank_zero_warn(
            f"'{path}' has no state of NMSparsityCallback: it is of a dense training, or of another callback. Masks "
            f"begin now, after its {lifecycle.steps_before} steps; load the weights alone for a training of its own"
        )
    if lifecycle.origin is Origin.CHECKPOINT and _data_begin_again(trainer):
        rank_zero_warn(
            "the checkpoint was saved within an epoch, and this DataLoader cannot resume there: the run goes on with "
            "other batches than an uninterrupted one. Use a loader with state_dict(), such as StatefulDataLoader of "
            "torchdata"
        )


def _data_begin_again(trainer: pl.Trainer) -> bool:
    """Whether a resumed epoch reads other batches than the interrupted one would have."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    loaders = tree_leaves(trainer.train_dataloader)
    if progress.current.ready >= trainer.num_training_batches or progress.is_last_batch:
        if progress.current.completed == progress.current.ready:
            return False  # saved at the end of the epoch
        # All batches were read. Their loader begins once more, to find that, and a sampler draws another order then.
        loaders = [loader for loader in loaders if _draws_an_order(loader)]
    return any(not hasattr(loader, "load_state_dict") for loader in loaders)


def _draws_an_order(loader: Any) -> bool:
    """Whether a loader draws the order of its data anew each time that it begins, as shuffled ones do."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # DistributedSampler draws by the number of the epoch alone.
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return not isinstance(sampler, (SequentialSampler, DistributedSampler))


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
    if sparsifier.frozen_again:
        rank_zero_warn(
            "these layers have trained before and are frozen now (requires_grad=False), so that nothing trains them "
            f"and their masks stand still: {sparsifier.frozen_again}. Callbacks such as BackboneFinetuning freeze them "
            "again when a run resumes: unfreeze them if that is not meant"
        )
    if sparsifier.short_of_tokens:
        rank_zero_warn(
            "the first batch had fewer tokens than one block of the gradient estimator, so nothing is gained: "
            f"{sparsifier.short_of_tokens}. Use larger batches, a smaller M, or a rule with `grad_estimator: null`"
        )
