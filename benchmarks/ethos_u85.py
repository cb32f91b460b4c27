"""What Vela makes of N:M weights on an Ethos-U85: its estimated cycles and the size of the program.

``python -m benchmarks.ethos_u85`` compiles one convolution for each pattern, in an environment of the extra ethos-u
(``make .venv-ethos/.dev``). ``--study residual`` or ``mobile`` compiles every model of a study of ``studies/cycles``
instead, whose trainings are in ``benchmarks/results/study-cycles-fashion-mnist-KIND.csv``, and writes the estimates
next to it, for the picture of accuracy over cycles. Estimates depend on shapes and zeros, not on values: the models are
built with random weights. The cycles are those of the compiler's model of the NPU and its memories: no chip is
measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.tables.markdown import RESULTS, read_csv, table
from lightning_nm import prune
from lightning_nm.demo import ResidualCNN
from lightning_nm.export import ExecutorchExport, export_executorch
from lightning_nm.export.patterns import Found
from lightning_nm.functional import nm_prune
from lightning_nm.pattern import NMPattern
from studies.models import MobileCNN

STUDIES: dict[str, type[ResidualCNN]] = {"residual": ResidualCNN, "mobile": MobileCNN}
"""The models of ``studies/cycles``."""

NAME = "cycles-fashion-mnist"
"""Begins the names of the studies and of their results."""

PATTERNS = ("3:4", "4:8", "2:4", "1:4", "1:8", "1:16")


def export(
    pattern: str, channels: int, size: int, target: str, *, bare: bool = False
) -> ExecutorchExport:
    """Compile a 3x3 convolution in a pattern, with a pooling after it, or alone."""
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, channels, 3, padding=1)
    layer.weight.data = nm_prune(layer.weight.data, pattern, dim=1)
    # Without the pooling the NPU transposes the convolution's output to torch's order of axes.
    model = nn.Sequential(layer) if bare else nn.Sequential(layer, nn.AvgPool2d(size))
    example = torch.randn(1, channels, size, size)
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.pte")
        return export_executorch(
            model,
            path,
            (example,),
            target=target,
            calibration=[example],
            patterns={"0.weight": Found(NMPattern.parse(pattern))},
        )


class Variant(NamedTuple):
    """A model of a study.

    Attributes:
        name: In the study: ``dense-WIDTH`` or ``METHOD-N:M-WIDTH``.
        method: Of the training; ``"dense"`` if nothing is masked.
        pattern: Empty if it is dense.
        width: Of its first stage.
    """

    name: str
    method: str
    pattern: str
    width: int

    @classmethod
    def of(cls, name: str) -> Variant:
        """Read a name.

        Example:
            >>> Variant.of("sr-ste-2:4-32")[1:]
            ('sr-ste', '2:4', 32)
        """
        before, _, width = name.rpartition("-")
        method, _, pattern = before.rpartition("-") if ":" in before else (before, "", "")
        return cls(name, method, pattern, int(width))


def build(kind: str, variant: Variant) -> nn.Module:
    """A model of a study with random weights, pruned to its pattern; what is always dense in training is dense."""
    torch.manual_seed(0)
    model: nn.Module = STUDIES[kind](width=variant.width)
    model.eval()
    if variant.pattern:
        prune(model, variant.pattern)
    return model


def estimates(kind: str, names: Sequence[str], target: str) -> dict[str, dict[str, int]]:
    """Cycles and bytes of the programs of a study's models; those of one pattern and width are compiled once."""
    images = torch.randn(4, 1, 28, 28)
    found: dict[tuple[str, int], dict[str, int]] = {}
    by_name = {}
    for name in names:
        variant = Variant.of(name)
        key = variant.pattern, variant.width
        if key not in found:
            # Every model is compiled with zeros: the dense ones' estimates are those without them.
            sparse = variant if variant.pattern else variant._replace(pattern="2:4")
            with TemporaryDirectory() as folder:
                result = export_executorch(
                    build(kind, sparse),
                    Path(folder, "model.pte"),
                    (images[:1],),
                    target=target,
                    calibration=[images],
                )
            cycles, size = result.cycles, result.bytes
            if not variant.pattern:
                assert result.dense_cycles is not None
                assert result.dense_bytes is not None
                cycles, size = result.dense_cycles, result.dense_bytes
            found[key] = {"cycles": cycles, "bytes": size}
        by_name[name] = found[key]
    return by_name


def study(kind: str, target: str) -> None:
    """Write the estimates of a study's models, and print them."""
    rows = read_csv(f"study-{NAME}-{kind}.csv")
    names = list(dict.fromkeys(row["variant"] for row in rows))
    by_name = estimates(kind, names, target)
    path = RESULTS / f"{NAME}-{kind}.json"
    path.write_text(
        json.dumps({"target": target, "variants": by_name}, indent=1) + "\n", encoding="utf-8"
    )
    cells = [[name, *map(str, each.values())] for name, each in by_name.items()]
    print(table(("model", "cycles", "bytes"), cells))
    print(f"written: {path}")


def main() -> None:
    """Print one row for each pattern, or for each model of a study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--size", type=int, default=16, help="height and width of the input")
    parser.add_argument("--target", default="ethos-u85-256")
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    parser.add_argument("--bare", action="store_true", help="no pooling after the convolution")
    parser.add_argument("--study", choices=tuple(STUDIES), help="compile the models of this study")
    options = parser.parse_args()
    if options.study:
        study(options.study, options.target)
        return
    rows = []
    for pattern in options.patterns:
        result = export(pattern, options.channels, options.size, options.target, bare=options.bare)
        (convolution,) = (each for each in result.operators if each.has_weight)
        stored = "2:4" if convolution.sparse else "dense"
        cells = (pattern, stored, convolution.cycles, convolution.dense_cycles)
        rows.append((*map(str, cells), str(result.bytes), str(result.dense_bytes)))
    print(table(("pattern", "weight", "cycles", "dense", "bytes", "dense bytes"), rows))


if __name__ == "__main__":
    main()
