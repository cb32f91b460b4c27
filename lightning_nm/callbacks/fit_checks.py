"""What is refused or warned of in a fit: the Trainer, the data, masks that differ between processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelPruning,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import Rule
from lightning_nm.plugins.ddp import NMDDPStrategy
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.optimizer_step import is_frozen
from lightning_nm.training.phases import finished_phases, told_as_dense
from lightning_nm.training.ranks import compare_ranks, reduce_gradients
from lightning_nm.training.statistics import layers_short_of_tokens

CallbackT = TypeVar("CallbackT", bound=Callback)


def callbacks_of(trainer: Trainer, kind: type[CallbackT]) -> list[CallbackT]:
    """Return the Trainer's callbacks of a class.

    Example:
        >>> callbacks_of(Trainer(logger=False, accelerator="cpu"), ModelPruning)
        []
    """
    # The Trainer has the attribute, but no annotation of it.
    return [one for one in getattr(trainer, "callbacks", []) if isinstance(one, kind)]


def check_trainer(trainer: Trainer) -> None:
    """Refuse a Trainer of another package, and Lightning's own pruning next to ours.

    Raises:
        TypeError: If the Trainer is that of the package ``pytorch_lightning``.
        ValueError: If the Trainer has a ModelPruning callback.

    Example:
        >>> check_trainer(Trainer(logger=False, accelerator="cpu"))
    """
    if not isinstance(trainer, Trainer):
        # The two packages hold the same classes twice, so its hooks would not know ours.
        raise TypeError(
            f"NMSparsityCallback is made for lightning.pytorch, but this Trainer is {type(trainer).__module__}'s: "
            "import from `lightning.pytorch`, not from `pytorch_lightning`"
        )
    if callbacks_of(trainer, ModelPruning):
        raise ValueError(
            "ModelPruning and NMSparsityCallback in one Trainer would mask the same weights twice: remove one"
        )


def check_averaging_order(callback: Callback, trainer: Trainer) -> None:
    """Raise a ``ValueError`` if a WeightAveraging callback follows this one: its weights could not be masked."""
    # Lightning calls on_save_checkpoint in the callbacks' order: the average must be in the checkpoint already.
    callbacks = callbacks_of(trainer, Callback)
    for other in callbacks[callbacks.index(callback) + 1 :]:
        if isinstance(other, WeightAveraging):
            raise ValueError(
                f"{type(other).__name__} comes after NMSparsityCallback in the Trainer's callbacks, so its checkpoints "
                "would hold dense weights: put it before NMSparsityCallback"
            )


def refuse_unreadable(path: str | Path | None, error: Exception) -> None:
    """Say by a ``ValueError`` why a checkpoint cannot be read, where torch's own error does not name the file."""
    # Only here: most fits read no checkpoint.
    from lightning_nm.export.sources import file_fault

    # Distributed checkpoints are folders.
    fault = file_fault(Path(path)) if path and Path(path).is_file() else ""
    if fault:
        raise ValueError(f"cannot read '{path}': {fault}") from error


_LEFT_OUT = (
    "DistributedDataParallel does not average the gradients of {names}: they were frozen when it wrapped the model and "
    "are trained now, so that each process trains weights of its own. Freeze them later, in on_train_start, with the "
    "strategy 'ddp_find_unused_parameters_true'"
)


