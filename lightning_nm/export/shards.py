"""Read sharded checkpoints without running code: torch's own reader unpickles whatever they hold."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

_OPTIMIZER = "optimizer_"  # how Lightning's keys of optimizer states begin
_METADATA = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # Python 3.13
    "torch": {"Size"},
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
"""The names that torch writes into the file ``.metadata``, beside dtypes."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()) or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise ValueError(f"its file .metadata names {module}.{name}, which no checkpoint needs: it may be an attack")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        _read_metadata(Path(self.path))
        return super().read_metadata(*args, **kwargs)


def _read_metadata(folder: Path) -> Metadata:
    found = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    if not isinstance(found, Metadata):
        raise ValueError(f"its file .metadata holds a {type(found).__name__}")
    return found


def read_shards(folder: Path) -> dict[str, Any]:
    """Read the tensors of a sharded checkpoint, but for the states of optimizers, in one process.

    Nothing else in the shards is read, because torch unpickles it. Of a checkpoint of Lightning, the file ``meta.pt``
    holds everything else, and is read as tensors and primitives.

    Args:
        folder: That of the file ``.metadata``.

    Returns:
        The saved dictionary, nested as it was.
    """
    metadata = _read_metadata(folder)
    places = metadata.planner_data or {}
    tensors: dict[str, Tensor] = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata) and not name.startswith(_OPTIMIZER)
    }
    _load_state_dict(tensors, _Reader(folder), no_dist=True)
    content: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        *parents, last = places.get(name, (name,))
        inner = content
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = tensor
    meta = folder / "meta.pt"
    return content | torch.load(meta, map_location="cpu", weights_only=True) if meta.is_file() else content
