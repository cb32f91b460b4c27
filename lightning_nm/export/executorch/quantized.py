"""Quantise a model to int8 by PT2E on data in the shapes of its inputs, and check that N:M weights stay N:M."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from lightning_nm.export.patterns import Found, pattern_of
from lightning_nm.training.macs import evaluation

# With weights that the quantizers leave in float.
_ALWAYS_FLOAT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "bilinear")

# Operators with a constant weight, by the position of the weight among their arguments.
_CONVOLUTIONS = (f"{kind}{axes}d" for kind in ("conv", "conv_transpose") for axes in (1, 2, 3))
_WEIGHT_ARGUMENT = {**dict.fromkeys((*_CONVOLUTIONS, "linear", "matmul", "mm"), 1), "addmm": 2}


class QuantizedLayer(NamedTuple):
    """A weight after quantisation.

    Args:
        key: Its key in the model's state dict.
        module: The name of the module that uses it.
        operator: Such as ``conv2d``.
        pattern: ``"N:M"``, as it was before and is after quantisation; empty for a dense weight.
        reason: Why it is dense.
        weight: The int8 values, of the shape of the float weight.
        buffer: The attribute of the quantised graph that holds them.
        density: Fraction of nonzeros; rounding adds zeros.
    """

    key: str
    module: str
    operator: str
    pattern: str
    reason: str
    weight: Tensor
    buffer: str
    density: float


def trace(model: nn.Module, example: tuple[Tensor, ...]) -> GraphModule:
    """Trace a model in evaluation mode by ``torch.export``, for the shapes of an example.

    Raises:
        ValueError: If ``torch.export`` cannot trace it, with the first line of its error.
    """
    try:
        with evaluation(model):
            program = torch.export.export(model, example)
    except Exception as error:  # of many classes: what a model's forward raises comes through, too
        name = type(model).__name__
        shapes = ", ".join(f"{x.dtype} {list(x.shape)}".removeprefix("torch.") for x in example)
        raise ValueError(
            f"torch.export cannot trace {name} for inputs {shapes}: {first_cause(error)}"
        ) from error
    # Without the node that checks the inputs, which is no operator to quantise.
    graph = program.module(check_guards=False)
    assert isinstance(graph, GraphModule)
    return graph


def layers_of_graph(graph: GraphModule) -> tuple[dict[str, tuple[str, str, str]], dict[str, str]]:
    """The GEMMs with a constant weight, in the order of the program, and why modules stay in float.

    Returns:
        By the name of a GEMM's node the weight's key, the module and the operator, see :class:`QuantizedLayer`; and
        by the name of a module the reason, if it holds whatever the quantizer does.
    """
    layers = {}
    in_float = {}
    for node in graph.graph.nodes:
        operator = _operator(node)
        if operator in _ALWAYS_FLOAT:
            in_float[module_of(node)] = f"there is no int8 form of {operator}"
        position = _WEIGHT_ARGUMENT.get(operator)
        # No GEMM, or one whose weight is no positional argument.
        if position is None or len(node.args) <= position:
            continue
        weight = node.args[position]
        if not isinstance(weight, Node) or weight.op != "get_attr":
            continue  # of two activations, as in attention
        # By name, under which quantized_layers() looks for the node after quantisation.
        layers[node.name] = str(weight.target), module_of(node), operator
    return layers, in_float


def quantize(
    graph: GraphModule, quantizer: Any, inputs: Iterable[tuple[Tensor, ...]]
) -> GraphModule:
    """Quantise a traced model after calibration.

    Batch norms are folded into the convolutions before them, which scales filters and keeps zeros.

    Args:
        graph: From :func:`trace`; it is changed.
        quantizer: Of ExecuTorch.
        inputs: For calibration.

    Returns:
        The program with int8 weights.

    Raises:
        RuntimeError: If the quantizer fails, as it does for some operators.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    try:
        prepared = prepare_pt2e(graph, quantizer)
        with torch.no_grad():
            # For the observers, which note the ranges of activations.
            for each in inputs:
                prepared(*each)
        converted: GraphModule = convert_pt2e(prepared)
    except Exception as error:  # of many classes, from passes over the graph
        kind = type(quantizer).__name__
        raise RuntimeError(f"{kind} fails on this model: {first_cause(error)}") from error
    return converted


