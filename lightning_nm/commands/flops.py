"""``lightning-nm flops``: what a model and its planned training cost in multiply-adds, counted and never timed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_nm.callbacks import NMSparsityCallback
from lightning_nm.callbacks.report.tables import COUNTINGS, print_layers
from lightning_nm.callbacks.training_length import is_scheduled, planned_steps
from lightning_nm.commands.build import (
    Enough,
    add_training,
    build,
    fit_until_enough,
    masking_callbacks,
)
from lightning_nm.commands.output import add_json, columns_table, print_json, print_line
from lightning_nm.export.graphs import example_of
from lightning_nm.functional import FlopsKind, GemmDensity
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.nn.layer.gemms import mean_densities
from lightning_nm.nn.layer.layout import known_size
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.macs import MacsCounter, forward_macs
from lightning_nm.training.planned import charge_plan
from lightning_nm.training.statistics import flops_ratios

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

_NEEDS_STEPS = (
    "a schedule of the config depends on the number of training steps: give it by --steps N"
)


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
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"lightning-nm flops: {error}", file=sys.stderr)
        return 2
    if options.json:
        print_json("flops", reports=reports)
    return 0


def _reports(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Count the model once, and its training once for each pattern."""
    # Refuse what can be refused before the model is built. None stands for the config's own patterns.
    patterns: list[str | None] = [str(NMPattern.parse(pattern)) for pattern in options.pattern]
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps {options.steps} must be at least 1")
    cli = build(options.config, options.model, options.data, "lightning-nm flops", masks=False)
    callbacks = masking_callbacks(cli)
    if options.pattern and not callbacks:
        given = " ".join(options.pattern)
        raise ValueError(f"--pattern {given}: the config has no NMSparsityCallback")
    # A schedule changes the costs during training, so that its length matters.
    rules = [rule for callback in callbacks for rule in callback.config.resolve().rules]
    dense = _observe(cli, options, scheduled=any(map(is_scheduled, rules)))
    return [
        _report(cli.model, callbacks, dense, pattern, console) for pattern in patterns or [None]
    ]


def _observe(cli: LightningCLI, options: argparse.Namespace, *, scheduled: bool) -> _FirstBatch:
    """Run a dense forward pass; data are read only where they are needed."""
    example = cli.model.example_input_array
    if options.input:
        example = example_of(cli.model, options.input)
    dense = _FirstBatch()
    # Loading the data, to count its batches, may take long or be impossible here.
    if example is None or (scheduled and options.steps is None):
        try:
            fit_until_enough(cli, dense)
        except (ImportError, OSError, ValueError) as error:
            if example is None:  # only a batch says what the model takes
                raise
            raise ValueError(f"{_NEEDS_STEPS}, or its data: {error}") from error
    if example is not None:
        dense.inputs = example
        dense.macs = forward_macs(cli.model, example)
    dense.steps = options.steps or dense.steps
    if scheduled and dense.steps is None:
        raise ValueError(
            f"{_NEEDS_STEPS}: the Trainer does not know it in an endless training, of data without a length, with "
            "changing gradient accumulation, and under manual optimization"
        )
    return dense


class _FirstBatch(pl.Callback):
    """Notes the plan of a training and counts its first batch, and ends it before the backward pass."""

    def __init__(self) -> None:
        self.macs: Mapping[str, int] = {}  # by layer name, as MacsCounter counts them
        self.inputs: Any = None
        self.steps: int | None = None
        self.optimizers: list[torch.optim.Optimizer] | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any
    ) -> None:
        """Note the plan, which needs the Trainer's optimizers and data, and begin to count."""
        self.steps = planned_steps(trainer, pl_module)
        self.optimizers = trainer.optimizers
        self.inputs = batch
        self._counter = MacsCounter(pl_module)
        self._counter.watch_step()  # which may multiply by weights itself
        self.macs = self._counter.macs

    def on_before_backward(self, *_: Any) -> None:
        """End the training: the forward pass is complete."""
        self._counter.close()
        raise Enough

    # Under manual optimization a training step need not call `manual_backward`.
    on_train_batch_end = on_before_backward  # type: ignore[assignment]


