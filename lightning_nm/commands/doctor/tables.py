"""The machine and the reports as rich tables."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.commands.doctor.machine import Cpu, Machine
from lightning_nm.commands.doctor.report import Report, Row

_MEANINGS = {
    "masked": "an operand has pruned entries, but is not N:M along its depth",
    "outputs": "the result is needed at kept entries alone",
}


def print_machine(machine: Machine, console: Console) -> None:
    """Print the device, the libraries and each kernel."""
    environment = machine.environment
    table = _table("machine", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    if machine.cpu is None:
        capability = f", compute capability {machine.capability}" if machine.capability else ""
        table.add_row("device", f"{environment.device}{capability}")
        for name in ("driver", "torch", "cuda", "cusparselt"):
            table.add_row(name, getattr(environment, name) or "none")
    else:
        for name, value in _cpu_rows(machine.cpu):
            table.add_row(name, value)
        table.add_row("torch", environment.torch)
    console.print(table)
    kernels = _table("kernels")
    kernels.add_column("kernel", no_wrap=True)
    kernels.add_column("works", no_wrap=True)
    kernels.add_column("why", overflow="fold", ratio=1)
    for kernel in machine.kernels:
        why = (
            "; ".join(filter(None, (kernel.reason, kernel.remark)))
            or "passed its numeric check on this device"
        )
        if kernel.name == "reference":
            why = "the dense product on masked operands, always available"
        kernels.add_row(
            kernel.name, "yes" if kernel.works else "no", why, style=None if kernel.works else "dim"
        )
    console.print(kernels)
    if not any(kernel.works for kernel in machine.kernels if kernel.name != "reference"):
        console.print(
            "No sparse kernel works here: nothing is measured, and a training runs every product dense.",
            soft_wrap=True,
        )


def _cpu_rows(cpu: Cpu) -> list[tuple[str, str]]:
    """What is shown of a CPU, and of how the kernels use it."""
    instructions = cpu.instructions or "none, the kernels do not work"
    if cpu.asked:
        instructions += f" (LIGHTNING_NM_ISA={cpu.asked})"
    if cpu.instructions is None:
        threads = f"{cpu.threads}"
    elif cpu.parallel:
        threads = f"{cpu.threads}, for dense products and kernels"
    else:
        threads = (
            f"{cpu.threads} for dense products; the kernels use one: more need torch 2.10 or later"
        )
    return [
        ("device", f"CPU, {cpu.model}"),
        ("instructions", instructions),
        ("cores", f"{cpu.cores} that this process may use"),
        ("threads", threads),
    ]


def print_report(report: Report, console: Console) -> None:
    """Print each product, the sums and the verdict."""
    for table in (_sparse_table(report), _dense_table(report)):
        if table.row_count:
            console.print(table)
    if report.plain_step_ms is not None or report.step_ms is not None:
        console.print(_step_table(report))
    lines = []
    if report.unseen:
        lines.append(f"masked, but not called: {', '.join(report.unseen)}")
    if report.timed:
        times = f"{report.dense_ms:.3g} ms dense, {report.chosen_ms:.3g} ms as chosen"
        lines.append(f"the measured products in a training step: {times}")
    if report.on_gpu is not None:
        could = f"{report.on_gpu} of {len(report.rows)} products could run sparse in a 16-bit dtype"
        lines.append(f"on a GPU with sparse tensor cores, not measured here: {could}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"{report.verdict}.", style="bold", markup=False, soft_wrap=True)


def _step_table(report: Report) -> Table:
    """The times of a training step: without masks, and with them."""
    table = _table("training step")
    table.add_column("", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("speed", justify="right", no_wrap=True)
    steps = {
        "plain dense training, measured": report.plain_step_ms,
        "under masks with dense products, measured": report.step_ms,
        "under masks with the chosen products, predicted": report.predicted_step_ms,
    }
    for name, milliseconds in steps.items():
        speed = report.against_plain(milliseconds)
        time = "unknown" if milliseconds is None else f"{milliseconds:.4g} ms"
        table.add_row(name, time, "-" if speed is None else f"{speed:.3f}x")
    return table


def _sparse_table(report: Report) -> Table:
    """One row for each product that a sparse kernel can run."""
    measured = report.kernels is not None
    title = "products, measured" if measured else "products that could run sparse, not measured"
    table = _product_table(title, report, layer_width=9, gemm_width=8)
    for column in ("dense", "sparse+pack", "gain") if measured else ():
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("choice" if measured else "could run on", overflow="fold", min_width=11)
    last = None
    for row in filter(_can_run_sparse, report.rows):
        cells = [", ".join(row.could)]
        if measured:
            sparse = f"{_microseconds(row.sparse_ms)} + {_microseconds(row.pack_ms)}"
            gain = "-" if row.gain is None else f"{row.gain:.3f}x"
            cells = [
                _microseconds(row.dense_ms),
                sparse,
                gain,
                row.kernel if row.sparse else "dense",
            ]
        table.add_row(*_product_cells(row, last), *cells, style="green" if row.sparse else None)
        last = row
    table.caption = "sizes: rows x depth of the sparse operand x columns of the other"
    if measured:
        table.caption += (
            "; times: µs of a call; gain: dense / (sparse + pack / products that share it)"
        )
    sparsities = {row.product.key.sparsity for row in report.rows if _can_run_sparse(row)}
    for sparsity, meaning in _MEANINGS.items():
        table.caption += f"; {sparsity}: {meaning}" if sparsity in sparsities else ""
    table.caption_justify = "left"
    return table


def _dense_table(report: Report) -> Table:
    """One row, with the reason, for each other product and for each layer that is not masked."""
    table = _product_table("always dense", report, layer_width=10, gemm_width=7)
    table.add_column("why", overflow="fold", min_width=16)
    last = None
    for row in report.rows:
        if not _can_run_sparse(row):
            table.add_row(*_product_cells(row, last), row.why)
            last = row
    for name, reason in report.skipped.items():
        table.add_row(name, "all", "-", reason, style="dim")
    return table


def _can_run_sparse(row: Row) -> bool:
    return row.eligible or row.sparse


def _product_table(title: str, report: Report, layer_width: int, gemm_width: int) -> Table:
    table = _table(title if report.tokens is None else f"{title}; as if {report.tokens} tokens")
    table.add_column("layer", overflow="fold", min_width=layer_width)
    table.add_column("GEMM", overflow="fold", min_width=gemm_width)
    table.add_column("sizes", no_wrap=True)
    return table


def _product_cells(row: Row, last: Row | None) -> tuple[str, str, str]:
    """Layer, GEMM and sizes of a product; the layer is not repeated below itself."""
    layer, key, _ = row.product
    calls = f" x{row.calls:g}" if row.calls != 1 else ""
    return (
        "" if last and layer == last.product.layer else layer,
        key.gemm
        + calls
        + " permuted" * key.permuted
        + f" {key.sparsity}" * (key.sparsity in _MEANINGS),
        f"{key.rows}x{key.depth}x{key.columns}",
    )


def _microseconds(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    value = 1e3 * milliseconds
    return (
        f"{value:.0f}"
        if value >= 100 or not value
        else f"{value:.1f}"
        if value >= 1
        else f"{value:.2f}"
    )


def _table(title: str, **options: Any) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), **options
    )
