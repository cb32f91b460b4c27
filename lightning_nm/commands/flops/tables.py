"""A report of multiply-adds as rich tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.callbacks.report.tables import Whole
from lightning_nm.commands.flops.counts import GEMMS, LayerFlops, Report
from lightning_nm.functional import FlopsKind
from lightning_nm.nn.selection.ranges import grouped

_MEANINGS: Mapping[FlopsKind, str] = {
    "arithmetic": "nonzero operands, needed outputs",
    "paper": "as the N:M papers count",
    "eligible": "GEMMs that N:M hardware could skip",
}


def print_report(report: Report, console: Console) -> None:
    """Print a row per weight, the sums, and what they hold for."""
    reasons = {why: number for number, why in enumerate(dict.fromkeys(row.why for row in report.layers if row.why), 1)}
    console.print(Whole(layer_table(report, reasons)), crop=False, soft_wrap=True)
    for why, number in reasons.items():
        console.print(f"({number}) {why}", style="dim", soft_wrap=True, highlight=False, markup=False)
    console.print(ratio_table(report))
    for line in facts(report):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def layer_table(report: Report, reasons: Mapping[str, int]) -> Table:
    """Each weight with the shares of its GEMMs, in the three countings where they differ.

    Args:
        report: The report.
        reasons: The number of each reason why a weight is dense.
    """
    heads = ("parameters", "MACs", "masks", *GEMMS, "all", "why")
    rows = grouped(_cells(layer, reasons) for layer in report.layers)
    table = _table(f"FLOPs of {report.model}" + (f" at {report.pattern}" if report.pattern else ""))
    table.add_column("weight", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right" if head in heads[:2] else "left", no_wrap=True)
    for name, *cells in rows:
        table.add_row(name, *cells, style=None if cells[2] else "dim")
    table.min_width = 2 + sum(
        2 + max(len(row[k]) for row in [("weight", *heads), *rows]) for k in range(len(heads) + 1)
    )
    table.caption = "parameters and MACs (multiply-adds of the dense forward GEMM) are those of each weight; shares: "
    table.caption += "arithmetic/paper/eligible, or one for all three"
    table.caption_justify = "left"
    return table


def _cells(layer: LayerFlops, reasons: Mapping[str, int]) -> tuple[str, ...]:
    shares = {kind: layer.shares(kind) for kind in get_args(FlopsKind)}
    masks = " ".join(filter(None, (layer.pattern, layer.method, layer.estimator)))
    return (
        layer.name,
        _short(layer.parameters),
        _short(layer.macs),
        masks,
        *(_in_three(tuple(f"{share[gemm]:.3f}" for share in shares.values())) for gemm in (*GEMMS, "all")),
        f"({reasons[layer.why]})" if layer.why else "",
    )


def _short(count: int) -> str:
    """A count in four digits.

    Example:
        >>> [_short(count) for count in (512, 36_864, 115_605_504)]
        ['512', '36.9k', '115.6M']
    """
    if count < 1000:
        return str(count)
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.1f}{' kMGT'[power]}"


def _in_three(numbers: tuple[str, ...]) -> str:
    """One number where the three countings agree."""
    return numbers[0] if len(set(numbers)) == 1 else "/".join(numbers)


def ratio_table(report: Report) -> Table:
    """The training's multiply-adds over those of dense training, in the three countings."""
    table = _table("training FLOPs, dense is 1")
    table.add_column("counted as", no_wrap=True)
    for name in (*GEMMS, "all", "masked alone"):
        table.add_column(name, justify="right")
    table.add_column("meaning", style="dim", overflow="fold")
    for kind in get_args(FlopsKind):
        whole, masked = report.ratios(kind), report.ratios(kind, masked_alone=True)
        cells = [f"{whole[gemm]:.4f}" if whole else "-" for gemm in (*GEMMS, "all")]
        table.add_row(kind, *cells, f"{masked['all']:.4f}" if masked else "-", _MEANINGS[kind])
    return table


def facts(report: Report) -> list[str]:
    """The size of the model, and what the shares are an average of."""
    macs = f"{report.macs:,} multiply-adds ({2e-9 * report.macs:.4g} GFLOPs)"
    given = ", ".join(report.inputs) or "no tensor"
    lines = [f"{report.parameters:,} parameters; dense forward pass of {given}: {macs}"]
    lines.append("products of two activations, as in attention, are not counted")
    if not report.masked:
        return [*lines, "no weight is masked: there is no NMSparsityCallback in the config, so every GEMM is dense"]
    if report.planned_steps is not None:
        lines.append(f"averaged over {report.planned_steps:,} planned training steps")
    return [*lines, *report.phases]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
