"""What ``lightning-nm export --to coreml`` prints."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_nm.export.coreml import CoreMLReport, CoreMLWritten


def coreml_table(report: CoreMLReport) -> Table:
    """The N:M weights of a package, as they were read back from it."""
    table = Table(title="Core ML", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Names fold in a narrow terminal; numbers that fold could not be read.
    table.add_column("weight", overflow="fold", min_width=20)
    for column in ("pattern", "operator", "bytes"):
        table.add_column(column, no_wrap=True)
    table.add_column("of dense", no_wrap=True, justify="right")
    table.add_column("in the file", overflow="fold", min_width=12)
    for weight in report.weights:
        table.add_row(*_cells(weight), style="" if weight.is_sparse else "dim")
    return table


def coreml_text(report: CoreMLReport, output: str) -> str:
    """One sentence on the file, and one on what was not tried."""
    sparse = sum(weight.is_sparse for weight in report.weights)
    # A weight that two operators use is counted for both.
    counts = [f"{count} {operator}" for operator, count in report.operators.items()]
    used = f" ({', '.join(counts)})" if counts else ""
    share = report.bytes / report.dense_bytes
    return (
        f"wrote {output}: {sparse} of {len(report.weights)} N:M weights as nonzeros and a bit mask{used}; "
        f"{report.bytes} bytes, {share:.3f} of the dense package's {report.dense_bytes}\n"
        "The weights were read back and are N:M. The program was not run: that needs macOS, and no speed is claimed."
    )


def _cells(weight: CoreMLWritten) -> tuple[str, ...]:
    # A weight that the forward does not use is not converted.
    if not weight.name:
        return weight.key, weight.pattern, "", "", "", "not in the program"
    operators = ", ".join(weight.operators)
    share = weight.bytes / weight.dense_bytes
    form = "" if weight.is_sparse else "dense: "
    name = f"{form}{weight.name}"
    return weight.key, weight.pattern, operators, str(weight.bytes), f"{share:.3f}", name
