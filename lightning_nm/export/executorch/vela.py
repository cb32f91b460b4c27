"""What Vela, the compiler for Ethos-U, says of a program that it compiled: its operators and their cycles.

The cycles are the estimates of the compiler's model of the NPU and its memories. No chip is measured.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

# Files that ExecuTorch and Vela write beside each program.
_DATABASE = "output/out_debug.xml"  # of Vela's --enable-debug-db
_NODES = "debug.json"  # of ExecuTorch: the module of each operator

_SPARSE = "Sparse2_4"  # in Vela's weight formats, such as "Fast|Sparse2_4"


@dataclass(frozen=True)
class Operator:
    """An operator of the compiled program.

    Args:
        name: In the program.
        kind: Such as ``"Conv2D"``.
        module: The module of the model that it computes; empty where ExecuTorch does not say.
        cycles: The compiler's estimate: the larger one of arithmetic and memory accesses.
        macs: Multiply-adds that the NPU makes; half of them in a sparse product.
        has_weight: Whether it has a constant weight.
        sparse: Whether its weight is stored as 2:4.
        reason: Why not, if it has a weight.
        dense_cycles: Of the same operator with a dense weight; ``None`` if that was not compiled.
    """

    name: str
    kind: str
    module: str
    cycles: int
    macs: int
    has_weight: bool
    sparse: bool
    reason: str = ""
    dense_cycles: int | None = None


def read_operators(folder: Path) -> list[Operator]:
    """The operators of one compiled program, in the order in which they run.

    Args:
        folder: Where ExecuTorch and Vela left their files.

    Raises:
        RuntimeError: If a file is missing or of another form, as after a change of Vela.
    """
    try:
        tables = _tables(folder / _DATABASE)
        modules = _modules(folder / _NODES)
        formats = {row["id"]: row["weight_format"] for row in tables["perf_debug"]}
        return [
            Operator(
                name=row["name"],
                kind=row["operator"],
                module=modules.get(row["name"], ""),
                cycles=int(row["op_cycles"]),
                macs=int(row["mac_count"]),
                has_weight=bool(formats[row["id"]]),
                sparse=_SPARSE in formats[row["id"]],
            )
            for row in tables["perf"]
        ]
    except (OSError, KeyError, ValueError, ElementTree.ParseError) as error:
        raise RuntimeError(
            f"the report of Vela cannot be read ({type(error).__name__}: {error}): this package knows that of "
            "ethos-u-vela 5.1"
        ) from error


def _tables(path: Path) -> dict[str, list[dict[str, str]]]:
    """The tables of Vela's database, which are CSV texts in an XML file."""
    root = ElementTree.parse(path).getroot()
    tables = {}
    for table in root.iter("table"):
        text = (table.text or "").strip()
        tables[table.attrib["name"]] = list(csv.DictReader(io.StringIO(text)))
    return tables


def _modules(path: Path) -> dict[str, str]:
    """The module of each operator, by the operator's name."""
    modules = {}
    for event in json.loads(path.read_text()):
        stack = event["torch_info"]["nn_module_stack"]
        if isinstance(stack, Mapping) and stack:
            innermost = list(stack.values())[-1]
            modules[event["aten_info"]["node_name"]] = str(innermost[0])
    return modules


def explained(operators: Sequence[Operator], reasons: Mapping[str, str]) -> list[Operator]:
    """Operators with the reasons why their weights are not sparse.

    Args:
        operators: From :func:`read_operators`.
        reasons: By module; empty where the rules would allow a sparse weight.
    """
    found = []
    for each in operators:
        if each.has_weight and not each.sparse:
            reason = reasons.get(each.module, "the compiler does not name its layer")
            # The compiler compares both forms, and takes the one that its model says is faster.
            each = replace(each, reason=reason or "by the compiler's estimate it is not faster")
        found.append(each)
    return found


def with_dense(operators: Sequence[Operator], dense: Sequence[Operator]) -> list[Operator]:
    """Operators with the cycles of their dense twins, which have the same names in the same order.

    Raises:
        RuntimeError: If the compiler made another program of the dense weights.
    """
    names = [each.name for each in operators]
    if names != [each.name for each in dense]:
        raise RuntimeError(
            "Vela compiled the model with dense weights to other operators, so they cannot be compared"
        )
    return [
        replace(each, dense_cycles=twin.cycles) for each, twin in zip(operators, dense, strict=True)
    ]
