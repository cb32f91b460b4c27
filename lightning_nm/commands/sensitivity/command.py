"""``lightning-nm sensitivity``: the output error and the retained magnitude of each layer in each pattern."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any, get_args

import lightning.pytorch as pl
from rich.console import Console
from torch import nn

from lightning_nm.commands.build import add_classes, build
from lightning_nm.commands.sensitivity.tables import print_choices, print_sensitivity
from lightning_nm.export.graphs import build_model, import_class
from lightning_nm.export.sources import Source, read_source
from lightning_nm.functional.allocation import retained_magnitudes
from lightning_nm.functional.budget import Choice, Counted, all_patterns
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.methods.calibration import call_model
from lightning_nm.methods.sensitivity import (
    LayerSensitivity,
    Score,
    Sensitivity,
    parse_patterns,
    sensitivity,
)
from lightning_nm.nn.selection.first_last import SkipFirstLast

SCHEMA = 1  # the version of the JSON document

_SKIPS: dict[str, SkipFirstLast] = {"both": True, "first": "first", "last": "last", "none": False}


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm sensitivity``.

    Returns:
        0, or 2 if the checkpoint, a config, an option or the data cannot be used; stderr says why.
    """
    options = _parser().parse_args(list(args))
    try:
        # Lightning and the model print, too; stdout is for the result alone.
        with redirect_stdout(sys.stderr):
            result, choices = _scan(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"lightning-nm sensitivity: {error}", file=sys.stderr)
        return 2
    if options.json:
        content = {"schema": SCHEMA, "checkpoint": options.checkpoint, **result.to_dict()}
        if choices:
            content["choices"] = {name: asdict(choice) for name, choice in choices.items()}
        print(json.dumps(content, indent=1, allow_nan=False))
        return 0
    console = Console()
    print_sensitivity(result, console)
    if choices:
        print_choices(result, choices, console)
    return 0


def _scan(options: argparse.Namespace) -> tuple[Sensitivity, dict[str, Choice]]:
    """Return the result, and the choices if a budget or a bound is given."""
    # Refuse what can be refused before the checkpoint is read.
    patterns = _patterns(options)
    if options.batches < 1:
        raise ValueError(f"--batches {options.batches} must be at least 1")
    source = read_source(options.checkpoint)
    if not options.config and not options.model:
        _refuse_without_model(options)
        result = _of_file(source, patterns)
    else:
        model, data = _model_and_data(source, options)
        result = sensitivity(
            model,
            data,
            patterns,
            score=options.score,
            include=options.include or None,
            exclude=options.exclude or None,
            skip_first_last=_SKIPS[options.skip_first_last],
            conv_layout=options.conv_layout,
            call=_called,
        )
    if options.budget is None and options.max_error is None:
        return result, {}
    return result, result.choose(options.budget, options.max_error, counted=options.counted)


def _patterns(options: argparse.Namespace) -> tuple[NMPattern, ...]:
    """The candidates: those that are named, or all of one block length."""
    if options.pattern and options.pattern_m is not None:
        raise ValueError("give one of --pattern and --pattern-m")
    if options.pattern:
        return parse_patterns(options.pattern)
    m = 16 if options.pattern_m is None else options.pattern_m
    return tuple(all_patterns(m))


def _refuse_without_model(options: argparse.Namespace) -> None:
    """Refuse options that need a model, by a ``ValueError``."""
    needing = {
        "--data": options.data,
        "--score": options.score != "magnitude",
        "--include": options.include,
        "--exclude": options.exclude,
        "--max-error": options.max_error is not None,
        "--counted": options.counted != "parameters",
    }
    for option, is_given in needing.items():
        if is_given:
            raise ValueError(
                f"{option} needs the model: give the CONFIG of its training by -c, or its class by --model train.Net"
            )


def _of_file(source: Source, patterns: Sequence[NMPattern]) -> Sensitivity:
    """Measure the matrices of a file, whose layer kinds are not known, with blocks along dim 1."""
    layers: dict[str, LayerSensitivity] = {}
    skipped: dict[str, str] = {}
    dense: dict[str, int] = {}
    for key, weight in source.weights.items():
        if weight.dim() < 2 or not weight.is_floating_point():
            continue
        fitting = [pattern for pattern in patterns if weight.shape[1] % pattern.m == 0]
        if not fitting:
            skipped[key] = f"shape {tuple(weight.shape)}: no candidate fits along dim 1"
            dense[key] = weight.numel()
            continue
        shares = {m: retained_magnitudes(weight, m, 1).tolist() for m in {p.m for p in fitting}}
        retained = {str(pattern): shares[pattern.m][pattern.n - 1] for pattern in fitting}
        layers[key] = LayerSensitivity(weight.numel(), retained=retained)
    if not layers:
        raise ValueError(f"'{source.path}' holds no matrix that a candidate pattern fits")
    return Sensitivity(layers, tuple(patterns), skipped=skipped, dense_sizes=dense)


