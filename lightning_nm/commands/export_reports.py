"""What ``lightning-nm export`` prints of the files that it wrote: tables, and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lightning_nm.commands.output import columns_table
from lightning_nm.export.coreml import CoreMLReport
from lightning_nm.export.executorch import ExecutorchExport, Operator
from lightning_nm.export.outputs import Written

Report = list[Table | str]


def packed_report(written: Sequence[Written], output: str, *, is_int8: bool) -> Report:
    """Each tensor of a packed file, its parts, and their sums."""
    heads = ("weight", "pattern", "layout", "bytes", "of dense", "note")
    table = columns_table("packed", heads, {"weight": 20, "note": 12}, right=("bytes", "of dense"))
    for each in written:
        if each.pattern:
            note = ", ".join(filter(None, (each.stored, each.reason)))
            cells = (each.key, each.pattern, each.layout, f"{each.bytes}", _share([each]), note)
            table.add_row(*cells, style="green")
        else:
            table.add_row(each.key, "dense", "", f"{each.bytes}", "", each.reason, style="dim")

    by_part: dict[str, list[Written]] = {}
    for each in written:
        if each.part:
            by_part.setdefault(each.part, []).append(each)
    size = sum(each.bytes for each in written)
    numbers = ("tensors", "bytes", "of file", "of dense")
    parts = columns_table("parts", ("part", *numbers), {}, right=numbers)
    in_float = []
    # The largest part first.
    for part, members in sorted(by_part.items(), key=lambda item: -_bytes(item[1])):
        of_file = f"{_bytes(members) / size:.1%}" if size else ""
        parts.add_row(part, f"{len(members)}", f"{_bytes(members)}", of_file, _share(members))
        if part.startswith("dense") and "int8" not in part:
            in_float.append(
                f"{of_file} of the file are dense matrices (embeddings: --int8-embeddings GLOB)"
            )
        elif part.endswith("three axes") and "int8" not in part:
            in_float.append(
                f"{of_file} of the file are N:M weights of three axes (of experts: --int8-experts GLOB)"
            )

    report: Report = [table, parts]
    if is_int8 and in_float:
        report.append(f"not in int8: {'; '.join(in_float)}")
    # Others are dense, some of these in int8.
    packed = [each for each in written if each.pattern not in ("", "dense")]
    report.append(
        f"wrote {output}: {len(packed)} of {len(written)} tensors packed, at {_share(packed)} of their dense size; "
        f"all tensors together {size} bytes, {_share(written)} of dense"
    )
    return report


def _bytes(written: Sequence[Written]) -> int:
    return sum(each.bytes for each in written)


def _share(written: Sequence[Written]) -> str:
    """Bytes in the file over those of dense tensors; empty for tied weights, which another one holds."""
    dense_size = sum(each.dense_bytes for each in written)
    return f"{_bytes(written) / dense_size:.3f}" if dense_size else ""


def coreml_report(report: CoreMLReport, output: str) -> Report:
    """The N:M weights of a Core ML package, as they were read back from it, and what was not tried."""
    heads = ("weight", "pattern", "operator", "bytes", "of dense", "in the file")
    table = columns_table(
        "Core ML", heads, {"weight": 20, "in the file": 12}, right=("bytes", "of dense")
    )
    for each in report.weights:
        if not each.name:  # the forward does not use it, so it was not converted
            table.add_row(each.key, each.pattern, "", "", "", "not in the program", style="dim")
            continue
        operators = ", ".join(each.operators)
        share = f"{each.bytes / each.dense_bytes:.3f}"
        name = each.name if each.is_sparse else f"dense: {each.name}"
        style = "" if each.is_sparse else "dim"
        table.add_row(each.key, each.pattern, operators, f"{each.bytes}", share, name, style=style)
    sparse = sum(each.is_sparse for each in report.weights)
    # A weight that two operators use is counted for both.
    counts = [f"{count} {operator}" for operator, count in report.operators.items()]
    used = f" ({', '.join(counts)})" if counts else ""
    share = f"{report.bytes / report.dense_bytes:.3f}"
    return [
        table,
        f"wrote {output}: {sparse} of {len(report.weights)} N:M weights as nonzeros and a bit mask{used}; "
        f"{report.bytes} bytes, {share} of the dense package's {report.dense_bytes}",
        "The weights were read back and are N:M. The program was not run: that needs macOS, and no speed is claimed.",
    ]


def executorch_report(result: ExecutorchExport, output: str) -> Report:
    """The operators of a program with their estimated cycles, and what was written."""
    report: Report = [_operators(result)] if result.operators else []
    sparse = sum(bool(each.pattern) for each in result.layers)
    report += [
        f"wrote {output}: {result.bytes} bytes, {sparse} of {len(result.layers)} weights are N:M as int8",
        f"int8 scales of activations are from {result.calibrated_with} inputs",
    ]
    for each in result.on_cpu:
        where = f" of '{each.module}'" if each.module else ""
        report.append(f"on the host's CPU: {each.operator}{where}")
    if result.difference is not None:
        report.append(
            f"ExecuTorch's runtime differs from torch by {result.difference:.2g} of the largest output"
        )
    if result.operators:
        weights = sum(each.has_weight for each in result.operators)
        estimate = (
            f"Vela's estimate, which no chip has confirmed: {len(result.sparse)} of {weights} operators with weights "
            f"run sparse; {result.cycles} cycles of the NPU"
        )
        if result.dense_cycles is not None:
            gain = result.dense_cycles / max(result.cycles, 1)
            estimate += (
                f", {result.dense_cycles} with dense weights, {gain:.2f}x; {result.bytes} bytes, "
                f"{result.dense_bytes} with dense weights"
            )
        report.append(estimate)
    return report


def _operators(result: ExecutorchExport) -> Table:
    table = columns_table(
        f"cycles on {result.target}, estimated by Vela",
        ("operator", "layer", "cycles", "dense", "gain", "weight", "why"),
        {"operator": 10, "layer": 8, "why": 16},
        right=("cycles", "dense", "gain"),
    )

    def add(kind: str, module: str, members: list[Operator], weight: str, why: str) -> None:
        cycles = sum(each.cycles for each in members)
        dense, gain = "-", "-"
        if result.dense_cycles is not None:
            dense_cycles = sum(each.dense_cycles or 0 for each in members)
            dense = str(dense_cycles)
            gain = f"{dense_cycles / cycles:.2f}x" if weight and cycles else ""
        style = {"2:4": "green", "": "dim"}.get(weight)
        table.add_row(kind, module, str(cycles), dense, gain, weight, why, style=style)

    for each in result.operators:
        if each.has_weight:
            weight = "2:4" if each.sparse else "dense"
            add(each.kind, each.module, [each], weight, each.reason)
    others = [each for each in result.operators if not each.has_weight]
    if others:
        add(f"{len(others)} others", "", others, "", "")
    return table
