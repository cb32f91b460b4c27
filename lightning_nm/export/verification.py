"""Check that every block of a checkpoint's weights holds at most N nonzeros in M."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_nm.export.checkpoint import read_checkpoint
from lightning_nm.functional import count_violations
from lightning_nm.nn.layout import rows_of
from lightning_nm.nn.names import key_of_layer, plain_name
from lightning_nm.pattern import NMPattern, PatternLike

_DENSE_FROM = 0.5  # without a sparsifier state, weights with fewer violating blocks are broken, the others dense


@dataclass(frozen=True)
class Verdict:
    """The result for one weight.

    Args:
        key: Key in the state dict.
        verdict: ``"N:M"``, ``"dense"`` or ``"broken"``.
        pattern: The pattern that the weight was checked against.
        blocks: Number of blocks.
        violations: Blocks with more than N nonzeros.
        density: Share of nonzeros.
        note: The axis, or the reason why nothing was checked.
    """

    key: str
    verdict: str
    pattern: str
    blocks: int = 0
    violations: int = 0
    density: float = 1.0
    note: str = ""


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`.

    Args:
        verdicts: One result for each weight.
        problems: Messages; empty if every masked weight is N:M, and at least one weight is.
        matrices: The number of entries of every floating-point weight of two or more dimensions, by key.
    """

    verdicts: list[Verdict]
    problems: list[str]
    matrices: Mapping[str, int] = field(default_factory=dict)

    def count(self, verdict: str) -> int:
        """The number of matrices with a verdict; those that the sparsifier state does not name are dense."""
        found = sum(v.verdict == verdict for v in self.verdicts if v.key in self.matrices)
        unnamed = len(self.matrices.keys() - {v.key for v in self.verdicts})
        return found + unnamed if verdict == "dense" else found

    @property
    def share(self) -> float:
        """The share of the matrices' entries that is in N:M matrices."""
        return _share(self.verdicts, self.matrices)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify(
    checkpoint: str | Path,
    pattern: PatternLike | None = None,
    include: str | Sequence[str] = (),
    min_share: float = 0.0,
) -> Verification:
    """Check that every block of a checkpoint's masked weights holds at most N nonzeros in M.

    Args:
        checkpoint: A Lightning checkpoint, sharded or not, a saved state dict, a safetensors file, or the folder of a
            transformers model.
        pattern: Classify every weight against this pattern. By default the masked layers and their patterns are those
            of the sparsifier state in the file.
        include: Globs over keys or module names of weights that must be N:M.
        min_share: The least share of the entries of all matrices that must be in N:M matrices, from 0 to 1.

    Raises:
        ValueError: If the file cannot be read, or has no sparsifier state and no pattern is given.

    Example::

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from lightning_nm.functional import nm_prune
        >>> with TemporaryDirectory() as folder:
        ...     torch.save({"weight": nm_prune(torch.randn(8, 8), "2:4")}, Path(folder) / "model.pt")
        ...     verify(Path(folder) / "model.pt", "2:4").ok
        True
    """
    parsed = None if pattern is None else NMPattern.parse(pattern)
    if not 0 <= min_share <= 1:
        raise ValueError(f"min_share={min_share} must be a share from 0 to 1")
    weights, states = read_checkpoint(checkpoint)
    matrices = {key: weight for key, weight in weights.items() if weight.dim() >= 2 and weight.is_floating_point()}
    if parsed is not None:
        verdicts = [_classify(key, weight, parsed) for key, weight in matrices.items()]
    elif states:
        verdicts = [verdict for state in states for verdict in verify_state(weights, state)]
    else:
        raise ValueError(
            f"'{checkpoint}' has no sparsifier state that names its masked layers: give a pattern, for example "
            "--pattern 2:4"
        )
    verdicts = [_with_adapter(verdict, weights) for verdict in verdicts]
    problems = _problems(verdicts, [include] if isinstance(include, str) else include)
    sizes = {key: weight.numel() for key, weight in matrices.items()}
    share = _share(verdicts, sizes)
    if share < min_share:
        problems.append(f"only {share:.1%} of the matrices' entries are in N:M matrices, less than {min_share:.1%}")
    return Verification(verdicts, problems, sizes)