def _model_and_data(
    source: Source, options: argparse.Namespace
) -> tuple[nn.Module, list[Any] | None]:
    """The model with the checkpoint's weights, and some batches; ``None`` without data."""
    if not options.config:
        model = build_model(source, options.model)
        datamodule = None
        if options.data is not None:
            datamodule = import_class(options.data, "--data", pl.LightningDataModule)()
    else:
        cli = build(
            options.config,
            options.model,
            options.data,
            "lightning-nm sensitivity",
            kernels=False,
            masks=False,
        )
        model = cli.model
        datamodule = cli.datamodule
        try:
            model.load_state_dict(source.weights)
        except RuntimeError as error:
            raise ValueError(
                f"the weights of '{source.path}' do not fit the config's model: {error}"
            ) from error
        model.to(cli.trainer.strategy.root_device)
    if datamodule is None or options.no_data:
        return model, None
    return model, _batches(datamodule, model, options.batches)


def _batches(datamodule: pl.LightningDataModule, model: nn.Module, number: int) -> list[Any]:
    """The first training batches, as the Trainer would give them to the model."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    batches = []
    for batch in itertools.islice(datamodule.train_dataloader(), number):
        # The hooks of the data module are used where it has some, else those of the LightningModule.
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            own = getattr(type(datamodule), hook)
            is_default = own is getattr(pl.LightningDataModule, hook)
            owner = model if is_default and isinstance(model, pl.LightningModule) else datamodule
            batch = getattr(owner, hook)(batch, 0)
        batches.append(batch)
    if not batches:
        raise ValueError(f"{type(datamodule).__name__} gives no training batch")
    return batches


def _called(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch; what it does not take is an error of the user's."""
    try:
        return call_model(model, batch)
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} does not take a batch of its data: {error}; lightning_nm.sensitivity(call=...) "
            "runs any model"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm sensitivity",
        description="Measure what each N:M pattern would do to each layer of a trained model: the relative change of "
        "its output on calibration data, |X (W - W_F)^T| / |X W^T|, and the share of the magnitude that it keeps. "
        "Nothing is written. Exits with 0, or with 2 if something cannot be used.",
    )
    kinds = "Lightning checkpoint, state dict (.pt, .safetensors), packed model, or folder of transformers"
    parser.add_argument("checkpoint", metavar="CKPT", help=kinds)
    files = (
        "the YAML file of the training, as `lightning-nm fit -c` takes it, for the model and its data; without it and "
        "--model, the magnitudes of the file's matrices"
    )
    parser.add_argument("-c", "--config", metavar="FILE", action="append", default=[], help=files)
    add_classes(parser)
    batches = "training batches to calibrate with; 8 by default"
    parser.add_argument("--batches", metavar="K", type=int, default=8, help=batches)
    parser.add_argument("--no-data", action="store_true", help="measure magnitudes alone")
    every = "the candidates are 1:M, 2:M, ...; M is 16 by default"
    parser.add_argument("--pattern-m", metavar="M", type=int, help=every)
    named = "the candidates, instead of --pattern-m"
    parser.add_argument("--pattern", metavar="N:M", nargs="+", default=[], help=named)
    score = "which entries are kept, see docs/pruning.md; default: magnitude"
    parser.add_argument("--score", choices=get_args(Score), default="magnitude", help=score)
    for option, text in (("include", "to scan"), ("exclude", "to leave out")):
        parser.add_argument(
            f"--{option}",
            metavar="GLOB",
            action="append",
            default=[],
            help=f"modules {text}; may be given several times",
        )
    ends = "which of the first convolution and the last linear layer to leave out; default: both"
    parser.add_argument("--skip-first-last", choices=tuple(_SKIPS), default="both", help=ends)
    layout = "how the blocks of convolutions lie; default: channels"
    parser.add_argument(
        "--conv-layout", choices=("channels", "flat"), default="channels", help=layout
    )
    budget = "also choose a pattern for each layer, so that this share of all weights is kept"
    parser.add_argument("--budget", metavar="S", type=float, help=budget)
    bound = "also choose the sparsest pattern of each layer with at most this output error"
    parser.add_argument("--max-error", metavar="E", type=float, help=bound)
    counted = "what the budget is a share of; default: parameters"
    parser.add_argument("--counted", choices=get_args(Counted), default="parameters", help=counted)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else to stdout"
    )
    return parser
