"""Read weights and sparsifier states from checkpoints, state dicts, safetensors files and folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_nm.export.files import read_file, tensors_in
from lightning_nm.export.foreign import decoded
from lightning_nm.export.huggingface import read_folder
from lightning_nm.export.shards import read_shards
from lightning_nm.training.checkpoint import check_schema


def read_checkpoint(
    path: str | Path, *, nested: bool = False
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Read the weights and the sparsifier states of a checkpoint.

    Args:
        path: A Lightning checkpoint, a saved state dict or a safetensors file; or the folder of a sharded checkpoint
            or of a transformers model.
        nested: Also read the tensors in dictionaries and lists within the state dict, under names with dots.

    Returns:
        The state dict, and the sparsifier states; a plain state dict has none.

    Raises:
        ValueError: If the file cannot be read, is damaged or holds no weights, or holds them in a form that is not
            read, such as packed integers of other libraries.
    """
    path = Path(path)
    if (path / ".metadata").is_file():
        try:
            content = read_shards(path)
        except Exception as error:
            raise ValueError(f"cannot read the sharded checkpoint '{path}': {error}") from error
        return _find_weights_and_states(content, path, nested)
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
