"""Read weights and sparsifier states from checkpoints, state dicts, safetensors files and folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_nm.export.files import read_file
from lightning_nm.export.huggingface import read_folder
from lightning_nm.export.shards import read_shards
from lightning_nm.training.checkpoint import check_schema


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Read the weights and the sparsifier states of a checkpoint.

    Args:
        path: A Lightning checkpoint, a saved state dict or a safetensors file; or the folder of a sharded checkpoint
            or of a transformers model.

    Returns:
        The state dict, and the sparsifier states; a plain state dict has none.

    Raises:
        ValueError: If the file cannot be read, is damaged or holds no weights.
    """
    path = Path(path)
    if (path / ".metadata").is_file():
        try:
            content = read_shards(path)
        except Exception as error:
            raise ValueError(f"cannot read the sharded checkpoint '{path}': {error}") from error
        return _find_weights_and_states(content, path)
    if path.is_dir():
        return read_folder(path)
    if not path.is_file():
        raise ValueError(f"'{path}' is neither a file nor a folder")
    return _find_weights_and_states(read_file(path), path)


def _find_weights_and_states(
    content: Any, path: Path
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    if not isinstance(content, Mapping):
        content = {}
    state_dict = content
    # Lightning's key, and those that many training loops use.
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content.get(key), Mapping):
            state_dict = content[key]
            break
    weights = {key: value for key, value in state_dict.items() if isinstance(value, Tensor)}
    if not weights:
        raise ValueError(
            f"'{path}' holds no state dict: expected tensors by name, or a checkpoint with 'state_dict'"
        )
    states = []
    for name, state in content.get("callbacks", {}).items():
        if str(name).startswith("NMSparsityCallback") and isinstance(state, Mapping) and state:
            states.append(dict(state))
    # A file that holds the state of a sparsifier itself.
    if "schema" in content and isinstance(content.get("layers"), Mapping):
        states.append(dict(content))
    for state in states:
        check_schema(state)
    return weights, states
