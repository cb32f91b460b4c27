"""The weights in ONNX files and in programs of torch.export, read without running or unpickling anything of them."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.export.files import load_tensors

# The numbers of dtypes in programs of torch.export.
_DTYPES = {
    **{1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64},
    **{6: torch.float16, 7: torch.float32, 8: torch.float64, 13: torch.bfloat16},
    **{9: torch.complex32, 10: torch.complex64, 11: torch.complex128, 12: torch.bool},
    **{29: torch.float8_e4m3fn, 30: torch.float8_e5m2},
    **{31: torch.float8_e4m3fnuz, 32: torch.float8_e5m2fnuz},
}
_FOLDERS = ("data/weights", "data/constants")
_PICKLED = ("serialized_state_dict.pt", "serialized_constants.pt")  # of torch 2.6
# ONNX operators that read integers: inputs that may be a weight, the input of its zero point, and the axis of several.
_READERS = {
    "DequantizeLinear": ((0, 2, 1),),
    "QLinearConv": ((0, 2, 0), (3, 5, 0)),
    "ConvInteger": ((0, 2, 0), (1, 3, 0)),
    "QLinearMatMul": ((0, 2, -2), (3, 5, -1)),
    "MatMulInteger": ((0, 2, -2), (1, 3, -1)),
}
_MOVERS = ("Gather", "Identity", "Reshape", "Transpose")
_PACKERS = ("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized")  # several values in a byte


def program_weights(path: Path) -> dict[str, Tensor]:
    """The parameters, buffers and constants in a program of ``torch.export``.

    Raises:
        ValueError: If the file is damaged, or holds an object that is no tensor.
    """
    found: dict[str, Tensor] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
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
    return found


def _stored(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a record holds, or whose places it names."""
    folder, _, last = name.rpartition("/")
    in_folder = folder.endswith(_FOLDERS)
    if in_folder and last.endswith("_config.json"):
        for key, entry in json.loads(_record(archive, name))["config"].items():
            yield key, _tensor(archive, key, entry, folder)
    elif last in _PICKLED or (in_folder and last.endswith(".pt")):
        for key, value in load_tensors(io.BytesIO(_record(archive, name))).items():
            if not isinstance(value, Tensor):
                raise ValueError(f"'{key}' is a {type(value).__name__}, not a tensor")
            yield key, value


def _tensor(archive: zipfile.ZipFile, key: str, entry: Mapping[str, Any], folder: str) -> Tensor:
    content = _record(archive, f"{folder}/{entry['path_name']}")
    meta = entry["tensor_meta"]
    if entry["use_pickle"]:
        value = load_tensors(io.BytesIO(content))
        if not isinstance(value, Tensor):
            raise ValueError(f"'{key}' is a {type(value).__name__}, not a tensor")
        return value
    if meta is None or meta["dtype"] not in _DTYPES:
        raise ValueError(f"'{key}' is no tensor of a known dtype")
    sizes, strides = ([each["as_int"] for each in meta[part]] for part in ("sizes", "strides"))
    if not content:
        return torch.empty(sizes, dtype=_DTYPES[meta["dtype"]])
    storage = torch.frombuffer(bytearray(content), dtype=_DTYPES[meta["dtype"]])
    # torch refuses a view that does not lie in its storage.
    return storage.as_strided(sizes, strides, meta["storage_offset"]["as_int"])


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    # torch compresses nothing, so that a record takes no more memory than the file has.
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"its record '{name}' is compressed, as torch writes none")
    return archive.read(name)


class _Zero(NamedTuple):
    """Which value of an integer weight of ONNX stands for zero.

    Args:
        name: The tensor of zero points; empty if it is 0.
        axis: The axis along which several zero points lie.
        block: How many entries along the axis share one, if the tensor has as many axes as the weight.
    """

    name: str
    axis: int = 0
    block: int = 0


def onnx_weights(path: Path) -> dict[str, Tensor]:
    """The constant matrices of an ONNX file; of integers, the zero point is subtracted where the graph tells it.

    Raises:
        ValueError: If the file is damaged, a weight is in a form that is not read, or the package ``onnx`` is missing.
    """
    try:
        import onnx
    except ImportError as error:
        advice = "pip install -e '.[onnx]' in a checkout of lightning_nm"
        raise ValueError(f"reading '{path}' needs the package `onnx`: {advice}") from error
    found: dict[str, Tensor] = {}
    try:
        model = onnx.load(path, load_external_data=False)
        for prefix, graph in [("", model.graph), *((f"{f.name}/", f) for f in model.functions)]:
            for name, tensor in _matrices(graph, str(path.parent)):
                found[f"{prefix}{name}"] = tensor
    except Exception as error:
        raise ValueError(f"cannot read '{path}' as ONNX: {error}") from error
    return found


