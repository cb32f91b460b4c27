"""Models by the paths of their classes, and their graphs: ``torch.export`` programs and ONNX files."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm.export.atomic_write import FilePath, Weights, replacing
from lightning_nm.export.sources import Source, check_loadable, decoded, load_tensors
from lightning_nm.training.macs import evaluation, tensors_in

TOLERANCE = 1e-3
"""Largest difference of an output of onnxruntime and of torch, relative to the largest output."""


def export_pt2(model: nn.Module, example: tuple[Any, ...], output: FilePath) -> None:
    """Write a model as a program of ``torch.export``, dense or packed; its first axis of each input may vary.

    The program of a packed model holds the packed weights and unpacks them for each GEMM by torch's operators. It
    runs without this package.

    Args:
        model: Any module that ``torch.export`` takes; it is exported in evaluation mode.
        example: Inputs, positional; an axis that may vary must not be 0 or 1 in them.
        output: The file, ``.pt2``.

    Raises:
        OSError: If it cannot be written.
    """
    shapes = _first_axis_varies(example)
    with evaluation(model):
        program = torch.export.export(model, example, dynamic_shapes=shapes)
    # torch aborts the process where it cannot write a file to its end.
    content = io.BytesIO()
    torch.export.save(program, content)
    with replacing(Path(output)) as new:
        new.write_bytes(content.getbuffer())


def export_onnx(model: nn.Module, example: tuple[Any, ...], output: FilePath) -> float:
    """Write a model as ONNX, by ``torch.onnx.export(dynamo=True)``, and compare it with torch in onnxruntime.

    Weights are dense, with zeros.

    Args:
        model: A module that is not packed; it is exported in evaluation mode.
        example: Inputs, positional tensors; their first axis may vary, and must not be 0 or 1 in them.
        output: The file, ``.onnx``.

    Returns:
        The largest difference of an output, relative to the largest output, on random inputs of these shapes; integers
        are the example's.

    Raises:
        ImportError: If onnx, onnxscript or onnxruntime is missing: ``pip install -e '.[onnx]'``.
        RuntimeError: If onnxruntime computes something else; nothing is written.
        OSError: If the file cannot be written.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError as error:
        raise ImportError(
            f"{error}: pip install -e '.[onnx]' in a checkout of lightning_nm"
        ) from error
    shapes = _first_axis_varies(example)
    # Other values than in the trace, so that what it took for a constant shows. Random integers could lie outside of a
    # table.
    inputs = tuple(torch.randn_like(x) if x.is_floating_point() else x for x in example)
    with evaluation(model):
        program: Any = torch.onnx.export(
            model, example, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
        outputs = model(*inputs)
    # Compared before the file gets its name.
    with replacing(Path(output)) as new:
        program.save(str(new), external_data=False)
        session = onnxruntime.InferenceSession(str(new), providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        found = [torch.from_numpy(array) for array in session.run(None, feeds)]
        return worst_difference("onnxruntime", found, outputs, TOLERANCE)


def build_model(source: Source, name: str) -> nn.Module:
    """A model with the weights of a checkpoint.

    Args:
        source: The checkpoint.
        name: Import path of the model's class. It is called with the hyperparameters that Lightning saved, or without
            arguments; a class of ``transformers`` reads its folder.

    Raises:
        ValueError: If the class cannot be imported or called, or the weights do not fit.
    """
    cls = import_class(name, "--model", nn.Module)
    try:
        if source.is_folder and hasattr(cls, "from_pretrained"):
            check_loadable(source.path)
            found: nn.Module = cls.from_pretrained(source.path)
            return found.eval()
        # What was saved may hold more than the constructor takes, such as entries of LightningCLI.
        names = inspect.signature(cls).parameters
        saved = source.hyperparameters.items()
        arguments = {name: value for name, value in saved if name in names}
        model: nn.Module = cls(**arguments)
        model.load_state_dict(source.weights)
    # A missing argument, weights that do not fit, or no folder of this class.
    except (TypeError, RuntimeError, OSError) as error:
        raise ValueError(f"--model {name} and '{source.path}': {error}") from error
    return model.eval()


def example_of(model: nn.Module, texts: list[str]) -> tuple[Tensor, ...]:
    """Inputs by their shapes, such as ``2x3x32x32`` or ``2x16:int64``; by default the model's ``example_input_array``.

    Raises:
        ValueError: If there are none, a text cannot be read, or the model does not take them.
    """
    if texts:
        example = tuple(_example_input(text) for text in texts)
    else:
        own_example = getattr(model, "example_input_array", None)
        if own_example is None:
            raise ValueError(
                "give the shape of each input, for example --input 2x3x32x32, or --input 2x16:int64"
            )
        example = (own_example,) if isinstance(own_example, Tensor) else tuple(own_example)
    # Tracers and compilers answer inputs that do not fit by pages of traces.
    try:
        with evaluation(model):
            model(*example)
    except Exception as error:
        given = " ".join(f"--input {text}" for text in texts) or "its example_input_array"
        kind = type(model).__name__
        raise ValueError(f"{kind} does not take {given}: {first_line(error)}") from error
    return example


def _example_input(text: str) -> Tensor:
    """Random numbers, or zeros of another dtype."""
    shape_text, _, dtype_name = text.partition(":")
    sizes = shape_text.split("x")
    dtype = getattr(torch, dtype_name or "float32", None)
    if not all(map(str.isdecimal, sizes)) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"--input {text}: a shape is written 2x3x32x32, with a dtype 2x16:int64")
    shape = [int(size) for size in sizes]
    # Zeros are valid indices of every embedding.
    make = torch.randn if dtype.is_floating_point else torch.zeros
    return make(shape, dtype=dtype)


def _first_axis_varies(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shapes of inputs for torch, which keeps the first axis fixed where the model needs that."""
    free = {0: torch.export.Dim.AUTO}
    return tuple(free if isinstance(x, Tensor) and x.dim() else None for x in example)


def worst_difference(who: str, found: list[Tensor], outputs: Any, tolerance: float) -> float:
    """The largest difference of another runtime's outputs and of torch's, relative to the largest expected value.

    Raises:
        RuntimeError: If it is larger than the tolerance.
    """
    expected = tensors_in(outputs)
    # In double precision, because 16-bit outputs would round their own differences. Expected values may all be 0.
    errors = [
        float(
            (own.double() - each.double()).abs().max() / each.double().abs().max().clamp_min(1e-30)
        )
        for own, each in zip(found, expected, strict=True)
        if each.numel()
    ]
    worst = max(errors, default=0.0)
    # An error may be NaN.
    if not all(error < tolerance for error in errors):
        raise RuntimeError(
            f"{who} differs from torch by {worst:.2g} of the largest output: nothing is written"
        )
    return worst


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class without one: compilers answer by pages of traces."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def find_modules_here() -> None:
    """Let modules of the current folder be imported, as ``python -m`` does."""
    # The path of an installed command begins with the folder of the command, not with the current one.
    if "" not in sys.path:
        sys.path.insert(0, "")


def import_class(path: str, option: str, kind: type) -> Any:
    """Import a class by its path; modules in the working folder can be imported, too.

    Args:
        path: Such as ``train.Net``.
        option: Of the command line, for messages.
        kind: What the class must be derived from.

    Raises:
        ValueError: If it cannot be imported, or is no such class.
    """
    module, _, name = path.rpartition(".")
    find_modules_here()
    try:
        found = getattr(importlib.import_module(module), name)
    # A ValueError is that of import_module(""), for a path without a dot.
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{option} {path}: {error}; give a class as module.Class, from this folder"
        ) from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{option} {path}: is no {kind.__name__}")
    return found


# The numbers of dtypes in programs of torch.export.
_DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
}
_FOLDERS = ("data/weights", "data/constants")  # below the root, which each archive names itself
_PICKLED = ("serialized_state_dict.pt", "serialized_constants.pt")  # of torch 2.6
# ONNX operators that read integers with zero points, or several values in a byte, and are not read here.
_QUANTISED = (
    "QLinearConv",
    "ConvInteger",
    "QLinearMatMul",
    "MatMulInteger",
    # Of onnxruntime.
    "QGemm",
    "QAttention",
    "QEmbedLayerNormalization",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "MatMulBnb4",
    "GatherBlockQuantized",
)
# ONNX operators whose inputs behind the first one are scales and zero points.
_WITH_SCALES = ("QuantizeLinear", "DequantizeLinear")
# ONNX operators that only move what they read: their first input, the others are places; Concat reads all.
_MOVING = (
    "Identity",
    "Transpose",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Gather",
    "Slice",
    "Split",
    "Concat",
)


def program_weights(path: Path) -> Weights:
    """The parameters, buffers and constants in a program of ``torch.export``.

    Raises:
        ValueError: If the file is damaged, or holds an object that is no tensor.
    """
    found: Weights = {}
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            # Readers of archives differ on which of two such records counts.
            if len(set(names)) < len(names):
                raise ValueError("two of its records have one name")
            for name in names:
                for key, tensor in _stored(archive, name):
                    if key in found:
                        raise ValueError(f"'{key}' occurs twice")
                    found[key] = tensor
    except Exception as error:
        raise ValueError(f"cannot read '{path}' as a program of torch.export: {error}") from error
    if not found:
        raise ValueError(
            f"'{path}' holds no weights outside compiled code: give the checkpoint that it was made from"
        )
    return decoded(found, path)


def _stored(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a record holds, or whose places it names."""
    folder, _, last = name.rpartition("/")
    in_folder = folder.endswith(_FOLDERS)
    found: dict[str, Any] = {}
    # From torch 2.9 on: for each tensor the name of its record, its dtype and its place in a storage.
    if in_folder and last.endswith("_config.json"):
        for key, entry in json.loads(_record(archive, name))["config"].items():
            content = _record(archive, f"{folder}/{entry['path_name']}")
            is_pickled = entry["use_pickle"]
            # torch pickles tensors of subclasses alone; of others it writes the bytes.
            found[key] = (
                load_tensors(io.BytesIO(content)) if is_pickled else _tensor(content, entry)
            )
    # In older programs: whole dictionaries of tensors, pickled.
    elif last in _PICKLED or (in_folder and last.endswith(".pt")):
        found = load_tensors(io.BytesIO(_record(archive, name)))
    for key, value in found.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"'{key}' is a {type(value).__name__}, not a tensor of a known dtype")
        yield key, value


def _tensor(content: bytes, entry: Mapping[str, Any]) -> Tensor | None:
    """A tensor in its storage, as the program describes it."""
    meta = entry["tensor_meta"]
    if meta is None or meta["dtype"] not in _DTYPES:
        return None
    dtype = _DTYPES[meta["dtype"]]
    sizes, strides = ([each["as_int"] for each in meta[part]] for part in ("sizes", "strides"))
    # frombuffer() takes no empty buffer.
    if not content:
        return torch.empty(sizes, dtype=dtype)
    # A bytearray, because bytes are read-only, of which torch warns.
    storage = torch.frombuffer(bytearray(content), dtype=dtype)
    # torch refuses a view that does not lie in its storage.
    return storage.as_strided(sizes, strides, meta["storage_offset"]["as_int"])


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    # torch compresses nothing, so that a record takes no more memory than the file has.
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"its record '{name}' is compressed, as torch writes none")
    return archive.read(name)


