"""A Trainer, a model and data from the YAML files of ``lightning-nm fit``, without logs, checkpoints and validation."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_nm.callbacks import MaskMonitor, NMSparsityCallback
from lightning_nm.commands.lightning_cli import NMLightningCLI
from lightning_nm.export.graphs import import_class
from lightning_nm.plugins import NMFSDPPrecision
from lightning_nm.plugins.precision import KernelRouting

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
"""Options of a Trainer that prints, logs and saves nothing."""

# Options that do not change what a training step computes. The training length is not among them:
# schedules depend on it.
_FORCED: dict[str, Any] = {
    **QUIET,
    "fast_dev_run": False,  # which ends a training after a few batches
    "barebones": False,
    "limit_val_batches": 0,
    "profiler": None,
    "max_time": None,
    "devices": 1,
    "num_nodes": 1,
}

# Callbacks that do not change the training and need a logger or a validation, write files or print.
_WATCHERS: tuple[type, ...] = (
    callbacks.Checkpoint,
    callbacks.DeviceStatsMonitor,
    callbacks.EarlyStopping,
    callbacks.LearningRateMonitor,
    callbacks.ModelSummary,
    callbacks.ProgressBar,
    callbacks.Timer,
)


def import_classes(
    model: str | None, data: str | None, configs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Import the model's and the data module's class, for configs that do not name them.

    Args:
        model: Import path of the model's class; ``None`` if the configs name it.
        data: The same of the data module's.
        configs: The contents of the files.

    Returns:
        The classes, as arguments of a LightningCLI.

    Raises:
        ValueError: If one cannot be imported, or is no such class, or if a section of the configs names no class, and
            no argument names it.

    Example:
        >>> import_classes("lightning_nm.demo.ResidualCNN", None, [])["model_class"].__name__
        'ResidualCNN'
    """
    classes: dict[str, Any] = {}
    faults = []
    for option, given, argument, kind, example in (
        ("model", model, "model_class", pl.LightningModule, "Net"),
        ("data", data, "datamodule_class", pl.LightningDataModule, "Data"),
    ):
        if given is not None:
            classes[argument] = import_class(given, f"--{option}", kind)
            continue
        sections = [each[option] for each in configs if each.get(option)]
        # `model: Net` is short for `model: {class_path: Net}`.
        # One file is enough: the others may change arguments of the class that it names.
        is_named = any(isinstance(each, str) or "class_path" in each for each in sections)
        if sections and not is_named:
            faults.append(
                f"`{option}:` of the config names no class: give it by --{option}, such as --{option} "
                f"train.{example}, or write `class_path` and `init_args` in the config"
            )
    # A class that was named wrongly is told first.
    if faults:
        raise ValueError(faults[0])
    return classes


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file that holds one mapping.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is not YAML, or holds something else.
    """
    import yaml  # of the extra `cli`

    try:
        content = yaml.safe_load(path.read_text())
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a mapping of keys to values, not {content!r:.60}")
    return content


def build(
    options: argparse.Namespace, prog: str = "lightning-nm doctor", *, masks: bool = True
) -> LightningCLI:
    """Create the Trainer, the model and the data on one device: a GPU if there is one, else the CPU.

    Args:
        options: Those of :func:`add_training`. ``config`` are YAML files as ``lightning-nm fit -c`` takes them, or as a
            ``LightningCLI(Model, Data)`` of one's own does; later ones override. For such files ``model`` is the import
            path of the model's class, such as ``train.Net``, and ``data`` that of the data module.
        prog: What the messages of usage errors begin with.
        masks: Keep the callbacks that mask, and the precision plugins that choose kernels for masked layers. Without
            them Lightning's own precision is the same.

    Raises:
        ImportError: If jsonargparse is missing.
        ValueError: If a class cannot be imported, or is no such class.
        SystemExit: With status 2 if a file cannot be read or an argument is wrong; stderr says which.
    """
    contents = []
    # Only to see whether they name the classes: the parser reads the files once more.
    for path in options.config:
        # Why a file cannot be read is explained by the parser.
        with suppress(OSError, ValueError):
            contents.append(read_yaml(Path(path)))
    class_arguments = import_classes(options.model, options.data, contents)
    arguments = [word for path in options.config for word in ("--config", str(path))]

    class CLI(NMLightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            # Arguments of fit, in the configs that it prints and saves.
            for name in ("ckpt_path", "weights_only"):
                parser.add_argument(f"--{name}", default=None, type=Any)

        def before_instantiate_classes(self) -> None:
            # Some loggers start a run when they are created.
            self.config.trainer.logger = False

        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            # Callbacks and plugins in it are objects already: LightningCLI creates the Trainer after them.
            given = self.config_init.trainer
            forced = {**_FORCED, **_for_this_machine(given, masks)}
            # Arguments win over the Trainer's section of the config.
            return super().instantiate_trainer(**forced, **kwargs)

    with warnings.catch_warnings():
        # LightningCLI warns of `args` while the process has arguments, too.
        warnings.filterwarnings(
            "ignore", message="LightningCLI's args parameter is intended to run from within Python"
        )
        return CLI(
            **class_arguments,
            run=False,
            save_config_callback=None,  # which would write a file
            parser_kwargs={"prog": prog},
            args=arguments,
        )


def _for_this_machine(given: Any, masks: bool) -> dict[str, Any]:
    """Options of the Trainer that depend on those of the config and on the device."""
    # MaskMonitor reads the masks of an NMSparsityCallback.
    unused = _WATCHERS if masks else (*_WATCHERS, NMSparsityCallback, MaskMonitor)
    kept = [each for each in _listed(given.callbacks) if not isinstance(each, unused)]
    forced: dict[str, Any] = {"callbacks": kept}
    # These plugins refuse a model without masked layers.
    unusable: tuple[type, ...] = () if masks else (KernelRouting,)
    if not torch.cuda.is_available():
        # The config may be for GPUs, as `strategy: fsdp` is.
        forced |= {"accelerator": "cpu", "strategy": "auto"}
        unusable += (NMFSDPPrecision,)  # it is for the strategy that was replaced
    plugins = _listed(given.plugins)
    for plugin in plugins:
        if isinstance(plugin, unusable):
            # Lightning makes its own plugin of the precision, which it refuses next to another precision plugin.
            forced["precision"] = plugin.precision  # type: ignore[attr-defined]
            forced["plugins"] = [each for each in plugins if each is not plugin]
    return forced


def masking_callbacks(cli: LightningCLI) -> list[NMSparsityCallback]:
    """Return the callbacks of the config that mask, also if the Trainer was built without them."""
    callbacks = _listed(cli.config_init.trainer.callbacks)
    return [each for each in callbacks if isinstance(each, NMSparsityCallback)]


def _listed(given: Any) -> list[Any]:
    """The entries of an option of the Trainer: a list, a single object or none."""
    entries = given if isinstance(given, list) else [given]
    return [entry for entry in entries if entry is not None]


class Enough(Exception):
    """Ends a training; an exception, so that the hooks for the end of an epoch or a fit do not run."""


def fit_until_enough(cli: LightningCLI, watcher: pl.Callback) -> None:
    """Train until a callback, which comes after all others, raises :exc:`Enough`, or to the end.

    Raises:
        ValueError: If no batch was trained.
    """
    cli.trainer.callbacks.append(watcher)  # type: ignore[attr-defined]  # missing in its annotations
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    except Enough:
        return
    # A training that is shorter than the watcher wants is no error, but one without a step is.
    if not cli.trainer.global_step:
        raise ValueError(
            "the training ended before its first batch: see its max_steps, limit_train_batches and data"
        )


def add_training(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options of a command that takes what :func:`build` takes."""
    config = "a YAML file as `lightning-nm fit -c` takes it; may be given several times, later ones override"
    parser.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        required=required,
        help=config,
    )
    add_classes(parser)


def add_classes(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--model`` and ``--data`` of a command that builds a training."""
    for option, example in (("model", "Net"), ("data", "Data")):
        own = (
            f"in the config of a LightningCLI of your own, whose `{option}:` has no class_path: "
            f"its class, such as train.{example}"
        )
        parser.add_argument(f"--{option}", metavar="CLASS", help=own)
