"""The machine and the reports as rich tables."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.commands.doctor.machine import Cpu, KernelState, Machine
from lightning_nm.commands.doctor.report import Report, Row

# Of sparsities other than N:M, for the caption of a table that shows them.
_MEANINGS = {
    "masked": "an operand has pruned entries, but is not N:M along its depth",
    "outputs": "the result is needed at kept entries alone",
}


def print_machine(machine: Machine, console: Console) -> None:
    """Print the device, the libraries and each kernel."""
    console.print(_machine_table(machine))
    console.print(_kernel_table(machine))
    # The reference is the dense product.
    sparse_kernels = [kernel for kernel in machine.kernels if kernel.name != "reference"]
    if not any(kernel.works for kernel in sparse_kernels):
        console.print(
            "No sparse kernel works here: nothing is measured, and a training runs every product dense.",
            soft_wrap=True,
        )


def _machine_table(machine: Machine) -> Table:
    environment = machine.environment
    table = _table("machine", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    if machine.cpu is None:
        capability = f", compute capability {machine.capability}" if machine.capability else ""
        table.add_row("device", f"{environment.device}{capability}")
        for name in ("driver", "torch", "cuda", "cusparselt"):
            table.add_row(name, getattr(environment, name) or "none")
        if machine.triton is not None:
            table.add_row("triton", _triton_use(machine.triton))
    else:
        for name, value in _cpu_rows(machine.cpu):
            table.add_row(name, value)
        table.add_row("torch", environment.torch)
    return table


def _kernel_table(machine: Machine) -> Table:
    table = _table("kernels")
    table.add_column("kernel", no_wrap=True)
    table.add_column("works", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1)
    for kernel in machine.kernels:
        works = "yes" if kernel.works else "no"
        style = None if kernel.works else "dim"
        table.add_row(kernel.name, works, _why(kernel), style=style)
    return table


def _why(kernel: KernelState) -> str:
    if kernel.name == "reference":
        return "the dense product on masked operands, always available"
    texts = [text for text in (kernel.reason, kernel.remark) if text]
    return "; ".join(texts) or "passed its numeric check on this device"


def _triton_use(reason: str) -> str:
    """Whether Triton kernels run, from the reason why they do not."""
    if reason:
        return f"{reason}: torch prepares operands, and makes BAME's passes"
    return "its kernels prepare operands, and make BAME's passes"


def _cpu_rows(cpu: Cpu) -> list[tuple[str, str]]:
    """What is shown of a CPU, and of how the kernels use it."""
    # Without the compiled library there are no instructions to name.
    instructions = cpu.instructions or "none, the kernels do not work"
    if cpu.asked:
        instructions += f" (LIGHTNING_NM_ISA={cpu.asked})"
    if cpu.instructions is None:  # no kernels, so torch alone has threads
        threads = f"{cpu.threads}"
    elif cpu.parallel:
        threads = f"{cpu.threads}, for dense products and kernels"
    else:
        threads = (
            f"{cpu.threads} for dense products; the kernels use one: more need torch 2.10 or later"
        )
    rows = [
        ("device", f"CPU, {cpu.model}"),
        ("instructions", instructions),
        ("cores", f"{cpu.cores} that this process may use"),
        ("threads", threads),
    ]
    if cpu.amx:
        rows.append(
            ("AMX", "for dense products of many tokens in bfloat16: N:M ones cannot use it")
        )
    return rows


def print_report(report: Report, console: Console) -> None:
    """Print each product, the sums and the verdict."""
    for table in (_sparse_table(report), _dense_table(report)):
        if table.row_count:  # rich would print the head of an empty table
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
    # Without markup: rich would take square brackets in a layer's name for a style.
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
    # Speeds are relative to the first row, the training that masks are to beat.
    for name, milliseconds in steps.items():
        time = "unknown" if milliseconds is None else f"{milliseconds:.4g} ms"
        table.add_row(name, time, _factor(report.against_plain(milliseconds)))
    return table


def _sparse_table(report: Report) -> Table:
    """One row for each product that a sparse kernel can run."""
    measured = report.kernels is not None
    if measured:
        table = _product_table("products, measured", report, layer_width=9, gemm_width=8)
        for column in ("dense", "sparse+pack", "gain"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("choice", overflow="fold", min_width=11)
    else:
        title = "products that could run sparse, not measured"
        table = _product_table(title, report, layer_width=9, gemm_width=8)
        table.add_column("could run on", overflow="fold", min_width=11)

    shown = [row for row in report.rows if _can_run_sparse(row)]
    above = None  # the row above, whose layer is not repeated
    for row in shown:
        cells = _measured_cells(row) if measured else [", ".join(row.could)]
        style = "green" if row.sparse else None
        table.add_row(*_product_cells(row, above), *cells, style=style)
        above = row

    caption = "sizes: rows x depth of the sparse operand x columns of the other"
    if measured:
        caption += "; times: µs of a call; gain: dense / (sparse + pack / products that share it)"
    sparsities = {row.product.key.sparsity for row in shown}
    for sparsity, meaning in _MEANINGS.items():
        if sparsity in sparsities:
            caption += f"; {sparsity}: {meaning}"
    table.caption = caption
    table.caption_justify = "left"
    return table


def _measured_cells(row: Row) -> list[str]:
    """Times in microseconds, their gain, and the choice."""
    dense = _microseconds(row.dense_ms)
    sparse = f"{_microseconds(row.sparse_ms)} + {_microseconds(row.pack_ms)}"
    choice = row.kernel if row.sparse else "dense"
    return [dense, sparse, _factor(row.gain), choice]


def _factor(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:.3f}x"


def _dense_table(report: Report) -> Table:
    """One row, with the reason, for each other product and for each layer that is not masked."""
    table = _product_table("always dense", report, layer_width=10, gemm_width=7)
    table.add_column("why", overflow="fold", min_width=16)
    above = None
    for row in report.rows:
        if not _can_run_sparse(row):
            table.add_row(*_product_cells(row, above), row.why)
            above = row
    # Layers that are not masked: none of their products was observed, so there are no sizes.
    for name, reason in report.skipped.items():
        table.add_row(name, "all", "-", reason, style="dim")
    return table


def _can_run_sparse(row: Row) -> bool:
    return row.eligible or row.sparse


def _product_table(title: str, report: Report, layer_width: int, gemm_width: int) -> Table:
    """Make a table whose first columns are those of :func:`_product_cells`."""
    if report.tokens is not None:
        title = f"{title}; as if {report.tokens} tokens"
    table = _table(title)
    # Least widths, so that a narrow terminal folds long names, and does not drop columns.
    table.add_column("layer", overflow="fold", min_width=layer_width)
    table.add_column("GEMM", overflow="fold", min_width=gemm_width)
    table.add_column("sizes", no_wrap=True)
    return table


def _product_cells(row: Row, above: Row | None) -> tuple[str, str, str]:
    """Layer, GEMM and sizes of a product; the layer is not repeated below itself."""
    layer, key, _ = row.product
    is_repeated = above is not None and layer == above.product.layer
    gemm: str = key.gemm
    # More than one in a step: micro-batches, or a layer that is called several times.
    if row.calls != 1:
        gemm += f" x{row.calls:g}"
    if key.permuted:
        gemm += " permuted"
    if key.drawn:
        gemm += " drawn"
    if key.sparsity in _MEANINGS:
        gemm += f" {key.sparsity}"
    sizes = f"{key.rows}x{key.depth}x{key.columns}"
    return "" if is_repeated else layer, gemm, sizes


def _microseconds(milliseconds: float | None) -> str:
    """Microseconds in about three digits."""
    if milliseconds is None:
        return "-"
    value = 1e3 * milliseconds
    if value == 0 or value >= 100:
        return f"{value:.0f}"
    if value >= 1:
        return f"{value:.1f}"
    return f"{value:.2f}"


def _table(title: str, **options: Any) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), **options
    )
