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


@dataclass(frozen=True)
class KernelRow:
    """A product of the masked layers, with its kernel and the measured times, None where they are unknown.

    Attributes:
        product: The GEMM and its sizes, as rows x depth x columns.
        calls: How often it ran, on all kernels together.
        kernel: The kernel that ran it last.
        why: The reason for that kernel.
        dense_ms: Milliseconds of the dense product.
        sparse_ms: Milliseconds of the sparse product, without packing.
        pack_ms: Milliseconds of packing its operand once.
        pack_uses: Products that share one packed operand.

    Example:
        >>> row = KernelRow("fwd 64x64x64", 10, "cpu-csr", "", dense_ms=3.0, sparse_ms=1.0, pack_ms=1.0, pack_uses=2)
        >>> row.sparse_and_pack_ms, row.gain
        (1.5, 2.0)
    """

    product: str
    calls: int
    kernel: str
    why: str
    dense_ms: float | None = None
    sparse_ms: float | None = None
    pack_ms: float | None = None
    pack_uses: int = 1

    @property
    def sparse_and_pack_ms(self) -> float | None:
        """Milliseconds of a call with its part of packing: ``sparse + pack / pack_uses``."""
        if self.sparse_ms is None or self.pack_ms is None:
            return None
        return self.sparse_ms + self.pack_ms / self.pack_uses

    @property
    def gain(self) -> float | None:
        """How many times as fast as the dense product: ``dense / (sparse + pack / pack_uses)``."""
        sparse_ms = self.sparse_and_pack_ms
        return None if self.dense_ms is None or sparse_ms is None else self.dense_ms / sparse_ms


def kernel_rows(router: Router) -> list[KernelRow]:
    """Return one row for each product, in the order of first use; equal products of several layers share it."""
    uses_of_key: dict[GemmKey, list[Used]] = {}
    for used in router.used():
        uses_of_key.setdefault(used.product.key, []).append(used)
    names = _names(uses_of_key)
    rows = []
    for key, uses in uses_of_key.items():
        # Uses are by layer and kernel. A kernel may change during a fit, from the first batch, which is dense, to the
        # measured one: the row is of the last one, and says how often others ran before.
        last = uses[-1]
        reasons = [_reason(used) for used in uses if used.kernel == last.kernel]
        before = [used for used in uses if used.kernel != last.kernel]
        if before:
            others = ", ".join(dict.fromkeys(used.kernel for used in before))
            calls = sum(used.calls for used in before)
            reasons.append(f"{calls} calls before that on {others}")
        row = KernelRow(
            product=names[key],
            calls=sum(used.calls for used in uses),
            kernel=last.kernel,
            why="; ".join(dict.fromkeys(reasons)),  # equal reasons of several layers once
        )
        if last.decision is not None:
            row = replace(
                row,
                dense_ms=last.decision.dense_ms,
                sparse_ms=last.decision.sparse_ms,
                pack_ms=last.decision.pack_ms,
                pack_uses=uses_of_pack(key, router.pack_reuse(key.device)),
            )
        rows.append(row)
    return rows


def _reason(used: Used) -> str:
    # What holds for the product, such as a size that no kernel takes, comes before any measurement.
    if used.product.reason:
        return used.product.reason
    if used.decision is None:
        return "first batch, not measured yet"
    return used.decision.reason


def _names(keys: Iterable[GemmKey]) -> dict[GemmKey, str]:
    """A name for each product: its GEMM and sizes, and where these are equal, what else differs."""
    keys_of_sizes: dict[str, list[GemmKey]] = {}
    for key in keys:
        sizes = f"{key.gemm} {key.rows}x{key.depth}x{key.columns}"
        keys_of_sizes.setdefault(sizes, []).append(key)
    names = {}
    for sizes, equal in keys_of_sizes.items():
        # A single product shares all properties with itself, so its name is its sizes alone.
        common = set.intersection(*(set(_properties(key)) for key in equal))
        for key in equal:
            differing = [text for text in _properties(key) if text not in common]
            names[key] = " ".join([sizes, *differing])
    return names


def _properties(key: GemmKey) -> list[str]:
    """Everything but the sizes in which two products may differ, as text."""
    dtype = str(key.dtype).removeprefix("torch.")
    properties = [str(key.pattern), dtype, key.sparsity, key.device]
    if key.permuted:
        properties.append("permuted")
    if key.drawn:
        properties.append("drawn")
    if key.conv is not None:
        properties.append(str(key.conv))
    return properties


def kernel_columns(router: Router) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the cells of a table with every time and reason; without times if none was measured."""
    rows = kernel_rows(router)
    is_measured = any(row.dense_ms for row in rows)
    times_head = ("dense ms", "sparse ms", "pack ms") if is_measured else ()
    head = ("rows x depth x columns", "calls", *times_head, "kernel", "why")
    cells = []
    for row in rows:
        times = []
        if is_measured:
            times = [_ms(row.dense_ms), _ms(row.sparse_ms), _ms(row.pack_ms)]
        cells.append((row.product, str(row.calls), *times, row.kernel, row.why))
    return head, cells


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3f}"


def _kernel_table(rows: list[KernelRow], notes: dict[str, int]) -> Table:
    """The table of a terminal: it fits into 80 columns, so ``why`` is the number of a note."""
    # Only sizes and names of kernels may take several lines: a broken number would be misread.
    table = plain_table("N:M kernels")
    table.add_column("rows x depth x columns", overflow="fold")
    table.add_column("calls", justify="right", no_wrap=True)
    is_measured = any(row.dense_ms for row in rows)
    if is_measured:
        for column in ("dense ms", "sparse ms", "gain"):
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    table.add_column("why", justify="right", no_wrap=True)
    for row in rows:
        times = []
        if is_measured:
            gain = "-" if row.gain is None else f"{row.gain:.2f}x"
            times = [_ms(row.dense_ms), _ms(row.sparse_and_pack_ms), gain]
        note = notes.get(row.why, "")
        table.add_row(row.product, str(row.calls), *times, row.kernel, str(note))
    if is_measured:
        table.caption = "times of a call, packing included; gain: dense / sparse"
        table.caption_justify = "left"
    return table


def print_kernels(router: Router, console: Console | None = None) -> None:
    """Print the table and the share of GEMM time that ran sparse; a warning if nothing did."""
    console = console or Console()
    reason = router.unavailable_reason
    if reason:  # there is no row with anything but the dense product
        console.print(
            f"[yellow]warning:[/] every product was dense, no sparse kernel works here: {reason}"
        )
        return
    rows = kernel_rows(router)
    # Why a product is sparse is in its gain, so only dense ones get a note; every reason is in TensorBoard.
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
        # A router that found nothing faster is inactive, and so is its counting.
        later = "; later calls are not counted" if router.all_dense else ""
        why = f"this precision plugin gained nothing; the notes say why{later}"
        console.print(f"[yellow]warning:[/] no product ran on a sparse kernel, so {why}")