def onnx_weights(path: Path) -> Weights:
    """The constant matrices of an ONNX file; of one that ``DequantizeLinear`` reads, which entries are not its zero.

    Quantised weights are int8 of 0 and 1: a value q stands for ``scale * (q - zero_point)``, and so for 0 only where it
    is the zero point.

    Raises:
        ValueError: If the file is damaged, a weight is in a form that is not read, or the package ``onnx`` is missing.
    """
    try:
        import onnx
    except ImportError as error:
        advice = "pip install -e '.[onnx]' in a checkout of lightning_nm"
        raise ValueError(f"reading '{path}' needs the package `onnx`: {advice}") from error
    found: Weights = {}
    try:
        # Values in other files are read below, one by one and of matrices alone.
        model = onnx.load(path, load_external_data=False)
        # Names within a function are its own, and may occur in the graph, too.
        for prefix, graph in [("", model.graph), *((f"{f.name}/", f) for f in model.functions)]:
            for name, tensor in _matrices(graph, str(path.parent)):
                key = f"{prefix}{name}"
                if key in found:
                    raise ValueError(f"'{key}' is defined twice")
                found[key] = tensor
    except Exception as error:
        raise ValueError(f"cannot read '{path}' as ONNX: {error}") from error
    return found


def _matrices(root: Any, folder: str) -> Iterator[tuple[str, Tensor]]:
    """The constant matrices of a graph and of the graphs in it."""
    from onnx import numpy_helper

    graphs = list(_graphs(root))
    constants = [each for graph in graphs for each in _constants(graph)]
    # One name may mean two constants in two branches: which one an operator reads is then not known.
    times = Counter(name for name, _ in constants)
    by_name = {name: constant for name, constant in constants if times[name] == 1}
    nodes = [node for graph in graphs for node in graph.node]
    dequantised = _dequantised(nodes, by_name)
    scales = {name for node in nodes if node.op_type in _WITH_SCALES for name in node.input[1:]}
    # A scale that is also a weight is judged as one.
    for node in nodes:
        scales -= {*(node.input[:1] if node.op_type in _WITH_SCALES else node.input)}

    def values(name: str, constant: Any) -> Any:
        try:
            return numpy_helper.to_array(constant, folder)
        except Exception as error:
            raise ValueError(f"'{name}': {error}") from error

    for name, constant in constants:
        if len(constant.dims) < 2 or name in scales:
            continue
        array = values(name, constant)
        if name in dequantised:
            # Operators may read one weight with different zero points: an entry counts as zero if it is for all of
            # them.
            nonzero: Any = False
            for node, is_moved in dequantised[name]:
                zero: Any = 0
                # The zero point may be left out, or have an empty name.
                for zero_name in filter(None, node.input[2:]):
                    if zero_name not in by_name:
                        raise ValueError(
                            f"DequantizeLinear reads '{name}' with the zero point '{zero_name}', which is no constant: "
                            "check the checkpoint that the file was made from"
                        )
                    zero = _spread(values(zero_name, by_name[zero_name]), array, node, is_moved)
                nonzero = nonzero | (array != zero)
            yield name, torch.from_numpy(nonzero.astype("int8"))
            continue
        # Types that numpy itself does not have, such as bfloat16 and integers of four bits.
        if array.dtype.isbuiltin != 1:
            type_name = array.dtype.name
            # int4 and uint2, for example, become int8 and uint8.
            array = array.astype(type_name.rstrip("24") + "8" if "int" in type_name else "float32")
        elif array.dtype.kind in "iu" and array.dtype.itemsize > 1:
            continue  # indices
        if array.dtype.kind in "iufc":  # no texts and masks
            # A copy, because arrays of protobuf's bytes are read-only.
            yield name, torch.from_numpy(array.copy())


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph, and those in its operators, such as branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                yield from _graphs(inner)


