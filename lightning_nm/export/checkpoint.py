"""Read weights and sparsifier states from checkpoints, state dicts and safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_nm.export.archive import check_archive
from lightning_nm.sparsifier import check_schema


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Read the weights and the sparsifier states of a file.

    Args:
        path: A Lightning checkpoint, sharded or not, a saved state dict, or a safetensors file.

    Returns:
        The state dict, and the sparsifier states; a plain state dict has none.

    Raises:
        ValueError: If the file cannot be read, is damaged or holds no weights.
    """
    path = Path(path)
    if (path / ".metadata").is_file():
        return _find(_read_shards(path), path)
    if not path.is_file():
        raise ValueError(f"'{path}' is neither a file nor the folder of a sharded checkpoint")
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise ValueError(
                "reading safetensors needs the package `safetensors`: pip install 'lightning-nm[cli]'"
            ) from None
        try:
            return load_file(path), []
        except Exception as error:
            raise ValueError(f"cannot read '{path}' as safetensors: {error}") from error
    check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"cannot read '{path}' as tensors alone: {error}") from error
    return _find(content, path)


def _read_shards(path: Path) -> dict[str, Any]:
    """Read a sharded checkpoint of Lightning: shards of the weights, and one file with everything else."""
    try:
        with TemporaryDirectory() as folder:
            dcp_to_torch_save(path, Path(folder) / "whole.pt")
            content = torch.load(Path(folder) / "whole.pt", map_location="cpu", weights_only=True)
        rest = path / "meta.pt"
        return {**content, **(torch.load(rest, map_location="cpu", weights_only=True) if rest.is_file() else {})}
    except Exception as error:
        raise ValueError(f"cannot read the sharded checkpoint '{path}': {error}") from error


def _find(content: Any, path: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    weights = _find_weights(content)
    if not weights:
        raise ValueError(f"'{path}' holds no state dict: expected tensors by name, or a checkpoint with 'state_dict'")
    callbacks = content.get("callbacks", {})
    states = [
        dict(s)
        for key, s in callbacks.items()
        if str(key).startswith("NMSparsityCallback") and isinstance(s, Mapping) and s
    ]
    if "schema" in content and "layers" in content:
        states.append(content)
    for state in states:
        check_schema(state)
    return weights, states


def _find_weights(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content.get(key), Mapping):
            content = content[key]
            break
    return {key: value for key, value in content.items() if isinstance(value, Tensor)}
