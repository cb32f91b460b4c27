"""The table of kernels after a fit: one row for each product of the masked layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from lightning_nm.callbacks.report.tables import plain_table
from lightning_nm.kernels import GemmKey, Router
from lightning_nm.kernels.api import uses_of_pack
from lightning_nm.kernels.router.router import Used
from lightning_nm.kernels.router.tuner import speedup


@dataclass(frozen=True)
class KernelRow:
    """A product of the masked layers, with its kernel and the measured times, None where they are unknown."""

    product: str
    calls: int
    kernel: str
    why: str
    dense_ms: float | None = None
    sparse_ms: float | None = None  # of a product without packing
    pack_ms: float | None = None  # of packing its operand once
    pack_uses: int = 1  # products that share one packed operand

    @property
    def sparse_and_pack_ms(self) -> float | None:
        """``sparse + pack / pack_uses``."""
        if self.sparse_ms is None or self.pack_ms is None:
            return None
        return self.sparse_ms + self.pack_ms / self.pack_uses

    @property
    def gain(self) -> float | None:
        """``dense / (sparse + pack / pack_uses)``."""
        if self.dense_ms is None or self.sparse_ms is None or self.pack_ms is None:
            return None
        return speedup(self.dense_ms, self.sparse_ms, self.pack_ms, self.pack_uses)


def kernel_rows(router: Router) -> list[KernelRow]:
    """One row for each product, in the order of first use; equal products of several layers share it."""
    by_key: dict[GemmKey, list[Used]] = {}
    for used in router.used():
        by_key.setdefault(used.product.key, []).append(used)
    names = _names(by_key)
    return [_row(router, names[key], key, uses) for key, uses in by_key.items()]


def _row(router: Router, name: str, key: GemmKey, uses: list[Used]) -> KernelRow:
    """The row of the uses of one product: its last kernel, and how often another one ran it before."""
    last = uses[-1]
    others = [used for used in uses if used.kernel != last.kernel]
    reasons = [_reason(used) for used in uses if used.kernel == last.kernel]
    if others:
        calls_before = sum(used.calls for used in others)
        kernels = dict.fromkeys(used.kernel for used in others)
        reasons.append(f"{calls_before} calls before that on {', '.join(kernels)}")
    why = "; ".join(dict.fromkeys(reasons))
    row = KernelRow(name, sum(used.calls for used in uses), last.kernel, why)
    decision = last.decision
    if decision is None:
        return row
    return replace(
        row,
        dense_ms=decision.dense_ms,
        sparse_ms=decision.sparse_ms,
        pack_ms=decision.pack_ms,
        pack_uses=uses_of_pack(key.gemm, router.pack_reuse(key.device)),
    )


def _reason(used: Used) -> str:
    if used.product.reason:
        return used.product.reason
    return "first batch, not measured yet" if used.decision is None else used.decision.reason


def _names(keys: Iterable[GemmKey]) -> dict[GemmKey, str]:
    """A name for each product: its GEMM and sizes, and where these are equal, what else differs."""
    by_sizes: dict[str, list[GemmKey]] = {}
    for key in keys:
        sizes = f"{key.gemm} {key.rows}x{key.depth}x{key.columns}"
        by_sizes.setdefault(sizes, []).append(key)
    names = {}
    for sizes, equal in by_sizes.items():
        marks = {key: _marks(key) for key in equal}
        common = set.intersection(*map(set, marks.values()))
        for key, own in marks.items():
            differing = [mark for mark in own if mark not in common]
            names[key] = " ".join([sizes, *differing])
    return names


def _marks(key: GemmKey) -> list[str]:
    """What else than its sizes a product differs in."""
    marks = [str(key.pattern), str(key.dtype).removeprefix("torch."), key.sparsity, key.device]
    if key.permuted:
        marks.append("permuted")
    if key.conv is not None:
        marks.append(str(key.conv))
    return marks


def kernel_columns(router: Router) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the cells of a table with every time and reason; without times if none was measured."""
    rows = kernel_rows(router)
    measured = any(row.dense_ms for row in rows)
    times_head = ("dense ms", "sparse ms", "pack ms") if measured else ()
    head = ("rows x depth x columns", "calls", *times_head, "kernel", "why")
    cells = []
    for row in rows:
        times = (row.dense_ms, row.sparse_ms, row.pack_ms) if measured else ()
        cells.append((row.product, str(row.calls), *map(_ms, times), row.kernel, row.why))
    return head, cells


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3f}"


def _kernel_table(rows: list[KernelRow], notes: dict[str, int]) -> Table:
    """The table of a terminal: it fits into 80 columns, so reasons are numbers of notes."""
    table = plain_table("N:M kernels")
    table.add_column("rows x depth x columns", overflow="fold")
    table.add_column("calls", justify="right", no_wrap=True)
    measured = any(row.dense_ms for row in rows)
    if measured:
        for column in ("dense ms", "sparse ms", "gain"):
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    table.add_column("why", justify="right", no_wrap=True)
    for row in rows:
        times = []
        if measured:
            gain = "-" if row.gain is None else f"{row.gain:.2f}x"
            times = [_ms(row.dense_ms), _ms(row.sparse_and_pack_ms), gain]
        note = notes.get(row.why, "")
        table.add_row(row.product, str(row.calls), *times, row.kernel, str(note))
    if measured:
        table.caption = "times of a call, packing included; gain: dense / sparse"
        table.caption_justify = "left"
    return table


def print_kernels(router: Router, console: Console | None = None) -> None:
    """Print the table and the share of GEMM time that ran sparse; a warning if nothing did."""
    console = console or Console()
    reason = router.unavailable_reason
    if reason:
        console.print(
            f"[yellow]warning:[/] every product was dense, no sparse kernel works here: {reason}"
        )
        return
    rows = kernel_rows(router)
    # Why a product is sparse is in its gain; every reason is in TensorBoard.
    reasons = dict.fromkeys(row.why for row in rows if row.kernel == router.registry.reference.name)
    notes = {reason: number for number, reason in enumerate(reasons, 1)}
    console.print(_kernel_table(rows, notes))
    for reason, number in notes.items():
        console.print(f"{number}: {reason}", markup=False, highlight=False)
    share, basis = router.sparse_share()
    console.print(
        f"share of the masked layers' GEMM time on sparse kernels: {share:.1%} (by {basis})"
    )
    if not share:
        later = "; later calls are not counted" if router.all_dense else ""
        why = f"this precision plugin gained nothing; the notes say why{later}"
        console.print(f"[yellow]warning:[/] no product ran on a sparse kernel, so {why}")
