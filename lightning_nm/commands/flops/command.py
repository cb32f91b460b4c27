"""``lightning-nm flops``: what a model and its planned training cost in multiply-adds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from lightning_nm.callbacks import NMSparsityCallback
from lightning_nm.callbacks.report.tables import phases
from lightning_nm.callbacks.training_length import is_scheduled
from lightning_nm.commands.build import add_classes, build
from lightning_nm.commands.flops.counts import Report, layers_of
from lightning_nm.commands.flops.forward import Forward, Plan, first_forward, forward_of, plan_of
from lightning_nm.commands.flops.tables import print_report
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.training.planned import charge_plan

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

SCHEMA = 1  # the version of the JSON document


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm flops``.

    Returns:
        0, or 2 if a config, an option or the data cannot be used; stderr says why.
    """
    options = _parser().parse_args(list(args))
    try:
        # Lightning and the model print, too; stdout is for the report alone.
        with redirect_stdout(sys.stderr):
            reports = _reports(options)
    except (ImportError, OSError, ValueError) as error:
        print(f"lightning-nm flops: {error}", file=sys.stderr)
        return 2
    if options.json:
        content = {"schema": SCHEMA, "reports": [report.to_dict() for report in reports]}
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        for report in reports:
            print_report(report, Console())
    return 0


def _reports(options: argparse.Namespace) -> list[Report]:
    """Count the model once, and its training once for each pattern."""
    # Refuse what can be refused before the model is built. None stands for the config's own patterns.
    patterns: list[str | None] = [None]
    if options.pattern:
        patterns = [str(NMPattern.parse(pattern)) for pattern in options.pattern]
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps {options.steps} must be at least 1")
    configs = [*options.files, *options.config]
    if not configs:
        raise ValueError("give the CONFIG of a training, such as configs/digits-bi-mask.yaml")

    cli = build(configs, options.model, options.data, "lightning-nm flops", kernels=False)
    all_callbacks = getattr(cli.trainer, "callbacks", [])
    callbacks = [each for each in all_callbacks if isinstance(each, NMSparsityCallback)]
    if options.pattern and not callbacks:
        raise ValueError(
            f"--pattern {' '.join(options.pattern)}: the config has no NMSparsityCallback"
        )
    forward, plan = _observe(cli, callbacks, options)
    if plan.steps is None and any(map(_is_scheduled, callbacks)):
        raise ValueError(
            "a schedule of the config needs the number of training steps, which the Trainer does not know: an endless "
            "training, data without a length, changing gradient accumulation or manual optimization. Give --steps N"
        )
    return [_report(cli, callbacks, forward, plan, pattern) for pattern in patterns]


def _observe(
    cli: LightningCLI, callbacks: Sequence[NMSparsityCallback], options: argparse.Namespace
) -> tuple[Forward, Plan]:
    """Return a forward pass and the plan; data are read only where they are needed."""
    if options.input is not None:
        example = _zeros(options.input)
    else:
        example = cli.model.example_input_array

    if example is None:
        # Only a batch says what the model takes. The Trainer that loads one knows the plan, too.
        forward, plan = first_forward(cli.trainer, cli.model, cli.datamodule)
        if options.steps is not None:
            plan = Plan(options.steps, plan.optimizers)
        return forward, plan

    forward = forward_of(cli.model, example)
    # Loading the data, to count its batches, may take long or be impossible here.
    if options.steps is not None or not any(map(_is_scheduled, callbacks)):
        return forward, Plan(options.steps, ())
    try:
        return forward, plan_of(cli.trainer, cli.model, cli.datamodule)
    except (ImportError, OSError, ValueError) as error:
        needed = (
            "a schedule of the config depends on the number of training steps, which takes its data"
        )
        raise ValueError(f"{needed}, and {error}\nor give the number: --steps N") from error


def _is_scheduled(callback: NMSparsityCallback) -> bool:
    """Whether the costs change during training, so that its length matters."""
    # A sparsifier of no layer resolves the config into rules.
    rules = NMSparsifier(torch.nn.Module(), config=callback.config).rules
    return any(is_scheduled(rule) for rule in rules)


def _report(
    cli: LightningCLI,
    callbacks: Sequence[NMSparsityCallback],
    forward: Forward,
    plan: Plan,
    pattern: str | None,
) -> Report:
    """Attach the callbacks' sparsifiers, charge the planned training, and detach them."""
    sparsifiers: list[NMSparsifier] = []
    try:
        for callback in callbacks:
            config = callback.config
            if pattern is not None:
                config = replace(config, pattern=pattern)
            sparsifier = NMSparsifier(cli.model, config=config, planned_steps=plan.steps)
            # With optimizers, weights that none of them trains stay dense, as in the training.
            sparsifier.attach(optimizers=plan.optimizers or None)
            sparsifiers.append(sparsifier)
            charge_plan(list(sparsifier.layers.values()), plan.steps)
        layers = layers_of(cli.model, forward.macs, sparsifiers)
        lines: dict[str, None] = {}  # in order, each once: callbacks may share a schedule
        for sparsifier in sparsifiers:
            lines.update(dict.fromkeys(phases(sparsifier)))
    finally:
        # The model serves for the next pattern.
        for sparsifier in sparsifiers:
            sparsifier.detach()
    return Report(
        model=type(cli.model).__name__,
        inputs=forward.inputs,
        layers=layers,
        planned_steps=plan.steps,
        phases=tuple(lines),
        pattern=pattern,
    )


def _zeros(sizes: str) -> torch.Tensor:
    """An input of these sizes, which are separated by commas or by ``x``."""
    try:
        shape = [int(size) for size in sizes.replace("x", ",").split(",")]
        return torch.zeros(shape, dtype=torch.float32)  # refuses negative sizes
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--input {sizes} is no shape: write it as 1,3,224,224") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm flops",
        description="Count the multiply-adds of a config's model, weight by weight, and those of its training relative "
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
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else to stdout"
    )
    return parser
