"""NMSparsityCallback: N:M sparse training of an unchanged LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypedDict

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Required

from lightning_nm.callbacks.averages import mask_average, refuse_later_averaging, restore_average
from lightning_nm.callbacks.kernels import print_kernels
from lightning_nm.callbacks.monitor import NOT_THE_DEFAULT, MaskMonitor
from lightning_nm.callbacks.plan import has_schedule, planned_steps
from lightning_nm.callbacks.ranks import Ranks
from lightning_nm.callbacks.tables import print_layers, print_summary
from lightning_nm.callbacks.throughput import settle_throughput
from lightning_nm.callbacks.trial import AchievedLoss
from lightning_nm.estimators import EstimatorName, GradientEstimator
from lightning_nm.export.archive import check_archive
from lightning_nm.kernels import Router
from lightning_nm.methods import Method, MethodName
from lightning_nm.nn.layer import NMLayer
from lightning_nm.pattern import PatternLike
from lightning_nm.sparsifier import NMSparsifier, check_schema
from lightning_nm.training.phases import finished_windows


class RuleSpec(TypedDict, total=False):
    """A rule of :class:`NMSparsityCallback`; what it leaves out is the callback's."""

    include: Required[str | list[str]]
    pattern: PatternLike
    method: MethodName | Method
    grad_estimator: EstimatorName | GradientEstimator | None


