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
from lightning_nm.export.classes import import_class
from lightning_nm.plugins import NMFSDPPrecision
from lightning_nm.plugins.routing import KernelRouting

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

# The Trainer's training length is not among them: schedules depend on it.
_FORCED: dict[str, Any] = {
    **dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    ),
    **dict.fromkeys(("fast_dev_run", "barebones"), False),
    **dict.fromkeys(("limit_val_batches", "num_sanity_val_steps"), 0),
    **dict.fromkeys(("profiler", "max_time"), None),
    **dict.fromkeys(("devices", "num_nodes"), 1),
}

# Callbacks that do not change the training and need a logger or a validation, write files or print.
_WATCHERS = (
    *(
        callbacks.Checkpoint,
        callbacks.DeviceStatsMonitor,
        callbacks.EarlyStopping,
        callbacks.LearningRateMonitor,
    ),
    *(callbacks.ModelSummary, callbacks.ProgressBar, callbacks.Timer),
)


class Classes(NamedTuple):
    """Import paths of the model's and the data module's class, for a config that does not name them."""

    model: str | None = None
    data: str | None = None

    def imported(self) -> dict[str, Any]:
        """Return the classes as arguments of a LightningCLI.

        Raises:
            ValueError: If one cannot be imported, or is no such class.
        """
        model, data = self.model, self.data
        return {
            "model_class": None
            if model is None
            else import_class(model, "--model", pl.LightningModule),
            "datamodule_class": None
            if data is None
            else import_class(data, "--data", pl.LightningDataModule),
        }


def require_classes(configs: Sequence[Any], classes: Classes) -> None:
    """Refuse configs whose ``model:`` or ``data:`` names no class, if no option names it.

    Raises:
        ValueError: With the option.
    """
    for option, name, example in (("model", classes.model, "Net"), ("data", classes.data, "Data")):
        sections = [
            config[option]
            for config in configs
            if isinstance(config, Mapping) and config.get(option)
        ]
        named = name is not None or any(
            isinstance(each, str) or "class_path" in each for each in sections
        )
        if sections and not named:
            raise ValueError(
                f"`{option}:` of the config names no class: give it by --{option}, such as --{option} train.{example}, "
                "or write `class_path` and `init_args` in the config"
            )


def _content(path: str) -> Any:
    """What a YAML file holds; nothing if it cannot be read, which the parser explains."""
    import yaml

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

    class CLI(NMLightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            for name in (
                "ckpt_path",
                "weights_only",
            ):  # arguments of fit, in the configs that it prints and saves
                parser.add_argument(f"--{name}", default=None, type=Any)

        def before_instantiate_classes(self) -> None:
            self.config.trainer.logger = False  # some loggers start a run when they are created

        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            given = self.config_init.trainer
            unused = _WATCHERS if masks else (*_WATCHERS, NMSparsityCallback, MaskMonitor)
            forced = {**_FORCED, "callbacks": _without(given.callbacks, unused)}
            if not torch.cuda.is_available():
                forced |= {"accelerator": "cpu", "strategy": "auto"}
            if not kernels or not torch.cuda.is_available():
                forced["plugins"] = _without(
                    given.plugins, NMFSDPPrecision if kernels else KernelRouting
                )
            if not masks:
                plugins = forced.get("plugins", _without(given.plugins, ()))
                forced["plugins"] = [_without_routing(plugin) for plugin in plugins]
            return super().instantiate_trainer(**forced, **kwargs)

    classes = Classes(model, data).imported()
    require_classes([_content(path) for path in configs], Classes(model, data))
    arguments = [word for path in configs for word in ("--config", str(path))]
    with (
        warnings.catch_warnings()
    ):  # LightningCLI warns of `args` while the process has arguments, too
        warnings.filterwarnings(
            "ignore", message="LightningCLI's args parameter is intended to run from within Python"
        )
        options = {"save_config_callback": None, "parser_kwargs": {"prog": prog}, "args": arguments}
        return CLI(**classes, run=False, **options)


def _without_routing(plugin: Any) -> Any:
    """Lightning's own plugin of the same precision in place of one that chooses kernels."""
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
    own = "in the config of a LightningCLI of your own, whose `{0}:` has no class_path: its class, such as train.{1}"
    parser.add_argument("--model", metavar="CLASS", help=own.format("model", "Net"))
    parser.add_argument("--data", metavar="CLASS", help=own.format("data", "Data"))


def _without(given: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """The entries of an option of the Trainer, a list or a single object, except those of some classes."""
    entries = given if isinstance(given, list) else [given]
    return [entry for entry in entries if entry is not None and not isinstance(entry, kinds)]
