"""Lower a quantised program by ExecuTorch: to XNNPACK for CPUs, or through Vela to Ethos-U85."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from lightning_nm.export.executorch.quantized import first_cause, module_of
from lightning_nm.export.executorch.vela import Operator, read_operators

_REPORTER = (
    "executorch.backends.arm.tosa.partitioner"  # the logger with the reasons of the partitioner
)

# Operators at the edges of delegated parts, which are no work of their own.
_EDGES = ("quantize_per_tensor", "dequantize_per_tensor", "executorch_call_delegate", "getitem")


@dataclass(frozen=True)
class Undelegated:
    """An operator that runs on the host's CPU, in ExecuTorch's portable kernels.

    Args:
        operator: Such as ``"aten.native_layer_norm.default"``.
        module: The module that calls it.
        reason: Of the partitioner; empty where it gives none.
    """

    operator: str
    module: str
    reason: str


@dataclass(frozen=True)
class Lowered:
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
        folder: An empty folder for files of the compiler.
        memory: ``system_config`` and ``memory_mode`` of Vela; ``None`` for ExecuTorch's choice.

    Raises:
        RuntimeError: If the compiler fails.
    """
    from executorch.exir import to_edge_transform_and_lower

    program = torch.export.export(graph, example)
    partitioner = _partitioner(target, folder, memory)
    # Vela prints a summary, and ends the process where it fails.
    printed = StringIO()
    try:
        with redirect_stdout(printed), _rejections() as reasons:
            edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
            # Before the planning of memory, which adds operators and renames others.
            on_cpu = tuple(_undelegated(edge.exported_program().graph.nodes, reasons))
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


def _undelegated(nodes: Iterable[Node], reasons: Mapping[str, str]) -> Iterator[Undelegated]:
    for node in nodes:
        name = getattr(node.target, "__name__", str(node.target))
        is_edge = any(edge in name for edge in _EDGES)
        if node.op != "call_function" or is_edge:
            continue
        yield Undelegated(name, module_of(node), reasons.get(node.name, ""))


@contextmanager
def _rejections() -> Iterator[dict[str, str]]:
    """The partitioner's reasons by operator, which it only logs: a table of name, target, function and reason."""
    reasons: dict[str, str] = {}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reasons.update(read_rejections(record.getMessage()))

    logger = logging.getLogger(_REPORTER)
    handler = Handler(logging.INFO)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield reasons
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def read_rejections(table: str) -> dict[str, str]:
    r"""The reasons in the partitioner's table, by operator; empty for another text.

    Example:
        >>> read_rejections("│ Node name │ Target │ Torch func │ Reason │\n╞══╡\n"
        ...     "│ conv_1 │ aten.conv │ f │ kernel is │\n│ │ │ │ too large │")
        {'conv_1': 'kernel is too large'}
    """
    reasons: dict[str, str] = {}
    name = ""
    in_body = False
    for line in table.splitlines():
        if not line.startswith("│"):
            in_body = in_body or line.startswith("╞")
            # The next row begins below a rule.
            name = ""
            continue
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if not in_body or len(cells) != 4:
            continue
        # Long names and reasons go on in the rows below.
        if not name:
            name = cells[0]
            reasons[name] = cells[3]
        else:
            long_name = name + cells[0]
            reasons[long_name] = f"{reasons.pop(name)} {cells[3]}".strip()
            name = long_name
    return reasons


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
