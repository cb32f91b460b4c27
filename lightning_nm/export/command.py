"""The subcommand ``lightning-nm verify``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.export.verification import Verdict, verify

SCHEMA = 1


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm verify`` and return its exit status."""
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
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else to stdout")
    options = parser.parse_args(list(args))
    console = Console()
    try:
        result = verify(options.checkpoint, options.pattern, options.include)
    except ValueError as error:
        Console(stderr=options.json).print(f"lightning-nm verify: {error}", markup=False, soft_wrap=True)
        return 2
    if options.json:
        weights = [asdict(verdict) for verdict in result.verdicts]
        content = {"schema": SCHEMA, "checkpoint": options.checkpoint, "ok": result.ok}
        print(json.dumps({**content, "problems": result.problems, "weights": weights}, indent=1, allow_nan=False))
        return 0 if result.ok else 1
    console.print(_table(result.verdicts))
    for problem in result.problems:
        console.print(f"FAILED: {problem}", markup=False, soft_wrap=True)
    if result.ok:
        good = sum(verdict.verdict == "N:M" for verdict in result.verdicts)
        console.print(f"OK: {good} weights, no block holds more than N of M")
    return 0 if result.ok else 1


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="N:M verification", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("weight", overflow="fold", min_width=20)
    for column in ("pattern", "verdict", "violating", "density"):
        table.add_column(column, no_wrap=True)
    table.add_column("note", overflow="fold", min_width=12)
    styles = {"N:M": "green", "broken": "red", "dense": "dim"}
    for v in verdicts:
        cells = (v.key, v.pattern, v.verdict, f"{v.violations} / {v.blocks}", f"{v.density:.4f}", v.note)
        table.add_row(*cells, style=styles[v.verdict])
    return table
