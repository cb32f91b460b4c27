"""Safetensors files: the library checks the header, and tensors are read one at a time.

The format is a little-endian length of eight bytes, so many bytes of JSON, and the tensors without gaps. The library
takes the last of two equal names, which are refused here. It maps a file into memory, so that one that becomes shorter
would end the process by SIGBUS: tensors are read as bytes. Its writer orders the metadata at random, and equal models
would become different files: this one does not.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_nm.export.atomic_write import replacing

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file, and where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class SafetensorsFile:
    """The header of a file, checked, and its tensors on request.

    Args:
        path: The file.

    Raises:
        ValueError: If the file is not one.
        OSError: If it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if sys.byteorder != "little":
            raise ValueError(
                "safetensors files are little-endian, and this machine is not: they cannot be read here"
            )
        self.path = Path(path)
        with open(self.path, "rb") as file:
            first = file.read(8)
            # torch.save writes zip files.
            if first.startswith(b"PK"):
                raise ValueError(
                    f"'{self.path}' is a checkpoint of torch, not a safetensors file: "
                    f"`lightning-nm export {self.path} -o model.safetensors` packs it"
                )
            try:
                # The library compares all sizes and places with the file before anything is read.
                with safe_open(self.path, "pt"):
                    pass
            except SafetensorError as error:
                self._refuse(str(error))
            length = int.from_bytes(first, "little")
            header = read_json(file.read(length), self._refuse)
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.entries: dict[str, Entry] = {}
        for name, fields in header.items():
            if fields["dtype"] not in DTYPES:
                self._refuse(f"'{name}' is of dtype {fields['dtype']}, none of {', '.join(DTYPES)}")
            begin = 8 + length + fields["data_offsets"][0]
            self.entries[name] = Entry(DTYPES[fields["dtype"]], tuple(fields["shape"]), begin)

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"'{self.path}' is not a safetensors file, or is damaged: {reason}")

    def read(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            ValueError: If the file became shorter.
        """
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if tensor.numel():
            with open(self.path, "rb") as file:
                file.seek(entry.begin)
                if file.readinto(bytes_of(tensor).numpy().data) != tensor.nbytes:
                    self._refuse(f"it ends within '{name}'")
        return tensor


def read_json(text: bytes | str, refuse: Callable[[str], NoReturn]) -> Any:
    """Parse JSON in which no object may have two equal names."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            refuse(f"'{name}' occurs twice in its header")
        return found

    try:
        # json.loads would guess the encoding of bytes.
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=unique)
    except (RecursionError, json.JSONDecodeError, UnicodeDecodeError) as error:
        refuse(f"its header is no JSON ({error})")
    except ValueError as error:
        # Python refuses integers of thousands of digits by a plain ValueError, the class of `refuse`.
        if str(error).startswith("Exceeds the limit"):
            refuse(f"its header is no JSON ({error})")
        raise


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file: into a temporary one next to it, which takes its place when it is complete.

    Args:
        path: The file, which is replaced.
        tensors: By name.
        metadata: Texts by name.

    Raises:
        ValueError: If a dtype is unknown to the format.
        OSError: If the file cannot be written; an older one is then as it was.
    """
    # Larger elements come first, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in NAMES:
            raise ValueError(
                f"safetensors files hold no {tensor.dtype}: leave out or convert '{name}'"
            )
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(Path(path)) as new, open(new, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(bytes_of(tensors[name]).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU, uint8 of one axis: a view if it is contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def crc32(tensor: Tensor) -> str:
    """The CRC-32 of a tensor's bytes, eight hexadecimal digits: it finds damage, and is no protection from attacks.

    Example:
        >>> crc32(torch.tensor([1.0, 2.0]))
        '2e3fa576'
    """
    return f"{zlib.crc32(bytes_of(tensor).numpy().data):08x}"


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same view of the same memory, as tied weights are."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()