class ProcessConsistency:
    """Keeps masks, and the parameters that methods own, equal in all processes.

    It compares the masks of all processes, and averages the gradients of parameters that methods own. Masks are
    compared before the first backward pass after a mask update, since its collectives are the first that
    could depend on the masks. The Trainer's hooks decide when, so all processes do it together. It does nothing unless
    the strategy is a ``DDPStrategy`` or a ``ModelParallelStrategy``.

    ``every`` is the number of optimizer steps between two comparisons; 0 for none. With ``nm_ddp`` it is always 1,
    because its communication hook depends on the masks.

    Raises:
        ValueError: If a method owns parameters whose optimizer state the strategy cannot save.
    """

    def __init__(self, strategy: Strategy, sparsifier: NMSparsifier, every: int) -> None:
        self.sparsifier = sparsifier
        self.is_parallel = isinstance(strategy, (DDPStrategy, ModelParallelStrategy))
        self.every = every if self.is_parallel else 0
        self.statistics: list[str] = []
        """The names of what :meth:`after_batch` returns."""
        self.comm_hook = None
        if isinstance(strategy, NMDDPStrategy):
            self.comm_hook = strategy.comm_hook
            self.every = 1
            self.statistics = ["grad_bytes_ratio"]
        self._steps = 0  # of any optimizer, in this fit
        self._due = self.every > 0  # the first masks are compared, too
        # DistributedDataParallel, which wrapped the model before this fit started, leaves these out for good.
        self._left_out: list[NMLayer] = []
        self._said_left_out: list[str] = []
        selection = sparsifier.selection
        if isinstance(strategy, DDPStrategy):
            self._left_out = [
                layer
                for layer in (*selection.layers, *selection.frozen)
                if not layer.param.requires_grad and layer.spec.method.trains_weight
            ]
        # DCP saves optimizer states by the names of the model's parameters, and these have none.
        for layer in selection.layers if isinstance(strategy, ModelParallelStrategy) else ():
            if layer.parameters:
                raise ValueError(
                    f"{type(layer.spec.method).__name__} owns parameters at layer '{layer.name}', and distributed "
                    "checkpoints save no optimizer state of parameters that are not the model's: use the ddp or nm_ddp "
                    "strategy with this method"
                )

    def close(self) -> None:
        """End the fit: the communication hook sends full gradients again."""
        if self.comm_hook is not None:
            self.comm_hook.remove(self.sparsifier.layers.values())

    def before_backward(self) -> None:
        """Tell the communication hook of the layers, and compare the masks if a comparison is due."""
        # Not once for all: frozen layers are masked when they are unfrozen.
        if self.comm_hook is not None:
            self.comm_hook.add(self.sparsifier.selection.layers)
        # Weights that are trained now, and were frozen when DistributedDataParallel wrapped the model.
        trained = [layer for layer in self._left_out if layer.param.requires_grad]
        if trained:
            names = [layer.name for layer in trained]
            self._left_out = [layer for layer in self._left_out if layer not in trained]
            self._said_left_out += names
            rank_zero_warn(_LEFT_OUT.format(names=names))
        if self._due:
            self._due = False
            self._compare()

    def _compare(self) -> None:
        """Compare the masks of all processes, and say why they may differ."""
        try:
            compare_ranks(self.sparsifier.selection.layers)
        except RuntimeError as error:
            if not self._said_left_out:
                raise
            raise RuntimeError(
                f"{error}. The likely cause: {_LEFT_OUT.format(names=self._said_left_out)}"
            ) from error

    def after_backward(self, trainer: Trainer) -> None:
        """Average the gradients of parameters that methods own, in the micro-batches in which DDP synchronizes."""
        # DDP has this attribute; in other models every backward pass synchronizes.
        if self.is_parallel and getattr(trainer.model, "require_backward_grad_sync", True):
            reduce_gradients(self.sparsifier.selection.layers)

    def before_step(self) -> None:
        """Count an optimizer step, after which masks may be updated.

        The comparison waits for the next backward pass, because the masks change only when the batch ends.
        """
        self._steps += 1
        if self.every and self._steps % self.every == 0:
            self._due = True

    def after_batch(self) -> dict[str, float]:
        """Return the statistics of the step that this batch ended, if it did; call it once in each batch."""
        ratio = None if self.comm_hook is None else self.comm_hook.end_step()
        return {} if ratio is None else {"grad_bytes_ratio": ratio}

    def at_end(self) -> None:
        """Compare once more at the end of training, before rank 0 saves the model."""
        if self.every:
            self._compare()


def is_scheduled(rule: Rule) -> bool:
    """Return whether anything that a rule gives its layers starts or stops during training.

    Example:
        >>> from lightning_nm import BAME, SRSTE, NMPattern
        >>> [is_scheduled(Rule(None, NMPattern(2, 4), method)) for method in (BAME(), SRSTE())]
        [True, False]
    """
    if rule.schedule is not None:
        return True
    try:
        return bool(
            rule.method.schedule(None) or (rule.estimator and rule.estimator.schedule(None))
        )
    except ValueError:
        # The schedule is given as fractions of the training length, which is not known here.
        return True


