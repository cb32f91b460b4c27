"""``lightning-nm verify``: does every block of a checkpoint's weights hold at most N of M?"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_nm.export.archive import check_archive
from lightning_nm.functional import count_violations
from lightning_nm.nn.names import key_of_layer, plain_name
from lightning_nm.pattern import NMPattern
from lightning_nm.sparsifier import check_schema

_NEARLY = 0.5
"""A weight with a smaller share of violating blocks was meant to be N:M; a dense one violates nearly everywhere."""


@dataclass(frozen=True)
class Verdict:
    """What was found for one weight.

    Args:
        key: Key in the state dict.
        verdict: ``"N:M"``, ``"dense"`` or ``"broken"``.
        pattern: The pattern it was held against.
        blocks: Number of blocks.
        violations: Blocks with more than N nonzeros.
        density: Share of nonzeros.
        note: The axis, or why there is nothing to check.
    """

    key: str
    verdict: str
    pattern: str
    blocks: int = 0
    violations: int = 0
    density: float = 1.0
    note: str = ""


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Read the weights and the sparsifier states of a file.

    Args:
        path: A Lightning checkpoint, sharded or not, a saved state dict, or a safetensors file.

    Returns:
        The state dict, and the sparsifier states, of which there is none in a plain state dict.

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
    """The contents of a sharded checkpoint of Lightning's: shards of the weights, and a file of all else."""
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


def verify_state(weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> list[Verdict]:
    """Hold every layer that a sparsifier state names against its pattern.

    Raises:
        ValueError: If the weights of a layer are missing.
    """
    verdicts = []
    keys = {plain_name(key): key for key in weights}
    for name, layer in state["layers"].items():
        plain = key_of_layer(plain_name(name), layer["parameter"])
        if plain not in keys:
            raise ValueError(f"the file has masks for '{name}' but no weight '{plain}'")
        key = keys[plain]
        pattern = NMPattern.parse(layer["pattern"])
        if not layer["masked"]:
            verdicts.append(Verdict(key, "dense", str(pattern), note="forward weight not masked"))
            continue
        weight = weights[key]
        rows = {"flat": lambda w: w.flatten(1), "transposed": lambda w: w.t(), "plain": lambda w: w}[layer["layout"]](
            weight
        )
        verdicts.append(_judge(key, rows, pattern, 1, layer["layout"], dense_from=None))
    return verdicts


def classify(weights: Mapping[str, Tensor], pattern: NMPattern) -> list[Verdict]:
    """Tell for every matrix and kernel of a file without sparsifier state whether it is N:M, dense or broken.

    A matrix is tried along dimension 1 and along dimension 0 (weights stored ``[in, out]``), a kernel along its input
    channels and along the flattened filter; the axis with the fewest violations counts.
    """
    verdicts = []
    for key, weight in weights.items():
        if weight.dim() < 2 or not weight.is_floating_point():
            continue
        views = [(weight, 1, "along dim 1")]
        views.append(
            (weight, 0, "along dim 0") if weight.dim() == 2 else (weight.flatten(1), 1, "along the flattened filter")
        )
        tried = [
            _judge(key, rows, pattern, dim, note, dense_from=_NEARLY)
            for rows, dim, note in views
            if rows.shape[dim] % pattern.m == 0
        ]
        if tried:
            verdicts.append(min(tried, key=lambda verdict: verdict.violations / max(verdict.blocks, 1)))
        else:
            verdicts.append(
                Verdict(key, "dense", str(pattern), note=f"shape {tuple(weight.shape)} has no axis of blocks")
            )
    return verdicts


def _judge(key: str, rows: Tensor, pattern: NMPattern, dim: int, note: str, dense_from: float | None) -> Verdict:
    violations, blocks = int(count_violations(rows, pattern, dim=dim)), rows.numel() // pattern.m
    density = float(torch.count_nonzero(rows)) / max(rows.numel(), 1)
    if not violations:
        verdict = "N:M"
        if density == 0:
            verdict, note = "dense" if dense_from is not None else "N:M", "all zero"
    elif dense_from is not None and violations >= dense_from * blocks:
        verdict = "dense"
    else:
        verdict = "broken"
    return Verdict(key, verdict, str(pattern), blocks, violations, density, note)


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm verify``.

    Returns:
        0 if every masked weight is N:M; 1 if one is not, or none is; 2 if the file or an option cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-nm verify",
        description="Check that every block of a checkpoint's masked weights holds at most N nonzeros in M. "
        "Exits with 0 if so, 1 if not, 2 if the file cannot be read.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="Lightning checkpoint, state dict or .safetensors file")
    parser.add_argument(
        "--pattern",
        metavar="N:M",
        help="classify every weight against this pattern; needed for a file without sparsifier state",
    )
    parser.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        default=[],
        help="weights (by key or module name) that must be N:M; may be given several times",
    )
    options = parser.parse_args(list(args))
    console = Console()
    try:
        pattern = NMPattern.parse(options.pattern) if options.pattern else None
        weights, states = read_checkpoint(options.checkpoint)
        if pattern is not None:
            verdicts = classify(weights, pattern)
        elif states:
            verdicts = [verdict for state in states for verdict in verify_state(weights, state)]
        else:
            raise ValueError(
                f"'{options.checkpoint}' has no sparsifier state that names its masked layers: give --pattern, "
                "for example --pattern 2:4"
            )
    except ValueError as error:
        console.print(f"lightning-nm verify: {error}", markup=False, soft_wrap=True)
        return 2
    console.print(_table(verdicts))
    problems = _problems(verdicts, options.include)
    for problem in problems:
        console.print(f"FAILED: {problem}", markup=False, soft_wrap=True)
    if not problems:
        good = sum(verdict.verdict == "N:M" for verdict in verdicts)
        console.print(f"OK: {good} weights, no block holds more than N of M")
    return 1 if problems else 0


def _problems(verdicts: Sequence[Verdict], include: Sequence[str]) -> list[str]:
    problems = [
        f"'{v.key}' is not {v.pattern}: {v.violations} of {v.blocks} blocks hold more"
        for v in verdicts
        if v.verdict == "broken"
    ]
    if not any(verdict.verdict == "N:M" for verdict in verdicts):
        problems.append("no weight is N:M sparse")
    for glob in include:
        named = [v for v in verdicts if fnmatchcase(v.key, glob) or fnmatchcase(v.key.rpartition(".")[0], glob)]
        if not named:
            problems.append(f"--include '{glob}' matches no weight")
        problems += [f"'{v.key}' is demanded by --include but is dense" for v in named if v.verdict == "dense"]
    return problems


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="N:M verification", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("weight", overflow="fold", min_width=20)
    for column in ("pattern", "verdict", "violating", "density"):
        table.add_column(column, no_wrap=True)
    table.add_column("note", overflow="fold", min_width=12)
    colours = {"N:M": "green", "broken": "red", "dense": "dim"}
    for v in verdicts:
        table.add_row(
            v.key,
            v.pattern,
            v.verdict,
            f"{v.violations} / {v.blocks}",
            f"{v.density:.4f}",
            v.note,
            style=colours[v.verdict],
        )
    return table
