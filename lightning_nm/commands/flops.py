"""``lightning-nm flops``: what a model and its planned training cost in multiply-adds, counted and never timed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from rich.console import Console

from lightning_nm.callbacks.fit_checks import is_scheduled, planned_steps
from lightning_nm.callbacks.tables import COUNTINGS, columns_table, print_layers
from lightning_nm.commands.from_config import (
    Enough,
    add_training,
    build,
    fit_until_enough,
    masking_callbacks,
)
from lightning_nm.commands.output import add_json, print_json, print_line
from lightning_nm.export.graphs import example_of
from lightning_nm.functional import FlopsKind, GemmDensity
from lightning_nm.nn.costs import mean_densities
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.macs import MacsCounter, forward_macs, tensors_in
from lightning_nm.training.phases import charge_plan
from lightning_nm.training.statistics import flops_ratios


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm flops``.

    Returns:
        0, or 2 if a config, an option or the data cannot be used; stderr says why.
    """
    options = _parser().parse_args(list(args))
    # The file is bound now: within the redirection below, sys.stdout is stderr.
    console = Console(file=sys.stdout, quiet=options.json)
    try:
        # Lightning and the model print, too; stdout is for the report alone.
        with redirect_stdout(sys.stderr):
            report = _report(options, console)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"lightning-nm flops: {error}", file=sys.stderr)
        return 2
    if options.json:
        print_json("flops", **report)
    return 0


def _report(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Charge the planned training to attached layers, print its costs, and return them as primitives."""
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps {options.steps} must be at least 1")
    # Without the callbacks that mask: the forward pass that is counted is dense, and the masks are attached below.
    cli = build(options, "lightning-nm flops", masks=False)
    callbacks = masking_callbacks(cli)
    if options.pattern and not callbacks:
        raise ValueError(f"--pattern {options.pattern}: the config has no NMSparsityCallback")
    configs = [callback.config for callback in callbacks]
    if options.pattern:
        # This is the general pattern: a rule with a pattern of its own keeps it.
        configs = [replace(config, pattern=options.pattern) for config in configs]
    # A schedule changes the costs during training, so that its length matters.
    is_changing = any(is_scheduled(rule) for config in configs for rule in config.resolve().rules)
    # Also the plan of the training and its optimizers, where a first batch is read.
    dense = _observe(cli, options)
    if is_changing and dense.steps is None:
        raise ValueError(
            "a schedule of the config depends on the number of training steps, which the Trainer does not know without "
            "reading data, or at all, as in an endless training: give it by --steps N"
        )
    sparsifiers = [
        NMSparsifier(cli.model, config=config, planned_steps=dense.steps) for config in configs
    ]
    for sparsifier in sparsifiers:
        # With optimizers, weights that none of them trains stay dense, as in the training.
        sparsifier.attach(optimizers=dense.optimizers)

    name = type(cli.model).__name__
    print_line(console, f"FLOPs of {name}")
    if not callbacks:
        print_line(console, "no NMSparsityCallback is in the config, so every GEMM is dense")
    densities: dict[str, Mapping[FlopsKind, GemmDensity]] = {}  # of masked layers, averaged
    for sparsifier in sparsifiers:
        sparsifier.macs.update(dense.macs)  # as after a first batch
        # Before the next line, which moves masks and counters to the end of the training.
        print_layers(sparsifier, console)
        charge_plan(list(sparsifier.layers.values()), dense.steps)
        densities |= {key: mean_densities(layer) for key, layer in sparsifier.layers.items()}
    # `macs` has all layers under the names that the sparsifiers use; those that no sparsifier masks are dense.
    masked_macs = {key: count for key, count in dense.macs.items() if key in densities}
    tensors = tensors_in(dense.inputs)
    report = {
        "model": name,
        "pattern": options.pattern,
        "inputs": [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors],
        "macs": sum(dense.macs.values()),
        "masked_macs": sum(masked_macs.values()),
        "planned_steps": dense.steps,
        "ratios": flops_ratios(densities, dense.macs),
        # Without masked layers there is nothing to divide by.
        "masked_ratios": flops_ratios(densities, masked_macs) if masked_macs else None,
    }
    heads = ("counted as", "all layers", "masked alone", "meaning")
    table = columns_table("training FLOPs", heads, {"meaning": 20}, right=heads[1:-1])
    for kind, meaning in COUNTINGS.items():
        alone = f"{report['masked_ratios'][kind]:.4f}" if report["masked_ratios"] else "-"
        table.add_row(kind, f"{report['ratios'][kind]:.4f}", alone, meaning)
    console.print(table)
    print_line(
        console,
        f"dense forward pass of {', '.join(report['inputs'])}: {report['macs']:,} multiply-adds "
        # A multiply-add is two FLOPs, and 1e9 FLOPs are a GFLOP.
        f"({2e-9 * report['macs']:.4g} GFLOPs), of which {report['masked_macs']:,} in masked layers\n"
        "GEMMs of two activations, as in attention, are not counted",
    )
    if report["planned_steps"] is not None:
        print_line(console, f"averaged over {report['planned_steps']:,} planned training steps")
    return report


def _observe(cli: LightningCLI, options: argparse.Namespace) -> _FirstBatch:
    """Run a dense forward pass; data, which may not be here, are read only for their first batch."""
    dense = _FirstBatch()
    dense.inputs = cli.model.example_input_array
    if options.input:
        dense.inputs = example_of(cli.model, options.input)
    if dense.inputs is None:
        fit_until_enough(cli, dense)
    else:
        dense.macs = forward_macs(cli.model, dense.inputs)
        # Without max_epochs, the number of steps does not depend on the data.
        # With manual optimization a batch takes any number of steps.
        if cli.trainer.max_epochs in (None, -1) and cli.model.automatic_optimization:
            dense.steps = max(cli.trainer.max_steps, 0) or None  # -1 is no limit
    dense.steps = options.steps or dense.steps
    return dense


class _FirstBatch(pl.Callback):
    """Notes the plan of a training and counts its first batch, and ends it before the backward pass."""

    macs: Mapping[str, int] = {}  # by layer name, as MacsCounter counts them
    inputs: Any = None
    steps: int | None = None
    optimizers: list[torch.optim.Optimizer] | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any
    ) -> None:
        """Note the plan, which needs the Trainer's optimizers and data, and begin to count."""
        self.steps = planned_steps(trainer, pl_module)
        self.optimizers = trainer.optimizers
        self.inputs = batch
        self._counter = MacsCounter(pl_module)
        self._counter.watch_step()  # which may multiply by weights itself
        # The same dictionary, which the training step that follows fills.
        self.macs = self._counter.macs

    def on_before_backward(self, *_: Any) -> None:
        """End the training: the forward pass is complete."""
        self._counter.close()
        raise Enough

    # Under manual optimization a training step need not call `manual_backward`.
    on_train_batch_end = on_before_backward  # type: ignore[assignment]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm flops",
        description="Count the multiply-adds of a config's model and, relative to a dense one, of its training, in "
        "three ways (docs/flops.md). Nothing is trained or timed. Exits with 0, or with 2 if something cannot be used.",
    )
    add_training(parser, required=True)
    shape = "of each input, such as 2x16:int64; by default that of example_input_array, else of the first batch"
    parser.add_argument("--input", metavar="SHAPE", action="append", default=[], help=shape)
    steps = "training steps; by default those that the Trainer plans"
    parser.add_argument("--steps", metavar="N", type=int, help=steps)
    instead = "count for this pattern instead of the callback's own"
    parser.add_argument("--pattern", metavar="N:M", help=instead)
    add_json(parser)
    return parser
