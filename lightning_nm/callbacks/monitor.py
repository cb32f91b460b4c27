"""MaskMonitor: logs statistics of the masks as scalars, histograms, heat maps and text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_nm.callbacks.fit_checks import callbacks_of
from lightning_nm.callbacks.tables import (
    PREFIX,
    environment,
    kernel_columns,
    layers_markdown,
    markdown_table,
    router_of,
    summary_rows,
)
from lightning_nm.callbacks.tensorboard import (
    MAPS,
    LayerHistory,
    custom_scalars_layout,
    draw_histogram,
    heat_map,
    layer_column,
    margin_histogram,
)
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.spelling import check_interval
from lightning_nm.training.statistics import joint_statistics

NOT_THE_DEFAULT = (
    "log_layers=True is a setting of the default monitor: write MaskMonitor(log_layers=True)"
)
COSTS = "train_flops_ratio"
"""The statistic that is a text in TensorBoard until it changes."""
MAPS_GROWTH = 1.25
"""Heat maps show the run from its start, so they are drawn again only once it is longer by this factor.

Drawing them all takes a time that grows with the logarithm of the run's length.
"""


@dataclass(eq=False, repr=False)
class MaskMonitor(Callback):
    """Logs statistics of the masks of an :class:`~lightning_nm.NMSparsityCallback`; docs/tensorboard.md lists them.

    Each of those callbacks has a monitor with default settings. To change them, pass a monitor as ``monitor``, or add
    one to the Trainer's callbacks, at any position.

    Every logger gets the scalars ``nm/<statistic>``, and with ``log_layers`` ``nm/<statistic>/<layer>``, at the
    Trainer's logging interval. Between two logs nothing is computed, and there is no device synchronization.
    TensorBoard also gets, once in a fit, the table of layers and the environment as text and a layout of its custom
    scalars, and at intervals histograms of mask margins (:func:`~lightning_nm.functional.mask_margin`) and heat maps of
    the flip rate, the margin and the kept magnitude of every layer over the steps, which need matplotlib. When fit ends
    it gets the heat maps again, the summary, and the kernels that ran. If a logger refuses one of these, or matplotlib
    is missing, there is one warning. ``train_flops_ratio`` is a text, and one value in other loggers, until it changes.

    Args:
        statistics: Names of the statistics to log; all by default.
        log_layers: Also log statistics and histograms of every layer.
        histograms_every: Optimizer steps between two histograms, the first of which come with the first log; 0 for
            none. They are written at the next log.
        images_every: The same for the heat maps, which are left out until the run is a quarter longer than in the last
            ones. With 0 there are none at the end either.
        custom_scalars: Write the layout. A log holds one; set this to ``False`` if the model writes its own.
        layer_table: Write the table of layers, the environment, the summary and the kernels as text.
        heat_maps: Compute the heat maps' statistics of every layer at every log, and draw the maps. A run that resumes
            goes on with its columns, which the callback's state keeps in 1536 bytes for a layer.
        progress_bar: Show density, flip rate and the method's ``headline`` statistic in the progress bar.

    Raises:
        ValueError: For a negative interval, at once; when fit starts, for an unknown statistic, for several monitors in
            one Trainer, and for a monitor that no callback uses.

    Example::

        >>> import lightning.pytorch as pl
        >>> from lightning_nm import NMSparsityCallback
        >>> callbacks = [NMSparsityCallback("2:4"), MaskMonitor(log_layers=True, images_every=0)]
        >>> trainer = pl.Trainer(callbacks=callbacks, logger=False, accelerator="cpu")
    """

    statistics: list[str] | None = None
    log_layers: bool = False
    histograms_every: int = 500
    images_every: int = 500
    custom_scalars: bool = True
    layer_table: bool = True
    heat_maps: bool = True
    progress_bar: bool = True

    def __post_init__(self) -> None:
        check_interval("histograms_every", self.histograms_every)
        check_interval("images_every", self.images_every)
        if isinstance(self.statistics, str):
            raise TypeError(
                f"statistics={self.statistics!r} must be a list of names, as in [{self.statistics!r}]"
            )
        self._watched: list[Watch] = []  # of the current fit, one for each callback
        self._failed: list[Logger] = []  # TensorBoard's, which refused something
        self._missed_maps = False  # whether the warning was given that matplotlib is missing

    @classmethod
    def chosen(
        cls, monitor: bool | MaskMonitor | None, trainer: Trainer, log_layers: bool
    ) -> MaskMonitor | None:
        """Return the monitor that a callback uses in a fit.

        ``True`` stands for the one among the Trainer's callbacks, or else a default one with ``log_layers``.

        Raises:
            ValueError: If the Trainer has several monitors, or ``log_layers`` is set for one that is not the default.
        """
        if monitor is not True:
            return monitor or None
        monitors = callbacks_of(trainer, MaskMonitor)
        if len(monitors) > 1:
            raise ValueError(
                f"there are {len(monitors)} MaskMonitors among the Trainer's callbacks: keep one of them"
            )
        if not monitors:
            return cls(log_layers=log_layers)
        if log_layers:
            raise ValueError(NOT_THE_DEFAULT)
        return monitors[0]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error if no callback uses this monitor."""
        # All callbacks have called watch() in on_fit_start by now, whatever their order.
        if not self._watched:
            raise ValueError(
                "MaskMonitor: there are no masks for it to watch: add an NMSparsityCallback without a `monitor` of its "
                "own"
            )

    def watch(
        self,
        trainer: Trainer,
        sparsifier: NMSparsifier,
        also: Sequence[str] = (),
        name: str | None = None,
        history: Mapping[str, Any] | None = None,
    ) -> Watch:
        """Start to watch a sparsifier in a fit, as a callback does when it has masked the layers.

        Args:
            trainer: That of the fit.
            sparsifier: The sparsifier.
            also: The statistics that the callback has besides the sparsifier's.
            name: That of the callback.
            history: The heat maps' columns of the run that this fit resumes.

        Raises:
            ValueError: If a requested statistic does not exist.
        """
        # Layers of one method have the same statistics: one of them stands for all.
        layers = sparsifier.layers.values()
        layer_of_method = {type(layer.spec.method): layer for layer in layers}
        names = [*joint_statistics([*layer_of_method.values()]), COSTS, *also]
        # Gradients are compared later.
        if sparsifier.config.grad_snr_every and any(layer.spec.estimator for layer in layers):
            names += ["grad_snr", "grad_density"]
        # The methods of frozen layers, which may be masked later, may have a requested statistic.
        if not sparsifier.selection.frozen:
            for requested in self.statistics or ():
                if requested not in names:
                    raise ValueError(
                        f"MaskMonitor: there is no statistic '{requested}' in this training, only {names}"
                    )
        columns = LayerHistory.from_state(history) if history else LayerHistory()
        watch = Watch(self, trainer, sparsifier, names, f"/{name}" if name else "", columns)
        self._watched.append(watch)
        return watch


