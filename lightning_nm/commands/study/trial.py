"""One training and its test, by the project's LightningCLI."""

from __future__ import annotations

import logging
import math
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from io import StringIO
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from lightning_nm.callbacks import NMSparsityCallback
from lightning_nm.commands.build import Classes, require_classes
from lightning_nm.commands.lightning_cli import NMLightningCLI
from lightning_nm.functional.spelling import did_you_mean

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

NO_CLASSES = Classes()


class UnknownMetric(ValueError):
    """The test logs other metrics than the study's."""


class _Flops(pl.Callback):
    """Reads the FLOPs ratios of a run before the masks are taken off."""

    def __init__(self) -> None:
        self.ratios: dict[str, float] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, NMSparsityCallback) and callback.sparsifier is not None:
                self.ratios = callback.sparsifier.mean_flops_ratios()


def build(config: Mapping[str, Any], seed: int, classes: Classes = NO_CLASSES) -> LightningCLI:
    """Create the Trainer, the model and the data of a trial.

    ``seed`` is that of ``seed_everything`` and, if the data module takes one, of the data, so all variants of a seed
    start from the same weights and see the same batches. ``classes`` are those of a config that does not name them.

    Raises:
        ValueError: If the config has an unknown key or a bad value, in jsonargparse's words, or a class cannot be
            imported.
    """

    class CLI(NMLightningCLI):
        def before_instantiate_classes(self) -> None:
            data = self.config.get("data")
            arguments = data.get("init_args") if data else None
            if arguments is not None and "seed" in arguments:
                arguments["seed"] = seed

    require_classes([config], classes)
    said = StringIO()
    try:
        with silence(), redirect_stderr(said), redirect_stdout(said):
            options = {
                "run": False,
                "save_config_callback": None,
                "args": {**config, "seed_everything": seed},
            }
            return CLI(**classes.imported(), **options)
    except SystemExit as error:  # jsonargparse printed the usage and then the error
        raise ValueError(said.getvalue().rpartition("error: ")[2].strip()) from error


def train(
    config: Mapping[str, Any], seed: int, metric: str, classes: Classes = NO_CLASSES
) -> dict[str, Any]:
    """Fit and test once; return everything that is known of it, as a row for a table.

    Raises:
        UnknownMetric: If the test logs metrics, but not `metric`.
        ValueError: If the test logs nothing, or `metric` is no finite number.
    """
    with silence():
        cli = build(config, seed, classes)
        flops = _Flops()
        cli.trainer.callbacks.append(flops)  # type: ignore[attr-defined]
        start = time.perf_counter()
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        seconds = time.perf_counter() - start
        steps = cli.trainer.global_step
        tested: dict[str, float] = {}
        for found in cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False):
            tested |= found
    if metric not in tested:
        kind = UnknownMetric if tested else ValueError
        names = ", ".join(tested) or "nothing"
        raise kind(f"metric: the test logs no {metric!r} but {names}{did_you_mean(metric, tested)}")
    if not math.isfinite(tested[metric]):
        raise ValueError(f"the training diverged: {metric} is {tested[metric]}")
    return {
        **{name: float(value) for name, value in tested.items()},
        **{f"flops_{kind}": ratio for kind, ratio in flops.ratios.items()},
        "steps": steps,
        "fit_seconds": round(seconds, 3),
        "torch": torch.__version__,
        "lightning_nm": version("lightning-nm"),
        "threads": torch.get_num_threads(),
        "device": str(cli.trainer.strategy.root_device),
        "host": socket.gethostname(),
    }


@contextmanager
def silence() -> Iterator[None]:
    """Without the messages of Lightning, and the warnings that a small or short training gives rise to."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
