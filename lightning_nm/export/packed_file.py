"""Files of packed models: safetensors with a header of their own, as docs/format.md describes it."""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_nm.export.atomic_write import FilePath, Weights, replacing
from lightning_nm.functional.int8 import INT8_DTYPES
from lightning_nm.functional.nm_format import MAX_M, PACKED_DTYPES
from lightning_nm.nn.weight import Layout
from lightning_nm.packed.tensor import EVERY_ENTRY, LAYOUTS, PackedKind, PackedTensor
from lightning_nm.pattern import NMPattern

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

    _form = "a safetensors file"

    def __init__(self, path: FilePath) -> None:
        # Bytes go straight into tensors, without a swap.
        if sys.byteorder != "little":
            raise ValueError(
                "safetensors files are little-endian, and this machine is not: they cannot be read here"
            )
        self.path = Path(path)
        with open(self.path, "rb") as file:
            # The length of the header, an unsigned little-endian integer.
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
            # The library has refused a length beyond the end of the file.
            header = _read_json(file.read(length), self._refuse)
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.entries: dict[str, Entry] = {}
        for name, fields in header.items():
            if fields["dtype"] not in DTYPES:
                self._refuse(f"'{name}' is of dtype {fields['dtype']}, none of {', '.join(DTYPES)}")
            # Offsets count from the end of the header.
            begin = 8 + length + fields["data_offsets"][0]
            self.entries[name] = Entry(DTYPES[fields["dtype"]], tuple(fields["shape"]), begin)

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"'{self.path}' is not {self._form}, or is damaged: {reason}")

    def read_stored(self, name: str) -> Tensor:
        """Read one tensor of the file, by its own name.

        Raises:
            ValueError: If the file became shorter.
        """
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if tensor.numel():
            with open(self.path, "rb") as file:
                file.seek(entry.begin)
                # Into the memory of the tensor, of which bytes_of() is a view: a large weight is not copied.
                if file.readinto(bytes_of(tensor).numpy().data) != tensor.nbytes:
                    self._refuse(f"it ends within '{name}'")
        return tensor


def _read_json(text: bytes | str, refuse: Callable[[str], NoReturn]) -> Any:
    """Parse JSON in which no object may have two equal names."""
    # Python takes the last of two equal names, and other readers may take the first: the file would mean two things.
    repeated: list[str] = []

    def note_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        repeated.extend(name for name, count in counts.items() if count > 1)
        return dict(pairs)

    try:
        # json.loads would guess the encoding of bytes.
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        found = json.loads(decoded, object_pairs_hook=note_repeated)
    except (RecursionError, ValueError) as error:
        # Of no class of its own: Python also refuses integers of thousands of digits.
        refuse(f"its header is no JSON ({error})")
    if repeated:
        refuse(f"'{repeated[0]}' occurs twice in its header")
    return found


