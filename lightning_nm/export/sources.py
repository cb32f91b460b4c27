"""Read weights and sparsifier states from checkpoints, state dicts, packed models and folders of ``transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.export.files import read_file, tensors_in
from lightning_nm.export.huggingface import decoded, read_folder
from lightning_nm.export.packed_file import PackedFile, is_packed
from lightning_nm.training.checkpoint import check_schema

# What transformers and its relatives call files of weights.
_WEIGHTS = (
    *(".safetensors", ".bin", ".index.json", ".pt", ".pth", ".ckpt"),
    *(".h5", ".msgpack", ".onnx", ".ot", ".gguf"),
)


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


def read_checkpoint(
    path: str | Path, *, nested: bool = False
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Read the weights and the sparsifier states of a checkpoint.

    Args:
        path: A Lightning checkpoint, a saved state dict or a safetensors file; or the folder of a transformers model.
        nested: Also read the tensors in dictionaries and lists within the state dict, under names with dots.

    Returns:
        The state dict, and the sparsifier states; a plain state dict has none.

    Raises:
        ValueError: If the file cannot be read, is damaged or holds no weights, or holds them in a form that is not
            read, such as packed integers of other libraries.
    """
    path = Path(path)
    if (path / ".metadata").is_file():
        # Lightning keeps the callbacks' states, the sparsifier's among them, in a file of their own.
        command = (
            f"lightning.fabric.utilities.consolidate_checkpoint {path} --output_file NEW.ckpt"
            if (path / "meta.pt").is_file()
            else f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} NEW.pt"
        )
        raise ValueError(
            f"'{path}' is a sharded checkpoint, whose index is a pickle, and no pickle is read: if you trust it, make "
            f"one file of it by `python -m {command}`"
        )
    if path.is_dir():
        return read_folder(path, nested=nested)
    if not path.is_file():
        raise ValueError(f"'{path}' is neither a file nor a folder")
    return _find_weights_and_states(read_file(path), path, nested)


def _find_weights_and_states(
    content: Any, path: Path, nested: bool
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    if nested and isinstance(content, list | tuple):
        content = dict(enumerate(content))
    if not isinstance(content, Mapping):
        content = {}
    state_dict = content
    # Lightning's key, and those that many training loops use.
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content.get(key), Mapping):
            state_dict = content[key]
            break
    # A file may also hold the state of a sparsifier itself.
    is_state = "schema" in content and isinstance(content.get("layers"), Mapping)
    weights = decoded(tensors_in(state_dict, path, nested=nested and not is_state), path)
    if not weights:
        raise ValueError(
            f"'{path}' holds no state dict: expected tensors by name, or a checkpoint with 'state_dict'"
        )
    states = []
    callbacks = content.get("callbacks")
    for name, state in callbacks.items() if isinstance(callbacks, Mapping) else ():
        if str(name).startswith("NMSparsityCallback") and isinstance(state, Mapping) and state:
            states.append(dict(state))
    if is_state:
        states.append(dict(content))
    for state in states:
        check_schema(state)
    return weights, states


def read_source(path: str | Path, prefix: str = "") -> Source:
    """Read a checkpoint; nothing is unpickled but tensors and primitives.

    Args:
        path: A Lightning checkpoint, a state dict (``.pt``, ``.safetensors``), a packed model, or a
            folder that ``save_pretrained`` of ``transformers`` wrote.
        prefix: Take only the keys that begin with it, and remove it.

    Raises:
        ValueError: If it cannot be read, holds no weights, or no key begins with `prefix`.
    """
    path = Path(path)
    source = _read(path)
    if not prefix:
        return source
    weights = {}
    for key, weight in source.weights.items():
        if key.startswith(prefix):
            weights[key.removeprefix(prefix)] = weight
    if not weights:
        shown = ", ".join(repr(key) for key in list(source.weights)[:4])
        raise ValueError(f"no key of '{path}' begins with '{prefix}': they are {shown}, ...")
    states = [{**state, "layers": _without(state["layers"], prefix)} for state in source.states]
    return source._replace(weights=weights, states=states)


def _without(layers: dict[str, Any], prefix: str) -> dict[str, Any]:
    found = {}
    for name, layer in layers.items():
        # The module that the prefix names has no dot at its end.
        if f"{name}.".startswith(prefix):
            found[name.removeprefix(prefix)] = layer
    return found


def _read(path: Path) -> Source:
    if is_packed(path):
        file = PackedFile(path)
        unpacked = {key: file.read_dense(key) for key in (*file.dense, *file.packed)}
        # Aliases share their tensor.
        return Source(
            path, unpacked | {key: unpacked[own] for key, own in file.aliases.items()}, []
        )
    weights, states = read_checkpoint(path)
    folder = path if (path / "config.json").is_file() else None
    return Source(path, weights, states, folder)


def hyperparameters(path: Path) -> dict[str, Any]:
    """The model's arguments that Lightning saved in a checkpoint; none in another file."""
    if not path.is_file() or path.suffix == ".safetensors":
        return {}
    content = torch.load(path, map_location="meta", weights_only=True)
    found = content.get("hyper_parameters") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(key, str)}


def other_files(folder: Path) -> list[Path]:
    """The files of a folder of ``transformers`` that hold no weights: its configuration, its tokenizer."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.endswith(_WEIGHTS)
    ]
