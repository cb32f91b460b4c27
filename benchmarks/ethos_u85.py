"""What Vela makes of N:M weights on an Ethos-U85: its estimated cycles and the size of the program, by pattern.

``python -m benchmarks.ethos_u85`` compiles one convolution for each pattern, in an environment of the extra ethos-u
(``make .venv-ethos/.dev``). The cycles are those of the compiler's model of the NPU and its memories: no chip is
measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from benchmarks.tables.markdown import table
from lightning_nm.export import ExecutorchExport, export_executorch
from lightning_nm.export.patterns import Found
from lightning_nm.functional import nm_prune
from lightning_nm.functional.pattern import NMPattern

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


def main() -> None:
    """Print one row for each pattern."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--size", type=int, default=16, help="height and width of the input")
    parser.add_argument("--target", default="ethos-u85-256")
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    parser.add_argument("--bare", action="store_true", help="no pooling after the convolution")
    options = parser.parse_args()
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
