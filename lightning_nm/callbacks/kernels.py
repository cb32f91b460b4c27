"""The table of the products that a router ran, printed after a fit."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.kernels import Router

_REPEATED = "as above"


def _kernel_table(router: Router) -> Table:
    """One row per kind of product and kernel: its calls, times in milliseconds if measured, and the reason."""
    table = Table(title="N:M kernels", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("rows x depth x columns", overflow="fold", min_width=16)
    table.add_column("calls", justify="right", no_wrap=True)
    measured = any(used.decision and used.decision.dense_ms for used in router.used())
    for column in ("dense", "sparse", "pack") if measured else ():
        table.add_column(f"{column} ms", justify="right")
    table.add_column("kernel", overflow="fold", min_width=9)
    table.add_column("why", overflow="fold", ratio=1, min_width=20)
    calls: dict[tuple[str, ...], int] = {}
    for used in router.used():
        key, decision = used.product.key, used.decision
        times = (decision.dense_ms, decision.sparse_ms, decision.pack_ms) if decision else (None, None, None)
        cells = ["-" if time is None else f"{time:.3f}" for time in times]
        why = used.product.reason or (decision.reason if decision else "first batch, not measured yet")
        row = (f"{key.gemm} {key.rows}x{key.depth}x{key.columns}", *cells, used.kernel, why)
        calls[row] = calls.get(row, 0) + used.calls
    shown: set[str] = set()
    for (product, *times_ms, kernel, why), count in calls.items():
        repeated = why in shown and len(why) > len(_REPEATED)
        shown.add(why)
        table.add_row(product, str(count), *(times_ms if measured else ()), kernel, _REPEATED if repeated else why)
    return table


def print_kernels(router: Router, console: Console | None = None) -> None:
    """Print the table and the share of GEMM time that ran sparse; a warning if nothing did."""
    console = console or Console()
    if router.unavailable_reason:
        console.print(
            f"[yellow]warning:[/] every product was dense, no sparse kernel works here: {router.unavailable_reason}"
        )
        return
    console.print(_kernel_table(router))
    share, basis = router.sparse_share()
    console.print(f"share of the masked layers' GEMM time on sparse kernels: {share:.1%} (by {basis})")
    if not share:
        later = "; later calls are not counted" if router.all_dense else ""
        console.print(
            "[yellow]warning:[/] no product ran on a sparse kernel, so this precision plugin gained nothing; the last "
            f"column gives the reasons{later}"
        )