def _with_adapter(verdict: Verdict, weights: Mapping[str, Tensor]) -> Verdict:
    """A verdict that tells of a low-rank adapter that the file holds for the weight."""
    module, base, _ = verdict.key.rpartition(".base_layer.")
    if verdict.verdict != "N:M" or not base or not any(key.startswith(f"{module}.lora_") for key in weights):
        return verdict
    note = "a low-rank adapter lies on it; merged, it is N:M only if mask_adapters() masked the adapter"
    return replace(verdict, note="; ".join(filter(None, (verdict.note, note))))


def verify_state(weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> list[Verdict]:
    """Check the weights of all layers of a sparsifier state against their patterns.

    Raises:
        ValueError: If the weights of a layer are missing.
    """
    verdicts = []
    keys = {plain_name(key): key for key in weights}
    for name, layer in state["layers"].items():
        plain, pattern = key_of_layer(plain_name(name), layer["parameter"]), NMPattern.parse(layer["pattern"])
        if plain not in keys:
            raise ValueError(f"the file has masks for '{name}' but no weight '{plain}'")
        if layer["masked"]:
            layout = layer["layout"]
            rows = rows_of(weights[keys[plain]], layout)
            verdicts.append(_judge(keys[plain], rows, pattern, 1, layout, masked=True))
        else:
            verdicts.append(Verdict(keys[plain], "dense", str(pattern), note="forward weight not masked"))
    return verdicts


def _classify(key: str, weight: Tensor, pattern: NMPattern) -> Verdict:
    """Check a weight along all axes on which blocks may lie; the axis with the fewest violations counts."""
    # Some layers store weights as [in, out]; the blocks of a convolution may lie along the flattened filter. A 3-D
    # weight is that of a 1-d convolution, or one matrix for each expert.
    axes = [(weight, 1, "along dim 1")]
    if weight.dim() == 2:
        axes.append((weight, 0, "along dim 0"))
    elif weight.dim() == 3:
        axes += [(weight, 2, "along dim 2"), (weight.flatten(1), 1, "along the flattened filter")]
    else:
        axes.append((weight.flatten(1), 1, "along the flattened filter"))
    verdicts = [
        _judge(key, rows, pattern, dim, note, masked=False)
        for rows, dim, note in axes
        if rows.shape[dim] % pattern.m == 0
    ]
    none = Verdict(key, "dense", str(pattern), note=f"shape {tuple(weight.shape)} has no axis of blocks")
    return min(verdicts, key=lambda verdict: verdict.violations / max(verdict.blocks, 1), default=none)


def _judge(key: str, rows: Tensor, pattern: NMPattern, dim: int, note: str, masked: bool) -> Verdict:
    violations, blocks = int(count_violations(rows, pattern, dim=dim)), rows.numel() // pattern.m
    density = float(torch.count_nonzero(rows)) / max(rows.numel(), 1)
    if not violations:
        verdict = "N:M" if masked or density else "dense"
        note = note if density else "all zero"
    else:
        verdict = "broken" if masked or violations < _DENSE_FROM * blocks else "dense"
    return Verdict(key, verdict, str(pattern), blocks, violations, density, note)


def _share(verdicts: Sequence[Verdict], sizes: Mapping[str, int]) -> float:
    sparse = sum(sizes.get(verdict.key, 0) for verdict in verdicts if verdict.verdict == "N:M")
    return sparse / sum(sizes.values()) if sparse else 0.0


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
            problems.append(f"`include` '{glob}' matches no weight")
        problems += [f"'{v.key}' is named by `include` but is dense" for v in named if v.verdict == "dense"]
    return problems