def _report(
    model: pl.LightningModule,
    callbacks: Sequence[NMSparsityCallback],
    dense: _FirstBatch,
    pattern: str | None,
    console: Console,
) -> dict[str, Any]:
    """Charge the planned training to attached layers, print its costs, and return them as primitives."""
    name = type(model).__name__
    densities: dict[str, Mapping[FlopsKind, GemmDensity]] = {}  # of masked layers, averaged
    sparsifiers: list[NMSparsifier] = []
    try:
        for callback in callbacks:
            config = replace(callback.config, pattern=pattern) if pattern else callback.config
            sparsifier = NMSparsifier(model, config=config, planned_steps=dense.steps)
            # With optimizers, weights that none of them trains stay dense, as in the training.
            sparsifiers.append(sparsifier.attach(optimizers=dense.optimizers))
        print_line(console, f"FLOPs of {name} at {pattern}" if pattern else f"FLOPs of {name}")
        if not callbacks:
            print_line(console, "no NMSparsityCallback is in the config, so every GEMM is dense")
        for sparsifier in sparsifiers:
            sparsifier.macs.update(dense.macs)  # as after a first batch
            print_layers(sparsifier, console)
            charge_plan(list(sparsifier.layers.values()), dense.steps)
            densities |= {key: mean_densities(layer) for key, layer in sparsifier.layers.items()}
    finally:
        # The model serves for the next pattern.
        for sparsifier in sparsifiers:
            sparsifier.detach()
    masked_macs = {key: count for key, count in dense.macs.items() if key in densities}
    ratios = flops_ratios(densities, dense.macs)
    masked_ratios = flops_ratios(densities, masked_macs) if masked_macs else None

    heads = ("counted as", "all layers", "masked alone", "meaning")
    table = columns_table("training FLOPs", heads, {"meaning": 20}, right=heads[1:-1])
    for kind, meaning in COUNTINGS.items():
        alone = f"{masked_ratios[kind]:.4f}" if masked_ratios else "-"
        table.add_row(kind, f"{ratios[kind]:.4f}", alone, meaning)
    console.print(table)
    tensors = [leaf for leaf in tree_leaves(dense.inputs) if isinstance(leaf, Tensor)]
    inputs = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors]
    parameters = sum(map(known_size, model.parameters()))
    macs = sum(dense.macs.values())
    print_line(
        console,
        f"{parameters:,} parameters; dense forward pass of {', '.join(inputs)}: {macs:,} multiply-adds "
        f"({2e-9 * macs:.4g} GFLOPs), of which {sum(masked_macs.values()):,} in masked layers\n"
        "products of two activations, as in attention, are not counted",
    )
    if dense.steps is not None:
        print_line(console, f"averaged over {dense.steps:,} planned training steps")
    return {
        "model": name,
        "pattern": pattern,
        "inputs": inputs,
        "parameters": parameters,
        "macs": macs,
        "masked_macs": sum(masked_macs.values()),
        "planned_steps": dense.steps,
        "ratios": ratios,
        "masked_ratios": masked_ratios,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm flops",
        description="Count the multiply-adds of a config's model, and those of its training relative "
        "to a dense one: of the forward, dgrad and wgrad GEMM, averaged over the planned steps, counted in three ways "
        "(docs/flops.md). Nothing is trained or timed. Exits with 0, or with 2 if something cannot be used.",
    )
    add_training(parser, required=True)
    shapes = (
        "run the model on an input of this shape, such as 1x3x224x224 or 2x16:int64, once for each input; by default "
        "on its example_input_array, or else on the first batch of the data"
    )
    parser.add_argument("--input", metavar="SHAPE", action="append", default=[], help=shapes)
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
