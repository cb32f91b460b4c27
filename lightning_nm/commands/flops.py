"""``lightning-nm flops``: what a model and its planned training cost in multiply-adds, counted and never timed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import lightning.pytorch as pl
import torch
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_nm.callbacks import NMSparsityCallback
from lightning_nm.callbacks.report.tables import phases, print_layers
from lightning_nm.callbacks.training_length import is_scheduled, planned_steps
from lightning_nm.commands.build import (
    Enough,
    add_classes,
    build,
    fit_until_enough,
    masking_callbacks,
)
from lightning_nm.commands.output import add_json, columns_table, print_json, print_line
from lightning_nm.functional import FlopsKind, GemmDensity
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.nn.layer.gemms import mean_densities
from lightning_nm.nn.layer.layout import known_size
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.macs import MacsCounter, forward_macs
from lightning_nm.training.planned import charge_plan

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

_GEMMS = ("forward", "dgrad", "wgrad")
_MEANINGS: Mapping[FlopsKind, str] = {
    "arithmetic": "nonzero operands, needed outputs",
    "paper": "as the N:M papers count",
    "eligible": "GEMMs that N:M hardware could skip",
}


@dataclass
class _Dense:
    """A dense forward pass, and what the Trainer knows of the training."""

    macs: Mapping[str, int]  # multiply-adds by layer name, as MacsCounter counts them
    inputs: list[str]  # dtype and shape of each tensor
    steps: int | None
    optimizers: Sequence[Optimizer] | None = None


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm flops``.

    Returns:
        0, or 2 if a config, an option or the data cannot be used; stderr says why.
    """
    options = _parser().parse_args(list(args))
    console = Console(file=sys.stdout, quiet=options.json)
    try:
        # Lightning and the model print, too; stdout is for the report alone.
        with redirect_stdout(sys.stderr):
            reports = _reports(options, console)
    except (ImportError, OSError, ValueError) as error:
        print(f"lightning-nm flops: {error}", file=sys.stderr)
        return 2
    if options.json:
        print_json("flops", reports=reports)
    return 0


