"""Checkpoints of other compression libraries: bitmasks are decoded, weights in a form that is not read are named."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_nm.functional import unpack_mask

_CONFIGS = ("quantization_config", "compression_config")  # of config.json, newer and older
_BITMASKS = ("sparse-24-bitmask", "sparse-bitmask")
# What compressed-tensors calls weights that stand under their usual keys, one value an element.
_IN_PLACE = ("dense", "int-quantized", "float-quantized", "naive-quantized")
_LIBRARY = "the library that wrote it can make a dense model of it"
# Last parts of keys that tell of a weight in another form, who writes them, and the way out.
_PACKED = {
    "qweight": ("GPTQ or AWQ", _LIBRARY),
    "weight_packed": ("compressed-tensors (pack-quantized or marlin-24)", _LIBRARY),
    "quant_map": ("bitsandbytes (4 bits)", _LIBRARY),
    "positions": ("pack() of lightning_nm", "save it by save_packed(), or unpacked_state_dict()"),
    "kernel_index": (
        "pack() of lightning_nm",
        "verify the packed file or the checkpoint that the program was made from",
    ),
}


def compression_of(folder: Path) -> dict[str, Any]:
    """What config.json of a model folder says of its quantisation or compression; empty if nothing.

    Raises:
        ValueError: If the file cannot be read.
    """
    config = _read_config(folder)
    found: Any = next((config[name] for name in _CONFIGS if config.get(name)), {})
    return found if isinstance(found, dict) else {"quant_method": str(found)}


def holds_bitmasks(folder: Path) -> bool:
    """Whether the weights of a model folder are compressed by bitmasks, which transformers does not read."""
    return _sparsity(compression_of(folder)) in _BITMASKS


def check_compression(folder: Path) -> None:
    """Refuse a model folder whose weights are in a form that is not read.

    Raises:
        ValueError: With the name of the form.
    """
    config = compression_of(folder)
    if not config:
        return
    default = "compressed-tensors" if "sparsity_config" in config else "unknown"
    method = str(config.get("quant_method", default))
    form = str(config.get("format", "dense"))
    sparsity = _sparsity(config)
    if method == "fp8":
        return
    if method == "compressed-tensors" and form in _IN_PLACE and sparsity in ("dense", *_BITMASKS):
        return
    names = [method]
    if method == "compressed-tensors":
        names += [name for name in (form, sparsity) if name != "dense"]
    elif "bits" in config:
        names.append(f"{config['bits']} bits")
    raise ValueError(
        f"'{folder}' is quantised ({', '.join(names)}), and weights in this form are not read: {_LIBRARY}"
    )


def decoded(weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The dense weights of a checkpoint: those that compressed-tensors (up to 0.9) wrote as bitmasks are decoded.

    A weight of R x C has its nonzeros, row by row, under ``.compressed``, and its mask under ``.bitmask``: R rows of
    ceil(C / 8) bytes, the lowest bit first. ``.shape`` holds R and C.

    Args:
        weights: Tensors by key.
        path: Of the file or folder, for messages.

    Raises:
        ValueError: If a bitmask does not fit its values, or a weight is in a form that is not read.
    """
    found: dict[str, Tensor] = {}
    parts: set[str] = set()
    for key in weights:
        name, _, part = key.rpartition(".")
        if part == "bitmask":
            parts |= {
                f"{name}.{each}" for each in ("compressed", "bitmask", "shape", "row_offsets")
            }
        elif part in _PACKED and not weights[key].is_floating_point():
            writer, way_out = _PACKED[part]
            raise ValueError(
                f"'{path}' holds '{key}', a weight as {writer} packs it, which is not read: {way_out}"
            )
    for key, weight in weights.items():
        name, _, part = key.rpartition(".")
        if part == "bitmask":
            module = name.removesuffix(".weight")
            dense_key = f"{module}.weight"
            if dense_key in weights:
                raise ValueError(f"'{path}' holds both '{dense_key}' and '{key}'")
            try:
                found[dense_key] = _dense(weight, weights, name)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                reason = f"there is no {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"'{path}' is damaged: '{key}': {reason}") from error
        elif key not in parts:
            found[key] = weight
    return found


def config_without_bitmasks(folder: Path) -> str:
    """The text of config.json for the same weights as dense tensors."""
    config = _read_config(folder)
    for name in _CONFIGS:
        if isinstance(config.get(name), dict):
            config[name].pop("sparsity_config", None)
            # What is left describes quantised weights, or nothing.
            if config[name].get("format", "dense") == "dense":
                del config[name]
    return json.dumps(config, indent=2) + "\n"


def _dense(bitmask: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    values = weights[f"{name}.compressed"].reshape(-1)
    shape = [int(size) for size in weights[f"{name}.shape"].reshape(-1).tolist()]
    if not shape or min(shape) < 1:
        raise ValueError(f"its shape is {shape}")
    *rows, columns = shape
    row_bytes = math.ceil(columns / 8)
    # Nothing of the shape is allocated before the file is known to have a bit for each entry.
    if bitmask.dtype != torch.uint8 or bitmask.numel() != math.prod(rows) * row_bytes:
        raise ValueError(f"it has {bitmask.numel()} bytes, which do not fit the shape {shape}")
    bits = unpack_mask(bitmask.reshape(-1), (math.prod(rows), row_bytes * 8))
    mask = bits[:, :columns].reshape(shape)
    kept = int(mask.sum())
    if kept != values.numel():
        raise ValueError(f"it keeps {kept} entries, and there are {values.numel()} values")
    dense = torch.zeros(shape, dtype=values.dtype)
    if values.itemsize == 1:  # older versions of torch assign no float8 values by a mask
        dense.view(torch.int8)[mask] = values.view(torch.int8)
    else:
        dense[mask] = values
    return dense


def _sparsity(config: Mapping[str, Any]) -> str:
    found = config.get("sparsity_config")
    return str(found.get("format", "dense")) if isinstance(found, dict) else "dense"


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot read '{path}': {error}") from error
    return config if isinstance(config, dict) else {}
