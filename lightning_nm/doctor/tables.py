"""The doctor's reports as rich tables."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.doctor.machine import Machine
from lightning_nm.doctor.report import Report, Row


def print_machine(machine: Machine, console: Console) -> None:
    """Print the device, the libraries and each kernel."""
    environment = machine.environment
    table = _table("machine", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    capability = f", compute capability {machine.capability}" if machine.capability else ""
    table.add_row("device", f"{environment.device}{capability}")
    for name in ("driver", "torch", "cuda", "cusparselt"):
        table.add_row(name, getattr(environment, name) or "none")
    console.print(table)
    kernels = _table("kernels")
    kernels.add_column("kernel", no_wrap=True)
    kernels.add_column("works", no_wrap=True)
    kernels.add_column("why", overflow="fold", ratio=1)
    for kernel in machine.kernels:
        why = "; ".join(filter(None, (kernel.reason, kernel.remark))) or "passed its numeric check on this device"
        if kernel.name == "reference":
            why = "the dense product on masked operands, always there"
        kernels.add_row(kernel.name, "yes" if kernel.works else "no", why, style=None if kernel.works else "dim")
    console.print(kernels)
    if machine.capability is None:
        console.print(
            "torch finds no CUDA device: nothing is measured, and a training runs every product dense.",
            soft_wrap=True,
        )


def print_report(report: Report, console: Console) -> None:
    """Print each product, the sums and the verdict."""
    for table in (product_table(report), dense_table(report)):
        if table.row_count:
            console.print(table)
    if report.unseen:
        console.print(f"masked, but not called: {', '.join(report.unseen)}", markup=False, soft_wrap=True)
    if report.timed:
        console.print(
            f"GEMMs in a training step, measured, the products with times: {report.dense_ms:.3g} ms dense, "
            f"{report.chosen_ms:.3g} ms as chosen",
            soft_wrap=True,
        )
    if report.step_ms is not None:
        predicted = report.predicted_step_ms
        then = "unknown" if predicted is None else f"{predicted:.4g} ms"
        console.print(
            f"training step: {report.step_ms:.4g} ms measured with dense products, {then} predicted as chosen",
            soft_wrap=True,
        )
    console.print(f"{report.verdict}.", style="bold", markup=False, soft_wrap=True)


def product_table(report: Report) -> Table:
    """One row for each product that a sparse kernel can make."""
    measured = report.kernels is not None
    table = _table(
        _titled("products, measured" if measured else "products that could run sparse, not measured", report)
    )
    table.add_column("layer", overflow="fold", min_width=9)
    table.add_column("GEMM", overflow="fold", min_width=8)
    table.add_column("sizes", no_wrap=True)
    for column in ("dense", "sparse+pack", "gain") if measured else ():
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("choice" if measured else "could run on", overflow="fold", min_width=6)
    last = ""
    for row in filter(_listed, report.rows):
        times = (
            _microseconds(row.dense_ms),
            f"{_microseconds(row.sparse_ms)} + {_microseconds(row.pack_ms)}",
            "-" if row.gain is None else f"{row.gain:.3f}x",
        )
        table.add_row(
            "" if row.product.layer == last else row.product.layer,
            _gemm(row),
            _sizes(row),
            *(times if measured else ()),
            (row.kernel if row.sparse else "dense") if measured else ", ".join(row.could),
            style="green" if row.sparse else None,
        )
        last = row.product.layer
    table.caption = "sizes: rows x depth of the sparse operand x columns of the other"
    if measured:
        table.caption += "; times: µs of a call; gain: dense / (sparse + pack / products that share it)"
    table.caption_justify = "left"
    return table


def dense_table(report: Report) -> Table:
    """One row for each other product and for each layer that is not masked, with the reason."""
    table = _table(_titled("always dense", report))
    table.add_column("layer", overflow="fold", min_width=10)
    table.add_column("GEMM", overflow="fold", min_width=7)
    table.add_column("sizes", no_wrap=True)
    table.add_column("why", overflow="fold", min_width=16)
    last = ""
    for row in report.rows:
        if not _listed(row):
            name = "" if row.product.layer == last else row.product.layer
            table.add_row(name, _gemm(row), _sizes(row), row.why)
            last = row.product.layer
    for name, reason in report.skipped.items():
        table.add_row(name, "all", "-", reason, style="dim")
    return table


def _titled(title: str, report: Report) -> str:
    return title if report.tokens is None else f"{title}; as if {report.tokens} tokens"


def _listed(row: Row) -> bool:
    return row.eligible or row.sparse


def _gemm(row: Row) -> str:
    calls = f" x{row.calls:g}" if row.calls != 1 else ""
    return row.product.key.gemm + calls + " permuted" * row.product.key.permuted


def _sizes(row: Row) -> str:
    key = row.product.key
    return f"{key.rows}x{key.depth}x{key.columns}"


def _microseconds(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    value = 1e3 * milliseconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _table(title: str, show_header: bool = True) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=show_header)
