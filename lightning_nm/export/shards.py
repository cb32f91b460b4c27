"""Read sharded checkpoints without running code: torch's own reader unpickles whatever they hold.

The file ``.metadata`` is a pickle that names the tensors, their chunks and the chunks' places in the files. It is read
into stand-ins for torch's classes, so that nothing in it can call or change anything of this process.
"""

from __future__ import annotations

import io
import math
import operator
import pickle
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.export.files import load_tensors

_OPTIMIZER = "optimizer_"  # how Lightning's keys of optimizer states begin
_METADATA = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # Python 3.13
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""The names that torch writes into the file ``.metadata``, beside dtypes, sizes and dictionaries."""


class _Record:
    """Stands in for an object of torch: what was pickled of it."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """An attribute."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"a {type(self).__name__} in its file .metadata has no {name!r}")
        return self.state[name]


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # The stand-ins of this file alone: a pickle may set attributes of classes.
        self.kinds: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return tuple
        if module == "collections" and name == "OrderedDict":
            return dict
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return getattr(torch, name)
        if name in _METADATA.get(module, ()):
            return self.kinds.setdefault(name, type(name, (_Record,), {}))
        raise ValueError(
            f"its file .metadata names {module}.{name}, which no checkpoint needs: it may be an attack"
        )


def read_shards(folder: Path) -> dict[str, Any]:
    """Read the tensors of a sharded checkpoint, but for the states of optimizers, in one process.

    Nothing else in the shards is read, because torch unpickles it. Of a checkpoint of Lightning, the file ``meta.pt``
    holds everything else, and is read as tensors and primitives.

    Args:
        folder: That of the file ``.metadata``.

    Returns:
        The saved dictionary, nested as it was.

    Raises:
        ValueError: If the metadata name anything but tensors and their places, the chunks of a tensor do not cover it,
            or a place lies outside the files of the folder.
    """
    pickled = (folder / ".metadata").read_bytes()
    metadata = _Unpickler(pickled).load()
    if type(metadata).__name__ != "Metadata" or not isinstance(metadata, _Record):
        raise ValueError(f"its file .metadata holds a {type(metadata).__name__}")
    places = {}
    for key, place in metadata.get("storage_data").items():
        # Objects that are no tensors have no offset.
        offsets = tuple(key.state.get("offset") or ())
        places[key.get("fqn"), offsets] = place
    paths = metadata.get("planner_data") or {}
    content: dict[Any, Any] = {}
    for name, found in metadata.get("state_dict_metadata").items():
        is_tensor = type(found).__name__ == "TensorStorageMetadata"
        if not is_tensor or name.startswith(_OPTIMIZER):
            continue
        *parents, last = paths.get(name, (name,))
        inner = content
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = _tensor(folder, name, found, places)
    meta = folder / "meta.pt"
    if not meta.is_file():
        return content
    return content | load_tensors(meta)


def _tensor(folder: Path, name: str, found: _Record, places: Mapping[Any, _Record]) -> Tensor:
    """A tensor, put together from its chunks."""
    properties = found.get("properties").state
    # Versions of torch pickle the properties as a dictionary or as a tuple.
    dtype: Any = properties.get("dtype") if isinstance(properties, dict) else properties[0]
    shape = tuple(found.get("size"))
    chunks = []
    for box in found.get("chunks"):
        chunks.append(_Chunk(tuple(box.get("offsets")), tuple(box.get("sizes"))))
    # Nothing of this shape is allocated before the chunks are known to fill it.
    _check_cover(name, shape, chunks)
    parts = [
        _read_chunk(folder, name, chunk.sizes, dtype, places[name, chunk.offsets])
        for chunk in chunks
    ]
    if len(chunks) == 1 and chunks[0].sizes == shape:
        return parts[0]
    tensor = torch.empty(shape, dtype=dtype)
    for chunk, part in zip(chunks, parts, strict=True):
        tensor[tuple(map(slice, chunk.offsets, chunk.ends))] = part
    return tensor


class _Chunk(NamedTuple):
    """A box of a tensor: its first entry and its size along each axis."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.offsets, self.sizes))

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a shape has all entries of the box."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        numbers = self.offsets + self.sizes
        if min(numbers, default=0) < 0:
            return False
        return all(map(operator.le, self.ends, shape))

    def is_apart_from(self, other: _Chunk) -> bool:
        """Whether two boxes that are not empty share no entry: along some axis one ends before the other begins."""
        before = map(operator.le, self.ends, other.offsets)
        after = map(operator.le, other.ends, self.offsets)
        return any(before) or any(after)


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[_Chunk]) -> None:
    """Refuse chunks that leave entries out, lie outside, or overlap."""
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    inside = all(chunk.lies_in(shape) for chunk in chunks)
    apart = inside and all(one.is_apart_from(other) for one, other in combinations(filled, 2))
    # Boxes inside that are apart and have as many entries as the tensor leave nothing out.
    entries = sum(math.prod(chunk.sizes) for chunk in filled)
    if not apart or entries != math.prod(shape):
        raise ValueError(f"the chunks of '{name}' do not make up a tensor of shape {shape}")


def _read_chunk(
    folder: Path, name: str, sizes: tuple[int, ...], dtype: torch.dtype, place: _Record
) -> Tensor:
    """A chunk, from its place in a file of the folder."""
    path = place.get("relative_path")
    offset = place.get("offset")
    length = place.get("length")
    in_folder = isinstance(path, str) and Path(path).name == path
    if not in_folder or place.state.get("transform_descriptors"):
        raise ValueError(
            f"'{name}' is in a file {path!r} that is not read: outside the folder, or transformed"
        )
    with (folder / path).open("rb") as file:
        file.seek(offset)
        data = file.read(max(length, 0))
    if len(data) != length or length < math.prod(sizes) * dtype.itemsize:
        raise ValueError(
            f"'{path}' ends before '{name}' does, or holds too little for its shape {sizes}"
        )
    part = load_tensors(io.BytesIO(data))
    fits = isinstance(part, Tensor) and part.shape == sizes and part.dtype == dtype
    if not fits:
        raise ValueError(
            f"'{path}' holds another tensor than '{name}' of shape {sizes} and {dtype}"
        )
    return part
