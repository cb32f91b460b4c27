"""A report of multiply-adds as rich tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from rich.console import Console, JustifyMethod
from rich.table import Table

from lightning_nm.callbacks.report.tables import Whole, plain_table, print_note
from lightning_nm.commands.flops.counts import GEMMS, LayerFlops, Report
from lightning_nm.functional import FlopsKind
from lightning_nm.nn.selection.ranges import grouped

_HEADS = ("weight", "parameters", "MACs", "masks", *GEMMS, "all", "why")
_UNITS = ("", "k", "M", "G", "T")  # of powers of 1000
_MEANINGS: Mapping[FlopsKind, str] = {
    "arithmetic": "nonzero operands, needed outputs",
    "paper": "as the N:M papers count",
    "eligible": "GEMMs that N:M hardware could skip",
}


def print_report(report: Report, console: Console) -> None:
    """Print a row per weight, the sums, and what they hold for."""
    # Many weights share a reason: the table has its number, and the text stands once below.
    reasons: dict[str, int] = {}
    for layer in report.layers:
        if layer.why:
            reasons.setdefault(layer.why, len(reasons) + 1)
    console.print(Whole(layer_table(report, reasons)), crop=False, soft_wrap=True)
    for why, number in reasons.items():
        print_note(console, f"({number}) {why}")
    console.print(ratio_table(report))
    for line in facts(report):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def layer_table(report: Report, reasons: Mapping[str, int]) -> Table:
    """Return each weight with the shares of its GEMMs, in the three countings where they differ.

    Args:
        report: The report.
        reasons: The number of each reason why a weight is dense.
    """
    rows = grouped(_cells(layer, reasons) for layer in report.layers)
    title = f"FLOPs of {report.model}"
    if report.pattern:
        title += f" at {report.pattern}"
    table = plain_table(title)
    # A width that holds every cell: a line that rich folds or cuts cannot be read by programs.
    padding = 2
    table.min_width = padding
    for place, head in enumerate(_HEADS):
        justify: JustifyMethod = "right" if head in ("parameters", "MACs") else "left"
        table.add_column(head, justify=justify, no_wrap=True)
        lengths = [len(row[place]) for row in rows]
        table.min_width += padding + max([len(head), *lengths])
    for row in rows:
        is_masked = row[_HEADS.index("masks")] != ""
        table.add_row(*row, style=None if is_masked else "dim")
    table.caption = (
        "parameters and MACs (multiply-adds of the dense forward GEMM) are those of each weight; "
        "shares: arithmetic/paper/eligible, or one for all three"
    )
    table.caption_justify = "left"
    return table


def _cells(layer: LayerFlops, reasons: Mapping[str, int]) -> tuple[str, ...]:
    """A weight's row under :data:`_HEADS`."""
    masks = [text for text in (layer.pattern, layer.method, layer.estimator) if text]
    cells = [layer.name, _short(layer.parameters), _short(layer.macs), " ".join(masks)]
    shares = [layer.shares(kind) for kind in get_args(FlopsKind)]
    for gemm in (*GEMMS, "all"):
        texts = [f"{share[gemm]:.3f}" for share in shares]
        # One number where the three countings agree.
        is_same = len(set(texts)) == 1
        cells.append(texts[0] if is_same else "/".join(texts))
    cells.append(f"({reasons[layer.why]})" if layer.why else "")
    return tuple(cells)


def _short(count: int) -> str:
    """A count in four digits.

    Example:
        >>> [_short(count) for count in (512, 36_864, 115_605_504)]
        ['512', '36.9k', '115.6M']
    """
    if count < 1000:
        return str(count)
    thousands = (len(str(count)) - 1) // 3
    power = min(thousands, len(_UNITS) - 1)
    return f"{count / 1000**power:.1f}{_UNITS[power]}"


def ratio_table(report: Report) -> Table:
    """Return the training's multiply-adds over those of dense training, in the three countings."""
    table = plain_table("training FLOPs, dense is 1")
    table.add_column("counted as", no_wrap=True)
    for name in (*GEMMS, "all", "masked alone"):
        table.add_column(name, justify="right")
    table.add_column("meaning", style="dim", overflow="fold")
    for kind in get_args(FlopsKind):
        whole = report.ratios(kind)
        masked = report.ratios(kind, masked_alone=True)
        # A model without a product of a weight has no ratio.
        cells = ["-"] * len((*GEMMS, "all"))
        if whole is not None:
            cells = [f"{whole[gemm]:.4f}" for gemm in (*GEMMS, "all")]
        masked_cell = "-" if masked is None else f"{masked['all']:.4f}"
        table.add_row(kind, *cells, masked_cell, _MEANINGS[kind])
    return table


def facts(report: Report) -> list[str]:
    """Return the size of the model, and what the shares are an average of."""
    gflops = 2e-9 * report.macs  # a multiply-add is two floating-point operations
    macs = f"{report.macs:,} multiply-adds ({gflops:.4g} GFLOPs)"
    given = ", ".join(report.inputs) or "no tensor"
    lines = [f"{report.parameters:,} parameters; dense forward pass of {given}: {macs}"]
    lines.append("products of two activations, as in attention, are not counted")
    if not report.masked:
        lines.append(
            "no weight is masked: there is no NMSparsityCallback in the config, so every GEMM is dense"
        )
        return lines
    if report.planned_steps is not None:
        lines.append(f"averaged over {report.planned_steps:,} planned training steps")
    return [*lines, *report.phases]
