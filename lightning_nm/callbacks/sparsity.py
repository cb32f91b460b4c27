"""NMSparsityCallback: N:M sparse training of an unchanged LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from rich.console import Console
from torch.optim import Optimizer

from lightning_nm.callbacks.averages import check_averaging_order
from lightning_nm.callbacks.checkpoint import SavedSparsity
from lightning_nm.callbacks.checks import check_trainer
from lightning_nm.callbacks.consistency import ProcessConsistency
from lightning_nm.callbacks.lifecycle import Lifecycle, Origin, Phase
from lightning_nm.callbacks.monitor import NOT_THE_DEFAULT, MaskMonitor
from lightning_nm.callbacks.report.kernel_table import print_kernels
from lightning_nm.callbacks.report.settings import log_hyperparameters
from lightning_nm.callbacks.report.tables import print_layers, print_summary
from lightning_nm.callbacks.report.warnings import (
    warn_after_first_batch,
    warn_at_start,
    warn_of_replaced,
)
from lightning_nm.callbacks.throughput import turn_off_mfu
from lightning_nm.callbacks.training_length import has_schedule, planned_steps
from lightning_nm.config import SparsityConfig, chosen_config, refuse_unknown
from lightning_nm.estimators import EstimatorName, GradientEstimator
from lightning_nm.functional.pattern import PatternLike
from lightning_nm.kernels import Router
from lightning_nm.methods import Method, MethodName
from lightning_nm.nn.layer import NMLayer
from lightning_nm.sparsifier import NMSparsifier


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
        method: ``dense``, ``ste``, ``sr-ste``, ``asp``, ``transposable``, ``bi-mask``, ``bame``, or a :class:`Method`
            by ``class_path``.
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
        self._monitor: MaskMonitor | None = None
        self._consistency: ProcessConsistency | None = None
        self._finished_layers: dict[str, NMLayer] = {}
        self._masked = 0  # layers, in the last batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}(config={self.config})"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a Trainer of the package ``pytorch_lightning``, and Lightning's own pruning beside this one."""
        self._lifecycle.steps_before = 0
        check_trainer(trainer)
        self._read_checkpoint = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the masks, new or as saved."""
        if self.sparsifier is not None:
            if (
                self.sparsifier.model is pl_module
                and self._lifecycle.phase is not Phase.INTERRUPTED
            ):
                return
            self._finish()  # an exception kept the last fit from ending
        check_averaging_order(self, trainer)
        self._lifecycle.begin_fit()
        self._finished_layers = {}
        self._monitor = MaskMonitor.chosen(self.monitor, trainer, self.log_layers)
        self._install(trainer, pl_module)
        log_hyperparameters(trainer, self._installed(), self.name)

    def _install(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sparsifier = self._attach(trainer, pl_module)
        saved = self._lifecycle.state or {}
        try:
            sparsifier = self._restore(sparsifier, trainer, pl_module)
            for optimizer in trainer.optimizers:
                sparsifier.register(optimizer)
            self._consistency = ProcessConsistency.create(
                trainer, sparsifier, self.compare_ranks_every
            )
            if self._monitor is not None:
                sends = self._consistency is not None and self._consistency.comm_hook is not None
                history = None if self._lifecycle.is_new else saved.get("history")
                self._monitor.start(
                    sparsifier, ["grad_bytes_ratio"] if sends else [], self.name, history
                )
        except BaseException:
            sparsifier.detach()
            raise
        self.sparsifier, self._masked = sparsifier, len(sparsifier.layers)
        self._lifecycle.phase = Phase.INSTALLED

    def _attach(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> NMSparsifier:
        data_rank = (trainer.distributed_sampler_kwargs or {}).get("rank")
        sparsifier = NMSparsifier(pl_module, config=self.config, data_rank=data_rank)
        sparsifier.called_by_callback()
        if any(
            has_schedule(part)
            for rule in sparsifier.rules
            for part in (rule.method, rule.estimator)
        ):
            planned = planned_steps(trainer, pl_module)
            if (
                planned is not None and self._lifecycle.is_new
            ):  # the clock starts where this callback joins the run
                planned -= self._lifecycle.steps_before
            sparsifier.planned_steps = planned
        return sparsifier.attach(self._lifecycle.state, trainer.optimizers)

    def _restore(
        self, sparsifier: NMSparsifier, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> NMSparsifier:
        if self._lifecycle.state is None:
            return sparsifier
        try:
            sparsifier.load_state_dict(self._lifecycle.state)
        except ValueError as error:
            if self._lifecycle.origin is Origin.CHECKPOINT:
                raise
            rank_zero_warn(
                f"NMSparsityCallback starts anew instead of continuing its last fit: {error}"
            )
            self._lifecycle.start_anew()
            sparsifier.detach()
            return self._attach(trainer, pl_module)
        self._lifecycle.restored(self._lifecycle.state)
        return sparsifier

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore ordinary modules, which hold the sparse weights."""
        self._finish()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Remove the masks as after a fit, so that the model can be saved and training can continue.

        Sharded weights keep them until the next fit, because removing them takes all processes.
        """
        layers = [] if self.sparsifier is None else self.sparsifier.selection.layers
        if any(layer.sharded for layer in layers) and self._has_trained(layers):
            self._lifecycle.phase = Phase.INTERRUPTED
        else:
            self._finish()
        self.refuse_unreadable(trainer, exception)

    def _has_trained(self, layers: Sequence[NMLayer]) -> bool:
        return not self._lifecycle.is_new or any(layer.step for layer in layers)

    def _finish(self) -> None:
        if self.sparsifier is None:
            return
        sparsifier = self.sparsifier
        state = self.state_dict() if self._has_trained(sparsifier.selection.layers) else None
        self._remove(sparsifier)
        if state is None:
            self._lifecycle.end(None)
            sparsifier.detach()  # the model keeps its dense weights
            return
        self._lifecycle.end(state)
        sparsifier.bake()
        sparsifier.detach(keep_parameters=True)  # trainer.save_checkpoint() may follow
        self._finished_layers = sparsifier.layers  # averages may be saved after fit, too

    def _remove(self, sparsifier: NMSparsifier) -> None:
        self.sparsifier = None
        if self._monitor is not None:
            self._monitor.stop(sparsifier)
        if self._consistency is not None:
            self._consistency.close()
            self._consistency = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the table of layers, and register optimizers that were replaced since fit started."""
        sparsifier = self._installed()
        turn_off_mfu(trainer)
        sparsifier.follow(trainer.optimizers)
        if self._lifecycle.batch_open:  # saved within a batch, maybe after the optimizer step
            sparsifier.step()
        self._lifecycle.batch_open = False
        warn_at_start(sparsifier, continues=not self._lifecycle.is_new)
        if self.show_tables:
            rank_zero_only(print_layers)(sparsifier)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notice modules that were replaced."""
        warn_of_replaced(self._installed())

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Mask layers that were unfrozen since the last batch, by optimizers that may have been replaced."""
        sparsifier = self._installed()
        sparsifier.follow(trainer.optimizers)
        sparsifier.wake()
        router = getattr(trainer.precision_plugin, "router", None)
        if len(sparsifier.layers) != self._masked and isinstance(router, Router):
            router.tune_again()
        self._masked = len(sparsifier.layers)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the methods change the complete gradients, before clipping."""
        sparsifier = self._installed()
        if self._consistency is not None:
            self._consistency.before_step()
        sparsifier.register(optimizer)  # it may have been replaced during training
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            sparsifier.before_step(
                optimizer, scaler.get_scale()
            )  # fused optimizers unscale within their step
        else:
            sparsifier.before_step(optimizer)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any
    ) -> None:
        """Open the batch, and compare the masks of all processes if that is due."""
        self._lifecycle.batch_open = True
        if self._consistency is not None:
            self._consistency.before_backward()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Average the gradients of parameters that methods own, before they are unscaled."""
        if self._consistency is not None:
            self._consistency.after_backward(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Update the masks if an optimizer stepped, and call the monitor."""
        sparsifier = self._installed()
        if self._lifecycle.phase is Phase.INSTALLED:
            warn_after_first_batch(sparsifier)
        stepped = sparsifier.step()
        self._lifecycle.end_batch()
        comm_hook = None if self._consistency is None else self._consistency.comm_hook
        ratio = None if comm_hook is None else comm_hook.settle()
        if self._monitor is not None:
            also = {} if ratio is None else {"grad_bytes_ratio": ratio}
            self._monitor.watch(trainer, pl_module, sparsifier, stepped, also)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the masks of all processes a last time."""
        if self._consistency is not None:
            self._consistency.at_end()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the summary, and let the monitor write it."""
        if self._monitor is not None:
            self._monitor.finish(trainer, self._installed())
        if self.show_tables:
            # All processes compute it: statistics of sharded weights need all of them.
            print_summary(self._installed(), trainer, Console(quiet=not trainer.is_global_zero))
            router = getattr(trainer.precision_plugin, "router", None)
            if isinstance(router, Router) and (router.used() or router.unavailable_reason):
                rank_zero_only(print_kernels)(router)

    def _installed(self) -> NMSparsifier:
        if self.sparsifier is None:
            raise RuntimeError(
                "NMSparsityCallback is not installed: its on_fit_start was not called for this fit"
            )
        return self.sparsifier