def _constants(graph: Any) -> Iterator[tuple[str, Any]]:
    # A function has no initialisers.
    yield from ((each.name, each) for each in getattr(graph, "initializer", ()))
    if getattr(graph, "sparse_initializer", ()):
        raise ValueError("it has sparse initialisers, which are not read")
    for node in graph.node:
        if node.op_type in _QUANTISED:
            raise ValueError(
                f"the operator {node.op_type} reads a quantised weight, which is not read: check the checkpoint that "
                "it was made from, or quantise to DequantizeLinear (QDQ)"
            )
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("sparse_tensor"):
                raise ValueError(f"'{node.output[0]}' is a sparse constant, which is not read")
            if node.op_type == "Constant" and attribute.HasField("t"):
                yield node.output[0], attribute.t


def _dequantised(
    nodes: Iterable[Any], constants: Mapping[str, Any]
) -> dict[str, list[tuple[Any, bool]]]:
    """By constant, the ``DequantizeLinear`` operators that read it, each with whether it was moved before."""
    sources = {
        output: node.input if node.op_type == "Concat" else node.input[:1]
        for node in nodes
        for output in node.output
        if node.op_type in _MOVING
    }
    found: dict[str, list[tuple[Any, bool]]] = {}
    for node in nodes:
        if node.op_type == "DequantizeLinear":
            names = [node.input[0]]  # grows while it is read
            for name in names:
                # A damaged file may hold a circle.
                names += [each for each in sources.get(name, ()) if each not in names]
                if name in constants:
                    found.setdefault(name, []).append((node, name != node.input[0]))
    return found


def _spread(zero: Any, array: Any, node: Any, is_moved: bool) -> Any:
    """The zero points of ``DequantizeLinear``, one for all, or for each index or block of an axis, to compare with."""
    if zero.size == 1:
        return zero.reshape(())
    if is_moved:
        raise ValueError(
            f"'{node.input[0]}' has a zero point for each index of an axis, and its weight is moved before "
            "DequantizeLinear: check the checkpoint that the file was made from"
        )
    attributes = {each.name: each.i for each in node.attribute}
    # 1 is ONNX's default, and negative axes count from the last one.
    axis = attributes.get("axis", 1) % array.ndim
    block_size = attributes.get("block_size", 0)
    if block_size:
        # The last block may be cut.
        return zero.repeat(block_size, axis).take(range(array.shape[axis]), axis)
    return zero.reshape([-1 if each == axis else 1 for each in range(array.ndim)])
