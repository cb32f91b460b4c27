"""MaskMonitor: what the masks do, in scalars, pictures and text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_nm.callbacks.report.pictures import margin_histogram, mask_pictures, together
from lightning_nm.callbacks.report.progress import progress_bar_statistics
from lightning_nm.callbacks.report.tensorboard import Boards, draw_histogram, layout, panel
from lightning_nm.kernels import Router
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import as_globs
from lightning_nm.sparsifier import NMSparsifier

NOT_THE_DEFAULT = "log_layers=True is a setting of the default monitor: write MaskMonitor(log_layers=True)"


@dataclass
class _Watched:
    """What is known of a masked model in one fit.

    Args:
        names: The statistics that are logged.
        introduced: Whether its table was written.
        drawn: The last picture of each forward mask.
    """

    names: list[str]
    introduced: bool = False
    drawn: dict[str, Tensor] = field(default_factory=dict)


class MaskMonitor(pl.Callback):
    """Logs what the masks of an :class:`~lightning_nm.NMSparsityCallback` do; docs/tensorboard.md explains every tag.

    Each of those callbacks has one with the settings below. One of other settings is passed to it as ``monitor``, or
    put among the Trainer's callbacks, anywhere.

    Every logger gets the scalars ``nm/<statistic>``, and with ``log_layers`` ``nm/<statistic>/<layer>``, at the
    Trainer's logging interval. Between two logs nothing is computed, so no device is waited for. TensorBoard also gets
    the table of layers as text and a layout of its custom scalars, once in a fit; and now and then histograms of the
    margin by which masks hold (:func:`~lightning_nm.functional.mask_margin`) and pictures of masks: the upper left
    256 x 256 entries of ``[out, in]``, the taps of a convolution side by side. Without TensorBoard these are left out.
    What a logger refuses costs one warning.

    Args:
        statistics: Names of the statistics to log; ``None`` logs all that the methods and estimators have.
        log_layers: Log statistics and histograms of every layer, too.
        histograms_every: Optimizer steps between two histograms, which are drawn when the Trainer logs next; the first
            ones when it logs first. 0 for none.
        images_every: The same for pictures.
        image_layers: Globs over names of masked layers to draw; the first masked layer by default.
        custom_scalars: Write the layout. A log holds one: leave it out if the model writes its own.
        layer_table: Write the table of layers.
        progress_bar: Show density, flip rate and what the method is watched by in the progress bar.

    Raises:
        ValueError: For a negative interval, at once; when fit starts, for the name of a statistic or a layer that there
            is not, for several monitors in one Trainer, and for one that nothing uses.

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
        image_layers: str | list[str] | None = None,
        custom_scalars: bool = True,
        layer_table: bool = True,
        progress_bar: bool = True,
    ) -> None:
        for name, number in (("histograms_every", histograms_every), ("images_every", images_every)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"{name}={number} must be a number of optimizer steps, or 0 for never")
        if isinstance(statistics, str):
            raise TypeError(f"statistics={statistics!r} must be a list of names, as in [{statistics!r}]")
        self.statistics = statistics
        self.log_layers = log_layers
        self.histograms_every = histograms_every
        self.images_every = images_every
        self.image_layers = as_globs(image_layers, "image_layers")
        self.custom_scalars = custom_scalars
        self.layer_table = layer_table
        self.progress_bar = progress_bar
        self._boards = Boards()
        self._watched: dict[NMSparsifier, _Watched] = {}

    # -------------------------------------------------------------------------------------------------- the Trainer

    @staticmethod
    def of(trainer: pl.Trainer) -> MaskMonitor | None:
        """The one among a Trainer's callbacks.

        Raises:
            ValueError: If there are several.
        """
        found = [callback for callback in getattr(trainer, "callbacks", []) if isinstance(callback, MaskMonitor)]
        if len(found) > 1:
            raise ValueError(f"there are {len(found)} MaskMonitors among the Trainer's callbacks: keep one of them")
        return found[0] if found else None

    @classmethod
    def chosen(cls, monitor: bool | MaskMonitor | None, trainer: pl.Trainer, log_layers: bool) -> MaskMonitor | None:
        """The one that a callback uses in a fit.

        Args:
            monitor: One of its own; ``True`` for that among the Trainer's callbacks, or a default one; else none.
            trainer: The Trainer.
            log_layers: A setting of the default one.

        Raises:
            ValueError: If ``log_layers`` is for one that is not the default.
        """
        if not monitor or isinstance(monitor, MaskMonitor):
            return monitor or None
        among = cls.of(trainer)
        if among is not None and log_layers:
            raise ValueError(NOT_THE_DEFAULT)
        return among or cls(log_layers=log_layers)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse to watch nothing."""
        if not self._watched:
            raise ValueError(
                "MaskMonitor is among the Trainer's callbacks, but there are no masks for it to watch: add an "
                "NMSparsityCallback, one without a `monitor` of its own"
            )

    # ------------------------------------------------------------------------------------------------- the callback

    def start(self, sparsifier: NMSparsifier, also: Sequence[str] = ()) -> None:
        """Begin to watch; :class:`~lightning_nm.NMSparsityCallback` calls this, :meth:`watch` and :meth:`stop`.

        Args:
            sparsifier: The masked model.
            also: Names of statistics that come from elsewhere.

        Raises:
            ValueError: If a statistic or a layer that was asked for is not there.
        """
        names = statistic_names(sparsifier, also)
        unknown = [name for name in self.statistics or () if name not in names]
        if unknown:
            raise ValueError(f"MaskMonitor: there is no statistic '{unknown[0]}' in this training, only {names}")
        for glob in self.image_layers or ():
            if not any(fnmatchcase(name, glob) for name in sparsifier.layers):
                raise ValueError(
                    f"MaskMonitor: image_layers '{glob}' matches no masked layer; there are {list(sparsifier.layers)}"
                )
        self._watched[sparsifier] = _Watched([name for name in names if self._wanted(name)])

    def stop(self, sparsifier: NMSparsifier) -> None:
        """The fit is over."""
        self._watched.pop(sparsifier, None)

    def watch(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        sparsifier: NMSparsifier,
        stepped: bool,
        statistics: Callable[[], dict[str, float]],
    ) -> None:
        """Log if the Trainer logs now; to be called in all processes at the end of each batch, when masks have moved.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            sparsifier: One that was started.
            stepped: Whether an optimizer stepped in this batch.
            statistics: Makes the statistics of the model.
        """
        # Batches that ended a step: what `log` numbers its scalars by. With manual optimization every batch does, and
        # the Trainer's global_step may count several.
        automatic = pl_module.automatic_optimization
        count = trainer.global_step if automatic else trainer.fit_loop.total_batch_idx + 1
        if stepped and not self._watched[sparsifier].introduced:
            self._watched[sparsifier].introduced = True
            self._introduce(trainer, sparsifier, count - 1)
        every: int = getattr(trainer, "log_every_n_steps", 0)  # set by the Trainer, missing in its annotations
        due = every > 0 and (count % every == 0 or trainer.should_stop)
        if not due or (automatic and not stepped):
            return
        found = statistics()
        self._log(trainer, pl_module, sparsifier, found)
        if Boards.there(trainer):
            if _passed(count, every, self.histograms_every):
                self._draw_margins(trainer, sparsifier, count - 1)
            if _passed(count, every, self.images_every):
                self._draw_masks(trainer, sparsifier, count - 1)

    # ------------------------------------------------------------------------------------------------------ writing

    def _wanted(self, statistic: str) -> bool:
        return self.statistics is None or statistic in self.statistics

    def _introduce(self, trainer: pl.Trainer, sparsifier: NMSparsifier, step: int) -> None:
        """After the first step, when it is known which kernels run."""
        router = getattr(trainer.precision_plugin, "router", None)

        def draw(writer: Any) -> None:
            if self.layer_table:
                writer.add_text("nm/layers", panel(sparsifier, router if isinstance(router, Router) else None), step)
            if self.custom_scalars:
                writer.add_custom_scalars(layout(self._watched[sparsifier].names, self.log_layers))

        self._boards.write(trainer, draw)

    def _log(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, sparsifier: NMSparsifier, found: dict[str, float]
    ) -> None:
        scalars = {f"nm/{name}": value for name, value in found.items() if self._wanted(name)}
        if self.log_layers:
            for layer, values in sparsifier.layer_stats().items():
                scalars.update({f"nm/{name}/{layer}": value for name, value in values.items() if self._wanted(name)})
        for tag, value in scalars.items():
            pl_module.log(tag, value, on_step=True, on_epoch=False)
        if self.progress_bar and trainer.progress_bar_callback is not None:
            for name, value in progress_bar_statistics(sparsifier, found).items():
                pl_module.log(name, value, on_step=True, on_epoch=False, prog_bar=True, logger=False)

    def _draw_margins(self, trainer: pl.Trainer, sparsifier: NMSparsifier, step: int) -> None:
        made = {name: margin_histogram(layer) for name, layer in sparsifier.layers.items()}
        histograms = {name: histogram for name, histogram in made.items() if histogram is not None}
        if not histograms:
            return

        def draw(writer: Any) -> None:
            draw_histogram(writer, "nm/margin", together(list(histograms.values())), step)
            for name, histogram in histograms.items() if self.log_layers else ():
                draw_histogram(writer, f"nm/margin/{name}", histogram, step)

        self._boards.write(trainer, draw)

    def _draw_masks(self, trainer: pl.Trainer, sparsifier: NMSparsifier, step: int) -> None:
        before = self._watched[sparsifier].drawn
        drawn = {layer.name: mask_pictures(layer, before.get(layer.name)) for layer in self._pictured(sparsifier)}
        before.update(
            {name: pictures["forward_mask"] for name, pictures in drawn.items() if "forward_mask" in pictures}
        )

        def draw(writer: Any) -> None:
            for name, pictures in drawn.items():
                for kind, picture in pictures.items():
                    writer.add_image(f"nm/{kind}/{name}", picture, step)

        self._boards.write(trainer, draw)

    def _pictured(self, sparsifier: NMSparsifier) -> list[NMLayer]:
        layers = sparsifier.layers
        if self.image_layers is None:
            return list(layers.values())[:1]
        return [layer for name, layer in layers.items() if any(fnmatchcase(name, glob) for glob in self.image_layers)]


def _passed(count: int, logged_every: int, every: int) -> bool:
    """Whether ``every`` steps went by since the last log, or since the beginning before the first: no state needed."""
    return every > 0 and (count - 1) // every > (count - 1 - logged_every) // every


def statistic_names(sparsifier: NMSparsifier, also: Sequence[str] = ()) -> list[str]:
    """Names of the statistics that a training can have.

    Args:
        sparsifier: The masked model.
        also: Names of those that come from elsewhere.
    """
    names = ["density", "flip_rate", "kept_magnitude", "overlap", "train_flops_ratio"]
    layers = sparsifier.layers.values()
    if sparsifier.grad_snr_every and any(layer.estimator is not None for layer in layers):
        names += ["grad_snr", "grad_density"]
    for layer in {type(layer.method): layer for layer in layers}.values():
        names += layer.method.statistics([layer])
    return list(dict.fromkeys([*names, *also]))