def write_safetensors(
    path: FilePath, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
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
    # The format pads its header with spaces, so that the data begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    with replacing(Path(path)) as new, open(new, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            # One at a time: tensors of other devices, and strided ones, are copied here.
            file.write(bytes_of(tensors[name]).numpy().data)
        # On the disk before the file is renamed: otherwise a power failure could leave the new name without its
        # content.
        file.flush()
        os.fsync(file.fileno())


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU, uint8 of one axis: a view if it is contiguous."""
    # First one axis, because torch views no scalar in elements of another size.
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
_MOST_AXES = 32  # more than any layer has; a hostile header may claim thousands


class PackedFile(SafetensorsFile):
    """The header of a packed model, checked, and its tensors on request.

    Nothing of the sizes that a header claims is allocated before they are known to be those of the file.

    Args:
        path: The file.

    Attributes:
        packed: The kinds of the packed weights by key.
        dense: The entries of the other tensors by key.
        aliases: Keys of tensors that are the same as another one.
        checksums: The CRC-32 of each tensor in the file; ``None`` in files of lightning_nm 0.3 and older. Tensors are
            compared with it when they are first read.

    Raises:
        ValueError: If it is no such file, or is damaged: the message says where.
        OSError: If it cannot be opened.
    """

    def __init__(self, path: FilePath) -> None:
        expected = "a packed model is one file, which `lightning-nm export --to packed` or save_packed() writes"
        # open() would not say what kind of file is expected.
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no file '{path}': {expected}")
        if os.path.isdir(path):
            raise IsADirectoryError(f"'{path}' is a folder: {expected}")
        super().__init__(path)
        # For messages: up to here the file was no safetensors file at all.
        self._form = "a packed model"
        metadata = self.metadata
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
        # Metadata are texts, and this one is JSON. One that is missing is read as null, and refused as no object.
        packed = _read_json(metadata.get("packed", "null"), self._refuse)
        aliases = _read_json(metadata.get("aliases", "null"), self._refuse)
        if not isinstance(packed, dict) or not isinstance(aliases, dict):
            self._refuse("`packed` and `aliases` are not objects")
        self.packed = {key: self._entry(key, fields) for key, fields in packed.items()}
        # What remains when the parts of packed weights are taken out.
        self.dense = dict(self.entries)
        for key in self.packed:
            # Two tensors would claim one key of the state dict.
            if key in self.entries:
                self._refuse(f"'{key}' is both dense and packed")
            for part in self.packed[key].parts:
                self.dense.pop(f"{key}.{part}", None)
        self.checksums: dict[str, str] | None = None
        if CHECKSUMS in metadata:
            self.checksums = found = _read_json(metadata[CHECKSUMS], self._refuse)
            is_object = isinstance(found, dict)
            if not is_object or not all(isinstance(each, str) for each in found.values()):
                self._refuse(f"`{CHECKSUMS}` is no object of texts")
            # The first name that is on one side alone is enough.
            for name in found.keys() ^ self.entries.keys():
                self._refuse(f"'{name}' is not both a tensor and a name in `{CHECKSUMS}`")
        self._intact: set[str] = set()  # tensors whose checksum was compared
        self.aliases: dict[str, str] = aliases
        for alias, key in aliases.items():
            # An alias stands for a stored tensor, never for another alias: one look-up resolves it, and there is no
            # circle.
            known = isinstance(key, str) and (key in self.dense or key in self.packed)
            if not known or alias in self.packed or alias in self.entries:
                self._refuse(f"'{alias}' is an alias of {key!r}")

    def _entry(self, key: str, fields: Any) -> PackedKind:
        """A checked entry of the header."""
        names = set(fields) if isinstance(fields, dict) else set()
        # Exactly these: a field that this reader does not know could change what the bytes mean.
        int8 = self._version != VERSION and names == _INT8_FIELDS
        if not int8 and names != _FIELDS:
            self._refuse(f"'{key}' does not have exactly pattern, layout, shape and dtype")
        if int8 and fields["values"] != NAMES[torch.int8]:
            self._refuse(f"'{key}' has values in {fields['values']!r}, not I8")
        if fields["layout"] not in LAYOUTS:
            self._refuse(
                f"'{key}' has the layout {fields['layout']!r}, none of {', '.join(LAYOUTS)}"
            )
        sizes = fields["shape"]
        is_list = isinstance(sizes, list) and len(sizes) <= _MOST_AXES
        # type(), because isinstance() takes true and false of JSON for integers.
        if not is_list or not all(type(size) is int and 0 < size < 1 << 48 for size in sizes):
            self._refuse(f"'{key}' is of shape {sizes!r}")
        shape = tuple(sizes)
        # A list or an object from the header is not hashable: only texts are looked up.
        dtype: Any = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
        try:
            # parse() would also take 76, which is how YAML reads 1:16.
            if not isinstance(fields["pattern"], str):
                raise ValueError(f"pattern {fields['pattern']!r} is no text")
            is_dense = self._version == VERSION_DENSE and fields["pattern"] == str(EVERY_ENTRY)
            if is_dense and not (int8 and len(shape) == 2 and fields["layout"] == "plain"):
                raise ValueError(
                    "a dense matrix is not in int8, of two axes and of the layout 'plain'"
                )
            pattern = EVERY_ENTRY if is_dense else NMPattern.parse(fields["pattern"])
            if pattern.m > MAX_M:
                raise ValueError(f"pattern {pattern} has blocks of more than {MAX_M}")
            kind = PackedKind(pattern, Layout(fields["layout"]), shape, dtype, int8)
            # Also a ValueError if shape, layout and pattern do not fit together.
            shapes = kind.part_shapes
        except ValueError as error:
            self._refuse(f"'{key}': {error}")
        if dtype not in PACKED_DTYPES:
            self._refuse(f"'{key}' is of dtype {fields['dtype']!r}, which is not packed")
        if int8 and dtype not in INT8_DTYPES:
            self._refuse(
                f"'{key}' in {fields['dtype']} has int8 values, which weights in F32 and BF16 have alone"
            )
        dtypes = {
            "values": torch.int8 if int8 else dtype,
            "positions": torch.uint8,
            "scales": torch.float32,
        }
        # The claimed shape is compared with tensors that are known to lie in the file, before any is read.
        for name in kind.parts:
            part = self.entries.get(f"{key}.{name}")
            if part is None:
                self._refuse(f"there is no tensor '{key}.{name}'")
            if part.dtype != dtypes[name] or part.shape not in shapes[name]:
                expected = " or ".join(map(str, shapes[name]))
                self._refuse(
                    f"'{key}.{name}' is {part.dtype} {part.shape}, not {dtypes[name]} {expected}"
                )
        return kind

    def names(self) -> list[str]:
        """The keys of the model's state dict."""
        return [*self.dense, *self.packed, *self.aliases]

    def entry(self, key: str) -> PackedKind | Entry:
        """What has the ``shape`` and the ``dtype`` of a tensor of the dense state dict."""
        key = self.aliases.get(key, key)
        return self.packed.get(key) or self.dense[key]

    def read(self, key: str) -> Tensor | PackedTensor:
        """Read one tensor.

        Raises:
            ValueError: If it is damaged.
        """
        key = self.aliases.get(key, key)
        return self.read_packed(key) if key in self.packed else self.read_stored(key)

    def read_dense(self, key: str) -> Tensor:
        """Read one tensor, with zeros if it is packed."""
        found = self.read(key)
        return found.unpack() if isinstance(found, PackedTensor) else found

    def read_stored(self, name: str) -> Tensor:
        """Read one tensor of the file, by its own name, and compare it with its checksum the first time.

        Raises:
            ValueError: If it is damaged.
        """
        tensor = super().read_stored(name)
        # load_packed() reads packed weights twice: the first time to check all of them before the model is changed.
        if self.checksums is not None and name not in self._intact:
            found, expected = crc32(tensor), self.checksums[name]
            if found != expected:
                raise ValueError(
                    f"'{self.path}' is damaged: the bytes of '{name}' have the CRC-32 {found}, and were written "
                    f"with {expected}: copy the file again, or make it again from its checkpoint"
                )
            self._intact.add(name)
        return tensor

    def read_packed(self, key: str) -> PackedTensor:
        """Read one packed weight, by its own key.

        Raises:
            ValueError: If its bytes, its positions, or its int8 values and scales, are damaged.
        """
        kind = self.packed[key]
        parts: dict[str, Any] = {name: self.read_stored(f"{key}.{name}") for name in kind.parts}
        found = PackedTensor(kind=kind, **parts)
        try:
            # Next to the checksums: older files have none, and whoever edits a file can write others.
            found.check()
        except ValueError as error:
            self._refuse(f"'{key}': {error}")
        return found


def no_checksums(path: FilePath) -> str:
    """What is said of a packed file without checksums."""
    return (
        f"'{path}' was written by lightning_nm 0.3 or older and has no checksums, so damaged values are not noticed: "
        "save_packed(load_packed(model, path), path) adds them"
    )


def is_packed(path: FilePath) -> bool:
    """Whether a file is a packed model; one that cannot be read as safetensors is none."""
    path = Path(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    # What is wrong with such a file is for the reader of other files to say.
    with suppress(ValueError):
        return SafetensorsFile(path).metadata.get("format") == FORMAT
    return False


def write_packed(path: FilePath, tensors: Mapping[str, Tensor | PackedTensor]) -> None:
    """Write a packed model: a temporary file, which takes the place of `path` when it is complete.

    Tensors on the same memory are written once.

    Args:
        path: The file.
        tensors: By key of the dense state dict.

    Raises:
        ValueError: If a key is taken, or the format lacks a dtype.
        OSError: If the file cannot be written; an older one stays as it was.
    """
    first: dict[Any, str] = {}  # the key of each tensor that is written
    aliases: dict[str, str] = {}
    stored: Weights = {}
    header: dict[str, dict[str, Any]] = {}
    # The lowest that can hold the tensors, so that older readers take what they know.
    version = VERSION
    for key, tensor in tensors.items():
        # A packed weight is known by the memory of its values: its parts are made together.
        values = tensor.values if isinstance(tensor, PackedTensor) else tensor
        # All empty tensors have the address 0.
        same = first.setdefault(memory_of(values), key) if values.numel() else key
        if same != key:
            aliases[key] = same
            continue
        if isinstance(tensor, Tensor):
            stored[key] = tensor
            continue
        header[key] = {
            "pattern": str(tensor.kind.pattern),
            "layout": tensor.kind.layout,
            "shape": list(tensor.kind.shape),
            "dtype": NAMES[tensor.kind.dtype],
        }
        if tensor.kind.int8:
            header[key]["values"] = NAMES[torch.int8]
            is_dense = tensor.kind.pattern == EVERY_ENTRY
            # Texts of one digit are ordered like their numbers.
            version = max(version, VERSION_DENSE if is_dense else VERSION_INT8)
        for part, value in tensor.parts.items():
            name = f"{key}.{part}"
            if name in tensors:
                raise ValueError(
                    f"a packed weight needs the name '{name}', which another tensor has"
                )
            stored[name] = value
    metadata = {
        "format": FORMAT,
        "version": version,
        "packed": json.dumps(header),
        "aliases": json.dumps(aliases),
        CHECKSUMS: json.dumps({name: crc32(tensor) for name, tensor in stored.items()}),
    }
    write_safetensors(path, stored, metadata)
