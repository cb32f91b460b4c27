"""Export a model by ExecuTorch, int8 and N:M, and say what the target's compiler makes of the zeros."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from lightning_nm.export.atomic_write import FilePath, check_folder, replacing
from lightning_nm.export.executorch.lowering import (
    Operator,
    Undelegated,
    lower,
    make_quantizer,
    outputs_of,
)
from lightning_nm.export.executorch.quantized import (
    QuantizedLayer,
    always_in_float,
    calibration_inputs,
    fill_zeros,
    layers_of_graph,
    quantize,
    quantized_layers,
    trace,
)
from lightning_nm.export.executorch.targets import (
    check_target,
    is_depthwise,
    reason_of_weight,
    require_packages,
)
from lightning_nm.export.graphs import difference
from lightning_nm.export.patterns import Found

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
        memory_mode: Vela's name of what lies in which memory; likewise.

    Raises:
        ImportError: If a package is missing: ``pip install -e '.[ethos-u]'``.
        ValueError: If the target is unknown, there is no data for calibration, it does not fit or holds one value
            alone, ``torch.export`` cannot trace the model, no weight is N:M, quantisation loses a pattern, or layers
            are left in float.
        RuntimeError: If the quantizer or the compiler fails, or the runtime computes something else than torch.
        OSError: If the file cannot be written. Nothing is written on any of these.
    """
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
    in_float_anyway = always_in_float(graph)
    _require_int8(in_float_anyway, target, allow_float)
    layers = layers_of_graph(graph)
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
        lowered = lower(quantized_graph, example_inputs, target, Path(folder, "sparse"), memory)
        modules = {each.layer.module for each in quantized}
        for operator, module in lowered.on_cpu:
            if module in modules and any(name in operator for name in _PRODUCTS):
                in_float[module] = f"the partitioner does not take {operator}"
        _require_int8(in_float, target, allow_float)
        reasons = {each.layer.module: _why_dense(each, model) for each in quantized}
        operators = [explained(each, reasons) for each in lowered.operators]
        if target == "cpu":
            worst = _difference(quantized_graph, lowered.content, inputs[0])
        elif compare_dense:
            twin = deepcopy(quantized_graph)
            fill_zeros(twin, [each for each in quantized if each.pattern])
            dense = lower(twin, example_inputs, target, Path(folder, "dense"), memory)
            operators = with_dense(operators, dense.operators)
            dense_bytes = len(dense.content)
    with replacing(Path(path)) as new:
        new.write_bytes(lowered.content)
    return ExecutorchExport(
        target,
        len(lowered.content),
        tuple(quantized),
        lowered.on_cpu,
        in_float,
        tuple(operators),
        dense_bytes,
        worst,
        len(inputs),
    )


def with_dense(operators: Sequence[Operator], dense: Sequence[Operator]) -> list[Operator]:
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


def explained(operator: Operator, reasons: Mapping[str, str]) -> Operator:
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
        reasons = "; ".join(f"'{each.layer.key}': {each.reason}" for each in layers)
        raise ValueError(
            f"no weight of {name} is N:M sparse: {reasons or 'it has no products with weights'}"
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
    if is_depthwise(model.get_submodule(layer.layer.module)):
        return "depthwise convolution: these have no sparse weights on Ethos-U85"
    weight = layer.weight
    if layer.layer.operator.startswith("conv_transpose"):
        weight = weight.transpose(0, 1)  # [in, out, ...]
    reason = reason_of_weight(weight)
    if reason and not layer.pattern:
        return f"{layer.reason or 'dense'}; {reason}"
    return reason


def _difference(graph: GraphModule, content: bytes, inputs: tuple[Tensor, ...]) -> float:
    """The largest difference of the runtime's outputs and those of the quantised model in torch.

    Raises:
        RuntimeError: If it is not a rounding of int8 values.
    """
    with torch.no_grad():
        outputs = graph(*inputs)
    expected = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    found = outputs_of(content, inputs)
    pairs = zip(found, expected, strict=True)
    worst = max((difference(one, other) for one, other in pairs), default=0.0)
    if not worst < TOLERANCE:
        raise RuntimeError(
            f"ExecuTorch's runtime differs from torch by {worst:.2g} of the largest output: nothing is written"
        )
    return worst