@dataclass(eq=False)
class Watch:
    """Logs one sparsifier in one fit with the settings of a :class:`MaskMonitor`.

    Attributes:
        names: The statistics that there are.
        suffix: The end of tags that several callbacks of a Trainer share.
        history: The columns of the heat maps.
        latest: The last step of this fit.
        drawn_at: The step of the last heat maps; -1 before the first ones.
        first_ratio: The first FLOPs ratio that was logged.
        ratio_step: The last log with this one; ``None`` once there was another ratio.

    Steps are numbered from 0, as Lightning's loggers do.
    """

    monitor: MaskMonitor
    trainer: Trainer
    sparsifier: NMSparsifier
    names: list[str]
    suffix: str
    history: LayerHistory
    latest: int | None = None
    drawn_at: int = -1
    first_ratio: float | None = None
    ratio_step: int | None = None

    def after_batch(self, stepped: bool, also: Mapping[str, float]) -> None:
        """Log if the Trainer logs now. All processes call it at the end of each batch, after the masks were updated.

        ``stepped`` tells whether an optimizer stepped in this batch; ``also`` holds further statistics.
        """
        # Lightning numbers scalars by batches that end a step. With manual optimization every batch counts, and
        # global_step may count several steps in one.
        trainer, monitor = self.trainer, self.monitor
        automatic = trainer.lightning_module.automatic_optimization
        count = trainer.global_step if automatic else trainer.fit_loop.total_batch_idx + 1
        step = count - 1
        if stepped:
            # Not when fit starts: the kernels are known after the first step.
            if self.latest is None:
                self._introduce(step)
            self.latest = step

        # The rule of Lightning's logger connector: pl_module.log() would drop values at other steps.
        # The Trainer has the attribute, but no annotation of it.
        every: int = getattr(trainer, "log_every_n_steps", 0)
        is_due = every > 0 and (count % every == 0 or trainer.should_stop)
        # While gradients accumulate, global_step is that of the step before, which was logged.
        if not is_due or (automatic and not stepped):
            return
        self._log(step, also)
        # What follows is computed in all processes, which may share weights, and written by rank 0.
        if not self._has_tensorboard():
            return
        self._record(step)
        if _passed(count, every, monitor.histograms_every):
            self._draw_margins(step)
        is_longer = step + 1 >= MAPS_GROWTH * (self.drawn_at + 1)
        if is_longer and _passed(count, every, monitor.images_every):
            self._draw_maps(step)

    def finish(self) -> None:
        """Write what is known at the end of a fit. All processes call it, before the masks are removed."""
        step = self.latest
        if step is None or not self._has_tensorboard():
            return
        # The last step has a column and maps even if the Trainer did not log it.
        if step not in self.history.steps:
            self._record(step)
        if self.monitor.images_every and self.drawn_at != step:
            self._draw_maps(step)
        if self.monitor.layer_table:
            self._summarize(step)

    def stop(self) -> None:
        """End the fit."""
        self.monitor._watched.remove(self)

    def _wanted(self, statistic: str) -> bool:
        return self.monitor.statistics is None or statistic in self.monitor.statistics

    def _has_tensorboard(self) -> bool:
        """Whether the Trainer has a TensorBoard logger: the same in all processes, and after failures on rank 0."""
        return any(isinstance(logger, TensorBoardLogger) for logger in self.trainer.loggers)

    def _write(self, draw: Callable[[Any], None]) -> None:
        """Call ``draw`` with the ``SummaryWriter`` of each TensorBoard logger on rank 0; others get scalars only.

        After its first failure a logger is not used again, with one warning; training continues.
        """
        if not self.trainer.is_global_zero:
            return
        for logger in self.trainer.loggers:
            # By identity: loggers may define what equal means.
            has_failed = any(logger is failed for failed in self.monitor._failed)
            if has_failed or not isinstance(logger, TensorBoardLogger):
                continue
            try:
                draw(logger.experiment)
            # A full disk, a missing package or a strange version: no log is worth a training.
            except Exception as error:
                self.monitor._failed.append(logger)
                rank_zero_warn(
                    f"MaskMonitor: {type(logger).__name__} gets scalars alone from now on, it refused a picture, a "
                    f"histogram or a text ({type(error).__name__}: {error})"
                )

    def _introduce(self, step: int) -> None:
        """Write the table of layers, the environment and the layout."""

        def draw(writer: Any) -> None:
            if self.monitor.layer_table:
                layers = layers_markdown(self.sparsifier, router_of(self.trainer))
                parts = markdown_table(("part", "value"), environment(self.trainer).items())
                writer.add_text("nm/layers", layers, step)
                writer.add_text("nm/environment", parts, step)
            if self.monitor.custom_scalars:
                # The chart of costs would be empty in most runs.
                names = [name for name in self.names if self._wanted(name) and name != COSTS]
                writer.add_custom_scalars(custom_scalars_layout(names, self.monitor.log_layers))

        self._write(draw)

    def _summarize(self, step: int) -> None:
        """Write the summary, and the kernels that ran."""
        try:
            rows = list(summary_rows(self.sparsifier, dict(self.trainer.callback_metrics)))
        except ValueError as error:  # a weight holds NaN
            rank_zero_warn(f"MaskMonitor writes no summary: {error}")
            return
        # The strategy is torn down, and its router has freed its packs, but it still reports what ran.
        router = router_of(self.trainer)

        def draw(writer: Any) -> None:
            summary = markdown_table(("statistic", "value", "meaning"), rows)
            writer.add_text(f"nm/summary{self.suffix}", summary, step)
            if router is not None and router.used():
                writer.add_text("nm/kernels", markdown_table(*kernel_columns(router)), step)

        self._write(draw)

    def _log(self, step: int, also: Mapping[str, float]) -> None:
        """Log scalars, and show some in the progress bar by short names that do not collide with the model's."""
        trainer = self.trainer
        stats = {**self.sparsifier.stats(), **also}
        router = router_of(trainer)
        if router is not None and router.tuned and router.used():
            stats["sparse_gemm_share"], _ = router.sparse_share()  # so far
        groups = {"": stats}
        if self.monitor.log_layers:
            layers = self.sparsifier.layer_stats()
            groups |= {f"/{name}": values for name, values in layers.items()}
        # Through the model, so that the values reach every logger and trainer.callback_metrics.
        log = partial(trainer.lightning_module.log, on_step=True, on_epoch=False)
        for suffix, values in groups.items():
            for name in filter(self._wanted, values):
                logger = None  # if there is one
                if name == COSTS:
                    self._log_costs(values[name], step)
                    logger = False
                log(f"nm/{name}{suffix}", values[name], logger=logger)

        if not self.monitor.progress_bar or trainer.progress_bar_callback is None:
            return
        # Short names leave room for the model's own metrics. Layers may have several methods.
        shown = {"density": "density", "flips": "flip_rate"}
        for layer in self.sparsifier.layers.values():
            shown[layer.spec.method.headline] = layer.spec.method.headline
        for short, name in shown.items():
            if name in stats:
                # logger=False: the loggers have the value under its full name.
                log(PREFIX + short, stats[name], prog_bar=True, logger=False)

    def _log_costs(self, ratio: float, step: int) -> None:
        """Log the FLOPs ratio: until it changes in this fit as a text, and as one value in loggers without texts."""
        tag = f"nm/{COSTS}"
        points = {step: ratio}
        loggers = self.trainer.loggers
        if self.first_ratio is None:
            self.first_ratio = ratio
            self.ratio_step = step
            text = f"{ratio:.4g} of the multiply-adds of a dense training step; a curve follows if this changes"
            self._write(lambda writer: writer.add_text(tag, text, step))
            loggers = [logger for logger in loggers if not isinstance(logger, TensorBoardLogger)]
        elif self.ratio_step is not None:
            if ratio == self.first_ratio:
                self.ratio_step = step
                return
            # The curve begins with the last value before the change.
            points = {self.ratio_step: self.first_ratio, step: ratio}
            self.ratio_step = None
        for at, value in points.items():
            for logger in loggers:
                logger.log_metrics({tag: value}, at)

    def _draw_margins(self, step: int) -> None:
        """Write the histogram of all margins, and with ``log_layers`` those of the layers."""
        histograms = {
            name: margin_histogram(layer)
            for name, layer in self.sparsifier.layers.items()
            if layer.masks.has_forward
        }
        if not histograms:
            return

        def draw(writer: Any) -> None:
            draw_histogram(writer, "nm/margin", list(histograms.values()), step)
            for name, histogram in histograms.items() if self.monitor.log_layers else ():
                draw_histogram(writer, f"nm/margin/{name}", [histogram], step)

        self._write(draw)

    def _record(self, step: int) -> None:
        """Add a column to the heat maps."""
        # All layers, whatever log_layers says: heat maps are about the differences between layers.
        layers = self.sparsifier.layers
        if self.monitor.heat_maps and layers:
            self.history.add(step, list(layers), layer_column(list(layers.values())))

    def _draw_maps(self, step: int) -> None:
        """Write the heat maps of the run so far; one warning if matplotlib is missing."""
        history = self.history
        if not self.monitor.heat_maps or not history.steps:
            return
        self.drawn_at = step

        def draw(writer: Any) -> None:
            for name, values in zip(MAPS, history.values.unbind(1), strict=True):
                figure = heat_map(
                    f"{name.replace('_', ' ')} of layers over steps",
                    history.layers,
                    history.steps,
                    values,  # [columns, layers]
                    # Flip rates fall by orders of magnitude; by their square root the late ones still differ in colour.
                    root=name == "flip_rate",
                )
                # pyplot does not know the figure, so there is nothing to close.
                writer.add_figure(f"nm/{name}_map{self.suffix}", figure, step, close=False)

        if find_spec("matplotlib") is not None:
            self._write(draw)
        elif not self.monitor._missed_maps:
            self.monitor._missed_maps = True
            rank_zero_warn(
                "MaskMonitor draws no heat maps, because matplotlib is missing: pip install matplotlib"
            )


def _passed(count: int, logged_every: int, every: int) -> bool:
    """Whether ``every`` steps have passed since the last log, or since the start of training."""
    if every == 0:
        return False
    # Not "step % every == 0": logs come at multiples of their own interval, which may miss those of `every`. The last
    # log's step is negative in the first log, which therefore always passes.
    step = count - 1
    return step // every > (step - logged_every) // every
