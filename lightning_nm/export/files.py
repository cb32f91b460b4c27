"""Read files of tensors, and say in plain words why a file cannot be read."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

_ARCHIVE = b"PK\x03\x04"  # the first bytes of a file of torch.save
_ONNX = b"\x08"  # the first byte of an ONNX file: its first field is the version of the format
# Records of torch.export's files, new and old.
_OF_PROGRAMS = ("archive_format", "serialized_exported_program.json")
ONNX = "an ONNX graph"
PROGRAM = "a program of torch.export"
_SHOWN = 40  # characters of a text file


def check_archive(path: str | Path) -> None:
    """Compare the checksums of a file of ``torch.save``.

    ``torch.load`` finds a truncated file, but only the checksums reveal damage in the middle, for example after a power
    failure. Files without checksums or of other formats are not checked.

    Raises:
        ValueError: Naming the file and the damaged record.
    """
    if not torch.serialization.get_crc32_options() or not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(
            f"'{path}' is damaged: the contents of its record '{damaged}' do not match their checksum. Use another "
            "checkpoint; if this one was saved under torch.serialization.set_crc32_options(False), set that here, too"
        )


def read_file(path: Path) -> Any:
    """The content of a file of ``torch.save``, of tensors and primitives alone, or the tensors of a safetensors file.

    Raises:
        ValueError: Naming the file, and why it cannot be read.
    """
    fault = file_fault(path)
    if fault:
        raise ValueError(f"cannot read '{path}': {fault}")
    if path.suffix != ".safetensors":
        return _read_torch(path)
    try:
        return load_file(path)
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"cannot read '{path}' as safetensors, it is damaged or truncated: {error}"
        ) from error


def tensors_in(content: Mapping[Any, Any], path: Path, *, nested: bool) -> dict[str, Tensor]:
    """The tensors of a dictionary by key.

    Args:
        content: The dictionary.
        path: Of the file, for messages.
        nested: Also those in dictionaries and lists within it, with names joined by dots, but for the states of
            optimizers (names that begin with "optim") and of sparsifiers.

    Raises:
        ValueError: If two tensors have one name.
    """
    found: dict[str, Tensor] = {}
    seen = set()  # a list may hold itself, or one list many times
    waiting: list[tuple[str, Any]] = [(str(key), value) for key, value in content.items()]
    waiting.reverse()
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Tensor):
            if key in found:
                raise ValueError(f"'{path}' holds two tensors of the name '{key}'")
            found[key] = value
        elif nested and id(value) not in seen and not key.rpartition(".")[2].startswith("optim"):
            seen.add(id(value))
            waiting += reversed([(f"{key}.{name}", each) for name, each in _inner(value)])
    return found


def _inner(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a dictionary or list holds, by key or place; nothing of other objects and of sparsifier states."""
    if isinstance(value, Mapping):
        return () if "schema" in value and "layers" in value else value.items()
    return enumerate(value) if isinstance(value, list | tuple | set) else ()


def load_tensors(file: Path | BinaryIO) -> Any:
    """The content of a file of ``torch.save``, of tensors and primitives alone.

    Indices of sparse tensors are compared with their shapes, which torch does only if asked: others would be written
    outside the memory of the dense tensor.
    """
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        return torch.load(file, map_location="cpu", weights_only=True)


def _read_torch(path: Path) -> Any:
    check_archive(path)
    try:
        return load_tensors(path)
    except Exception as error:
        other = re.search(r"GLOBAL ([\w.]+)", str(error))
        if other:
            fault = f"it holds a {other[1]}, which only its own program can load safely: save model.state_dict()"
            raise ValueError(f"cannot read '{path}' as tensors alone: {fault}") from error
        raise ValueError(f"cannot read '{path}' as tensors alone: {error}") from error


def file_fault(path: Path) -> str:
    """What a look at its first bytes and its size shows to be wrong with a file; empty if it seems sound."""
    size = path.stat().st_size
    if not size:
        return "it is empty (0 bytes), as after an interrupted copy or on a full disk"
    with path.open("rb") as file:
        start = file.read(256)
    graph = kind_of_graph(path)
    if graph:
        return f"it is {graph}, not a checkpoint: give the checkpoint that it was exported from"
    archive = start[:4] == _ARCHIVE[: len(start)]
    text = "" if archive else _text(start)
    if text.startswith("version https://git-lfs"):
        return "it is a Git LFS pointer instead of the file itself: fetch that by `git lfs pull`"
    if text:
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        return f"it is text, not a checkpoint, and begins with {shown!r}"
    if archive and not zipfile.is_zipfile(path):
        return f"it is truncated: the {size} bytes that are there are the beginning of an archive of torch.save"
    return ""


def kind_of_graph(path: Path) -> str:
    """The kind of a file that holds a graph of a model; empty for other files."""
    with path.open("rb") as file:
        start = file.read(8)
    if path.suffix == ".onnx" and start[:1] == _ONNX:
        return ONNX
    if start[4:6] == b"ET" and path.suffix == ".pte":
        return "a program of ExecuTorch, whose weights are compiled for its target"
    if start[:4] == _ARCHIVE and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.rpartition("/")[2] in _OF_PROGRAMS for name in names):
            return PROGRAM
    return ""


def _text(start: bytes) -> str:
    """The first line, if a file begins with printable text."""
    # The last character may be cut off.
    text = start.decode("utf-8", "replace").rstrip("\ufffd")
    is_text = all(each.isprintable() or each.isspace() for each in text) and "\ufffd" not in text
    return text.strip().split("\n")[0] if is_text else ""
