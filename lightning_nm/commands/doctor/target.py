"""``lightning-nm doctor --target``: which layers of a training would run sparse on an NPU; nothing is trained."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_nm.callbacks import NMSparsityCallback
from lightning_nm.commands.build import build
from lightning_nm.config import SparsityConfig
from lightning_nm.export.executorch import Operator, export_executorch
from lightning_nm.export.executorch.targets import (
    EXTRA,
    check_target,
    missing_packages,
    reason_of_layer,
)
from lightning_nm.functional import nm_prune
from lightning_nm.nn.layer.layer import NMLayer
from lightning_nm.nn.layer.layout import from_rows, known_shape, rows_of
from lightning_nm.nn.selection.selection import Selection
from lightning_nm.training.optimizers import trained_by

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI


@dataclass(frozen=True)
class TargetRow:
    """A weight of the model.

    Args:
        layer: Its layer.
        shape: Its shape; empty where the selection does not tell.
        pattern: Its pattern; empty for a dense weight.
        reason: Why it would not run sparse; empty if it would.
        cycles: Vela's estimate for all operators of the layer with a weight; ``None`` where it was not compiled.
        dense_cycles: The same with dense weights.
    """

    layer: str
    shape: tuple[int, ...]
    pattern: str
    reason: str
    cycles: int | None = None
    dense_cycles: int | None = None


@dataclass(frozen=True)
class TargetReport:
    """What a training would gain on a target.

    Args:
        target: The target.
        rows: The weights, in the order of the model.
        cycles: Vela's estimate for one inference; ``None`` if nothing was compiled.
        dense_cycles: The same with dense weights.
        not_compiled: Why there are no estimates.
    """

    target: str
    rows: tuple[TargetRow, ...]
    cycles: int | None = None
    dense_cycles: int | None = None
    not_compiled: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as primitives, for JSON."""
        rows = [{**vars(row), "shape": list(row.shape)} for row in self.rows]
        return {**vars(self), "rows": rows}


def examine_target(options: argparse.Namespace) -> TargetReport:
    """Choose the layers that the config would mask, and judge their shapes; compile the model where Vela is installed.

    Raises:
        ValueError: If the target is unknown or no NPU, or the config masks nothing.
    """
    check_target(options.target)
    if options.target == "cpu":
        raise ValueError(
            "--target is for NPUs, such as ethos-u85-256; without it the doctor measures this machine"
        )
    cli = build(options.config, options.model, options.data, kernels=False)
    callbacks: list[Any] = getattr(cli.trainer, "callbacks", [])
    configs = [each.config for each in callbacks if isinstance(each, NMSparsityCallback)]
    if not configs:
        raise ValueError("there is no NMSparsityCallback among the Trainer's callbacks")
    selections = [_select(cli.model, config) for config in configs]
    rows = _rows(cli.model, selections)
    report = TargetReport(options.target, tuple(rows))
    missing = missing_packages(options.target)
    if missing:
        return replace(report, not_compiled=f"not installed: {', '.join(missing)}; {EXTRA}")
    try:
        return _with_cycles(report, cli, configs)
    except (RuntimeError, ValueError, OSError) as error:
        return replace(report, not_compiled=str(error))


def _select(model: nn.Module, config: SparsityConfig) -> Selection:
    """The layers that a training would mask."""
    is_trained = None if config.frozen == "mask" else trained_by(None)
    return config.resolve().select(model, seed=config.seed, is_trained=is_trained)


def _rows(model: nn.Module, selections: Sequence[Selection]) -> list[TargetRow]:
    """One row for each weight of a known kind: callbacks mask different ones."""
    masked: dict[str, NMLayer] = {}
    skipped: dict[str, str] = {}
    names: dict[str, None] = {}
    for selection in selections:
        masked |= {layer.name: layer for layer in selection.layers}
        skipped |= selection.skipped
        names |= dict.fromkeys(selection.sizes)
    rows = []
    for name in names:
        if name in masked:
            spec = masked[name].spec
            shape = tuple(getattr(spec.module, spec.parameter).shape)
            rows.append(TargetRow(name, shape, str(spec.pattern), _reason(masked[name])))
        else:
            module = dict(model.named_modules()).get(name)
            weight = getattr(module, "weight", None)
            shape = (known_shape(weight) or ()) if isinstance(weight, Tensor) else ()
            rows.append(TargetRow(name, shape, "", f"not masked: {skipped.get(name, 'dense')}"))
    return rows


