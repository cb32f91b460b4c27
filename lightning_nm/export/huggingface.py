"""Read model folders of Hugging Face's transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_nm.export.files import read_file, tensors_in
from lightning_nm.export.foreign import check_compression, decoded, holds_bitmasks
from lightning_nm.nn.layer.names import key_of_layer, plain_name
from lightning_nm.training.checkpoint import check_schema

STATE_FILE = "nm_sparsifier.pt"
"""Where :class:`~lightning_nm.integrations.NMTrainerCallback` saves its state in a checkpoint folder."""

_ONE_EXPERT = re.compile(r"\bexperts\.\d+\.")
_FILES = ("model.safetensors", "pytorch_model.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def holds_model(folder: Path) -> bool:
    """Whether a folder holds a whole model, in one file or in several."""
    names = [*_FILES, *(f"{name}.index.json" for name in _FILES)]
    return any((folder / name).is_file() for name in names)


def read_folder(
    folder: Path, *, nested: bool = False
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Read the weights of a model folder, in one file or in several with an index, and the sparsifier state in it.

    Args:
        folder: The folder.
        nested: As of :func:`~lightning_nm.export.read_checkpoint`.

    Raises:
        ValueError: If the folder holds no model, a file of it is missing or cannot be read, or its weights are in a
            form that is not read.
    """
    content = _read_weights(folder)
    check_compression(folder)
    weights = decoded(tensors_in(content, folder, nested=nested), folder)
    if not weights:
        raise ValueError(f"the model in '{folder}' holds no tensors")
    path = folder / STATE_FILE
    states = [read_file(path)] if path.is_file() else []
    for state in states:
        check_schema(state)
    return weights, states


def named_as_in_model(
    weights: dict[str, Tensor], states: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, Tensor]:
    """The weights of a checkpoint under the names that they have in the model.

    transformers saves the experts of many models one by one, under other names than their one weight in the model. If
    the sparsifier states name weights that the folder of such a model lacks, or its names tell of single experts, the
    model is built by transformers, and its state dict is returned.

    Raises:
        ValueError: If it cannot be built, and the states name weights that are missing.
    """
    if not (folder / "config.json").is_file():
        return weights
    named = set()
    for state in states:
        for name, layer in state["layers"].items():
            named.add(key_of_layer(plain_name(name), layer["parameter"]))
    lacking = sorted(named - {plain_name(key) for key in weights})
    if not lacking and not any(_ONE_EXPERT.search(key) for key in weights):
        return weights
    try:
        return _state_dict_of_model(folder)
    except Exception as error:
        if not lacking:
            return weights
        fault = f"'{folder}' has masks for '{lacking[0]}' under another name than its weight has"
        raise ValueError(f"{fault}, and transformers cannot build the model: {error}") from error


def check_loadable(folder: Path) -> None:
    """Refuse a folder of bitmasks where transformers is to build the model: it would not read them.

    Raises:
        ValueError: With the way out.
    """
    if holds_bitmasks(folder):
        raise ValueError(
            f"'{folder}' holds bitmasks of compressed-tensors, which transformers does not read: make an ordinary "
            f"folder of it by `lightning-nm export {folder} --to torch -o NEW_FOLDER`, and take that"
        )


def _state_dict_of_model(folder: Path) -> dict[str, Tensor]:
    check_loadable(folder)
    try:
        import transformers
    except ImportError:
        raise ValueError("pip install -e '.[hf]' in a checkout of lightning_nm") from None
    config = json.loads((folder / "config.json").read_text("utf-8"))
    names = config.get("architectures") or ["none"]
    cls = getattr(transformers, names[0], None)
    if cls is None:
        raise ValueError(f"it has no class {names[0]}")
    model = cls.from_pretrained(folder, dtype="auto", local_files_only=True)
    found: dict[str, Tensor] = model.state_dict()
    return found


def _read_weights(folder: Path) -> Mapping[str, Any]:
    for name in _FILES:
        path = folder / name
        if path.is_file():
            content = read_file(path)
            return content if isinstance(content, Mapping) else {}
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_parts(folder, index)
    found = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    if found:
        raise ValueError(
            f"'{folder}' holds no model itself, but folders that may: {', '.join(found)}"
        )
    if any((folder / name).is_file() for name in _ADAPTERS):
        advice = "merge it into its base model and save that"
        raise ValueError(
            f"'{folder}' holds an adapter, whose matrices are not the model's: {advice}"
        )
    names = ", ".join(f"{name}, {name}.index.json" for name in _FILES)
    raise ValueError(f"the folder '{folder}' holds no model: expected one of {names}")


def _read_parts(folder: Path, index: Path) -> dict[str, Any]:
    """Read a model whose index names the file of every weight."""
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        places = {key: str(name) for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"cannot read '{index}': it is no index with a `weight_map` of file names"
        ) from error
    files = sorted(set(places.values()))
    strange = [name for name in files if Path(name).name != name]
    if strange:
        raise ValueError(f"'{index}' names '{strange[0]}', which is not a file in its folder")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"'{folder}' is incomplete: {len(missing)} of {len(files)} files are missing: {missing}"
        )
    parts = {name: read_file(folder / name) for name in files}
    lost = [key for key, name in places.items() if key not in parts[name]]
    if lost:
        raise ValueError(
            f"'{folder / places[lost[0]]}' lacks the weight '{lost[0]}' that the index names"
        )
    return {key: parts[name][key] for key, name in places.items()}
