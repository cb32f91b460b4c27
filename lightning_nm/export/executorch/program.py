"""Export a model by ExecuTorch, int8 and N:M, and say what the target's compiler makes of the zeros."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from lightning_nm.export.atomic_write import FilePath, check_folder, replacing
from lightning_nm.export.executorch.quantized import (
    QuantizedLayer,
    calibration_inputs,
    fill_zeros,
    first_cause,
    layers_of_graph,
    module_of,
    quantize,
    quantized_layers,
    trace,
)
from lightning_nm.export.executorch.targets import (
    check_target,
    reason_of_weight,
    require_packages,
)
from lightning_nm.export.graphs import worst_difference
from lightning_nm.export.patterns import Found

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
        macs: Multiply-adds that the NPU makes; half of them in a sparse GEMM.
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


def make_quantizer(target: str) -> Any:
    """The quantizer of a target: int8, one scale for each output channel of a weight, zero points of weights 0."""
    # Imported for the target alone: packages of the others may be missing.
    if target == "cpu":
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )

        quantizer: Any = XNNPACKQuantizer()
        config = get_symmetric_quantization_config(is_per_channel=True)
    else:
        from executorch.backends.arm import quantizer as arm
        from executorch.backends.arm.ethosu import EthosUCompileSpec

        quantizer = arm.EthosUQuantizer(EthosUCompileSpec(target))
        config = arm.get_symmetric_quantization_config(is_per_channel=True)
    return quantizer.set_global(config)


def lower(
    graph: GraphModule,
    example: tuple[Tensor, ...],
    target: str,
    folder: Path,
    memory: Mapping[str, str | None],
) -> tuple[bytes, tuple[Undelegated, ...], list[Operator]]:
    """Compile a quantised program for a target.

    Args:
        graph: Quantised by the quantizer of the target.
        example: Inputs.
        target: Of :data:`~lightning_nm.export.executorch.targets.TARGETS`.
        folder: A folder for files of the compiler, which is made.
        memory: ``system_config`` and ``memory_mode`` of Vela; ``None`` for ExecuTorch's choice.

    Returns:
        The content of the ``.pte`` file, what the target does not take, and Vela's operators, none for CPUs.

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
    # Sorted, so that a program and its dense twin list their operators in one order.
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        operators += _read_operators(part)
    return content, on_cpu, operators


def _partitioner(target: str, folder: Path, memory: Mapping[str, str | None]) -> Any:
    """The partitioner of a target; that of Ethos-U leaves a folder of Vela's files for each part of the program."""
    if target == "cpu":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        return XnnpackPartitioner()
    from executorch.backends.arm.ethosu import EthosUCompileSpec, EthosUPartitioner
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.backend.partitioner import DelegationSpec

    # The database has the cycles and weight formats of the operators, see _read_operators().
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
                # Only the value tells which of the entries is the folder.
                is_folder = each.value == str(folder).encode()
                value = str(own_folder).encode() if is_folder else each.value
                specs.append(CompileSpec(each.key, value))
            result.partition_tags[tag] = DelegationSpec(delegation.backend_id, specs)
        return result

    partitioner.partition = partition_apart
    return partitioner


