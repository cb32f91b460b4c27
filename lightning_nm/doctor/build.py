"""A Trainer, a model and data from the YAML files of ``lightning-nm fit``, with everything off that leaves traces."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as lightning_callbacks

from lightning_nm.lightning_cli import lightning_cli
from lightning_nm.plugins import NMFSDPPrecision

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

_FORCED: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "profiler": None,
    "max_time": None,
    "barebones": False,
    "devices": 1,
    "num_nodes": 1,
}
"""Arguments of the Trainer. Its length stays as it is, because schedules follow from it."""

_WATCHERS = (
    lightning_callbacks.Checkpoint,
    lightning_callbacks.DeviceStatsMonitor,
    lightning_callbacks.EarlyStopping,
    lightning_callbacks.LearningRateMonitor,
    lightning_callbacks.ModelSummary,
    lightning_callbacks.ProgressBar,
    lightning_callbacks.Timer,
)
"""Callbacks that look on, and need a logger or a validation, write files or print."""


def build(configs: Sequence[str]) -> LightningCLI:
    """Make Trainer, model and data, on one device, which is the CPU where there is no CUDA.

    Args:
        configs: YAML files as ``lightning-nm fit -c`` takes them; later ones override.

    Raises:
        ImportError: If jsonargparse is missing.
        SystemExit: With status 2 if a file cannot be read or an argument is wrong; stderr says which.
    """

    class CLI(lightning_cli()):  # type: ignore[misc]
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            for name in ("ckpt_path", "weights_only"):  # arguments of fit, in the configs that it prints and saves
                parser.add_argument(f"--{name}", default=None, type=Any)

        def before_instantiate_classes(self) -> None:
            self.config.trainer.logger = False  # before it is made: some loggers begin a run then

        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            given = self.config_init.trainer
            callbacks = given.callbacks or []
            callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
            forced = {**_FORCED, "callbacks": [c for c in callbacks if not isinstance(c, _WATCHERS)]}
            if not torch.cuda.is_available():
                plugins = given.plugins or []
                plugins = plugins if isinstance(plugins, list) else [plugins]
                forced["plugins"] = [p for p in plugins if not isinstance(p, NMFSDPPrecision)]
                forced |= {"accelerator": "cpu", "strategy": "auto"}
            return super().instantiate_trainer(**forced, **kwargs)

    with _calm():
        words = [word for path in configs for word in ("--config", str(path))]
        return CLI(run=False, save_config_callback=None, parser_kwargs={"prog": "lightning-nm doctor"}, args=words)


@contextmanager
def _calm() -> Iterator[None]:
    """LightningCLI warns if it gets arguments of its own while the process has some, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within Python")
        yield
