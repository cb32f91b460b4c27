"""A Trainer, a model and data from the YAML files of ``lightning-nm fit``, without logs, checkpoints and validation."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision

from lightning_nm.callbacks import MaskMonitor, NMSparsityCallback
from lightning_nm.commands.lightning_cli import NMLightningCLI
from lightning_nm.export.graphs import import_class
from lightning_nm.plugins import NMFSDPPrecision
from lightning_nm.plugins.routing import KernelRouting

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

# Options that do not change what a training step computes. The training length is not among them:
# schedules depend on it.
_FORCED: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fast_dev_run": False,
    "barebones": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
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
_MASKING: tuple[type, ...] = (NMSparsityCallback, MaskMonitor)


class Classes(NamedTuple):
    """Import paths of the model's and the data module's class, for a config that does not name them.

    Example:
        >>> classes = Classes(model="lightning_nm.demo.ResidualCNN")
        >>> classes.imported()["model_class"].__name__
        'ResidualCNN'
    """

    model: str | None = None
    data: str | None = None

    def imported(self) -> dict[str, Any]:
        """Return the classes as arguments of a LightningCLI.

        Raises:
            ValueError: If one cannot be imported, or is no such class.
        """
        model_class = None
        if self.model is not None:
            model_class = import_class(self.model, "--model", pl.LightningModule)
        data_class = None
        if self.data is not None:
            data_class = import_class(self.data, "--data", pl.LightningDataModule)
        return {"model_class": model_class, "datamodule_class": data_class}


def require_classes(configs: Sequence[Any], classes: Classes) -> None:
    """Refuse configs whose ``model:`` or ``data:`` names no class, if no option names it.

    Raises:
        ValueError: With the option.
    """
    for option, given, example in (("model", classes.model, "Net"), ("data", classes.data, "Data")):
        sections = []
        for config in configs:
            if isinstance(config, Mapping) and config.get(option):
                sections.append(config[option])
        is_named = given is not None or any(_names_class(section) for section in sections)
        if sections and not is_named:
            raise ValueError(
                f"`{option}:` of the config names no class: give it by --{option}, such as --{option} train.{example}, "
                "or write `class_path` and `init_args` in the config"
            )


def _names_class(section: Any) -> bool:
    # `model: Net` is short for `model: {class_path: Net}`.
    return isinstance(section, str) or "class_path" in section


def _content(path: str) -> Any:
    """What a YAML file holds; nothing if it cannot be read, which the parser explains."""
    import yaml  # of the extra `cli`

    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None


def build(
    configs: Sequence[str],
    model: str | None = None,
    data: str | None = None,
    prog: str = "lightning-nm doctor",
    *,
    kernels: bool = True,
    masks: bool = True,
) -> LightningCLI:
    """Create the Trainer, the model and the data on one device: a GPU if there is one, else the CPU.

    Args:
        configs: YAML files as ``lightning-nm fit -c`` takes them, or as a ``LightningCLI(Model, Data)`` of one's own
            does; later ones override.
        model: For such files the import path of the model's class, such as ``train.Net``.
        data: Likewise of the data module.
        prog: What the messages of usage errors begin with.
        kernels: Keep the precision plugins that choose kernels; they refuse a model without masks.
        masks: Keep the callbacks that mask; without them plugins that choose kernels become Lightning's own.

    Raises:
        ImportError: If jsonargparse is missing.
        ValueError: If a class cannot be imported, or is no such class.
        SystemExit: With status 2 if a file cannot be read or an argument is wrong; stderr says which.
    """
    classes = Classes(model, data)
    class_arguments = classes.imported()
    require_classes([_content(path) for path in configs], classes)
    arguments = []
    for path in configs:
        arguments += ["--config", str(path)]
    with warnings.catch_warnings():
        # LightningCLI warns of `args` while the process has arguments, too.
        warnings.filterwarnings(
            "ignore", message="LightningCLI's args parameter is intended to run from within Python"
        )
        cli_class = _cli_class(kernels=kernels, masks=masks)
        return cli_class(
            **class_arguments,
            run=False,
            save_config_callback=None,
            parser_kwargs={"prog": prog},
            args=arguments,
        )


def _cli_class(*, kernels: bool, masks: bool) -> type[NMLightningCLI]:
    """Return a LightningCLI that creates the Trainer as :func:`build` says."""

    class CLI(NMLightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            # Arguments of fit, in the configs that it prints and saves.
            for name in ("ckpt_path", "weights_only"):
                parser.add_argument(f"--{name}", default=None, type=Any)

        def before_instantiate_classes(self) -> None:
            # Some loggers start a run when they are created.
            self.config.trainer.logger = False

        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            has_gpu = torch.cuda.is_available()
            given = self.config_init.trainer
            unused = _WATCHERS if masks else (*_WATCHERS, *_MASKING)
            forced = {**_FORCED, "callbacks": _without(given.callbacks, unused)}
            if not has_gpu:
                # The config may be for GPUs, as `strategy: fsdp` is.
                forced["accelerator"] = "cpu"
                forced["strategy"] = "auto"
            plugins = _without(given.plugins, ())
            if not kernels:
                plugins = _without(plugins, KernelRouting)
            elif not has_gpu:
                plugins = _without(plugins, NMFSDPPrecision)
            if not masks:
                plugins = [_without_routing(plugin) for plugin in plugins]
            # Else the option stays as the config has it, which may be none.
            if not kernels or not has_gpu or not masks:
                forced["plugins"] = plugins
            return super().instantiate_trainer(**forced, **kwargs)

    return CLI


def _without_routing(plugin: Any) -> Any:
    """Lightning's own plugin of the same precision in place of one that chooses kernels."""
    # The package's plugins derive from Lightning's, whose classes say the precision.
    if not isinstance(plugin, KernelRouting):
        return plugin
    if isinstance(plugin, MixedPrecision):
        return MixedPrecision(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[arg-type]
    if isinstance(plugin, HalfPrecision):
        return HalfPrecision(plugin.precision)
    if isinstance(plugin, FSDPPrecision):
        return FSDPPrecision(plugin.precision)  # type: ignore[arg-type]
    return Precision()


def add_classes(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--model`` and ``--data`` of a command that builds a training."""
    for option, example in (("model", "Net"), ("data", "Data")):
        own = (
            f"in the config of a LightningCLI of your own, whose `{option}:` has no class_path: "
            f"its class, such as train.{example}"
        )
        parser.add_argument(f"--{option}", metavar="CLASS", help=own)


def _without(given: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """The entries of an option of the Trainer, a list or a single object, except those of some classes."""
    entries = given if isinstance(given, list) else [given]
    return [entry for entry in entries if entry is not None and not isinstance(entry, kinds)]