def _reason(layer: NMLayer) -> str:
    """Why a masked layer would not run sparse in inference; empty if it would."""
    spec = layer.spec
    if not spec.method.sparse_forward:
        return f"{type(spec.method).__name__} leaves the forward weight dense"
    return spec.forward_reason or reason_of_layer(spec.module, spec.pattern, spec.layout)


def _with_cycles(
    report: TargetReport, cli: LightningCLI, configs: Sequence[SparsityConfig]
) -> TargetReport:
    """Compile the untrained model under first masks, and dense, and add Vela's estimates.

    Raises:
        ValueError: If there is no example input, or the model cannot be exported.
        RuntimeError: If the compiler fails.
    """
    example = _example(cli)
    model = deepcopy(cli.model)
    for config in configs:
        for layer in _select(model, config).layers:
            _prune(layer)
    # Estimates depend on shapes and zeros; random inputs serve for the scales.
    inputs = tuple(torch.randn_like(x) if x.is_floating_point() else x for x in example)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        # Branches of an untrained model may begin at zero.
        warnings.filterwarnings("ignore", "these layers read one value alone")
        result = export_executorch(
            model,
            Path(folder, "model.pte"),
            inputs,
            target=report.target,
            calibration=[inputs],
            allow_float=True,
        )
    rows = [_with_cycles_of(row, result.operators) for row in report.rows]
    return replace(report, rows=tuple(rows), cycles=result.cycles, dense_cycles=result.dense_cycles)


@torch.no_grad()
def _prune(layer: NMLayer) -> None:
    """Zero what a first mask would, whatever the method: the compiler sees where zeros may be, not which."""
    spec = layer.spec
    if not spec.method.sparse_forward or spec.forward_reason:
        return
    weight = getattr(spec.module, spec.parameter)
    rows = nm_prune(rows_of(weight, spec.layout), spec.pattern, dim=1)
    weight.copy_(from_rows(rows, spec.layout, weight.shape))


def _with_cycles_of(row: TargetRow, operators: Sequence[Operator]) -> TargetRow:
    own = [each for each in operators if each.has_weight and each.module == row.layer]
    if not own:
        return row
    cycles = sum(each.cycles for each in own)
    dense_cycles = sum(each.dense_cycles or 0 for each in own)
    reason = row.reason
    # The compiler has the last word.
    if not reason and not all(each.sparse for each in own):
        reason = next(each.reason for each in own if not each.sparse)
    return replace(row, reason=reason, cycles=cycles, dense_cycles=dense_cycles)


def _example(cli: LightningCLI) -> tuple[Tensor, ...]:
    """One input of the model: its ``example_input_array``, else from the first batch of the training data.

    Raises:
        ValueError: If there is neither.
    """
    example = cli.model.example_input_array
    if example is None and cli.datamodule is not None:
        cli.datamodule.prepare_data()
        cli.datamodule.setup("fit")
        batch = next(iter(cli.datamodule.train_dataloader()), None)
        # A batch is the input, or begins with it.
        example = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(example, Mapping) or example is None:
        raise ValueError(
            "the model has no example_input_array, and the data's batches are no tuples"
        )
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not all(isinstance(each, Tensor) and each.dim() for each in inputs):
        raise ValueError("the model's inputs are not tensors: set its example_input_array")
    # NPUs run one inference at a time.
    return tuple(each[:1] for each in inputs)


def print_target(report: TargetReport, console: Console) -> None:
    """Print the layers and the sums."""
    console.print(_table(report))
    sparse = sum(not row.reason for row in report.rows)
    lines = [f"{sparse} of {len(report.rows)} weights would run sparse on {report.target}"]
    if report.not_compiled:
        lines.append(f"cycles are not known: {report.not_compiled}")
    elif report.dense_cycles is not None and report.cycles:
        gain = report.dense_cycles / report.cycles
        lines.append(
            f"Vela's estimate of one inference, which no chip has confirmed: {report.cycles} cycles, "
            f"{report.dense_cycles} with dense weights, {gain:.2f}x"
        )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _table(report: TargetReport) -> Table:
    table = Table(
        title=f"weights on {report.target}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layer", overflow="fold", min_width=10)
    table.add_column("shape", no_wrap=True)
    table.add_column("pattern", no_wrap=True)
    table.add_column("runs", no_wrap=True)
    if report.cycles is not None:
        for column in ("cycles", "dense"):
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", min_width=16)
    for row in report.rows:
        cells = [row.layer, "x".join(map(str, row.shape)), row.pattern or "dense"]
        cells.append("dense" if row.reason else "2:4")
        if report.cycles is not None:
            cells += ["-" if each is None else str(each) for each in (row.cycles, row.dense_cycles)]
        table.add_row(*cells, row.reason, style=None if row.reason else "green")
    return table
