"""What the benchmarks of functions of a matrix share: their arguments, and timing in turn."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_nm.kernels.cpu.library import cpu_name


def matrix_parser(
    description: str | None, repeats: int, patterns: Sequence[str]
) -> argparse.ArgumentParser:
    """Make a parser of the matrix, the threads and the patterns, to which more may be added."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrix")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"]
    )
    parser.add_argument("--threads", type=int, default=None, help="instead of torch's default")
    parser.add_argument("--patterns", nargs="+", default=patterns)
    parser.add_argument(
        "--json", type=Path, help="also write the rows, with the settings and the machine"
    )
    return parser


def begin(args: argparse.Namespace) -> torch.Tensor:
    """Set the threads, say where this runs, and return the Gaussian matrix."""
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads by default, {os.cpu_count()} cores"
    )
    if args.threads is not None:
        torch.set_num_threads(args.threads)
        print(f"run with {args.threads} threads")
    torch.manual_seed(0)
    return torch.randn(args.size, args.size).to(getattr(torch, args.dtype))


def write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows where ``--json`` says, for ``python -m benchmarks.tables``."""
    if args.json is None:
        return
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    where = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    args.json.write_text(
        json.dumps({"settings": settings, "machine": where, "rows": rows}, indent=1) + "\n"
    )


def interleaved(functions: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Return the seconds of each function, called in turn after one call each to warm up."""
    for function in functions:
        function()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for times, function in zip(seconds, functions, strict=True):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return seconds
