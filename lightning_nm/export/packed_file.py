"""Files of packed models: safetensors with a header of their own, as docs/format.md describes it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_nm.export.safetensors_file import (
    DTYPES,
    NAMES,
    Entry,
    SafetensorsFile,
    crc32,
    is_shape,
    memory_of,
    read_json,
    write_safetensors,
)
from lightning_nm.functional.nm_format import MAX_M, PACKED_DTYPES
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.nn.layer.layout import Layout
from lightning_nm.nn.packed.tensor import (
    EVERY_ENTRY,
    EXPERTS,
    INT8_DTYPES,
    LAYOUTS,
    PackedTensor,
    Role,
    packed_shapes,
    scale_shapes,
)

FORMAT = "lightning_nm.packed"
VERSION = "1"
VERSION_INT8 = "2"
"""Of files that hold weights in int8, which readers of version 1 refuse; other files stay of version 1."""
VERSION_DENSE = "3"
"""Of files that hold dense matrices in int8, which readers of versions 1 and 2 refuse."""

CHECKSUMS = "crc32"
"""The entry of the metadata with the checksum of each tensor, which files of lightning_nm 0.3 and older lack.

Their readers ignore it. CRC-32 finds damage of a disk or of a copy, and costs less than reading the file; whoever wants
to change a file on purpose can change the checksum, too.
"""

_FIELDS = {"pattern", "layout", "shape", "dtype"}
_INT8_FIELDS = {*_FIELDS, "values"}


class ToPack(NamedTuple):
    """A dense weight that is packed when it is written, so that one weight at a time is in memory twice."""

    weight: Tensor
    pattern: NMPattern
    layout: Layout
    int8: bool = False
    role: Role = "linear"

    def packed(self) -> PackedTensor:
        """The packed weight."""
        if self.int8:
            return PackedTensor.of_int8(self.weight, self.pattern, self.layout, role=self.role)
        return PackedTensor.of(self.weight, self.pattern, self.layout)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales of int8 values."""
        shapes = scale_shapes(tuple(self.weight.shape), self.pattern, self.layout)
        return shapes[-1 if self.role in EXPERTS else 0]

    @property
    def scale_fault(self) -> str:
        """Why int8 values have no scales for the weight's role; empty if they have."""
        if self.role in EXPERTS and len(self.scale_shape) == 1:
            return (
                f"its blocks lie across rows, so that it is no weight of experts in {self.pattern}"
            )
        return ""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors."""
        shapes = packed_shapes(tuple(self.weight.shape), self.pattern, self.layout)
        values, positions = map(math.prod, shapes)
        if not self.int8:
            return values * self.weight.itemsize + positions
        return values + positions + math.prod(self.scale_shape) * 4


class PackedEntry(NamedTuple):
    """A packed weight in a file."""

    pattern: NMPattern
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    int8: bool = False


class PackedFile:
    """The header of a packed model, checked, and its tensors on request.

    Nothing of the sizes that a header claims is allocated before they are known to be those of the file.

    Args:
        path: The file.

    Attributes:
        packed: The packed weights by key.
        dense: The entries of the other tensors by key.
        aliases: Keys of tensors that are the same as another one.
        checksums: The CRC-32 of each tensor in the file; ``None`` in files of lightning_nm 0.3 and older. Tensors are
            compared with it when they are first read.

    Raises:
        ValueError: If it is no such file, or is damaged: the message says where.
        OSError: If it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        expected = "a packed model is one file, which `lightning-nm export --to packed` or save_packed() writes"
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no file '{path}': {expected}")
        if os.path.isdir(path):
            raise IsADirectoryError(f"'{path}' is a folder: {expected}")
        self.file = SafetensorsFile(path)
        metadata = self.file.metadata
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"'{path}' holds no packed model: make one by `lightning-nm export --to packed`"
            )
        self._version = metadata.get("version")
        if self._version not in (VERSION, VERSION_INT8, VERSION_DENSE):
            raise ValueError(
                f"'{path}' is of version {self._version!r}, and this lightning_nm reads {VERSION!r}, {VERSION_INT8!r} "
                f"and {VERSION_DENSE!r}: update it"
            )
        packed = read_json(metadata.get("packed", "null"), self._refuse)
        aliases = read_json(metadata.get("aliases", "null"), self._refuse)
        if not isinstance(packed, dict) or not isinstance(aliases, dict):
            self._refuse("`packed` and `aliases` are not objects")
        self.packed = {key: self._entry(key, fields) for key, fields in packed.items()}
        self.dense = dict(self.file.entries)
        for key in self.packed:
            if key in self.file.entries:
                self._refuse(f"'{key}' is both dense and packed")
            for part in parts_of(key, int8=self.packed[key].int8):
                self.dense.pop(part, None)
        self.checksums = self._checksums(metadata)
        self._intact: set[str] = set()  # tensors whose checksum was compared
        self.aliases: dict[str, str] = aliases
        for alias, key in aliases.items():
            known = isinstance(key, str) and (key in self.dense or key in self.packed)
            if not known or alias in self.packed or alias in self.file.entries:
                self._refuse(f"'{alias}' is an alias of {key!r}")

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"'{self.file.path}' is not a packed model, or is damaged: {reason}")

    def _checksums(self, metadata: Mapping[str, str]) -> dict[str, str] | None:
        """The checksum of every tensor, if the file has checksums."""
        if CHECKSUMS not in metadata:
            return None
        found = read_json(metadata[CHECKSUMS], self._refuse)
        if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
            self._refuse(f"`{CHECKSUMS}` is no object of texts")
        for name in found.keys() ^ self.file.entries.keys():
            self._refuse(f"'{name}' is not both a tensor and a name in `{CHECKSUMS}`")
        return found

    def _entry(self, key: str, fields: Any) -> PackedEntry:
        """A checked entry of the header."""
        names = set(fields) if isinstance(fields, dict) else set()
        int8 = self._version != VERSION and names == _INT8_FIELDS
        if not int8 and names != _FIELDS:
            self._refuse(f"'{key}' does not have exactly pattern, layout, shape and dtype")
        if int8 and fields["values"] != NAMES[torch.int8]:
            self._refuse(f"'{key}' has values in {fields['values']!r}, not I8")
        if fields["layout"] not in LAYOUTS:
            self._refuse(
                f"'{key}' has the layout {fields['layout']!r}, none of {', '.join(LAYOUTS)}"
            )
        if not is_shape(fields["shape"]) or 0 in fields["shape"]:
            self._refuse(f"'{key}' is of shape {fields['shape']!r}")
        try:
            if not isinstance(fields["pattern"], str):
                raise ValueError(f"pattern {fields['pattern']!r} is no text")
            is_dense = self._version == VERSION_DENSE and fields["pattern"] == str(EVERY_ENTRY)
            if is_dense and not (
                int8 and len(fields["shape"]) == 2 and fields["layout"] == "plain"
            ):
                raise ValueError(
                    "a dense matrix is not in int8, of two axes and of the layout 'plain'"
                )
            pattern = EVERY_ENTRY if is_dense else NMPattern.parse(fields["pattern"])
            if pattern.m > MAX_M:
                raise ValueError(f"pattern {pattern} has blocks of more than {MAX_M}")
            shapes = packed_shapes(tuple(fields["shape"]), pattern, fields["layout"])
        except ValueError as error:
            self._refuse(f"'{key}': {error}")
        # A list or an object from the header is not hashable: only texts are looked up.
        dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
        if dtype is None or dtype not in PACKED_DTYPES:
            self._refuse(f"'{key}' is of dtype {fields['dtype']!r}, which is not packed")
        values_shape, positions_shape = shapes
        values_name, positions_name, *scales_name = parts_of(key, int8=int8)
        if int8 and dtype not in INT8_DTYPES:
            self._refuse(
                f"'{key}' in {fields['dtype']} has int8 values, which weights in F32 and BF16 have alone"
            )
        self._check_part(values_name, torch.int8 if int8 else dtype, values_shape)
        self._check_part(positions_name, torch.uint8, positions_shape)
        for name in scales_name:
            possible = scale_shapes(tuple(fields["shape"]), pattern, fields["layout"])
            self._check_part(name, torch.float32, *possible)
        return PackedEntry(pattern, fields["layout"], tuple(fields["shape"]), dtype, int8)

    def _check_part(self, name: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        """Check a tensor that the header of a packed weight implies; it is of one of the shapes."""
        entry = self.file.entries.get(name)
        if entry is None:
            self._refuse(f"there is no tensor '{name}'")
        if entry.dtype != dtype or entry.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            self._refuse(f"'{name}' is {entry.dtype} {entry.shape}, not {dtype} {expected}")

    def names(self) -> list[str]:
        """The keys of the model's state dict."""
        return [*self.dense, *self.packed, *self.aliases]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor of the dense state dict."""
        return self._described(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor of the dense state dict."""
        return self._described(key).dtype

    def _described(self, key: str) -> PackedEntry | Entry:
        key = self.aliases.get(key, key)
        return self.packed[key] if key in self.packed else self.dense[key]

    def read(self, key: str) -> Tensor | PackedTensor:
        """Read one tensor.

        Raises:
            ValueError: If it is damaged.
        """
        key = self.aliases.get(key, key)
        return self.read_packed(key) if key in self.packed else self.read_stored(key)

    def check(self, key: str) -> None:
        """Compare a tensor with its checksum, if the file has checksums, without holding it as a whole.

        Raises:
            ValueError: If it is damaged.
        """
        key = self.aliases.get(key, key)
        names = parts_of(key, int8=self.packed[key].int8) if key in self.packed else [key]
        for name in names:
            if self.checksums is not None and name not in self._intact:
                self._compare(name, self.file.checksum(name))

    def read_stored(self, name: str) -> Tensor:
        """Read a tensor of the file, by its own name.

        Raises:
            ValueError: If it is damaged.
        """
        tensor = self.file.read(name)
        if self.checksums is not None and name not in self._intact:
            self._compare(name, crc32(tensor))
        return tensor

    def _compare(self, name: str, found: str) -> None:
        """Refuse a tensor whose bytes are not those that were written."""
        assert self.checksums is not None
        expected = self.checksums[name]
        if found != expected:
            raise ValueError(
                f"'{self.file.path}' is damaged: the bytes of '{name}' have the CRC-32 {found}, and were written with "
                f"{expected}: copy the file again, or make it again from its checkpoint"
            )
        self._intact.add(name)

    def read_packed(self, key: str) -> PackedTensor:
        """Read one packed weight, by its own key.

        Raises:
            ValueError: If its bytes, its positions, or its int8 values and scales, are damaged.
        """
        entry = self.packed[key]
        parts = [self.read_stored(name) for name in parts_of(key, int8=entry.int8)]
        values, positions, *scales = parts
        found = PackedTensor(values, positions, entry.pattern, entry.layout, entry.shape)
        if entry.int8:
            found = found._replace(scales=scales[0], dense_dtype=entry.dtype)
        try:
            found.check()
        except ValueError as error:
            self._refuse(f"'{key}': {error}")
        return found


def no_checksums(path: str | os.PathLike[str]) -> str:
    """What is said of a packed file without checksums."""
    return (
        f"'{path}' was written by lightning_nm 0.3 or older and has no checksums, so damaged values are not noticed: "
        "save_packed(load_packed(model, path), path) adds them"
    )


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a packed model; one that cannot be read as safetensors is none."""
    path = Path(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with suppress(ValueError):
        return SafetensorsFile(path).metadata.get("format") == FORMAT
    return False


def parts_of(key: str, *, int8: bool) -> list[str]:
    """Names of the tensors of a packed weight."""
    parts = ["values", "positions", "scales"] if int8 else ["values", "positions"]
    return [f"{key}.{part}" for part in parts]


def write_packed(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor | PackedTensor | ToPack]
) -> None:
    """Write a packed model: a temporary file, which takes the place of `path` when it is complete.

    Tensors on the same memory are written once.

    Args:
        path: The file.
        tensors: By key of the dense state dict. Weights to pack are packed one at a time.

    Raises:
        ValueError: If a key is taken, a weight is not of its pattern, or the format lacks a dtype.
        OSError: If the file cannot be written; an older one stays as it was.
    """
    aliases = _aliases(tensors)
    own = {key: tensor for key, tensor in tensors.items() if key not in aliases}
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    header: dict[str, dict[str, Any]] = {}
    for key, tensor in own.items():
        if isinstance(tensor, Tensor):
            entries[key] = tensor.dtype, tuple(tensor.shape)
            continue
        dtype = tensor.weight.dtype if isinstance(tensor, ToPack) else tensor.dtype
        shape = tuple(tensor.weight.shape) if isinstance(tensor, ToPack) else tensor.shape
        values_shape, positions_shape = packed_shapes(shape, tensor.pattern, tensor.layout)
        int8 = _is_int8(tensor)
        values_name, positions_name, *scales_name = parts_of(key, int8=int8)
        entries[values_name] = torch.int8 if int8 else dtype, values_shape
        entries[positions_name] = torch.uint8, positions_shape
        header[key] = {
            "pattern": str(tensor.pattern),
            "layout": tensor.layout,
            "shape": list(shape),
            "dtype": NAMES[dtype],
        }
        for name in scales_name:
            if isinstance(tensor, ToPack):
                entries[name] = torch.float32, tensor.scale_shape
            elif tensor.scales is not None:
                entries[name] = torch.float32, tuple(tensor.scales.shape)
            header[key]["values"] = NAMES[torch.int8]
    parts = [name for key in header for name in parts_of(key, int8="values" in header[key])]
    # Every part and every dense tensor has an entry of its own, unless a name was taken.
    if len(entries) < len(own) - len(header) + len(parts) or not set(entries).isdisjoint(
        {*header, *aliases}
    ):
        names = [name for name in parts if name in tensors]
        raise ValueError(f"a packed weight needs the name {names[0]!r}, which another tensor has")
    version = VERSION_INT8 if len(parts) > 2 * len(header) else VERSION
    if any(each["pattern"] == str(EVERY_ENTRY) for each in header.values()):
        version = VERSION_DENSE
    metadata = {
        "format": FORMAT,
        "version": version,
        "packed": json.dumps(header),
        "aliases": json.dumps(aliases),
    }
    write_safetensors(path, entries, _parts(own), metadata, CHECKSUMS)


def _parts(tensors: Mapping[str, Tensor | PackedTensor | ToPack]) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            yield key, tensor
        else:
            found = tensor.packed() if isinstance(tensor, ToPack) else tensor
            tensors_of_weight = [found.values, found.positions]
            if found.scales is not None:
                tensors_of_weight.append(found.scales)
            yield from zip(parts_of(key, int8=_is_int8(found)), tensors_of_weight, strict=True)


def _aliases(tensors: Mapping[str, Tensor | PackedTensor | ToPack]) -> dict[str, str]:
    """Keys whose tensor is in the same memory as that of an earlier key, and the earlier key."""
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for key, tensor in tensors.items():
        stored = _stored(tensor)
        # All empty tensors have the address 0.
        if stored.numel():
            other = first.setdefault(memory_of(stored), key)
            if other != key:
                aliases[key] = other
    return aliases


def _is_int8(tensor: PackedTensor | ToPack) -> bool:
    return tensor.int8 if isinstance(tensor, ToPack) else tensor.scales is not None


def _stored(tensor: Tensor | PackedTensor | ToPack) -> Tensor:
    """The tensor whose memory stands for a weight."""
    if isinstance(tensor, ToPack):
        return tensor.weight
    return tensor.values if isinstance(tensor, PackedTensor) else tensor
