"""MaskMonitor: logs statistics of the masks as scalars, histograms, heat maps and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_nm.callbacks.tables import (
    PREFIX,
    environment,
    kernel_columns,
    router_of,
    summary_rows,
)
from lightning_nm.callbacks.tensorboard import (
    MAPS,
    LayerHistory,
    TensorBoardWriter,
    can_draw,
    custom_scalars_layout,
    draw_histogram,
    heat_map,
    layer_column,
    layers_markdown,
    margin_histogram,
    markdown_table,
)
from lightning_nm.sparsifier import NMSparsifier

NOT_THE_DEFAULT = (
    "log_layers=True is a setting of the default monitor: write MaskMonitor(log_layers=True)"
)
COSTS = "train_flops_ratio"
"""The statistic that is a text in TensorBoard until it changes."""
MAPS_GROWTH = 1.25
"""Heat maps show the run from its start, so they are drawn again only once it is longer by this factor.

Drawing them all takes a time that grows with the logarithm of the run's length.
"""


@dataclass
class _Watched:
    """The state of logging for one sparsifier in one fit.

    Attributes:
        names: The statistics that are logged.
        suffix: The end of the tags that several callbacks would share.
        introduced: Whether the table of layers was written.
        first_ratio: The first FLOPs ratio that was logged.
        ratio_step: The last log with this one; ``None`` once there was another ratio.
        history: The columns of the heat maps.
        latest: The last step of this fit.
        drawn_step: The step of the last heat maps.

    Steps are numbered from 0, as Lightning's loggers do.
    """

    names: list[str]
    suffix: str = ""
    introduced: bool = False
    first_ratio: float | None = None
    ratio_step: int | None = 0
    history: LayerHistory = field(default_factory=LayerHistory)
    latest: int | None = None
    drawn_step: int | None = None


class MaskMonitor(pl.Callback):
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

    def __init__(
        self,
        statistics: list[str] | None = None,
        log_layers: bool = False,
        histograms_every: int = 500,
        images_every: int = 500,
        custom_scalars: bool = True,
        layer_table: bool = True,
        heat_maps: bool = True,
        progress_bar: bool = True,
    ) -> None:
        _check_interval("histograms_every", histograms_every)
        _check_interval("images_every", images_every)
        if isinstance(statistics, str):
            raise TypeError(
                f"statistics={statistics!r} must be a list of names, as in [{statistics!r}]"
            )
        self.statistics = statistics
        self.log_layers = log_layers
        self.histograms_every = histograms_every
        self.images_every = images_every
        self.custom_scalars = custom_scalars
        self.layer_table = layer_table
        self.heat_maps = heat_maps
        self.progress_bar = progress_bar
        self._tensorboard = TensorBoardWriter()
        self._watched: dict[NMSparsifier, _Watched] = {}
        self._missed_maps = False  # whether the warning was given that matplotlib is missing

    @classmethod
    def chosen(
        cls, monitor: bool | MaskMonitor | None, trainer: pl.Trainer, log_layers: bool
    ) -> MaskMonitor | None:
        """Return the monitor that a callback uses in a fit.

        ``True`` stands for the one among the Trainer's callbacks, or else a default one with ``log_layers``.

        Raises:
            ValueError: If the Trainer has several monitors, or ``log_layers`` is set for one that is not the default.
        """
        if isinstance(monitor, MaskMonitor):
            return monitor
        if not monitor:
            return None
        callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
        monitors = [callback for callback in callbacks if isinstance(callback, MaskMonitor)]
        if len(monitors) > 1:
            raise ValueError(
                f"there are {len(monitors)} MaskMonitors among the Trainer's callbacks: keep one of them"
            )
        if not monitors:
            return cls(log_layers=log_layers)
        if log_layers:
            raise ValueError(NOT_THE_DEFAULT)
        return monitors[0]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise an error if no callback uses this monitor."""
        # All callbacks have called start() in on_fit_start by now, whatever their order.
        if not self._watched:
            advice = "add an NMSparsityCallback without a `monitor` of its own"
            raise ValueError(f"MaskMonitor: there are no masks for it to watch: {advice}")

    def start(
        self,
        sparsifier: NMSparsifier,
        also: Sequence[str] = (),
        name: str | None = None,
        history: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a fit. The callback calls this, :meth:`watch`, :meth:`finish`, :meth:`history` and :meth:`stop`.

        ``also`` names the statistics that :meth:`watch` gets besides the sparsifier's, ``name`` is that of the
        callback, and ``history`` what :meth:`history` returned in the run that this fit resumes.

        Raises:
            ValueError: If a requested statistic does not exist.
        """
        # A dictionary keeps the order and has each name once.
        names = list(dict.fromkeys([*_statistic_names(sparsifier), *also]))
        # The methods of frozen layers, which may be masked later, may have a requested statistic.
        if not sparsifier.selection.frozen:
            for requested in self.statistics or ():
                if requested not in names:
                    raise ValueError(
                        f"MaskMonitor: there is no statistic '{requested}' in this training, only {names}"
                    )
        logged = [statistic for statistic in names if self._wanted(statistic)]
        watched = _Watched(logged, f"/{name}" if name else "")
        if history:
            watched.history = LayerHistory.from_state(history)
        self._watched[sparsifier] = watched

    def history(self, sparsifier: NMSparsifier) -> dict[str, Any]:
        """Return the heat maps' columns for a checkpoint; empty if there are none."""
        watched = self._watched.get(sparsifier)
        if watched is None or not watched.history.steps:
            return {}
        return watched.history.state_dict()

    def stop(self, sparsifier: NMSparsifier) -> None:
        """End a fit."""
        self._watched.pop(sparsifier, None)

    def watch(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        sparsifier: NMSparsifier,
        stepped: bool,
        also: Mapping[str, float],
    ) -> None:
        """Log if the Trainer logs now. All processes call it at the end of each batch, after the masks were updated.

        ``stepped`` tells whether an optimizer stepped in this batch; ``also`` holds further statistics.
        """
        # Lightning numbers scalars by batches that end a step. With manual optimization every batch counts, and
        # global_step may count several steps in one.
        automatic = pl_module.automatic_optimization
        count = trainer.global_step if automatic else trainer.fit_loop.total_batch_idx + 1
        step = count - 1
        watched = self._watched[sparsifier]
        if stepped:
            watched.latest = step
            # Not when fit starts: the kernels are known after the first step.
            if not watched.introduced:
                watched.introduced = True
                self._introduce(trainer, sparsifier, step)

        # The rule of Lightning's logger connector: pl_module.log() would drop values at other steps.
        # The Trainer has the attribute, but no annotation of it.
        every: int = getattr(trainer, "log_every_n_steps", 0)
        is_due = every > 0 and (count % every == 0 or trainer.should_stop)
        # While gradients accumulate, global_step is that of the step before, which was logged.
        is_within_step = automatic and not stepped
        if not is_due or is_within_step:
            return
        stats = {**sparsifier.stats(), **also, **_kernel_statistics(trainer)}
        self._log(trainer, pl_module, sparsifier, stats, step)
        # What follows is computed in all processes, which may share weights, and written by rank 0.
        if not TensorBoardWriter.has_logger(trainer):
            return
        self._record(trainer, sparsifier, step)
        if _passed(count, every, self.histograms_every):
            self._draw_margins(trainer, sparsifier, step)
        drawn = watched.drawn_step
        is_longer = drawn is None or step + 1 >= MAPS_GROWTH * (drawn + 1)
        if is_longer and _passed(count, every, self.images_every):
            self._draw_maps(trainer, sparsifier, step)

    def finish(self, trainer: pl.Trainer, sparsifier: NMSparsifier) -> None:
        """Write what is known at the end of a fit. All processes call it, before the masks are removed."""
        watched = self._watched[sparsifier]
        if watched.latest is None or not TensorBoardWriter.has_logger(trainer):
            return
        # The last step has a column and maps even if the Trainer did not log it.
        if watched.latest not in watched.history.steps:
            self._record(trainer, sparsifier, watched.latest)
        if self.images_every and watched.drawn_step != watched.latest:
            self._draw_maps(trainer, sparsifier, watched.latest)
        if self.layer_table:
            self._summarize(trainer, sparsifier, watched)

    def _wanted(self, statistic: str) -> bool:
        return self.statistics is None or statistic in self.statistics

    def _introduce(self, trainer: pl.Trainer, sparsifier: NMSparsifier, step: int) -> None:
        """Write the table of layers and the layout."""

        def draw(writer: Any) -> None:
            if self.layer_table:
                writer.add_text("nm/layers", layers_markdown(sparsifier, router_of(trainer)), step)
                parts = markdown_table(("part", "value"), environment(trainer).items())
                writer.add_text("nm/environment", parts, step)
            if self.custom_scalars:
                # The chart of costs would be empty in most runs.
                names = [name for name in self._watched[sparsifier].names if name != COSTS]
                writer.add_custom_scalars(custom_scalars_layout(names, self.log_layers))

        self._tensorboard.write(trainer, draw)

    def _summarize(self, trainer: pl.Trainer, sparsifier: NMSparsifier, watched: _Watched) -> None:
        """Write the summary, and the kernels that ran."""
        try:
            rows = list(summary_rows(sparsifier, dict(trainer.callback_metrics)))
        except ValueError as error:  # a weight holds NaN
            rank_zero_warn(f"MaskMonitor writes no summary: {error}")
            return
        # The strategy is torn down, and its router has freed its packs, but it still reports what ran.
        router = router_of(trainer)

        def draw(writer: Any) -> None:
            summary = markdown_table(("statistic", "value", "meaning"), rows)
            writer.add_text(f"nm/summary{watched.suffix}", summary, watched.latest)
            if router is not None and router.used():
                kernels = markdown_table(*kernel_columns(router))
                writer.add_text("nm/kernels", kernels, watched.latest)

        self._tensorboard.write(trainer, draw)

    def _log(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        sparsifier: NMSparsifier,
        stats: dict[str, float],
        step: int,
    ) -> None:
        """Log scalars, and show some in the progress bar by short names that do not collide with the model's."""
        scalars = {f"nm/{name}": value for name, value in stats.items() if self._wanted(name)}
        if self.log_layers:
            for layer, values in sparsifier.layer_stats().items():
                for name, value in values.items():
                    if self._wanted(name):
                        scalars[f"nm/{name}/{layer}"] = value
        # Through the model, so that the values reach every logger and trainer.callback_metrics.
        for tag, value in scalars.items():
            logger = None  # if there is one
            if tag == f"nm/{COSTS}":
                self._log_costs(trainer, sparsifier, value, step)
                logger = False
            pl_module.log(tag, value, on_step=True, on_epoch=False, logger=logger)

        if not self.progress_bar or trainer.progress_bar_callback is None:
            return
        # Short names leave room for the model's own metrics. Layers may have several methods.
        shown = {"density": "density", "flips": "flip_rate"}
        for watched_layer in sparsifier.layers.values():
            headline = watched_layer.spec.method.headline
            shown[headline] = headline
        for short, name in shown.items():
            if name not in stats:
                continue
            # logger=False: the loggers have the value under its full name.
            pl_module.log(
                PREFIX + short,
                stats[name],
                on_step=True,
                on_epoch=False,
                prog_bar=True,
                logger=False,
            )

    def _log_costs(
        self, trainer: pl.Trainer, sparsifier: NMSparsifier, ratio: float, step: int
    ) -> None:
        """Log the FLOPs ratio: until it changes in this fit as a text, and as one value in loggers without texts."""
        watched = self._watched[sparsifier]
        points = {step: ratio}
        loggers = trainer.loggers
        if watched.first_ratio is None:
            watched.first_ratio = ratio
            watched.ratio_step = step
            text = f"{ratio:.4g} of the multiply-adds of a dense training step; a curve follows if this changes"
            self._tensorboard.write(
                trainer, lambda writer: writer.add_text(f"nm/{COSTS}", text, step)
            )
            loggers = [logger for logger in loggers if not isinstance(logger, TensorBoardLogger)]
        elif watched.ratio_step is not None:
            if ratio == watched.first_ratio:
                watched.ratio_step = step
                return
            # The curve begins with the last value before the change.
            points = {watched.ratio_step: watched.first_ratio, step: ratio}
            watched.ratio_step = None
        for at, value in points.items():
            for logger in loggers:
                logger.log_metrics({f"nm/{COSTS}": value}, at)

    def _draw_margins(self, trainer: pl.Trainer, sparsifier: NMSparsifier, step: int) -> None:
        """Write the histogram of all margins, and with ``log_layers`` those of the layers."""
        histograms = {
            name: margin_histogram(layer)
            for name, layer in sparsifier.layers.items()
            if layer.forward_mask is not None
        }
        if not histograms:
            return

        def draw(writer: Any) -> None:
            draw_histogram(writer, "nm/margin", list(histograms.values()), step)
            if self.log_layers:
                for name, histogram in histograms.items():
                    draw_histogram(writer, f"nm/margin/{name}", [histogram], step)

        self._tensorboard.write(trainer, draw)

    def _record(self, trainer: pl.Trainer, sparsifier: NMSparsifier, step: int) -> None:
        """Add a column to the heat maps."""
        if not self.heat_maps or not sparsifier.layers:
            return
        # All layers, whatever log_layers says: heat maps are about the differences between layers.
        column = layer_column(list(sparsifier.layers.values()))
        self._watched[sparsifier].history.add(step, list(sparsifier.layers), column)

    def _draw_maps(self, trainer: pl.Trainer, sparsifier: NMSparsifier, step: int) -> None:
        """Write the heat maps of the run so far; one warning if matplotlib is missing."""
        watched = self._watched[sparsifier]
        if not self.heat_maps or not watched.history.steps:
            return

        def draw(writer: Any) -> None:
            history = watched.history
            for index, name in enumerate(MAPS):
                title = f"{name.replace('_', ' ')} of layers over steps"
                # Flip rates fall by orders of magnitude; by their square root the late ones still differ in colour.
                root = name == "flip_rate"
                values = history.values[:, index]  # [columns, layers]
                figure = heat_map(title, history.layers, history.steps, values, root=root)
                # pyplot does not know the figure, so there is nothing to close.
                writer.add_figure(f"nm/{name}_map{watched.suffix}", figure, step, close=False)

        if can_draw():
            self._tensorboard.write(trainer, draw)
        elif not self._missed_maps:
            self._missed_maps = True
            rank_zero_warn(
                "MaskMonitor draws no heat maps, because matplotlib is missing: pip install matplotlib"
            )
        watched.drawn_step = step


def _check_interval(name: str, number: int) -> None:
    # bool is a subclass of int, but True is no number of steps.
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{name}={number} must be a number of optimizer steps, or 0 for never")


def _kernel_statistics(trainer: pl.Trainer) -> dict[str, float]:
    """The share of GEMM time on sparse kernels so far; nothing without a router, or before it has chosen kernels."""
    router = router_of(trainer)
    if router is None or not router.tuned or not router.used():
        return {}
    share, _ = router.sparse_share()
    return {"sparse_gemm_share": share}


def _passed(count: int, logged_every: int, every: int) -> bool:
    """Whether ``every`` steps have passed since the last log, or since the start of training."""
    if every == 0:
        return False
    # Not "step % every == 0": logs come at multiples of their own interval, which may miss those of `every`.
    step = count - 1
    last_logged = step - logged_every  # negative in the first log, which therefore always passes
    return step // every > last_logged // every


def _statistic_names(sparsifier: NMSparsifier) -> list[str]:
    """The names of a sparsifier's statistics."""
    names = ["density", "flip_rate", "kept_magnitude", "overlap", "train_flops_ratio"]
    layers = sparsifier.layers.values()
    if sparsifier.config.grad_snr_every and any(
        layer.spec.estimator is not None for layer in layers
    ):
        names += ["grad_snr", "grad_density"]
    # Layers of one method have the same statistics: one of them stands for all.
    layer_of_method = {type(layer.spec.method): layer for layer in layers}
    for layer in layer_of_method.values():
        names += layer.spec.method.statistics([layer])
    return names