def _reports(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Count the model once, and its training once for each pattern."""
    # Refuse what can be refused before the model is built. None stands for the config's own patterns.
    patterns = [str(NMPattern.parse(pattern)) for pattern in options.pattern] or [None]
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps {options.steps} must be at least 1")
    configs = [*options.files, *options.config]
    if not configs:
        raise ValueError("give the CONFIG of a training, such as configs/digits-bi-mask.yaml")
    cli = build(configs, options.model, options.data, "lightning-nm flops", masks=False)
    callbacks = masking_callbacks(cli)
    if options.pattern and not callbacks:
        given = " ".join(options.pattern)
        raise ValueError(f"--pattern {given}: the config has no NMSparsityCallback")
    scheduled = any(map(_is_scheduled, callbacks))
    dense = _observe(cli, options, scheduled)
    if scheduled and dense.steps is None:
        raise ValueError(
            "a schedule of the config needs the number of training steps, which the Trainer does not know: an endless "
            "training, data without a length, changing gradient accumulation or manual optimization. Give --steps N"
        )
    return [_report(cli.model, callbacks, dense, pattern, console) for pattern in patterns]


def _is_scheduled(callback: NMSparsityCallback) -> bool:
    """Whether the costs change during training, so that its length matters."""
    # A sparsifier of no layer resolves the config into rules.
    rules = NMSparsifier(torch.nn.Module(), config=callback.config).rules
    return any(is_scheduled(rule) for rule in rules)


def _observe(cli: LightningCLI, options: argparse.Namespace, scheduled: bool) -> _Dense:
    """Run a dense forward pass; data are read only where they are needed."""
    example = cli.model.example_input_array
    if options.input is not None:
        example = _zeros(options.input)
    watcher = _FirstBatch(runs=example is None)
    if example is None:
        # Only a batch says what the model takes.
        fit_until_enough(cli, watcher)
    else:
        watcher.dense.inputs = _shapes(example)
        try:
            watcher.dense.macs = forward_macs(cli.model, example)
        except Exception as error:
            given = ", ".join(watcher.dense.inputs)
            name = type(cli.model).__name__
            raise ValueError(f"{name} does not take an input of {given}: {error}") from error
        # Loading the data, to count its batches, may take long or be impossible here.
        if scheduled and options.steps is None:
            try:
                fit_until_enough(cli, watcher)
            except (ImportError, OSError, ValueError) as error:
                raise ValueError(
                    "a schedule of the config depends on the number of training steps, which takes its data, and "
                    f"{error}\nor give the number: --steps N"
                ) from error
    watcher.dense.steps = options.steps or watcher.dense.steps
    return watcher.dense


class _FirstBatch(pl.Callback):
    """Notes the plan of a training, and ends it before the first batch; if it `runs`, before its backward pass."""

    def __init__(self, *, runs: bool) -> None:
        self.runs = runs
        self.dense = _Dense({}, [], None)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the plan, which needs the Trainer's optimizers and data, and begin to count."""
        self.dense.steps = planned_steps(trainer, pl_module)
        self.dense.optimizers = trainer.optimizers
        if not self.runs:
            raise Enough
        self.dense.inputs = _shapes(batch)
        self._counter = MacsCounter(pl_module)
        self.dense.macs = self._counter.macs
        self._counter.watch_step()  # which may multiply by weights itself

    def on_before_backward(self, *_: Any) -> None:
        """End the training: the forward pass is complete."""
        self._counter.close()
        raise Enough

    # Under manual optimization a training step need not call `manual_backward`.
    on_train_batch_end = on_before_backward


def _report(
    model: pl.LightningModule,
    callbacks: Sequence[NMSparsityCallback],
    dense: _Dense,
    pattern: str | None,
    console: Console,
) -> dict[str, Any]:
    """Charge the planned training to attached layers, print its costs, and return them as primitives."""
    name = type(model).__name__ + (f" at {pattern}" if pattern else "")
    print_line(console, f"FLOPs of {name}")
    densities: dict[str, Mapping[FlopsKind, GemmDensity]] = {}  # of masked layers, averaged
    lines: dict[str, None] = {}  # in order, each once: callbacks may share a schedule
    sparsifiers: list[NMSparsifier] = []
    try:
        for callback in callbacks:
            config = replace(callback.config, pattern=pattern) if pattern else callback.config
            sparsifier = NMSparsifier(model, config=config, planned_steps=dense.steps)
            # With optimizers, weights that none of them trains stay dense, as in the training.
            sparsifiers.append(sparsifier.attach(optimizers=dense.optimizers))
            print_layers(sparsifier, console)
            charge_plan(list(sparsifier.layers.values()), dense.steps)
            densities |= {key: mean_densities(layer) for key, layer in sparsifier.layers.items()}
            lines |= dict.fromkeys(phases(sparsifier))
    finally:
        # The model serves for the next pattern.
        for sparsifier in sparsifiers:
            sparsifier.detach()
    masked_macs = {key: count for key, count in dense.macs.items() if key in densities}
    report = {
        "model": type(model).__name__,
        "pattern": pattern,
        "inputs": dense.inputs,
        "parameters": sum(map(known_size, model.parameters())),
        "macs": sum(dense.macs.values()),
        "masked_macs": sum(masked_macs.values()),
        "planned_steps": dense.steps,
        "phases": list(lines),
        "ratios": _ratios(dense.macs, densities),
        "masked_ratios": _ratios(masked_macs, densities),
    }
    _print(report, console)
    return report


def _ratios(
    macs: Mapping[str, int], densities: Mapping[str, Mapping[FlopsKind, GemmDensity]]
) -> dict[str, dict[str, float] | None]:
    """The training's multiply-adds over dense ones, of each GEMM and of all; ``None`` if there are none."""
    total = sum(macs.values())
    ratios: dict[str, dict[str, float] | None] = {}
    for kind in get_args(FlopsKind):
        if not total:
            ratios[kind] = None
            continue
        # A dense dgrad and a dense wgrad have as many multiply-adds as the forward GEMM.
        of_gemms = dict.fromkeys(_GEMMS, 0.0)
        for key, count in macs.items():
            density = densities[key][kind] if key in densities else GemmDensity()
            for gemm in _GEMMS:
                of_gemms[gemm] += count * getattr(density, gemm) / total
        ratios[kind] = {**of_gemms, "all": sum(of_gemms.values()) / len(_GEMMS)}
    return ratios


def _print(report: Mapping[str, Any], console: Console) -> None:
    heads = ("counted as", *_GEMMS, "all", "masked alone", "meaning")
    table = columns_table("training FLOPs, dense is 1", heads, {"meaning": 20}, right=heads[1:-1])
    for kind, meaning in _MEANINGS.items():
        ratios, masked = report["ratios"][kind], report["masked_ratios"][kind]
        cells = ["-"] * 4 if ratios is None else [f"{ratio:.4f}" for ratio in ratios.values()]
        table.add_row(kind, *cells, f"{masked['all']:.4f}" if masked else "-", meaning)
    console.print(table)
    macs = report["macs"]
    print_line(
        console,
        f"{report['parameters']:,} parameters; dense forward pass of {', '.join(report['inputs']) or 'no tensor'}: "
        f"{macs:,} multiply-adds ({2e-9 * macs:.4g} GFLOPs), of which {report['masked_macs']:,} in masked layers\n"
        "products of two activations, as in attention, are not counted",
    )
    if report["planned_steps"] is not None:
        print_line(console, f"averaged over {report['planned_steps']:,} planned training steps")


def _shapes(inputs: Any) -> list[str]:
    """Dtype and shape of each tensor, such as ``float32 [2, 8]``."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in tensors]


def _zeros(sizes: str) -> Tensor:
    """An input of these sizes, which are separated by commas or by ``x``."""
    try:
        shape = [int(size) for size in sizes.replace("x", ",").split(",")]
        return torch.zeros(shape, dtype=torch.float32)  # refuses negative sizes
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--input {sizes} is no shape: write it as 1,3,224,224") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm flops",
        description="Count the multiply-adds of a config's model, and those of its training relative "
        "to a dense one: of the forward, dgrad and wgrad GEMM, averaged over the planned steps, counted in three ways "
        "(docs/flops.md). Nothing is trained or timed. Exits with 0, or with 2 if something cannot be used.",
    )
    files = "a YAML file as `lightning-nm fit -c` takes it; of several, later ones override"
    parser.add_argument("files", metavar="CONFIG", nargs="*", default=[], help=files)
    parser.add_argument(
        "-c", "--config", metavar="FILE", action="append", default=[], help="the same"
    )
    add_classes(parser)
    shape = (
        "run the model on zeros of this shape, such as 1,3,224,224; "
        "by default on its example_input_array, or else on the first batch of the data"
    )
    parser.add_argument("--input", metavar="SHAPE", help=shape)
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        help="training steps; by default those that the Trainer plans",
    )
    several = "count for these patterns instead of the callback's own; one report for each"
    parser.add_argument("--pattern", metavar="N:M", nargs="+", default=[], help=several)
    add_json(parser)
    return parser
