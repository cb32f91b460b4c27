"""NMSparsityCallback: N:M sparse training of an unchanged LightningModule."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from rich.console import Console
from torch.optim import Optimizer

from lightning_nm.callbacks.fit_checks import (
    ProcessConsistency,
    check_averaging_order,
    check_trainer,
    is_scheduled,
    planned_steps,
    refuse_unreadable,
    warn_after_first_batch,
    warn_at_start,
    warn_of_replaced,
    warn_of_resume,
)
from lightning_nm.callbacks.monitor import NOT_THE_DEFAULT, MaskMonitor, Watch
from lightning_nm.callbacks.saved_state import Lifecycle, Origin, mask_average, restore_average
from lightning_nm.callbacks.tables import (
    log_hyperparameters,
    print_kernels,
    print_layers,
    print_summary,
    router_of,
)
from lightning_nm.config import SparsityConfig, chosen_config
from lightning_nm.estimators import GradientEstimator
from lightning_nm.methods import Method
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.state import State
from lightning_nm.pattern import PatternLike
from lightning_nm.schedule import UnknownLength
from lightning_nm.short_names import EstimatorName, MethodName
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.spelling import check_interval, not_given
from lightning_nm.training.checkpoint import check_schema


class NMSparsityCallback(Callback):
    """Trains the weights of any LightningModule N:M sparse.

    Masks are installed when fit starts and are updated after each batch whose optimizer made a step. While they are
    installed, ``state_dict()`` of the model returns the sparse weights under the model's own keys, so every checkpoint
    holds the sparse model and loads without this callback. The callback's own state holds what training needs beyond
    that, so a run resumes exactly. After fit, the parameters are the sparse weights and the modules are ordinary ones.

    A :class:`~lightning_nm.MaskMonitor` logs statistics such as ``nm/density`` and ``nm/flip_rate`` at the Trainer's
    logging interval, see docs/tensorboard.md.

    Args:
        pattern: The N:M pattern: ``"2:4"``, ``{n: 2, m: 4}``, or the integer that YAML makes of an unquoted 2:4.
        method: The short name of a method, such as ``bame``, which needs a known number of steps, ``asp``, ``sr-ste``
            or ``bi-mask``, or a :class:`Method` by ``class_path``; docs/which-method.md has all of them.
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
        method: MethodName | Method = "bame",
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
        self.config = chosen_config(
            NMSparsityCallback,
            config,
            pattern=pattern,
            method=method,
            grad_estimator=grad_estimator,
            **options,
        )
        check_interval("compare_ranks_every", compare_ranks_every)
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
        # Of the current fit:
        self._trainer: weakref.ref[Trainer] | None = None
        self._watch: Watch | None = None  # what the monitor logs
        self._consistency: ProcessConsistency
        # Of accumulation windows, see on_train_batch_start().
        self._tuned_kinds: set[Hashable] = set()
        self._last_step: int | None = None  # of the Trainer's plan, where that matters
        self._stepped_late = False  # whether a step after the last batch's end was ended
        self._said_left_out = False
        self._read_checkpoint = False  # whether this call of the Trainer has read one
        # Of the last fit, after it:
        self._finished_layers: dict[str, NMLayer] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(config={self.config})"

    # Lightning calls the hooks of a fit in this order, and so are the methods below.
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
    # After an exception on_exception is called instead of the last three. A checkpoint may be saved at any time: first
    # the model's state_dict(), in which masked layers put their sparse weights, then state_dict() of every callback,
    # then on_save_checkpoint() of every callback.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer of the package ``pytorch_lightning``, and Lightning's own pruning next to this one."""
        # This comes first in fit, validate, test and predict, before a checkpoint is read. What an earlier call of the
        # Trainer has read does not count.
        self._lifecycle.steps_before = 0
        self._read_checkpoint = False
        check_trainer(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: State
    ) -> None:
        """Refuse a damaged file; restore averaged weights when a fit resumes."""
        # Only here: most processes read no checkpoint.
        from lightning_nm.export.sources import check_archive

        # Lightning calls this also if the checkpoint has no state of this callback, unlike load_state_dict.
        self._read_checkpoint = True
        path = trainer.ckpt_path
        # This reads the whole file, so one process does it for all.
        if trainer.is_global_zero and path and Path(path).is_file():
            check_archive(path)
        self._lifecycle.resumes = trainer.state.fn == "fit"
        if self._lifecycle.resumes:
            self._lifecycle.steps_before = checkpoint.get("global_step", 0)
            state = checkpoint.get("callbacks", {}).get(self.state_key, {})
            restore_average(checkpoint, state, trainer, pl_module)

    def load_state_dict(self, state_dict: State) -> None:
        """Restore now if masks are installed, else when fit starts; which comes first depends on the strategy."""
        if not state_dict:
            return
        check_schema(state_dict)
        if self.sparsifier is None:
            self._lifecycle.receive(state_dict)
        else:
            self.sparsifier.load_state_dict(state_dict)
            self._lifecycle.receive(state_dict)
            self._lifecycle.restored()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the masks, new or as saved."""
        # This is the first hook in which optimizers exist, which tell the trained weights from frozen ones. The
        # sanity validation, which follows, sees the sparse model already.
        if self.sparsifier is not None:
            is_same_trainer = self._trainer is not None and self._trainer() is trainer
            is_same_fit = is_same_trainer and self.sparsifier.model is pl_module
            if is_same_fit and not self._lifecycle.interrupted:
                return  # its masks are there
            # An exception kept the last fit from ending. In a search Lightning does not even tell of it.
            self._finish()
        check_averaging_order(self, trainer)
        self._lifecycle.begin_fit()
        self._trainer = weakref.ref(trainer)
        self._finished_layers = {}
        self._install(trainer, pl_module)

    def _install(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mask the layers, and start all that works with them; after an error the model is as before."""
        monitor = MaskMonitor.chosen(self.monitor, trainer, self.log_layers)
        lifecycle = self._lifecycle
        saved = lifecycle.state
        sparsifier = self._attach(trainer, pl_module)
        try:
            if saved is not None:
                try:
                    sparsifier.load_state_dict(saved)
                    lifecycle.restored()
                except ValueError as error:
                    # A resumed checkpoint has to fit. A second fit may be of another model, which starts again.
                    if lifecycle.origin is Origin.CHECKPOINT:
                        raise
                    rank_zero_warn(
                        f"NMSparsityCallback starts again instead of continuing its last fit: {error}"
                    )
                    saved = None
                    lifecycle.end(None)
                    # The state has decided on the selected layers and their masks, so they are chosen again.
                    sparsifier.detach()
                    sparsifier = self._attach(trainer, pl_module)
            for optimizer in trainer.optimizers:
                sparsifier.register(optimizer)
            self._consistency = ProcessConsistency(
                trainer.strategy, sparsifier, self.compare_ranks_every
            )
            if monitor is not None:
                history = (saved or {}).get("history")
                self._watch = monitor.watch(
                    trainer, sparsifier, self._consistency.statistics, self.name, history
                )
        except BaseException:  # KeyboardInterrupt, too, must not leave masks behind
            if saved is not None and lifecycle.state is None:
                # It was restored: the model had these weights, and the state has the values behind its masks.
                lifecycle.state = saved
                sparsifier.bake()
            sparsifier.detach()
            raise
        self.sparsifier = sparsifier
        self._tuned_kinds = set()
        log_hyperparameters(trainer, sparsifier, self.name)

    def _attach(self, trainer: Trainer, pl_module: LightningModule) -> NMSparsifier:
        """Return a sparsifier with its first masks installed."""
        # Processes that see the same part of a batch, as in tensor parallelism, must draw the same random numbers.
        data_rank = (trainer.distributed_sampler_kwargs or {}).get("rank")
        sparsifier = NMSparsifier(pl_module, config=self.config, data_rank=data_rank, managed=True)
        sparsifier.training.is_suspended = lambda: self._is_left_out(trainer)
        # The length matters only where a method or an estimator starts or stops during training. The clock does not
        # count the Trainer's steps before this callback joined the run.
        self._last_step = None
        if any(is_scheduled(rule) for rule in sparsifier.settings.rules):
            self._last_step = planned_steps(trainer, pl_module)
        if self._last_step is not None:
            sparsifier.planned_steps = self._last_step - self._lifecycle.joined_at
        try:
            return sparsifier.attach(
                self._lifecycle.state,
                trainer.optimizers,
                trained=bool(self._lifecycle.joined_at),
            )
        except UnknownLength as error:
            advice = ". Under manual optimization the Trainer knows none"
            if pl_module.automatic_optimization:
                advice = (
                    ", or give the Trainer max_steps: the training is endless, its data have no length, or gradient "
                    "accumulation changes"
                )
            raise ValueError(f"{error}{advice}") from error

    def _is_left_out(self, trainer: Trainer) -> bool:
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        warn_of_resume(
            trainer,
            joined_at=self._lifecycle.joined_at,
            is_resumed=self._lifecycle.origin is Origin.CHECKPOINT,
        )
        if self.show_tables:
            rank_zero_only(print_layers)(sparsifier)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notice modules that were replaced."""
        # Once in an epoch, since it walks over all modules.
        warn_of_replaced(self._installed())

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Mask layers that were unfrozen since the last batch, by optimizers that may have been replaced."""
        # Callbacks such as BaseFinetuning unfreeze layers when an epoch starts. Here they are masked before the first
        # forward pass in which they are trained.
        self._end_pending_step()
        sparsifier = self._installed()
        sparsifier.training.follow(trainer.optimizers)
        sparsifier.mask_unfrozen()
        router = router_of(trainer)
        if router is None:
            return
        # What decides which GEMMs the masked layers have until the next step. Methods may alternate between a few
        # kinds, as with a dense weight gradient in every second step; those of a new kind are not measured yet.
        kind = tuple(
            (layer.progress.stage, layer.progress.dense_gradient, layer.progress.estimating)
            for layer in sparsifier.layers.values()
        )
        if kind not in self._tuned_kinds:
            self._tuned_kinds.add(kind)
            router.tune_again()

    def _end_pending_step(self) -> None:
        """Update the masks if an optimizer stepped after the end of the last batch.

        With manual optimization the module may step in its own ``on_train_batch_end``, which follows the callbacks'.
        """
        sparsifier = self._installed()
        if sparsifier.training.stepped:
            sparsifier.step()
            self._lifecycle.batch_open = False
            self._stepped_late = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a validation within a fit see the masks of the last step."""
        # A sanity validation comes before the resumed step is ended; Trainer.validate() has no masks.
        lifecycle = self._lifecycle
        if self.sparsifier and not (lifecycle.in_first_batch or lifecycle.interrupted):
            self._end_pending_step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the checkpoint of an epoch, and the end of the training, have the masks of the last step."""
        self._end_pending_step()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Open the batch, and compare the masks of all processes if that is due."""
        # DDP sends gradients during the backward pass, so this is the last moment at which differing masks do no harm.
        self._lifecycle.batch_open = True
        self._consistency.before_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the gradients of parameters that methods own, before they are unscaled."""
        # DDP has averaged those of the model's own parameters. Before unscaling, since the gradient scaler looks for
        # infinities then, and must find the same ones in all processes.
        self._consistency.after_backward(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the methods change the complete gradients, before clipping."""
        # Lightning calls this once per step, with the gradients of all accumulated batches, and clips them afterwards,
        # with what methods add here.
        sparsifier = self._installed()
        self._consistency.before_step()
        sparsifier.register(optimizer)  # it may have been replaced during training

        # With float16 the gradient scaler has divided the gradients by the loss scale, except for fused optimizers,
        # which do so within their step.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        loss_scale = 1.0
        if scaler and getattr(optimizer, "_step_supports_amp_scaling", False):
            loss_scale = scaler.get_scale()
        sparsifier.before_step(optimizer, loss_scale)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the masks if an optimizer stepped, and call the monitor."""
        # Every batch comes here, also one that only accumulates gradients: estimators draw new random numbers for each.
        # ModelCheckpoint comes after all other callbacks, so it saves the updated masks.
        sparsifier = self._installed()
        if self._lifecycle.in_first_batch:
            # Not earlier: the first batch may unfreeze layers.
            warn_after_first_batch(sparsifier)
        stepped = sparsifier.step() or self._stepped_late
        self._stepped_late = False
        # The Trainer counts the steps that a gradient scaler skips, too: its plan may end before the sparsifier's.
        if self._last_step is not None and trainer.global_step >= self._last_step:
            sparsifier.finish()
        self._lifecycle.in_first_batch = self._lifecycle.batch_open = False
        # Whether somebody reads them or not: this begins the next count.
        also = self._consistency.after_batch()
        if self._watch is not None:
            self._watch.after_batch(stepped, also)

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint: the class's name, and that of the callback."""
        # Without the arguments, which Lightning's own keys have: a resume with others finds the state and is refused.
        class_name = type(self).__qualname__
        return f"{class_name}[{self.name}]" if self.name else class_name

    def state_dict(self) -> State:
        """Return the sparsifier's state, during fit and after it."""
        # After fit, trainer.save_checkpoint() saves what the fit left.
        if self.sparsifier is None:
            return self._lifecycle.state or {}
        state = self.sparsifier.state_dict()
        state["open"] = self._lifecycle.batch_open
        if self._watch is not None and self._watch.history.steps:
            state["history"] = self._watch.history.state_dict()
        return state

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: State
    ) -> None:
        """Mask the averaged weights that WeightAveraging saves, and save the dropped entries."""
        layers = self._finished_layers if self.sparsifier is None else self.sparsifier.layers
        # Under this key WeightAveraging saves the model itself: "state_dict" then holds the average, which is dense.
        if layers and "current_model_state" in checkpoint:
            averages = mask_average(checkpoint["state_dict"], pl_module, layers)
            # A new dictionary: the callback's own state may be the one that its next fit continues.
            states = checkpoint["callbacks"]
            states[self.state_key] = {**states[self.state_key], "averages": averages}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the masks of all processes a last time."""
        # ModelCheckpoint, which comes after this callback, may save once more: it must not save differing masks.
        self._consistency.at_end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary, and let the monitor write it."""
        if self._watch is not None:
            self._watch.finish()
        if not self.show_tables:
            return
        # All processes compute it: statistics of sharded weights need all of them.
        console = Console(quiet=not trainer.is_global_zero)
        print_summary(self._installed(), trainer, console)
        router = router_of(trainer)
        if router is not None and (router.used() or router.unavailable_reason):
            print_kernels(router, console)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore ordinary modules, which hold the sparse weights."""
        # The last hook of a fit: the model's own on_fit_end still sees the masks. After evaluation there are none.
        self._finish()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove the masks as after a fit, so that the model can be saved and training can continue.

        Sharded weights keep them until the next fit, because removing them takes all processes.
        """
        # Lightning calls no teardown after an exception. The error may be of this process alone, so nothing here may
        # wait for the others.
        layers = [] if self.sparsifier is None else self.sparsifier.selection.layers
        if any(layer.view.is_sharded for layer in layers) and self._has_trained():
            self._lifecycle.interrupted = True
        else:
            self._finish()
        # A KeyboardInterrupt is no fault of the file.
        if not self._read_checkpoint and isinstance(exception, Exception):
            refuse_unreadable(trainer.ckpt_path, exception)

    def _has_trained(self) -> bool:
        """Whether there is a training to continue: a resumed one, or at least one optimizer step."""
        return not self._lifecycle.is_new or self._installed().clock > 0

    def _finish(self) -> None:
        """End the fit: remove the masks, and keep the state for a next fit. Does nothing outside fit."""
        sparsifier = self.sparsifier
        if sparsifier is None:
            return
        # Before the pruned entries are lost, and the history of what is watched.
        state = self.state_dict() if self._has_trained() else None
        self.sparsifier = None
        self._lifecycle.end(state)
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._consistency.close()
        del self._consistency  # which holds the model
        if state is None:
            sparsifier.detach()  # the model keeps its dense weights
            return
        sparsifier.bake()
        sparsifier.detach(keep_parameters=True)  # trainer.save_checkpoint() may follow
        self._finished_layers = sparsifier.layers  # averages may be saved after fit, too

    def _installed(self) -> NMSparsifier:
        """The sparsifier of the current fit."""
        if self.sparsifier is None:
            raise RuntimeError(
                "NMSparsityCallback is not installed: its on_fit_start was not called for this fit"
            )
        return self.sparsifier