def planned_steps(trainer: Trainer, pl_module: LightningModule) -> int | None:
    """Return the number of optimizer steps of the whole training; ``None`` if the Trainer does not know it."""
    if not pl_module.automatic_optimization:  # a batch takes any number of steps
        return None
    if getattr(trainer, "fast_dev_run", False):  # one step of a training of unknown length
        return 1 << 30
    if callbacks_of(trainer, GradientAccumulationScheduler):
        # Lightning cannot estimate the number of steps where they have different numbers of batches. -1 is its sign for
        # no limit of epochs: then max_steps alone ends the training.
        planned: float = trainer.max_steps if trainer.max_epochs == -1 else math.inf
    else:
        planned = trainer.estimated_stepping_batches
    # A training without end has -1 or infinitely many steps.
    return int(planned) if 0 < planned < math.inf else None


def warn_at_start(sparsifier: NMSparsifier, *, continues: bool) -> None:
    """Warn of layers that are not trained and, in a resumed training, of phases that ended before it."""
    # A new training has only just begun its phases.
    if continues:
        for phase in finished_phases(sparsifier.selection.layers):
            rank_zero_warn(
                f"{phase}; for another training with phases of its own, make a new callback"
            )
    if not sparsifier.layers:
        frozen = sparsifier.selection.frozen
        names = ", ".join(layer.name for layer in frozen[:8])
        if len(frozen) > 8:
            names += f" and {len(frozen) - 8} more"
        advice = (
            "Each is masked when it is unfrozen and in an optimizer; frozen='mask' masks them now"
        )
        if not any(layer.spec.method.trains_weight for layer in frozen):
            advice = (
                "Give an optimizer their weights, frozen or not: it trains what the method owns"
            )
        rank_zero_warn(f"no layer is masked yet: no optimizer trains {names}. {advice}")
    told = told_as_dense([*sparsifier.selection.layers, *sparsifier.selection.frozen])
    if told:
        rank_zero_warn(told)
    # Layers that `include` names are masked although they are frozen.
    unowned = sparsifier.training.unowned()
    if unowned:
        rank_zero_warn(
            f"no optimizer trains these masked layers, so their masks stand still: {unowned}"
        )


def warn_of_resume(trainer: Trainer, *, joined_at: int, is_resumed: bool) -> None:
    """Warn of a checkpoint of so many steps without masks, and of one from which the data do not continue."""
    if joined_at:
        rank_zero_warn(
            f"'{trainer.ckpt_path}' has no state of NMSparsityCallback: it is of a dense training, or of another "
            f"callback. Masks begin now, after its {joined_at} steps; load the weights alone for a training "
            "of its own"
        )
    if is_resumed and _data_begin_again(trainer):
        rank_zero_warn(
            "the checkpoint was saved within an epoch, and this DataLoader cannot resume there: the run goes on with "
            "other batches than an uninterrupted one. Use a loader with state_dict(), such as StatefulDataLoader of "
            "torchdata"
        )


def _data_begin_again(trainer: Trainer) -> bool:
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
    """Whether a loader draws the order of its data again each time that it begins, as shuffled ones do."""
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
    training = sparsifier.training
    least = {} if training.counter is None else training.counter.least
    for layers, text in (
        # The calls of modules are counted, so a GEMM that reads a module's weight otherwise is not seen.
        (
            training.unseen(),
            "these masked layers were not called in the first batch: {}. If other code reads their weights directly, "
            "it reads dense ones: name the layers in `exclude`",
        ),
        (
            [layer.name for layer in training.layers if layer.step and is_frozen(layer)],
            "these layers have trained before and are frozen now (requires_grad=False), so that nothing trains them "
            "and their masks stand still: {}. Callbacks such as BackboneFinetuning freeze them again when a run "
            "resumes: unfreeze them if that is not meant",
        ),
        (
            layers_short_of_tokens(training.layers, least),
            "the first batch had fewer tokens than one block of the gradient estimator, so nothing is gained: {}. Use "
            "larger batches, a smaller M, or a rule with `grad_estimator: null`",
        ),
    ):
        if layers:
            rank_zero_warn(text.format(layers))
