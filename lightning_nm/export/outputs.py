"""Write packed and dense files of a checkpoint's weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_nm.export.atomic_write import (
    FilePath,
    Weights,
    check_suffix,
    replacing,
)
from lightning_nm.export.packed_file import memory_of, write_packed, write_safetensors
from lightning_nm.export.packed_model import matches
from lightning_nm.export.patterns import patterns_in
from lightning_nm.export.sources import (
    Source,
    config_without_bitmasks,
    holds_bitmasks,
    named_as_in_model,
)
from lightning_nm.packed.tensor import EVERY_ENTRY, PackedKind, PackedTensor, int8_fault
from lightning_nm.pattern import NMPattern, PatternLike

# What transformers and its relatives call files of weights.
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".index.json",  # it would name files that the new folder lacks
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
    ".gguf",
)


class Written(NamedTuple):
    """A weight in a packed file.

    Args:
        key: Its key.
        pattern: Its pattern; empty if its dense form is written.
        layout: Where its blocks lie.
        dense_bytes: Of the dense tensor.
        bytes: In the file.
        reason: Why it is dense.
        stored: ``"int8"`` if its values are; empty if they have the weight's dtype.
        part: What it is counted with in a table of the file's parts.
    """

    key: str
    pattern: str
    layout: str
    dense_bytes: int
    bytes: int
    reason: str = ""
    stored: str = ""
    part: str = ""


def export_packed(
    source: Source,
    output: FilePath,
    pattern: PatternLike | None = None,
    dtype: Literal["int8"] | None = None,
    experts: Sequence[str] = (),
    embeddings: Sequence[str] = (),
) -> list[Written]:
    """Write a packed model, which :func:`lightning_nm.load_packed` reads.

    The weights to pack are the masked layers of the sparsifier state in the checkpoint. Without one, or with `pattern`,
    they are all that are N:M. Every other tensor is written as it is.

    Args:
        source: What :func:`~lightning_nm.export.read_checkpoint` returned.
        output: The file, ``.safetensors``; it is replaced when the new one is complete.
        pattern: The pattern; by default the one of each layer.
        dtype: ``"int8"`` rounds the values to int8, as :func:`lightning_nm.pack` does. Weights of three axes keep their
            values, unless `experts` names them: they may be of a convolution or of experts, which only the model tells.
        experts: With `dtype`, globs over keys and module names of N:M weights of experts, ``[experts, out, in]`` or
            ``[experts, in, out]``, which are rounded to int8, too.
        embeddings: The same for embeddings, or other matrices that are not N:M, with a scale for each row.

    Returns:
        What became of every tensor; one that is the same as another one takes no bytes.

    Raises:
        ValueError: If no weight is N:M: the message has the blocks of each layer that are not; or a weight has no int8
            form, or a glob matches none. Nothing is written.
        OSError: If the file cannot be written.
    """
    check_suffix(output, (".safetensors",), "packed")
    weights = named_as_in_model(source)
    found = patterns_in(weights, source.states, pattern, f"'{source.path}'")
    tensors: dict[str, Tensor | PackedTensor] = {}
    written = []
    of_experts: list[str] = []  # keys that a glob names
    of_embeddings: list[str] = []
    shared: dict[object, list[str]] = {}  # the keys of each tensor: tied weights have several
    for key, weight in weights.items():
        # All empty tensors have the address 0, and are not tied for that.
        shared.setdefault(memory_of(weight) if weight.numel() else key, []).append(key)
    for keys in shared.values():
        weight = weights[keys[0]]
        own_pattern, layout, reason = found[keys[0]]
        # A weight of three axes may be of a convolution or of experts, whose scales differ.
        int8 = own_pattern is not None and dtype == "int8" and weight.dim() != 3
        is_experts = False
        # Any key of a tied weight may match.
        if own_pattern is not None and weight.dim() == 3 and _named(keys, experts):
            int8, is_experts = dtype == "int8", True
            of_experts += keys
        elif own_pattern is None and weight.dim() == 2 and _named(keys, embeddings):
            own_pattern, int8, reason = EVERY_ENTRY, True, ""
            of_embeddings += keys
        tensor: Tensor | PackedTensor = weight
        if own_pattern is not None:
            # Asked here, where the key is known for the message.
            fault = int8_fault(weight) if int8 else ""
            # The scales of experts are [experts, out].
            kind = PackedKind(own_pattern, layout, tuple(weight.shape), weight.dtype)
            if int8 and is_experts and len(kind.part_shapes["scales"]) < 2:
                fault = f"its blocks lie across rows, so that it is no weight of experts in {own_pattern}"
            if fault:
                raise ValueError(f"'{keys[0]}' of '{source.path}' has no int8 form: {fault}")
            tensor = PackedTensor.of(weight, own_pattern, layout, int8=int8, experts=is_experts)
        # One object under all keys: by its memory the writer sees that they are one tensor.
        tensors |= dict.fromkeys(keys, tensor)
        row = Written(
            keys[0],
            str(own_pattern or ""),
            layout,
            weight.nbytes,
            tensor.nbytes,
            reason,
            "int8" if int8 else "",
            _part(weight, own_pattern, int8),
        )
        written.append(row)
        # Tied keys have rows without bytes, so that the sum of all rows is the size of the file's tensors.
        for key in keys[1:]:
            same = f"the same tensor as '{keys[0]}'"
            written.append(row._replace(key=key, dense_bytes=0, bytes=0, reason=same, part=""))
    # A glob without a match is a mistake that would leave weights in float unnoticed.
    for option, globs, keys, expected in (
        ("--int8-experts", experts, of_experts, "N:M weight of three axes"),
        ("--int8-embeddings", embeddings, of_embeddings, "matrix that is not N:M"),
    ):
        for glob in globs:
            if not _named(keys, [glob]):
                raise ValueError(f"{option} '{glob}' matches no {expected}")
    # Last, so that what is refused above leaves no file.
    write_packed(output, tensors)
    return written


def _named(keys: Sequence[str], globs: Sequence[str]) -> bool:
    """Whether a glob matches a key of a tensor, or its module."""
    return any(matches(key, glob) for key in keys for glob in globs)


def _part(weight: Tensor, pattern: NMPattern | None, int8: bool) -> str:
    """The row of a tensor in a table of a file's parts."""
    dtype = "int8" if int8 else str(weight.dtype).removeprefix("torch.")
    if weight.dim() < 2:
        return "vectors and scalars"
    if pattern is None or pattern == EVERY_ENTRY:
        return f"dense, {dtype}"
    return f"N:M, {dtype}, three axes" if weight.dim() == 3 else f"N:M, {dtype}"