def _read_operators(folder: Path) -> list[Operator]:
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
            # A sentence in place of a stack says that there is none.
            if isinstance(stack, Mapping) and stack:
                # The innermost module is the last one.
                modules[event["aten_info"]["node_name"]] = str([*stack.values()][-1][0])
        formats = {row["id"]: row["weight_format"] for row in tables["perf_debug"]}
        return [
            Operator(
                name=row["name"],
                kind=row["operator"],
                module=modules.get(row["name"], ""),
                cycles=int(row["op_cycles"]),
                macs=int(row["mac_count"]),
                has_weight=bool(formats[row["id"]]),  # empty without a constant weight
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


# In the names of operators that may have a weight.
_PRODUCTS = ("convolution", "linear", "addmm", "mm", "matmul")

TOLERANCE = 0.05
"""Largest difference of an output of ExecuTorch's runtime and of the quantised model in torch, relative to the largest
output: roundings of int8 values that fall the other way."""


@dataclass(frozen=True)
class ExecutorchExport:
    """The result of :func:`export_executorch`.

    Args:
        target: The target.
        bytes: Size of the file.
        layers: The quantised weights.
        on_cpu: Operators that run in ExecuTorch's portable kernels on the host's CPU.
        in_float: Why layers were left in float, by module.
        operators: Vela's operators with its estimated cycles; empty for ``"cpu"``.
        dense_bytes: Size of the file with dense weights; ``None`` for ``"cpu"`` or without the comparison.
        difference: Of the runtime's outputs and those of the quantised model in torch, relative to the largest output;
            ``None`` for an NPU, which is not at hand.
        calibrated_with: Inputs of the program that the calibration had.
    """

    target: str
    bytes: int
    layers: tuple[QuantizedLayer, ...]
    on_cpu: tuple[Undelegated, ...]
    in_float: Mapping[str, str]
    operators: tuple[Operator, ...] = ()
    dense_bytes: int | None = None
    difference: float | None = None
    calibrated_with: int = 0

    @property
    def cycles(self) -> int:
        """The compiler's estimate of the NPU's cycles of one inference; it is no measurement."""
        return sum(each.cycles for each in self.operators)

    @property
    def dense_cycles(self) -> int | None:
        """The same with dense weights; ``None`` if that was not compiled."""
        if any(each.dense_cycles is None for each in self.operators) or not self.operators:
            return None
        return sum(each.dense_cycles or 0 for each in self.operators)

    @property
    def sparse(self) -> tuple[Operator, ...]:
        """The operators whose weights are stored as 2:4."""
        return tuple(each for each in self.operators if each.sparse)


def export_executorch(
    model: nn.Module,
    path: FilePath,
    example_inputs: tuple[Tensor, ...],
    *,
    target: str = "ethos-u85-256",
    calibration: Iterable[Any] | None,
    calibration_batches: int = 4,
    patterns: Mapping[str, Found] | None = None,
    allow_float: bool = False,
    compare_dense: bool = True,
    system_config: str | None = None,
    memory_mode: str | None = None,
) -> ExecutorchExport:
    """Write an int8 program of a model for ExecuTorch, whose N:M weights are N:M.

    The model is traced for the shapes of the example, quantised with one scale for each output channel of a weight,
    and calibrated. For an Ethos-U85 Vela compiles it twice, as it is and with dense weights in place of the zeros, and
    the result has the estimates of both. For ``"cpu"`` XNNPACK runs it, and it is compared with torch on the first
    input of the calibration.

    Args:
        model: A module with N:M weights that is not packed; it is exported in evaluation mode and not changed.
        path: The file, ``.pte``.
        example_inputs: Positional tensors; the program takes these shapes alone.
        target: ``"cpu"``, or an NPU with its multiply-accumulate units: ``"ethos-u85-256"``.
        calibration: Batches of real data, such as a ``DataLoader``: tensors, or tuples that begin with the inputs.
        calibration_batches: How many of them to use.
        patterns: The pattern of each weight by key, which is then required; by default it is found.
        allow_float: Write a program in which layers with weights run in float on the host's CPU.
        compare_dense: Compile the model with dense weights, too.
        system_config: Vela's name of the memories and the clock; by default ExecuTorch's for the target.
        memory_mode: Vela's name of what lies in which memory; as above.

    Raises:
        ImportError: If a package is missing: ``pip install -e '.[ethos-u]'``.
        ValueError: If the target is unknown, there is no data for calibration, it does not fit or holds one value
            alone, ``torch.export`` cannot trace the model, no weight is N:M, quantisation loses a pattern, or layers
            are left in float.
        RuntimeError: If the quantizer or the compiler fails, or the runtime computes something else than torch.
        OSError: If the file cannot be written. Nothing is written on any of these.
    """
    # From cheap to expensive: names and types, packages, the trace, the calibration, the compiler.
    check_target(target)
    is_tuple = isinstance(example_inputs, tuple) and bool(example_inputs)
    if not is_tuple or not all(isinstance(each, Tensor) for each in example_inputs):
        kind = type(example_inputs).__name__
        raise ValueError(f"example_inputs must be a tuple of the model's input tensors, got {kind}")
    if calibration is None:
        raise ValueError(
            "int8 scales are chosen from data: give calibration=, a few batches of real inputs, such as a DataLoader"
        )
    require_packages(target)
    check_folder(Path(path))
    graph = trace(model, example_inputs)
    layers, in_float_anyway = layers_of_graph(graph)
    # Known from the trace alone, before the model runs for the calibration.
    _require_int8(in_float_anyway, target, allow_float)
    # The float weights, with which the int8 ones are compared.
    weights = model.state_dict()
    inputs = calibration_inputs(calibration, example_inputs, calibration_batches)
    quantized_graph = quantize(graph, make_quantizer(target), inputs)
    quantized, in_float = quantized_layers(quantized_graph, layers, weights, patterns)
    in_float |= in_float_anyway
    _require_patterns(quantized, type(model).__name__)
    _require_int8(in_float, target, allow_float)

    memory = {"system_config": system_config, "memory_mode": memory_mode}
    worst = dense_bytes = None
    with TemporaryDirectory() as folder:
        content, on_cpu, operators = lower(
            quantized_graph, example_inputs, target, Path(folder, "sparse"), memory
        )
        reasons = {each.module: _why_dense(each, model) for each in quantized}
        # The last way into float: what the partitioner leaves to the host, after the quantizer took it.
        for operator, module in on_cpu:
            if module in reasons and any(name in operator for name in _PRODUCTS):
                in_float[module] = f"the partitioner does not take {operator}"
        _require_int8(in_float, target, allow_float)
        operators = [_explained(each, reasons) for each in operators]
        if target == "cpu":
            with torch.no_grad():
                outputs = quantized_graph(*inputs[0])
            own_outputs = outputs_of(content, inputs[0])
            worst = worst_difference("ExecuTorch's runtime", own_outputs, outputs, TOLERANCE)
        elif compare_dense:
            # A copy: the layers of the result share memory with the weights of this graph.
            twin = deepcopy(quantized_graph)
            fill_zeros(twin, [each for each in quantized if each.pattern])
            dense_folder = Path(folder, "dense")
            dense, _, twins = lower(twin, example_inputs, target, dense_folder, memory)
            operators = _with_dense(operators, twins)
            dense_bytes = len(dense)
    with replacing(Path(path)) as new:
        new.write_bytes(content)
    found = tuple(quantized), on_cpu, in_float, tuple(operators)
    return ExecutorchExport(target, len(content), *found, dense_bytes, worst, len(inputs))


def _with_dense(operators: Sequence[Operator], dense: Sequence[Operator]) -> list[Operator]:
    """Operators with the cycles of their dense twins, which have the same names in the same order.

    Raises:
        RuntimeError: If the compiler made another program of the dense weights.
    """
    if [each.name for each in operators] != [each.name for each in dense]:
        raise RuntimeError(
            "Vela compiled the model with dense weights to other operators, so they cannot be compared"
        )
    pairs = zip(operators, dense, strict=True)
    return [each._replace(dense_cycles=twin.cycles) for each, twin in pairs]


def _explained(operator: Operator, reasons: Mapping[str, str]) -> Operator:
    """An operator with the reason why its weight is not sparse; `reasons` by module are empty where it could be."""
    if operator.sparse or not operator.has_weight:
        return operator
    reason = reasons.get(operator.module, "the compiler does not name its layer")
    # The compiler compares both forms, and takes the one that its model says is faster.
    return operator._replace(reason=reason or "by the compiler's estimate it is not faster")


def _require_patterns(layers: Sequence[QuantizedLayer], name: str) -> None:
    """Refuse a model without N:M weights.

    Raises:
        ValueError: With the reason for each weight.
    """
    if not any(each.pattern for each in layers):
        reasons = "; ".join(f"'{each.key}': {each.reason}" for each in layers)
        raise ValueError(
            f"no weight of {name} is N:M sparse: {reasons or 'it has no GEMMs with weights'}"
        )


def _require_int8(in_float: Mapping[str, str], target: str, allow_float: bool) -> None:
    """Refuse layers that are left in float.

    Raises:
        ValueError: With the layers and the reasons.
    """
    if not in_float or allow_float:
        return
    named = "; ".join(f"'{name}': {reason}" for name, reason in in_float.items())
    raise ValueError(
        f"these layers would run in float on the host's CPU, not on {target}: {named}. Replace them, or accept that "
        "by allow_float=True (--allow-float)"
    )


def _why_dense(layer: QuantizedLayer, model: nn.Module) -> str:
    """Why a weight is not stored as 2:4; empty if the rules allow it."""
    module = model.get_submodule(layer.module)
    # Each group has one input channel. With one channel in all, a convolution is an ordinary one.
    if isinstance(module, nn.modules.conv._ConvNd) and module.groups == module.in_channels > 1:
        return "depthwise convolution: these have no sparse weights on Ethos-U85"
    weight = layer.weight
    if layer.operator.startswith("conv_transpose"):
        weight = weight.transpose(0, 1)  # [in, out, ...]
    reason = reason_of_weight(weight)
    if reason and not layer.pattern:
        return f"{layer.reason or 'dense'}; {reason}"
    return reason
