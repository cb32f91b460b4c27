"""Lower a quantised program by ExecuTorch: to XNNPACK for CPUs, or through Vela to Ethos-U85."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from lightning_nm.export.executorch.quantized import first_cause, module_of

# Operators at the edges of delegated parts, which are no work of their own.
_EDGES = ("quantize_per_tensor", "dequantize_per_tensor", "executorch_call_delegate", "getitem")


# Files that ExecuTorch and Vela write next to each program.
_DATABASE = "output/out_debug.xml"  # of Vela's --enable-debug-db
_NODES = "debug.json"  # of ExecuTorch: the module of each operator

_SPARSE = "Sparse2_4"  # in Vela's weight formats, such as "Fast|Sparse2_4"


class Undelegated(NamedTuple):
    """An operator that runs on the host's CPU, in ExecuTorch's portable kernels.

    Args:
        operator: Such as ``"aten.native_layer_norm.default"``.
        module: The module that calls it.
    """

    operator: str
    module: str


class Operator(NamedTuple):
    """An operator of the compiled program.

    The cycles are the estimates of the compiler's model of the NPU and its memories. No chip is measured.

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


class Lowered(NamedTuple):
    """A program that can be written.

    Args:
        content: The ``.pte`` file.
        on_cpu: What the target does not take.
        operators: Of Vela; empty for CPUs.
    """

    content: bytes
    on_cpu: tuple[Undelegated, ...]
    operators: tuple[Operator, ...] = ()


def make_quantizer(target: str) -> Any:
    """The quantizer of a target: int8, one scale for each output channel of a weight, zero points of weights 0."""
    if target == "cpu":
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )

        quantizer = XNNPACKQuantizer()
        return quantizer.set_global(get_symmetric_quantization_config(is_per_channel=True))
    from executorch.backends.arm.ethosu import EthosUCompileSpec
    from executorch.backends.arm.quantizer import EthosUQuantizer
    from executorch.backends.arm.quantizer import (
        get_symmetric_quantization_config as get_config_of_arm,
    )

    quantizer = EthosUQuantizer(EthosUCompileSpec(target))
    return quantizer.set_global(get_config_of_arm(is_per_channel=True))


def lower(
    graph: GraphModule,
    example: tuple[Tensor, ...],
    target: str,
    folder: Path,
    memory: Mapping[str, str | None],
) -> Lowered:
    """Compile a quantised program for a target.

    Args:
        graph: Quantised by the quantizer of the target.
        example: Inputs.
        target: Of :data:`~lightning_nm.export.executorch.targets.TARGETS`.
        folder: A folder for files of the compiler, which is made.
        memory: ``system_config`` and ``memory_mode`` of Vela; ``None`` for ExecuTorch's choice.

    Raises:
        RuntimeError: If the compiler fails.
    """
    from executorch.exir import to_edge_transform_and_lower

    folder.mkdir()
    program = torch.export.export(graph, example)
    partitioner = _partitioner(target, folder, memory)
    # Vela prints a summary, and ends the process where it fails.
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
            # Before the planning of memory, which adds operators and renames others.
            on_cpu = tuple(
                Undelegated(name, module_of(node))
                for node in edge.exported_program().graph.nodes
                if node.op == "call_function"
                and (name := getattr(node.target, "__name__", str(node.target)))
                and not any(edge_name in name for edge_name in _EDGES)
            )
            content = bytes(edge.to_executorch().buffer)
    except (Exception, SystemExit) as error:
        said = printed.getvalue().strip().splitlines()
        last = f"; Vela said: {said[-1]}" if said else ""
        raise RuntimeError(
            f"ExecuTorch cannot compile this model for {target}: {first_cause(error)}{last}"
        ) from error
    operators: list[Operator] = []
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        operators += read_operators(part)
    return Lowered(content, on_cpu, tuple(operators))


def _partitioner(target: str, folder: Path, memory: Mapping[str, str | None]) -> Any:
    """The partitioner of a target; that of Ethos-U leaves a folder of Vela's files for each part of the program."""
    if target == "cpu":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        return XnnpackPartitioner()
    from executorch.backends.arm.ethosu import EthosUCompileSpec, EthosUPartitioner
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.backend.partitioner import DelegationSpec

    spec = EthosUCompileSpec(target, extra_flags=["--enable-debug-db"], **memory)
    spec.dump_intermediate_artifacts_to(str(folder))
    spec.dump_debug_info(EthosUCompileSpec.DebugMode.JSON)
    partitioner = EthosUPartitioner(spec)
    partition = partitioner.partition

    def partition_apart(program: Any) -> Any:
        # Every part would be compiled in the same folder, and leave only the files of the last one.
        result = partition(program)
        for number, (tag, delegation) in enumerate(sorted(result.partition_tags.items())):
            own_folder = folder / f"{number:03}"
            own_folder.mkdir()
            specs = []
            for each in delegation.compile_specs:
                is_folder = each.value == str(folder).encode()
                value = str(own_folder).encode() if is_folder else each.value
                specs.append(CompileSpec(each.key, value))
            result.partition_tags[tag] = DelegationSpec(delegation.backend_id, specs)
        return result

    partitioner.partition = partition_apart
    return partitioner


def read_operators(folder: Path) -> list[Operator]:
    """The operators of one compiled program, in the order in which they run.

    Args:
        folder: Where ExecuTorch and Vela left their files.

    Raises:
        RuntimeError: If a file is missing or of another form, as after a change of Vela.
    """
    try:
        # CSV texts in an XML file.
        tables = {
            table.attrib["name"]: list(csv.DictReader(io.StringIO((table.text or "").strip())))
            for table in ElementTree.parse(folder / _DATABASE).getroot().iter("table")
        }
        modules = {}
        for event in json.loads((folder / _NODES).read_text()):
            stack = event["torch_info"]["nn_module_stack"]
            if isinstance(stack, Mapping) and stack:
                modules[event["aten_info"]["node_name"]] = str([*stack.values()][-1][0])
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


def outputs_of(content: bytes, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Run a ``.pte`` file in ExecuTorch's runtime on this CPU."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(content)
    method = program.load_method("forward")
    return [
        leaf.clone()
        for leaf in tree_leaves(list(method.execute(inputs)))
        if isinstance(leaf, Tensor)
    ]
