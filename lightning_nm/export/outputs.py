"""Write packed and dense files of a checkpoint's weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from lightning_nm.export.atomic_write import check_folder, replacing
from lightning_nm.export.foreign import config_without_bitmasks, holds_bitmasks
from lightning_nm.export.huggingface import named_as_in_model
from lightning_nm.export.packed_file import ToPack, write_packed
from lightning_nm.export.packed_model import refuse_empty
from lightning_nm.export.patterns import patterns_in
from lightning_nm.export.safetensors_file import write_safetensors
from lightning_nm.export.sources import Source, other_files
from lightning_nm.functional.nm_format import position_bytes
from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.nn.packed import int8_fault


class Written(NamedTuple):
    """A weight in a packed file.

    Args:
        key: Its key.
        pattern: Its pattern; empty if it is dense.
        layout: Where its blocks lie.
        dense_bytes: Of the dense tensor.
        bytes: In the file.
        reason: Why it is dense.
        stored: ``"int8"`` if its values are; empty if they have the weight's dtype.
    """

    key: str
    pattern: str
    layout: str
    dense_bytes: int
    bytes: int
    reason: str = ""
    stored: str = ""


def export_packed(
    source: Source,
    output: str | os.PathLike[str],
    pattern: PatternLike | None = None,
    dtype: Literal["int8"] | None = None,
) -> list[Written]:
    """Write a packed model, which :func:`lightning_nm.load_packed` reads.

    The weights to pack are the masked layers of the sparsifier state in the checkpoint. Without one, or with `pattern`,
    they are all that are N:M. Every other tensor is written as it is.

    Args:
        source: What :func:`~lightning_nm.export.sources.read_source` returned.
        output: The file, ``.safetensors``; it is replaced when the new one is complete.
        pattern: The pattern; by default the one of each layer.
        dtype: ``"int8"`` rounds the values to int8, as :func:`lightning_nm.pack` does. Weights of three axes keep their
            values: they may be of a convolution or of experts, which only the model tells.

    Returns:
        What became of every tensor.

    Raises:
        ValueError: If no weight is N:M: the message has the blocks of each layer that are not; or a weight has no int8
            form. Nothing is written.
        OSError: If the file cannot be written.
    """
    _check_suffix(output, (".safetensors",), "packed")
    given = None if pattern is None else NMPattern.parse(pattern)
    weights = source.weights
    if source.folder is not None:
        weights = named_as_in_model(weights, source.states, source.folder)
    found = patterns_in(weights, source.states, given)
    # Vectors are never packed: their reasons tell nothing.
    packed = {key: each for key, each in found.items() if each.pattern is not None}
    matrices = {key: each.reason for key, each in found.items() if weights[key].dim() >= 2}
    refuse_empty(packed, matrices, f"no weight of '{source.path}' is {given or 'N:M'} sparse")
    tensors: dict[str, Tensor | ToPack] = {}
    written = []
    for key, weight in weights.items():
        own_pattern, layout, reason = found[key]
        size = weight.nbytes
        if own_pattern is None:
            tensors[key] = weight
            written.append(Written(key, "", "", size, size, reason))
            continue
        # A weight of three axes may be of a convolution or of experts, whose scales differ.
        int8 = dtype == "int8" and weight.dim() != 3
        fault = int8_fault(weight) if int8 else ""
        if fault:
            raise ValueError(f"'{key}' of '{source.path}' has no int8 form: {fault}")
        tensors[key] = ToPack(weight, own_pattern, layout, int8)
        blocks = weight.numel() // own_pattern.m
        value_bytes = 1 if int8 else weight.itemsize
        packed_size = blocks * own_pattern.n * value_bytes + position_bytes(own_pattern, blocks)
        if int8:
            scale_count = weight.shape[1 if layout == "transposed" else 0]
            packed_size += scale_count * 4
        stored = "int8" if int8 else ""
        written.append(Written(key, str(own_pattern), layout, size, packed_size, reason, stored))
    write_packed(output, tensors)
    return written


def export_torch(source: Source, output: str | os.PathLike[str]) -> None:
    """Write the dense state dict, with zeros.

    Args:
        source: What :func:`~lightning_nm.export.sources.read_source` returned.
        output: A file ``.pt``, ``.pth``, ``.bin`` or ``.safetensors``, which is replaced when the new one is complete;
            for a folder of ``transformers`` also a new folder, with its other files.

    Raises:
        ValueError: If it is none of these.
        OSError: If it cannot be written.
    """
    path = Path(output)
    if not path.suffix and source.folder is not None:
        _write_folder(source, path)
        return
    _check_suffix(path, (".pt", ".pth", ".bin", ".safetensors"), "torch")
    _write_dense(source.weights, path)


def _write_dense(weights: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        entries = {key: (weight.dtype, tuple(weight.shape)) for key, weight in weights.items()}
        write_safetensors(path, entries, weights.items(), {"format": "pt"})
    else:
        with replacing(path) as new:
            torch.save(weights, new)


def _write_folder(source: Source, path: Path) -> None:
    if path.exists():
        raise ValueError(f"'{path}' exists: give a folder that does not")
    assert source.folder is not None
    check_folder(path)
    new = path.with_name(f".{path.name}.{uuid4().hex}")
    new.mkdir()
    try:
        for file in other_files(source.folder):
            shutil.copyfile(file, new / file.name)
        if holds_bitmasks(source.folder):
            (new / "config.json").write_text(config_without_bitmasks(source.folder), "utf-8")
        _write_dense(source.weights, new / "model.safetensors")
        new.rename(path)
    except OSError as error:
        # The name of the temporary folder tells nothing.
        fault = error.__cause__ or error
        reason = getattr(fault, "strerror", None) or fault
        raise type(error)(f"'{path}' was not written: {reason}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _check_suffix(path: str | os.PathLike[str], suffixes: tuple[str, ...], to: str) -> None:
    if Path(path).suffix not in suffixes:
        raise ValueError(f"--to {to} writes {' or '.join(suffixes)}, not '{path}'")