def _matrices(graph: Any, folder: str) -> Iterator[tuple[str, Tensor]]:
    nodes, constants = _contents(graph)
    zeros = _zero_points(nodes, constants)
    for name, constant in constants.items():
        if len(constant.dims) < 2:
            continue
        array = _array(name, constant, folder)
        if name in zeros:
            points = _points(name, array.shape, zeros[name], constants, folder)
            array = (array.astype("int32") - points).astype("float32")
        # Types that numpy itself does not have, such as bfloat16 and integers of four bits.
        elif array.dtype.isbuiltin != 1:
            type_name = array.dtype.name
            array = array.astype(type_name.rstrip("24") + "8" if "int" in type_name else "float32")
        elif array.dtype.kind in "iu" and array.dtype.itemsize > 1:
            continue  # indices
        if array.dtype.kind in "iufc":  # no texts and masks
            yield name, torch.from_numpy(array.copy())


def _contents(graph: Any) -> tuple[list[Any], dict[str, Any]]:
    """The operators and constants of a graph and of the graphs in it, in which a name is defined once."""
    nodes = []
    constants: dict[str, Any] = {}

    def add(name: str, constant: Any) -> None:
        if name in constants:
            raise ValueError(f"'{name}' is defined twice")
        constants[name] = constant

    waiting = [graph]
    while waiting:
        graph = waiting.pop()
        # A function has no initialisers.
        for constant in getattr(graph, "initializer", ()):
            add(constant.name, constant)
        for constant in getattr(graph, "sparse_initializer", ()):
            add(constant.values.name, constant)
        for node in graph.node:
            nodes.append(node)
            for attribute in node.attribute:
                waiting += [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
                for field in ("t", "sparse_tensor"):
                    if attribute.HasField(field) and node.op_type == "Constant":
                        add(node.output[0], getattr(attribute, field))
    return nodes, constants


def _zero_points(nodes: list[Any], constants: Mapping[str, Any]) -> dict[str, _Zero]:
    """The zero points of the constants that are read as quantised weights."""
    origins = {node.output[0]: node.input[0] for node in nodes if node.op_type in _MOVERS}
    zeros: dict[str, _Zero] = {}
    for node in nodes:
        if node.op_type in _PACKERS:
            raise ValueError(f"the operator {node.op_type} packs its weight, which is not read")
        for place, zero_place, axis in _READERS.get(node.op_type, ()):
            name = node.input[place]
            passed = set()  # a damaged graph may have a circle
            while name not in constants and name in origins and name not in passed:
                passed.add(name)
                name = origins[name]
            if name not in constants:
                continue
            zero = _Zero(node.input[zero_place] if len(node.input) > zero_place else "")
            if zero.name and zero.name not in constants:
                raise ValueError(f"the zero point '{zero.name}' of '{name}' is computed")
            several = zero.name and any(size > 1 for size in constants[zero.name].dims)
            if several:
                numbers = {attribute.name: attribute.i for attribute in node.attribute}
                zero = _Zero(zero.name, numbers.get("axis", axis), numbers.get("block_size", 0))
            # Of an embedding rows are taken, and axes change.
            if zeros.setdefault(name, zero) != zero or (passed and several):
                raise ValueError(f"'{name}' has several zero points")
    return zeros


def _points(
    name: str, shape: tuple[int, ...], zero: _Zero, constants: Mapping[str, Any], folder: str
) -> Any:
    """The zero points of a weight, in a shape that fits it."""
    import numpy as np

    if not zero.name:
        return 0
    points = _array(zero.name, constants[zero.name], folder).astype("int32")
    if points.size == 1:
        return points.reshape(())
    if points.ndim == 1:
        spread = [1] * len(shape)
        spread[zero.axis] = -1
        return points.reshape(spread)
    if zero.block:
        axis = range(len(shape))[zero.axis]
        points = np.repeat(points, zero.block, axis).take(range(shape[axis]), axis)
    return points


def _array(name: str, constant: Any, folder: str) -> Any:
    """A constant as an array; one that is stored sparse has its zeros."""
    import numpy as np
    from onnx import numpy_helper

    try:
        if not hasattr(constant, "indices"):
            return numpy_helper.to_array(constant, folder)
        values = numpy_helper.to_array(constant.values, folder)
        indices = numpy_helper.to_array(constant.indices, folder)
        array = np.zeros(tuple(constant.dims), values.dtype)
        if indices.ndim == 2:
            array[tuple(indices.T)] = values
        else:
            array.reshape(-1)[indices] = values
    except Exception as error:
        raise ValueError(f"'{name}': {error}") from error
    return array
