"""The weights in ONNX files and in programs of torch.export, read without running or unpickling anything of them."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_nm.export.atomic_write import Weights
from lightning_nm.export.sources import load_tensors

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
# ONNX operators that read integers, whose zero points may lie anywhere, or several values in a byte.
_QUANTISED = (
    *("DequantizeLinear", "QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger"),
    *("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized"),
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
    found: dict[str, Any] = {}
    if in_folder and last.endswith("_config.json"):
        for key, entry in json.loads(_record(archive, name))["config"].items():
            content = _record(archive, f"{folder}/{entry['path_name']}")
            is_pickled = entry["use_pickle"]
            found[key] = (
                load_tensors(io.BytesIO(content)) if is_pickled else _tensor(content, entry)
            )
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
    if not content:
        return torch.empty(sizes, dtype=dtype)
    storage = torch.frombuffer(bytearray(content), dtype=dtype)
    # torch refuses a view that does not lie in its storage.
    return storage.as_strided(sizes, strides, meta["storage_offset"]["as_int"])


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    # torch compresses nothing, so that a record takes no more memory than the file has.
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"its record '{name}' is compressed, as torch writes none")
    return archive.read(name)


def onnx_weights(path: Path) -> Weights:
    """The constant matrices of an ONNX file, whose weights are not quantised.

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
        model = onnx.load(path, load_external_data=False)
        for prefix, graph in [("", model.graph), *((f"{f.name}/", f) for f in model.functions)]:
            for name, tensor in _matrices(graph, str(path.parent)):
                if f"{prefix}{name}" in found:
                    raise ValueError(f"'{prefix}{name}' is defined twice")
                found[f"{prefix}{name}"] = tensor
    except Exception as error:
        raise ValueError(f"cannot read '{path}' as ONNX: {error}") from error
    return found


def _matrices(graph: Any, folder: str) -> Iterator[tuple[str, Tensor]]:
    """The constant matrices of a graph and of the graphs in it."""
    from onnx import numpy_helper

    for name, constant in _constants(graph):
        if len(constant.dims) < 2:
            continue
        try:
            array = numpy_helper.to_array(constant, folder)
        except Exception as error:
            raise ValueError(f"'{name}': {error}") from error
        # Types that numpy itself does not have, such as bfloat16 and integers of four bits.
        if array.dtype.isbuiltin != 1:
            type_name = array.dtype.name
            array = array.astype(type_name.rstrip("24") + "8" if "int" in type_name else "float32")
        elif array.dtype.kind in "iu" and array.dtype.itemsize > 1:
            continue  # indices
        if array.dtype.kind in "iufc":  # no texts and masks
            yield name, torch.from_numpy(array.copy())


def _constants(graph: Any) -> Iterator[tuple[str, Any]]:
    # A function has no initialisers.
    yield from ((each.name, each) for each in getattr(graph, "initializer", ()))
    if getattr(graph, "sparse_initializer", ()):
        raise ValueError("it has sparse initialisers, which are not read")
    for node in graph.node:
        if node.op_type in _QUANTISED:
            raise ValueError(
                f"the operator {node.op_type} reads a quantised weight, which is not read: check the checkpoint that "
                "it was made from"
            )
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("sparse_tensor"):
                raise ValueError(f"'{node.output[0]}' is a sparse constant, which is not read")
            if node.op_type == "Constant" and attribute.HasField("t"):
                yield node.output[0], attribute.t
            for inner in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                yield from _constants(inner)