class NMSparsityCallback(pl.Callback):
    """Trains the weights of any LightningModule N:M sparse; one line in a Trainer or in YAML.

    Masks are installed when fit starts and move after each batch whose optimizer made a real step. While they
    are installed, ``state_dict()`` yields the sparse weights under the model's own keys, so every checkpoint holds
    the sparse model and loads without this callback; what training needs beyond that is in the callback's own state,
    so a run resumes exactly. After fit, the parameters are the sparse weights and the modules are ordinary ones.

    A :class:`~lightning_nm.MaskMonitor` logs what the masks do, at the Trainer's logging interval: ``nm/density``,
    ``nm/flip_rate`` and more, see docs/tensorboard.md.

    Args:
        pattern: The N:M pattern: ``"2:4"``, ``{n: 2, m: 4}``, or the integer that YAML makes of an unquoted 2:4.
        method: ``dense``, ``ste``, ``sr-ste``, ``asp``, ``transposable``, ``bi-mask``, ``bame``, or a :class:`Method`
            by ``class_path``.
        grad_estimator: What replaces the output gradient dY in the weight-gradient GEMM: ``mvue``, ``approx-mvue``,
            ``top-n``, or a :class:`GradientEstimator` by ``class_path``; ``None`` keeps dY. With a short name the
            pattern of ``mvue`` and ``top-n`` is each layer's own; ``approx-mvue`` is always 2:4.
        include: Globs over module names to mask; all maskable layers by default. A name without wildcards
            must be maskable.
        exclude: Globs over module names to keep dense.
        rules: Exceptions for some layers: mappings with ``include`` and any of ``pattern``, ``method``,
            ``grad_estimator``; the first match wins.
        skip_first_last: Keep the first convolution and the last linear layer dense, as the papers do.
        conv_layout: ``channels``: convolution blocks along the input channels for a fixed kernel tap, as hardware reads
            them. ``flat``: along the flattened filter, as the papers' code has them.
        seed: Base of all random choices.
        log_layers: Also log every statistic per layer, as ``nm/<statistic>/<layer>``: a setting of the default monitor.
        log_achieved_loss: Whenever BAME adapts, compute the batch's loss with the old and with the new masks, and log
            the difference as ``nm/achieved_loss_change`` beside the predicted one (of this process alone). It costs two
            forward passes and a copy of the model each time, and needs automatic optimization.
        grad_snr_every: Training steps between two comparisons of estimated weight gradients with exact ones: one more
            GEMM in each of four layers, which take turns. 0 for none. Compiled layers are never compared.
        compare_ranks_every: Under a DDPStrategy or a ModelParallelStrategy, optimizer steps between two comparisons of
            all processes' masks, by one all-reduce of two numbers; 0 for none. A disagreement ends the fit in all of
            them, with the layer's name.
            The strategy ``nm_ddp`` compares before every step.
        show_tables: Print the table of layers before training and the summary after it.
        monitor: What logs: ``True`` takes the :class:`~lightning_nm.MaskMonitor` among the Trainer's callbacks, or one
            with default settings; a MaskMonitor is used itself; ``False`` or ``None`` logs nothing.
        name: Tells several of these callbacks in one Trainer apart in the checkpoint.

    Raises:
        ValueError: For an impossible pattern, an unknown method or estimator, a bad rule or a contradiction, at once;
            for layers that cannot be masked, when fit starts and before anything is changed.

    Example::

        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[NMSparsityCallback("2:4")], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        pattern: PatternLike = "2:4",
        method: MethodName | Method = "bi-mask",
        grad_estimator: EstimatorName | GradientEstimator | None = None,
        include: str | list[str] | None = None,
        exclude: str | list[str] | None = None,
        rules: list[RuleSpec] | None = None,
        skip_first_last: bool = True,
        conv_layout: Literal["channels", "flat"] = "channels",
        seed: int = 0,
        log_layers: bool = False,
        log_achieved_loss: bool = False,
        grad_snr_every: int = 100,
        compare_ranks_every: int = 1,
        show_tables: bool = True,
        name: str | None = None,
        monitor: bool | MaskMonitor | None = True,
    ) -> None:
        self.options: dict[str, Any] = {
            "pattern": pattern,
            "method": method,
            "grad_estimator": grad_estimator,
            "include": include,
            "exclude": exclude,
            "rules": rules,
            "skip_first_last": skip_first_last,
            "conv_layout": conv_layout,
            "seed": seed,
            "grad_snr_every": grad_snr_every,
        }
        if not isinstance(compare_ranks_every, int) or compare_ranks_every < 0:
            raise ValueError(f"compare_ranks_every={compare_ranks_every} must be a number of steps, or 0 for never")
        NMSparsifier(nn.Module(), **self.options)  # for its errors, before any Trainer exists
        if log_layers and monitor is not True:
            raise ValueError(NOT_THE_DEFAULT)
        if log_achieved_loss and not monitor:
            raise ValueError("log_achieved_loss=True needs a monitor that logs it: leave `monitor` as it is")
        self.log_layers = log_layers
        self.log_achieved_loss = log_achieved_loss
        self.compare_ranks_every = compare_ranks_every
        self.show_tables = show_tables
        self.name = name
        self.monitor = monitor
        self.sparsifier: NMSparsifier | None = None
        """The sparsifier of the current fit; ``None`` outside fit."""
        self._ranks: Ranks | None = None
        self._finished: dict[str, NMLayer] = {}
        self._state: dict[str, Any] | None = None
        self._from_checkpoint = False
        self._fresh = True
        self._checked = False
        self._open = False
        self._steps_before = 0
        self._achieved: AchievedLoss | None = None
        self._monitor: MaskMonitor | None = None
        self._evaluating = False
        self._broken_off = False

    @property
    def state_key(self) -> str:
        """The class name: a changed pattern, method or layer set is then found and refused on resume, not ignored."""
        return type(self).__qualname__ + (f"[{self.name}]" if self.name else "")

    # ------------------------------------------------------------------------------------------- install, remove

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a Trainer of the other package before anything happens."""
        self._steps_before = 0
        if not isinstance(trainer, pl.Trainer):
            raise TypeError(
                f"NMSparsityCallback is made for lightning.pytorch, but this Trainer is {type(trainer).__module__}'s: "
                "import Trainer and LightningModule from `lightning.pytorch`, not from `pytorch_lightning`"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the masks, fresh or as they were saved."""
        if self.sparsifier is not None:
            if self.sparsifier.model is pl_module and not self._broken_off:
                return
            self._finish()  # a failure kept the last fit from ending
        refuse_later_averaging(self, trainer)
        self._fresh, self._open, self._finished = self._state is None, False, {}
        self._achieved = AchievedLoss(pl_module) if self.log_achieved_loss else None
        self._monitor = MaskMonitor.chosen(self.monitor, trainer, self.log_layers)
        sparsifier = self._attach(trainer, pl_module)
        try:
            sparsifier = self._restore(sparsifier, trainer, pl_module)
            for optimizer in trainer.optimizers:
                sparsifier.register(optimizer)
            self._ranks = Ranks.of(trainer, sparsifier, self.compare_ranks_every)
            if self._monitor is not None:
                sends = self._ranks is not None and self._ranks.wire is not None
                also = {"achieved_loss_change": self.log_achieved_loss, "grad_bytes_ratio": sends}
                self._monitor.start(sparsifier, [name for name, there in also.items() if there])
        except BaseException:
            sparsifier.detach()
            raise
        self.sparsifier, self._checked = sparsifier, False

    def _attach(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> NMSparsifier:
        data_rank = (trainer.distributed_sampler_kwargs or {}).get("rank")
        sparsifier = NMSparsifier(pl_module, **self.options, data_rank=data_rank)
        if any(has_schedule(part) for rule in sparsifier.rules for part in (rule.method, rule.estimator)):
            planned = planned_steps(trainer, pl_module)
            if planned is not None and self._state is None:  # the clock begins when this callback joins a run
                planned -= self._steps_before
            sparsifier.planned_steps = planned
        return sparsifier.attach(self._state)

    def _restore(self, sparsifier: NMSparsifier, trainer: pl.Trainer, pl_module: pl.LightningModule) -> NMSparsifier:
        if self._state is None:
            return sparsifier
        try:
            sparsifier.load_state_dict(self._state)
        except ValueError as error:
            if self._from_checkpoint:
                raise
            # State that this callback kept from an earlier fit, but the model is another one by now.
            rank_zero_warn(f"NMSparsityCallback starts anew instead of continuing its last fit: {error}")
            self._fresh, self._state = True, None
            sparsifier.detach()
            return self._attach(trainer, pl_module)
        self._open = self._state.get("open", True)
        self._state, self._from_checkpoint = None, False
        return sparsifier

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave ordinary modules that hold the sparse weights."""
        self._finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As after a fit: nothing is lost, and the model can be saved and resumed.

        Where processes shard the weights, the masks stay installed until the next fit: to end takes all processes, and
        this may be the only one that failed.
        """
        sharded = self.sparsifier is not None and any(layer.sharded for layer in self.sparsifier.plan.layers)
        self._broken_off = sharded and self._has_trained(self.sparsifier)
        if not self._broken_off:
            self._finish()

    def _has_trained(self, sparsifier: NMSparsifier | None) -> bool:
        layers = () if sparsifier is None else sparsifier.layers.values()
        return not self._fresh or any(layer.step for layer in layers)

    def _finish(self) -> None:
        if self.sparsifier is None:
            return
        sparsifier, self.sparsifier, self._achieved, self._broken_off = self.sparsifier, None, None, False
        if self._monitor is not None:
            self._monitor.stop(sparsifier)
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if not self._has_trained(sparsifier):
            sparsifier.detach()  # nothing was trained: leave the weights as they came
            return
        self._state, self._from_checkpoint = {**sparsifier.state_dict(), "open": self._open}, False
        sparsifier.bake()
        sparsifier.detach(keep_parameters=True)  # trainer.save_checkpoint() may follow
        self._finished = sparsifier.layers  # averages may be saved after fit, too

    # ------------------------------------------------------------------------------------------------- training

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show what will happen; follow optimizers that were replaced since fit started."""
        sparsifier = self._installed()
        settle_throughput(trainer)
        for optimizer in trainer.optimizers:
            sparsifier.register(optimizer)
        if self._open:  # the checkpoint lies within a batch, perhaps between its step and the move of the masks
            sparsifier.step()
        self._open = False
        if not self._fresh:
            for over in finished_windows(sparsifier.plan.layers):
                rank_zero_warn(f"{over}; for another training with phases of its own, make a new callback")
        if sparsifier.unowned:
            rank_zero_warn(f"no optimizer trains these masked layers, so their masks stand still: {sparsifier.unowned}")
        if self.show_tables:
            rank_zero_only(print_layers)(sparsifier)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the methods shape the complete gradients, before clipping."""
        sparsifier = self._installed()
        if self._ranks is not None:
            self._ranks.before_step()
        sparsifier.register(optimizer)  # if it was replaced while training
        # A GradScaler leaves it to fused optimizers to unscale, within their step.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            sparsifier.before_step(optimizer, scaler.get_scale())
        else:
            sparsifier.before_step(optimizer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch as it came if its loss may be computed again."""
        if self._achieved is not None:
            self._achieved.keep(self._installed(), pl_module, batch)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        """Note that a batch is open: its noise is used, and a step may follow before the masks move."""
        self._open = True
        if self._ranks is not None:
            self._ranks.before_backward()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Average the gradients that data parallelism does not know, before they are unscaled."""
        if self._ranks is not None:
            self._ranks.after_backward(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the masks after a real step, and let them be watched."""
        sparsifier = self._installed()
        if not self._checked:
            self._checked = True
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
        if self._achieved is not None:
            self._achieved.settle(sparsifier, trainer, pl_module, batch_idx)
        stepped, self._open = sparsifier.step(), False
        sent = None if self._ranks is None else self._ranks.bytes_ratio()

        def statistics() -> dict[str, float]:
            found, achieved = sparsifier.stats(), None if self._achieved is None else self._achieved.change
            if achieved is not None:  # as the predicted change, 0 once the masks are frozen
                found["achieved_loss_change"] = achieved if found["adapted_blocks"] else 0.0
            if sent is not None:
                found["grad_bytes_ratio"] = sent
            return found

        if self._monitor is not None:
            self._monitor.watch(trainer, pl_module, sparsifier, stepped, statistics)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the masks of all processes a last time."""
        if self._ranks is not None:
            self._ranks.at_end()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show what came of it."""
        if self.show_tables:
            # All processes make it, as figures of sharded weights take them all.
            print_summary(self._installed(), trainer, Console(quiet=not trainer.is_global_zero))
            router = getattr(trainer.precision_plugin, "router", None)
            if isinstance(router, Router) and (router.used() or router.unavailable_reason):
                rank_zero_only(print_kernels)(router)

    def _installed(self) -> NMSparsifier:
        if self.sparsifier is None:
            raise RuntimeError("NMSparsityCallback is not installed: its on_fit_start was not called for this fit")
        return self.sparsifier

    # ---------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The sparsifier's state, during fit and after it."""
        if self.sparsifier is not None:
            return {**self.sparsifier.state_dict(), "open": self._open}
        return self._state or {}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Mask averaged weights, which WeightAveraging puts in the place of the model's, and keep what that drops."""
        layers = self._finished if self.sparsifier is None else self.sparsifier.layers
        if "current_model_state" in checkpoint and layers:
            dropped = mask_average(checkpoint["state_dict"], pl_module, layers)
            states = checkpoint["callbacks"]
            states[self.state_key] = {**states[self.state_key], "averages": dropped}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note whether the state that follows is of the run to continue, or of weights to evaluate; refuse damage."""
        if trainer.is_global_zero and trainer.ckpt_path and Path(trainer.ckpt_path).is_file():
            check_archive(trainer.ckpt_path)
        self._evaluating = trainer.state.fn != "fit"
        self._steps_before = 0 if self._evaluating else checkpoint.get("global_step", 0)
        if not self._evaluating:
            restore_average(checkpoint, checkpoint.get("callbacks", {}).get(self.state_key, {}), trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore at once if installed, else when fit starts; strategies differ in which comes first."""
        if not state_dict:
            return
        check_schema(state_dict)
        if self.sparsifier is not None:
            self.sparsifier.load_state_dict(state_dict)
            self._open = state_dict.get("open", True)
        else:
            self._state, self._from_checkpoint = state_dict, not self._evaluating
