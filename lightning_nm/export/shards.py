"""Read sharded checkpoints without running code: torch's own reader unpickles whatever they hold.

The file ``.metadata`` is a pickle that names the tensors, their chunks and the chunks' places in the files. It is read
into stand-ins for torch's classes, so that nothing in it can call or change anything of this process.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
        self.kinds: dict[str, type[_Record]] = {}  # of this file alone: a pickle may set attributes of classes

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return getattr(torch, name)
        if name in _METADATA.get(module, ()):
            return self.kinds.setdefault(name, type(name, (_Record,), {}))
        raise ValueError(f"its file .metadata names {module}.{name}, which no checkpoint needs: it may be an attack")


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
    metadata = _Unpickler((folder / ".metadata").read_bytes()).load()
    if type(metadata).__name__ != "Metadata" or not isinstance(metadata, _Record):
        raise ValueError(f"its file .metadata holds a {type(metadata).__name__}")
    places = {  # objects that are no tensors have no offset
        (key.get("fqn"), tuple(key.state.get("offset") or ())): info
        for key, info in metadata.get("storage_data").items()
    }
    paths = metadata.get("planner_data") or {}
    content: dict[Any, Any] = {}
    for name, found in metadata.get("state_dict_metadata").items():
        if type(found).__name__ == "TensorStorageMetadata" and not name.startswith(_OPTIMIZER):
            *parents, last = paths.get(name, (name,))
            inner = content
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = _tensor(folder, name, found, places)
    meta = folder / "meta.pt"
    return content | torch.load(meta, map_location="cpu", weights_only=True) if meta.is_file() else content


def _tensor(folder: Path, name: str, found: _Record, places: Mapping[Any, _Record]) -> Tensor:
    """A tensor, put together from its chunks."""
    properties = found.get("properties").state
    dtype: Any = properties.get("dtype") if isinstance(properties, dict) else properties[0]
    size = tuple(found.get("size"))
    chunks = [(tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))) for chunk in found.get("chunks")]
    _check_cover(name, size, chunks)
    parts = [_chunk(folder, name, sizes, dtype, places[name, offsets]) for offsets, sizes in chunks]
    if [sizes for _, sizes in chunks] == [size]:
        return parts[0]
    tensor = torch.empty(size, dtype=dtype)
    for (offsets, sizes), part in zip(chunks, parts, strict=True):
        tensor[tuple(slice(first, first + n) for first, n in zip(offsets, sizes, strict=True))] = part
    return tensor


def _check_cover(name: str, size: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Refuse chunks that leave entries out, lie outside, or overlap."""
    inside = all(
        len(offsets) == len(sizes) == len(size)
        and all(first >= 0 and n >= 0 and first + n <= end for first, n, end in zip(offsets, sizes, size, strict=True))
        for offsets, sizes in chunks
    )
    full = [chunk for chunk in chunks if math.prod(chunk[1])]
    apart = inside and all(
        any(a + n <= b or b + m <= a for a, n, b, m in zip(*one, *other, strict=True))
        for one, other in combinations(full, 2)
    )
    if not apart or sum(math.prod(sizes) for _, sizes in full) != math.prod(size):
        raise ValueError(f"the chunks of '{name}' do not make up a tensor of shape {size}")


def _chunk(folder: Path, name: str, sizes: tuple[int, ...], dtype: torch.dtype, place: _Record) -> Tensor:
    """A chunk, from its place in a file of the folder."""
    path, offset, length = (place.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(path, str) or Path(path).name != path or place.state.get("transform_descriptors"):
        raise ValueError(f"'{name}' is in a file {path!r} that is not read: outside the folder, or transformed")
    with (folder / path).open("rb") as file:
        file.seek(offset)
        data = file.read(max(length, 0))
    if len(data) != length or length < math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"'{path}' ends before '{name}' does, or holds too little for its shape {sizes}")
    part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(part, Tensor) or tuple(part.shape) != sizes or part.dtype != dtype:
        raise ValueError(f"'{path}' holds another tensor than '{name}' of shape {sizes} and {dtype}")
    return part