def export_torch(source: Source, output: FilePath) -> None:
    """Write the dense state dict, with zeros.

    Args:
        source: What :func:`~lightning_nm.export.read_checkpoint` returned.
        output: A file ``.pt``, ``.pth``, ``.bin`` or ``.safetensors``, which is replaced when the new one is complete;
            for a folder of ``transformers`` also a new folder, with its other files.

    Raises:
        ValueError: If it is none of these.
        OSError: If it cannot be written.
    """
    path = Path(output)
    if not path.suffix and source.is_folder:
        if path.exists():
            raise ValueError(f"'{path}' exists: give a folder that does not")
        with replacing(path) as new:
            new.mkdir()
            for file in source.path.iterdir():
                # Configurations and files of the tokenizer. The weights are written below, under one name.
                if file.is_file() and not file.name.endswith(_WEIGHTS):
                    shutil.copyfile(file, new / file.name)
            # The weights are dense from here on, and transformers must not look for bitmasks.
            if holds_bitmasks(source.path):
                (new / "config.json").write_text(config_without_bitmasks(source.path), "utf-8")
            _write_dense(source.weights, new / "model.safetensors")
        return
    check_suffix(path, (".pt", ".pth", ".bin", ".safetensors"), "torch")
    _write_dense(source.weights, path)


def _write_dense(weights: Weights, path: Path) -> None:
    if path.suffix == ".safetensors":
        # As save_pretrained() writes it: transformers 4 refuses a file without this entry.
        write_safetensors(path, weights, {"format": "pt"})
    else:
        with replacing(path) as new:
            torch.save(weights, new)
