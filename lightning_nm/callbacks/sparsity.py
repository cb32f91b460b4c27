"""NMSparsityCallback: N:M sparse training of an unchanged LightningModule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from rich.console import Console
from torch.optim import Optimizer

from lightning_nm.callbacks.checks import (
    ProcessConsistency,
    check_trainer,
    is_scheduled,
    planned_steps,
    warn_after_first_batch,
    warn_at_start,
    warn_of_replaced,
    warn_of_resume,
)
from lightning_nm.callbacks.monitor import NOT_THE_DEFAULT, MaskMonitor
from lightning_nm.callbacks.state import (
    Lifecycle,
    Origin,
    Phase,
    SavedSparsity,
    check_averaging_order,
)
from lightning_nm.callbacks.tables import (
    log_hyperparameters,
    print_kernels,
    print_layers,
    print_summary,
    router_of,
)
from lightning_nm.config import SparsityConfig, chosen_config, refuse_unknown
from lightning_nm.estimators import GradientEstimator
from lightning_nm.methods import Method
from lightning_nm.nn.layer import NMLayer
from lightning_nm.pattern import PatternLike
from lightning_nm.schedule import UnknownLength
from lightning_nm.short_names import EstimatorName, MethodName
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.spelling import not_given
from lightning_nm.training.comm_hook import CommHookState


class NMSparsityCallback(SavedSparsity):
    """Trains the weights of any LightningModule N:M sparse.

    Masks are installed when fit starts and are updated after each batch whose optimizer made a step. While they are
    installed, ``state_dict()`` of the model returns the sparse weights under the model's own keys, so every checkpoint
    holds the sparse model and loads without this callback. The callback's own state holds what training needs beyond
    that, so a run resumes exactly. After fit, the parameters are the sparse weights and the modules are ordinary ones.

    A :class:`~lightning_nm.MaskMonitor` logs statistics such as ``nm/density`` and ``nm/flip_rate`` at the Trainer's
    logging interval, see docs/tensorboard.md.

    Args:
        pattern: The N:M pattern: ``"2:4"``, ``{n: 2, m: 4}``, or the integer that YAML makes of an unquoted 2:4.
        method: The short name of a method, such as ``bi-mask``, ``sr-ste``, ``bame`` or ``asp``, or a :class:`Method`
            by ``class_path``; docs/which-method.md has all of them.
        grad_estimator: ``mvue``, ``approx-mvue``, ``top-n``, or a :class:`GradientEstimator` by ``class_path``, which
            replaces the output gradient dY in the weight-gradient GEMM; ``None`` keeps dY.
        config: All settings as one object, instead of the other ones.
        log_layers: Let the default monitor also log every statistic per layer, as ``nm/<statistic>/<layer>``.
        compare_ranks_every: Under a DDPStrategy or a ModelParallelStrategy, optimizer steps between two comparisons of
            all processes' masks, by one all-reduce of two numbers; 0 for none. A difference ends the fit in all
            processes, with the layer's name. The strategy ``nm_ddp`` compares before every step.
        show_tables: Print the table of layers before training and the summary after it.
        monitor: The :class:`~lightning_nm.MaskMonitor` to use; ``True`` for the one among the Trainer's callbacks, or
            else one with default settings; ``False`` or ``None`` for none.
        name: Distinguishes several of these callbacks of one Trainer in the checkpoint.
        options: The other settings of :class:`~lightning_nm.SparsityConfig` by name, such as ``include``, ``rules`` and
            ``preset``.

    Raises:
        ValueError: For a bad argument, at once; for layers that cannot be masked, when fit starts and before anything
            is changed.

    Example::

        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[NMSparsityCallback("2:4")], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        pattern: PatternLike = "2:4",
        method: MethodName | Method = "bi-mask",
        grad_estimator: EstimatorName | GradientEstimator | None = None,
        *,
        config: SparsityConfig | None = None,
        log_layers: bool = False,
        compare_ranks_every: int = 1,
        show_tables: bool = True,
        name: str | None = None,
        monitor: bool | MaskMonitor | None = True,
        **options: Any,
    ) -> None:
        refuse_unknown(options, NMSparsityCallback)
        given = SparsityConfig(
            pattern=pattern, method=method, grad_estimator=grad_estimator, **options
        )
        self.config = chosen_config(config, given)
        if not isinstance(compare_ranks_every, int) or compare_ranks_every < 0:
            raise ValueError(
                f"compare_ranks_every={compare_ranks_every} must be a number of steps, or 0 for never"
            )
        if not isinstance(monitor, (bool, MaskMonitor, type(None))):
            raise TypeError(f"monitor must be True, False or a MaskMonitor{not_given(monitor)}")
        if log_layers and monitor is not True:
            raise ValueError(NOT_THE_DEFAULT)
        self.log_layers = log_layers
        self.compare_ranks_every = compare_ranks_every
        self.show_tables = show_tables
        self.name = name
        self.monitor = monitor
        self.sparsifier: NMSparsifier | None = None
        """The sparsifier of the current fit; ``None`` outside fit."""
        self._lifecycle = Lifecycle()
        self._monitor: MaskMonitor | None = None  # what `monitor` stands for in the current fit
        self._consistency: ProcessConsistency | None = None  # None if a single process trains
        self._finished_layers: dict[str, NMLayer] = {}  # of the last fit, after it
        # What products the masked layers had in the batches so far, see _kind_of_window().
        self._seen_kinds: set[Hashable] = set()
        self._trainer: Callable[[], pl.Trainer | None] = _none  # of the current fit
        self._said_left_out = False
        self._stepped_late = False  # whether a step after a batch's end was ended before this batch
        self._last_step: int | None = (
            None  # the Trainer's count of steps at the end of its plan, if that matters
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(config={self.config})"

    # Lightning calls the hooks of a fit in this order, and so are the methods below; SavedSparsity has those of
    # checkpoints.
    #
    #   setup                       no optimizers yet
    #   on_load_checkpoint, load_state_dict     (with FSDP and ModelParallelStrategy only after on_fit_start)
    #   on_fit_start                the model is wrapped and on its device, and optimizers exist
    #   sanity validation
    #   on_train_start              the optimizers' states are restored
    #     on_train_epoch_start
    #       on_train_batch_start
    #       forward pass
    #       on_before_backward
    #       backward pass
    #       on_after_backward
    #       on_before_optimizer_step    (not in a batch that only accumulates gradients)
    #       clipping, optimizer.step()
    #       on_train_batch_end
    #   on_train_end
    #   on_fit_end                  the strategy has moved the model to the CPU
    #   teardown
    #
    # After an exception on_exception is called instead of the last three.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a Trainer of the package ``pytorch_lightning``, and Lightning's own pruning beside this one."""
        # This comes first in fit, validate, test and predict, before a checkpoint is read. What an earlier call of the
        # Trainer has read does not count.
        self._lifecycle.steps_before = 0
        check_trainer(trainer)
        self._read_checkpoint = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the masks, new or as saved."""
        # This is the first hook in which optimizers exist, which tell the trained weights from frozen ones. The
        # sanity validation, which follows, sees the sparse model already.
        if self.sparsifier is not None:
            is_same_fit = self.sparsifier.model is pl_module and self._trainer() is trainer
            if is_same_fit and self._lifecycle.phase is not Phase.INTERRUPTED:
                return  # its masks are there
            # An exception kept the last fit from ending. In a search Lightning does not even tell of it.
            self._finish()
        check_averaging_order(self, trainer)
        self._lifecycle.begin_fit()
        self._trainer = weakref.ref(trainer)
        self._finished_layers = {}
        self._monitor = MaskMonitor.chosen(self.monitor, trainer, self.log_layers)
        self._install(trainer, pl_module)
        log_hyperparameters(trainer, self._installed(), self.name)

    def _install(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mask the layers, and start all that works with them; after an error the model is as before."""
        sparsifier = self._attach(trainer, pl_module)
        # Restoring clears the lifecycle's state. The monitor needs a part of it, and after an error the next fit all.
        carried = self._lifecycle.state
        try:
            sparsifier = self._restore(sparsifier, trainer, pl_module)
            for optimizer in trainer.optimizers:
                sparsifier.register(optimizer)
            self._consistency = ProcessConsistency.create(
                trainer, sparsifier, self.compare_ranks_every
            )
            if self._monitor is not None:
                # The heat maps of a state that did not fit the model are not continued.
                history = None if self._lifecycle.is_new else (carried or {}).get("history")
                also = ["grad_bytes_ratio"] if self._comm_hook is not None else []
                self._monitor.start(sparsifier, also, self.name, history)
        except BaseException:  # KeyboardInterrupt, too, must not leave masks behind
            if self._lifecycle.give_back(carried):
                sparsifier.bake()  # the model had these weights; the state has the values behind its masks
            sparsifier.detach()
            raise
        self.sparsifier = sparsifier
        self._seen_kinds = {_kind_of_window(sparsifier)}
        self._lifecycle.phase = Phase.INSTALLED

    def _attach(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> NMSparsifier:
        """Return a sparsifier with its first masks installed."""
        # Processes that see the same part of a batch, as in tensor parallelism, must draw the same random numbers.
        sampler_arguments = trainer.distributed_sampler_kwargs or {}
        data_rank = sampler_arguments.get("rank")
        sparsifier = NMSparsifier(pl_module, config=self.config, data_rank=data_rank, managed=True)
        sparsifier.training.is_suspended = lambda: self._is_left_out(trainer)
        self._last_step = None
        if _any_schedule(sparsifier):
            sparsifier.planned_steps = self._planned_steps(trainer, pl_module)
        try:
            return sparsifier.attach(self._lifecycle.state, trainer.optimizers)
        except UnknownLength as error:
            if pl_module.automatic_optimization:
                why = "the training is endless, its data have no length, or gradient accumulation changes"
                raise ValueError(f"{error}, or give the Trainer max_steps: {why}") from error
            raise ValueError(
                f"{error}. Under manual optimization the Trainer knows none"
            ) from error

    def _is_left_out(self, trainer: pl.Trainer) -> bool:
        """Whether the Trainer trains without this callback now, as lr_find and the batch-size finder do in mid-fit."""
        # They save a checkpoint, take all callbacks away, train, and restore callbacks and checkpoint: masks and latent
        # weights come back with it.
        if self in trainer.callbacks:  # type: ignore[attr-defined]
            return False
        if not self._said_left_out:
            self._said_left_out = True
            rank_zero_info(
                "NMSparsityCallback: a search trains without the callbacks now, under the present masks. Its steps "
                "count for nothing: masks stand still, and methods add nothing, such as decay. The weights come back "
                "after it."
            )
        return True

    def _planned_steps(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> int | None:
        """The optimizer steps of the training on this callback's own clock; ``None`` if the Trainer does not know."""
        planned = planned_steps(trainer, pl_module)
        self._last_step = planned
        # The clock starts where this callback joins the run: it does not count the steps before.
        if planned is not None and self._lifecycle.is_new:
            planned -= self._lifecycle.steps_before
        return planned

    def _restore(
        self, sparsifier: NMSparsifier, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> NMSparsifier:
        """Load the saved state if there is one; return the sparsifier, or a new one if the state may be dropped."""
        if self._lifecycle.state is None:
            return sparsifier
        try:
            sparsifier.load_state_dict(self._lifecycle.state)
        except ValueError as error:
            # A resumed checkpoint has to fit. A second fit may be of another model, which starts anew.
            if self._lifecycle.origin is Origin.CHECKPOINT:
                raise
            rank_zero_warn(
                f"NMSparsityCallback starts anew instead of continuing its last fit: {error}"
            )
            self._lifecycle.start_anew()
            # The state has decided on the selected layers and their masks, so they are chosen again.
            sparsifier.detach()
            return self._attach(trainer, pl_module)
        self._lifecycle.restored(self._lifecycle.state)
        return sparsifier

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the table of layers, and register optimizers that were replaced since fit started."""
        sparsifier = self._installed()
        sparsifier.training.follow(trainer.optimizers)
        # Not in on_fit_start: the Trainer loads the state of optimizers after it.
        sparsifier.training.check_optimizer_states()
        # The checkpoint was saved within a batch, perhaps after the optimizer's step: its masks are due for an update,
        # and the random numbers of that batch are used. This ends the batch; in a new fit none is open.
        if self._lifecycle.batch_open:
            sparsifier.step()
        self._lifecycle.batch_open = False
        # Not earlier: some strategies load the state only after on_fit_start, and with it more layers may be masked.
        warn_at_start(sparsifier, continues=not self._lifecycle.is_new)
        warn_of_resume(trainer, self._lifecycle)
        if self.show_tables:
            rank_zero_only(print_layers)(sparsifier)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notice modules that were replaced."""
        # Once in an epoch, since it walks over all modules.
        warn_of_replaced(self._installed())

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Mask layers that were unfrozen since the last batch, by optimizers that may have been replaced."""
        # Callbacks such as BaseFinetuning unfreeze layers when an epoch starts. Here they are masked before the first
        # forward pass in which they are trained.
        self._end_pending_step()
        sparsifier = self._installed()
        sparsifier.training.follow(trainer.optimizers)
        sparsifier.mask_unfrozen()
        kind = _kind_of_window(sparsifier)
        if kind in self._seen_kinds:
            return
        self._seen_kinds.add(kind)
        router = router_of(trainer)
        if router is not None:
            router.tune_again()  # products of new layers, patterns and gradients are not measured yet

    def _end_pending_step(self) -> None:
        """Update the masks if an optimizer stepped after the end of the last batch.

        With manual optimization the module may step in its own ``on_train_batch_end``, which follows the callbacks'.
        """
        sparsifier = self._installed()
        if sparsifier.training.stepped:
            sparsifier.step()
            self._lifecycle.batch_open = False
            self._stepped_late = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let a validation within a fit see the masks of the last step."""
        # A sanity validation comes before the resumed step is ended; Trainer.validate() has no masks.
        if self.sparsifier is not None and self._lifecycle.phase is Phase.TRAINING:
            self._end_pending_step()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the checkpoint of an epoch, and the end of the training, have the masks of the last step."""
        self._end_pending_step()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any
    ) -> None:
        """Open the batch, and compare the masks of all processes if that is due."""
        # DDP sends gradients during the backward pass, so this is the last moment at which differing masks do no harm.
        self._lifecycle.batch_open = True
        if self._consistency is not None:
            self._consistency.before_backward()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Average the gradients of parameters that methods own, before they are unscaled."""
        # DDP has averaged those of the model's own parameters. Before unscaling, since the gradient scaler looks for
        # infinities then, and must find the same ones in all processes.
        if self._consistency is not None:
            self._consistency.after_backward(trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the methods change the complete gradients, before clipping."""
        # Lightning calls this once per step, with the gradients of all accumulated batches, and clips them afterwards,
        # with what methods add here.
        sparsifier = self._installed()
        if self._consistency is not None:
            self._consistency.before_step()
        sparsifier.register(optimizer)  # it may have been replaced during training

        # With float16 the gradient scaler has divided the gradients by the loss scale, except for fused optimizers,
        # which do so within their step.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        loss_scale = 1.0
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            loss_scale = scaler.get_scale()
        sparsifier.before_step(optimizer, loss_scale)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Update the masks if an optimizer stepped, and call the monitor."""
        # Every batch comes here, also one that only accumulates gradients: estimators draw new random numbers for each.
        # ModelCheckpoint comes after all other callbacks, so it saves the updated masks.
        sparsifier = self._installed()
        if self._lifecycle.phase is Phase.INSTALLED:
            # Not earlier: the first batch may unfreeze layers.
            warn_after_first_batch(sparsifier)
        stepped = sparsifier.step() or self._stepped_late
        self._stepped_late = False
        # The Trainer counts the steps that a gradient scaler skips, too: its plan may end before the sparsifier's.
        if self._last_step is not None and trainer.global_step >= self._last_step:
            sparsifier.finish()
        self._lifecycle.end_batch()
        # The hook counts the bytes of a step, whether somebody reads them or not.
        bytes_ratio = None if self._comm_hook is None else self._comm_hook.end_step()
        if self._monitor is not None:
            also = {} if bytes_ratio is None else {"grad_bytes_ratio": bytes_ratio}
            self._monitor.watch(trainer, pl_module, sparsifier, stepped, also)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the masks of all processes a last time."""
        # ModelCheckpoint, which comes after this callback, may save once more: it must not save differing masks.
        if self._consistency is not None:
            self._consistency.at_end()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the summary, and let the monitor write it."""
        if self._monitor is not None:
            self._monitor.finish(trainer, self._installed())
        if not self.show_tables:
            return
        # All processes compute it: statistics of sharded weights need all of them.
        console = Console(quiet=not trainer.is_global_zero)
        print_summary(self._installed(), trainer, console)
        router = router_of(trainer)
        if router is not None and (router.used() or router.unavailable_reason):
            rank_zero_only(print_kernels)(router)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore ordinary modules, which hold the sparse weights."""
        # The last hook of a fit: the model's own on_fit_end still sees the masks. After evaluation there are none.
        self._finish()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Remove the masks as after a fit, so that the model can be saved and training can continue.

        Sharded weights keep them until the next fit, because removing them takes all processes.
        """
        # Lightning calls no teardown after an exception. The error may be of this process alone, so nothing here may
        # wait for the others.
        layers = [] if self.sparsifier is None else self.sparsifier.selection.layers
        any_sharded = any(layer.view.is_sharded for layer in layers)
        if any_sharded and self._has_trained(layers):
            self._lifecycle.phase = Phase.INTERRUPTED
        else:
            self._finish()
        self.refuse_unreadable(trainer, exception)

    def _has_trained(self, layers: Sequence[NMLayer]) -> bool:
        """Whether there is a training to continue: a resumed one, or at least one optimizer step."""
        # The clock also counts steps in which all masked layers were frozen.
        has_stepped = self._installed().clock > 0 or any(layer.step for layer in layers)
        return not self._lifecycle.is_new or has_stepped

    def _finish(self) -> None:
        """End the fit: remove the masks, and keep the state for a next fit. Does nothing outside fit."""
        sparsifier = self.sparsifier
        if sparsifier is None:
            return
        if not self._has_trained(sparsifier.selection.layers):
            self._stop_helpers(sparsifier)
            self._lifecycle.end(None)
            sparsifier.detach()  # the model keeps its dense weights
            return
        # Before the helpers stop, since it holds the monitor's history, and before the pruned entries are lost.
        state = self.state_dict()
        self._stop_helpers(sparsifier)
        self._lifecycle.end(state)
        sparsifier.bake()
        sparsifier.detach(keep_parameters=True)  # trainer.save_checkpoint() may follow
        self._finished_layers = sparsifier.layers  # averages may be saved after fit, too

    def _stop_helpers(self, sparsifier: NMSparsifier) -> None:
        """Leave the fit: from here on :meth:`state_dict` returns the state that the lifecycle keeps."""
        self.sparsifier = None
        if self._monitor is not None:
            self._monitor.stop(sparsifier)
        if self._consistency is not None:
            self._consistency.close()
            self._consistency = None

    @property
    def _comm_hook(self) -> CommHookState | None:
        """The communication hook of the strategy ``nm_ddp``, which counts the bytes that it sends."""
        return None if self._consistency is None else self._consistency.comm_hook

    def _installed(self) -> NMSparsifier:
        """The sparsifier of the current fit."""
        if self.sparsifier is None:
            raise RuntimeError(
                "NMSparsityCallback is not installed: its on_fit_start was not called for this fit"
            )
        return self.sparsifier


def _none() -> None:
    return None


def _kind_of_window(sparsifier: NMSparsifier) -> Hashable:
    """What decides which products the masked layers have until the next step.

    Methods may alternate between a few kinds, as with a dense weight gradient in every second step.
    """
    return tuple(
        (layer.progress.stage, layer.progress.dense_gradient, layer.progress.estimating)
        for layer in sparsifier.layers.values()
    )


def _any_schedule(sparsifier: NMSparsifier) -> bool:
    """Whether a method or an estimator starts or stops during training: only then the planned length matters."""
    return any(is_scheduled(rule) for rule in sparsifier.settings.rules)