def first_cause(error: BaseException) -> str:
    """The first line of the error that began a chain of them: passes wrap each other's."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def quantized_layers(
    graph: GraphModule,
    layers: Mapping[str, tuple[str, str, str]],
    weights: Mapping[str, Tensor],
    expected: Mapping[str, Found] | None = None,
) -> tuple[list[QuantizedLayer], dict[str, str]]:
    """The int8 weights of a quantised graph, checked against the float ones.

    Args:
        graph: From :func:`quantize`.
        layers: From :func:`layers_of_graph`, before it.
        weights: The float weights by key.
        expected: The patterns by key, as the training knew them; by default they are found from the float weights.

    Returns:
        The layers, and the reasons for those left in float by module name.

    Raises:
        ValueError: If a float weight is not of its expected pattern, or quantisation made a zero nonzero.
    """
    nodes = {node.name: node for node in graph.graph.nodes}
    quantised = []
    in_float = {}
    for name, (key, module, operator) in layers.items():
        if name not in nodes:
            in_float[module] = (
                f"quantisation replaced its {operator}, so that its weight cannot be checked: use nn.Linear or a "
                "convolution"
            )
            continue
        buffer, is_int8 = _constant(nodes[name].args[_WEIGHT_ARGUMENT[operator]])
        if not is_int8:
            in_float[module] = f"the quantizer has no rule for {operator} here"
            continue
        weight = getattr(graph, buffer).detach()
        found = _check_kept(key, weights[key], weight, (expected or {}).get(key))
        density = int(torch.count_nonzero(weight)) / weight.numel()
        pattern = str(found.pattern or "")
        row = QuantizedLayer(key, module, operator, pattern, found.reason, weight, buffer, density)
        quantised.append(row)
    return quantised, in_float


def _check_kept(
    key: str, float_weight: Tensor, int8_weight: Tensor, expected: Found | None = None
) -> Found:
    """Check that a quantised weight has every zero of the float one, and its N:M pattern.

    ``w == 0 => q == 0``, so that at most N entries in each block of M of q are nonzero.

    Args:
        key: The weight's key, for messages.
        float_weight: Before quantisation, and before a batch norm was folded into it.
        int8_weight: After both.
        expected: Its pattern; by default the one in which the float weight takes the least memory.

    Raises:
        ValueError: With the number of entries that break it.

    Example:
        >>> weight = torch.tensor([[0.5, 0.0, 0.0, -1.0]])
        >>> _check_kept("fc.weight", weight, torch.tensor([[64, 1, 0, -127]], dtype=torch.int8))
        Traceback (most recent call last):
        ValueError: quantisation made 1 of 2 zeros of 'fc.weight' nonzero, so its pattern is lost
    """
    if int8_weight.shape != float_weight.shape:
        raise ValueError(
            f"the quantizer changed the shape of '{key}' from {list(float_weight.shape)} to "
            f"{list(int8_weight.shape)}, so that its pattern cannot be checked"
        )
    # A folded batch norm scales whole filters, and symmetric rounding maps 0 to 0: no zero may be lost.
    is_zero = float_weight.detach() == 0
    lost = int((int8_weight[is_zero] != 0).sum())
    if lost:
        raise ValueError(
            f"quantisation made {lost} of {int(is_zero.sum())} zeros of '{key}' nonzero, so its pattern is lost"
        )
    if expected is None:
        found = pattern_of(float_weight.detach())
    # A weight that was not masked in training: zeros that it may have are no pattern.
    elif expected.pattern is None:
        return expected
    else:
        found = pattern_of(float_weight.detach(), expected.pattern, [expected.layout])
        if found.pattern is None:
            raise ValueError(f"'{key}' is not {expected.pattern}: {found.reason}")
    # The pattern follows from the zeros.
    return found


@torch.no_grad()
def fill_zeros(graph: GraphModule, layers: Sequence[QuantizedLayer]) -> None:
    """Make the weights of a quantised graph dense in place: zeros become draws from the nonzero values of their weight.

    The program and its scales stay as they are, so that a compiler's estimates differ by the zeros alone.
    """
    # A generator of its own with a fixed seed: a model has one twin, and the caller's random numbers stay as they are.
    generator = torch.Generator().manual_seed(0)
    for each in layers:
        weight = getattr(graph, each.buffer)
        is_zero = weight == 0
        values = weight[~is_zero]
        if not len(values):  # a weight that is all zero
            values = torch.ones(1, dtype=weight.dtype)
        drawn = torch.randint(len(values), (int(is_zero.sum()),), generator=generator)
        weight[is_zero] = values[drawn]


def module_of(node: Node) -> str:
    """The name of the module that called an operator; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(entry[0]) for entry in stack.values()]
    return names[-1] if names else ""  # the innermost module is the last one


