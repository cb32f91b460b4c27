"""Safetensors files: tensors are read one at a time, and a file is checked before anything of its sizes is allocated.

The format is a little-endian length of eight bytes, so many bytes of JSON, and the tensors without gaps.

The package ``safetensors`` is not used here. It takes the last of duplicate names, its errors name neither the tensor
nor the sizes, it maps the file into memory, so that a file that becomes shorter ends the process by SIGBUS, and it
writes only what is in memory as a whole. Weights to pack are packed one at a time while they are written.
"""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
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
_MOST_HEADER = 100_000_000  # bytes, as the package has it
_MOST_AXES = 32
_PIECE = 1 << 24  # bytes that are written or summed at a time


class Entry(NamedTuple):
    """A tensor in a file: its place is counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """The header of a file, checked, and its tensors on request.

    Args:
        path: The file.

    Raises:
        ValueError: If the file is not one: its header names what is wrong.
        OSError: If it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if sys.byteorder != "little":
            raise ValueError(
                "safetensors files are little-endian, and this machine is not: they cannot be read here"
            )
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            length = int.from_bytes(first, "little")
            # torch.save writes zip files.
            if first.startswith(b"PK"):
                raise ValueError(
                    f"'{self.path}' is a checkpoint of torch, not a safetensors file: "
                    f"`lightning-nm export {self.path} -o model.safetensors` packs it"
                )
            if size < 10 or not 2 <= length <= min(size - 8, _MOST_HEADER):
                self._refuse(f"its header claims {length} bytes, and the file has {size}")
            self._start = 8 + length
            header = read_json(file.read(length), self._refuse)
        self.metadata, self.entries = self._checked(header, size - self._start)

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"'{self.path}' is not a safetensors file, or is damaged: {reason}")

    def _checked(self, header: Any, size: int) -> tuple[dict[str, str], dict[str, Entry]]:
        """The metadata, and the entries in the order of their places."""
        if not isinstance(header, dict):
            self._refuse("its header is no object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            self._refuse("its metadata do not map names to texts")
        unordered = {name: self._entry(name, fields, size) for name, fields in header.items()}
        entries = dict(sorted(unordered.items(), key=lambda item: (item[1].begin, item[1].end)))
        # Tensors that overlap or leave gaps could hide content, or let two names share memory.
        place = 0
        for name, entry in entries.items():
            if entry.begin != place:
                self._refuse(
                    f"'{name}' begins at {entry.begin}, and the tensors before it end at {place}"
                )
            place = entry.end
        if place != size:
            self._refuse(f"its tensors take {place} bytes, and it has {size} for them")
        return metadata, entries

    def _entry(self, name: str, fields: Any, size: int) -> Entry:
        if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
            self._refuse(f"'{name}' does not have exactly dtype, shape and data_offsets")
        dtype = fields["dtype"]
        shape = fields["shape"]
        offsets = fields["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self._refuse(f"'{name}' is of dtype {dtype!r}, none of {', '.join(DTYPES)}")
        if not is_shape(shape):
            self._refuse(f"'{name}' is of shape {shape!r}")
        if not is_shape(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
            self._refuse(f"'{name}' lies at {offsets!r} of {size} bytes")
        begin, end = offsets
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        if needed != end - begin:
            self._refuse(
                f"'{name}' of shape {shape} in {dtype} takes {needed} bytes, not {end - begin}"
            )
        return Entry(DTYPES[dtype], tuple(shape), begin, end)

    def read(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            ValueError: If the file became shorter.
        """
        entry = self.entries[name]
        content = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        if content.numel():
            with open(self.path, "rb") as file:
                file.seek(self._start + entry.begin)
                if file.readinto(content.numpy().data) != content.numel():
                    self._refuse(f"it ends within '{name}'")
        return content.view(entry.dtype).view(entry.shape)

    def checksum(self, name: str) -> str:
        """The CRC-32 of one tensor in the file, as :func:`crc32` writes it; the tensor is not held as a whole.

        Raises:
            ValueError: If the file became shorter.
        """
        entry = self.entries[name]
        found = 0
        missing = entry.end - entry.begin
        buffer = memoryview(bytearray(min(missing, _PIECE)))
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self._start + entry.begin)
            while missing:
                count = file.readinto(buffer[: min(missing, len(buffer))])
                if not count:
                    self._refuse(f"it ends within '{name}'")
                found = zlib.crc32(buffer[:count], found)
                missing -= count
        return f"{found:08x}"


def read_json(text: bytes | str, refuse: Callable[[str], NoReturn]) -> Any:
    """Parse JSON in which no object may have two equal names."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                refuse(f"'{name}' occurs twice in its header")
            found[name] = value
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


def is_shape(value: Any) -> bool:
    """Whether a value of JSON is a list of sizes."""
    return (
        isinstance(value, list)
        and len(value) <= _MOST_AXES
        and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
    )


def write_safetensors(
    path: str | os.PathLike[str],
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
    checksums: str | None = None,
) -> None:
    """Write a file: into a temporary one beside it, which takes its place when it is complete.

    Args:
        path: The file, which is replaced.
        entries: The dtype and the shape of every tensor, in the order of `tensors`.
        tensors: They are asked for one at a time; those of one size of elements lie beside each other in the file.
        metadata: Texts by name.
        checksums: The name of a further entry of the metadata: a JSON object with the :func:`crc32` of every tensor.

    Raises:
        ValueError: If a dtype is unknown to the format, or a tensor is not of its dtype and shape.
        OSError: If the file cannot be written; an older one is then as it was.
    """
    # Larger elements come first, so that every tensor is aligned.
    order = sorted(entries, key=lambda name: -entries[name][0].itemsize)
    places: dict[str, dict[str, object]] = {}
    begins: dict[str, int] = {}
    end = 0
    for name in order:
        dtype, shape = entries[name]
        if dtype not in NAMES:
            raise ValueError(f"safetensors files hold no {dtype}: leave out or convert '{name}'")
        begin = end
        end += math.prod(shape) * dtype.itemsize
        begins[name] = begin
        places[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    # Tensors are made while they are written, so the header is written twice: all checksums have one length.
    sums = dict.fromkeys(entries, "0" * 8)

    def header_of_sums() -> bytes:
        own = {} if checksums is None else {checksums: json.dumps(sums)}
        found = {"__metadata__": {**metadata, **own}, **places}
        text = json.dumps(found, separators=(",", ":")).encode()
        return text + b" " * (-len(text) % 8)

    header = header_of_sums()
    with replacing(Path(path)) as new, open(new, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        written = set()
        for name, tensor in tensors:
            if (tensor.dtype, tuple(tensor.shape)) != entries[name]:
                raise ValueError(
                    f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}, not {entries[name]}"
                )
            file.seek(8 + len(header) + begins[name])
            content = bytes_of(tensor.detach().cpu())
            for piece in content.split(_PIECE):
                file.write(piece.numpy().data)
            if checksums is not None:
                sums[name] = crc32(content)
            written.add(name)
        if written != set(entries):
            raise ValueError(f"there is no tensor for {sorted(set(entries) - written)}")
        file.seek(8)
        file.write(header_of_sums())
        file.flush()
        os.fsync(file.fileno())


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU, uint8 of one axis: a view if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


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
