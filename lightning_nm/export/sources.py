"""What ``lightning-nm export`` reads: checkpoints, state dicts, packed models and folders of ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.export.checkpoint import read_checkpoint
from lightning_nm.export.packed_file import PackedFile, is_packed
from lightning_nm.nn.packed import PackedTensor

_WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".ot", ".gguf")


class Source(NamedTuple):
    """A checkpoint.

    Args:
        path: Where it is.
        weights: The dense state dict.
        states: The sparsifier states in it.
        folder: The folder of ``transformers``, if it is one.
    """

    path: Path
    weights: dict[str, Tensor]
    states: list[dict[str, Any]]
    folder: Path | None = None


def read_source(path: str | Path, prefix: str = "") -> Source:
    """Read a checkpoint; nothing is unpickled but tensors and primitives.

    Args:
        path: A Lightning checkpoint, sharded or not, a state dict (``.pt``, ``.safetensors``), a packed model, or a
            folder that ``save_pretrained`` of ``transformers`` wrote.
        prefix: Take only the keys that begin with it, and remove it.

    Raises:
        ValueError: If it cannot be read, holds no weights, or no key begins with `prefix`.
    """
    path = Path(path)
    source = _read(path)
    if not prefix:
        return source
    weights = {key.removeprefix(prefix): value for key, value in source.weights.items() if key.startswith(prefix)}
    if not weights:
        shown = ", ".join(repr(key) for key in list(source.weights)[:4])
        raise ValueError(f"no key of '{path}' begins with '{prefix}': they are {shown}, ...")
    states = [{**state, "layers": _without(state["layers"], prefix)} for state in source.states]
    return source._replace(weights=weights, states=states)


def _without(layers: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): layer for name, layer in layers.items() if f"{name}.".startswith(prefix)}


def _read(path: Path) -> Source:
    if is_packed(path):
        packed = PackedFile(path)
        own = {key: _dense(packed.read(key)) for key in packed.names() if key not in packed.aliases}
        return Source(path, {key: own[packed.aliases.get(key, key)] for key in packed.names()}, [])
    weights, states = read_checkpoint(path)
    return Source(path, weights, states, path if (path / "config.json").is_file() else None)


def _dense(tensor: Tensor | PackedTensor) -> Tensor:
    return tensor.unpack() if isinstance(tensor, PackedTensor) else tensor


def hyperparameters(path: Path) -> dict[str, Any]:
    """The model's arguments that Lightning saved in a checkpoint; none in another file."""
    if not path.is_file() or path.suffix == ".safetensors":
        return {}
    content = torch.load(path, map_location="meta", weights_only=True)
    found = content.get("hyper_parameters") if isinstance(content, dict) else None
    return {key: value for key, value in found.items() if isinstance(key, str)} if isinstance(found, dict) else {}


def other_files(folder: Path) -> list[Path]:
    """The files of a folder of ``transformers`` that hold no weights: its configuration, its tokenizer."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.endswith(_WEIGHTS)]