def _operator(node: Node) -> str:
    """Such as ``conv2d``; empty for what is no operator of torch."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).removeprefix("aten::")


def _constant(node: Any) -> tuple[str, bool]:
    """The attribute that an argument comes from, and whether it is dequantised from integers on the way."""
    is_int8 = False
    # Back through dequantisation, transposes and the like, whose first argument is the tensor.
    while isinstance(node, Node) and node.op == "call_function" and node.args:
        is_int8 = is_int8 or "dequantize" in _operator(node)
        node = node.args[0]
    if not isinstance(node, Node) or node.op != "get_attr":
        return "", False
    return str(node.target), is_int8


def calibration_inputs(
    data: Iterable[Any], example: Sequence[Tensor], batches: int = 4
) -> list[tuple[Tensor, ...]]:
    """The first batches of data, cut into inputs of the shapes of an example.

    A batch of ``B`` rows becomes ``B // b`` inputs of ``b`` rows, as the example has; the rest is left out.

    Args:
        data: Batches: a tensor, or a tuple or list that begins with the model's inputs, such as ``(images, labels)``.
        example: The inputs that the program is exported with; all but the first axis must agree.
        batches: How many to take.

    Raises:
        ValueError: If there is no batch, a batch does not fit, with its shape, or all inputs hold one value: the
            activations of such a calibration tell nothing of those of real data.

    Example:
        >>> [x.shape for (x,) in calibration_inputs([torch.arange(15.0).view(5, 3)], [torch.zeros(2, 3)])]
        [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    found: list[tuple[Tensor, ...]] = []
    for position, batch in enumerate(islice(data, batches)):
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        inputs = tuple(parts[: len(example)])
        if len(inputs) < len(example) or not all(isinstance(each, Tensor) for each in inputs):
            kinds = ", ".join(type(each).__name__ for each in parts)
            raise ValueError(
                f"calibration batch {position} is ({kinds}), but the model takes {len(example)} tensors: give tensors, "
                "or tuples that begin with the model's inputs"
            )
        pairs = list(zip(inputs, example, strict=True))
        for index, (given, expected) in enumerate(pairs):
            what = f"calibration batch {position}, input {index}"
            # The number of rows may differ, because batches are cut.
            if given.dim() != expected.dim() or given.shape[1:] != expected.shape[1:]:
                raise ValueError(
                    f"{what} has shape {list(given.shape)}, but the program takes {list(expected.shape)}, or more rows"
                )
            if given.is_floating_point() != expected.is_floating_point():
                raise ValueError(f"{what} is {given.dtype}, but the program takes {expected.dtype}")
            if not bool(torch.isfinite(given).all()):
                # An infinite range would make every int8 value of an activation 0.
                raise ValueError(f"{what} has values that are not finite")
        # A scalar has no rows to cut, and goes with every part.
        counts = [len(x) // max(len(like), 1) for x, like in pairs if like.dim()]
        for step in range(min(counts, default=1)):
            rows = [
                (x[step * len(like) : (step + 1) * len(like)] if like.dim() else x).to(like.dtype)
                for x, like in pairs
            ]
            found.append(tuple(rows))
    if not found:
        raise ValueError(
            "the calibration data has no batch of enough rows: int8 scales cannot be chosen without data; give a "
            f"loader whose batches have at least {len(example[0]) if example[0].dim() else 1} rows"
        )
    # Of all parts together, because one may be constant by chance.
    values = [torch.cat([x.flatten() for x in tensors]) for tensors in zip(*found, strict=True)]
    if all(bool((each == each[:1]).all()) for each in values):
        raise ValueError(
            f"all {len(found)} inputs of the calibration hold one value alone, from which no int8 scales can be "
            "chosen: give calibration= a few batches of real inputs"
        )
    return found
