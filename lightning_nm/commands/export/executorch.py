"""``lightning-nm export --to executorch``: what it prints."""

from __future__ import annotations

import argparse

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.commands.export.calibration import calibration_data
from lightning_nm.export.executorch import ExecutorchExport, Operator, export_executorch
from lightning_nm.export.executorch.targets import check_target, require_packages
from lightning_nm.export.graphs import build_model, example_of
from lightning_nm.export.patterns import patterns_in
from lightning_nm.export.sources import Source
from lightning_nm.functional.pattern import NMPattern


def check_options(options: argparse.Namespace) -> None:
    """Refuse options of this export, before a checkpoint is read.

    Raises:
        ValueError: With the option.
        ImportError: If a package is missing.
    """
    if not options.target:
        raise ValueError("--to executorch needs a target: --target ethos-u85-256, or --target cpu")
    check_target(options.target)
    if not options.calibration:
        raise ValueError(
            "int8 scales are chosen from data: --calibration images.pt, a file of inputs, or --calibration train.Data, "
            "a LightningDataModule"
        )
    require_packages(options.target)


def export(source: Source, options: argparse.Namespace) -> ExecutorchExport:
    """Write the program of a checkpoint."""
    model = build_model(source, options.model)
    patterns = None
    if source.states or options.pattern:
        pattern = NMPattern.parse(options.pattern) if options.pattern else None
        patterns = patterns_in(source.weights, source.states, pattern)
    return export_executorch(
        model,
        options.output,
        example_of(model, options.input),
        target=options.target,
        calibration=calibration_data(options.calibration),
        patterns=patterns,
        allow_float=options.allow_float,
    )


def print_export(result: ExecutorchExport, output: str, console: Console) -> None:
    """Print the operators with their estimated cycles, and what was written."""
    if result.operators:
        console.print(_operators(result))
    # Without markup: names may have square brackets.
    for line in summary(result, output):
        console.print(line, markup=False, soft_wrap=True)


def summary(result: ExecutorchExport, output: str) -> list[str]:
    """What was written, in sentences."""
    sparse = [each for each in result.layers if each.pattern]
    lines = [
        f"wrote {output}: {result.bytes} bytes, {len(sparse)} of {len(result.layers)} weights are N:M as int8",
        f"int8 scales of activations are from {result.calibrated_with} inputs",
    ]
    for each in result.on_cpu:
        where = f" of '{each.module}'" if each.module else ""
        lines.append(f"on the host's CPU: {each.operator}{where}")
    if result.difference is not None:
        lines.append(
            f"ExecuTorch's runtime differs from torch by {result.difference:.2g} of the largest output"
        )
    if result.operators:
        weights = sum(each.has_weight for each in result.operators)
        lines.append(
            f"Vela's estimate, which no chip has confirmed: {len(result.sparse)} of {weights} operators with weights "
            f"run sparse; {result.cycles} cycles of the NPU"
        )
    if result.dense_cycles is not None:
        gain = result.dense_cycles / max(result.cycles, 1)
        lines[-1] += (
            f", {result.dense_cycles} with dense weights, {gain:.2f}x; {result.bytes} bytes, "
            f"{result.dense_bytes} with dense weights"
        )
    return lines


def _operators(result: ExecutorchExport) -> Table:
    table = Table(
        title=f"cycles on {result.target}, estimated by Vela",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("operator", overflow="fold", min_width=10)
    table.add_column("layer", overflow="fold", min_width=8)
    for column in ("cycles", "dense", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("weight", no_wrap=True)
    table.add_column("why", overflow="fold", min_width=16)
    for each in result.operators:
        if not each.has_weight:
            continue
        dense = "-" if each.dense_cycles is None else str(each.dense_cycles)
        weight = "2:4" if each.sparse else "dense"
        style = "green" if each.sparse else None
        cells = (each.kind, each.module, str(each.cycles), dense, _gain(each), weight, each.reason)
        table.add_row(*cells, style=style)
    others = [each for each in result.operators if not each.has_weight]
    if others:
        cycles = str(sum(each.cycles for each in others))
        dense = "-"
        if result.dense_cycles is not None:
            dense = str(sum(each.dense_cycles or 0 for each in others))
        table.add_row(f"{len(others)} others", "", cycles, dense, style="dim")
    return table


def _gain(operator: Operator) -> str:
    if operator.dense_cycles is None or not operator.cycles:
        return "-"
    return f"{operator.dense_cycles / operator.cycles:.2f}x"
