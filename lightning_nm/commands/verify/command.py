"""The subcommand ``lightning-nm verify``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.export.verdicts import Verdict
from lightning_nm.export.verification import Verification, verify
from lightning_nm.nn.selection.ranges import grouped

SCHEMA = 1


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm verify`` and return its exit status."""
    options = _parser().parse_args(list(args))
    console, errors = Console(quiet=options.json), Console(stderr=options.json)
    several = len(options.checkpoint) > 1
    statuses, contents = [], []
    for checkpoint in options.checkpoint:
        if several:
            console.print(
                f"{checkpoint}:", style="bold", highlight=False, markup=False, soft_wrap=True
            )
        try:
            result = verify(
                checkpoint,
                options.pattern,
                options.include,
                options.min_share,
                allow_dense=options.allow_dense,
                base=options.base,
            )
        except ValueError as error:
            errors.print(
                f"lightning-nm verify: {error}", highlight=False, markup=False, soft_wrap=True
            )
            contents.append({"checkpoint": checkpoint, "ok": False, "error": str(error)})
            statuses.append(2)
        else:
            _print(result, console, options.quiet)
            contents.append({"checkpoint": checkpoint, "ok": result.ok, **_content(result)})
            statuses.append(0 if result.ok else 1)
    if several:
        console.print(f"{statuses.count(0)} of {len(statuses)} checkpoints OK", highlight=False)
    if options.json and several:
        print(_dumped({"schema": SCHEMA, "ok": not any(statuses), "checkpoints": contents}))
    elif options.json and statuses[0] != 2:
        print(_dumped({"schema": SCHEMA, **contents[0]}))
    return max(statuses)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm verify",
        description="Check that every block of a checkpoint's masked weights holds at most N nonzeros in M. "
        "Exits with 0 if so, 1 if not, 2 if a file cannot be read; of several checkpoints, with the highest.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        nargs="+",
        help="Lightning checkpoint, state dict, .safetensors file, or folder of a transformers model",
    )
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
    parser.add_argument(
        "--min-share",
        metavar="S",
        type=float,
        help="the least share, from 0 to 1, of the entries of all matrices that must be in N:M matrices",
    )
    parser.add_argument(
        "--allow-dense",
        action="store_true",
        help="with --pattern: matrices may be dense; without it, --min-share or --base, a dense matrix is a failure",
    )
    parser.add_argument(
        "--base",
        metavar="CKPT",
        help="with --pattern: every matrix that is N:M in this checkpoint must be N:M, for example after a merge",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print no table")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else to stdout"
    )
    return parser


def _print(result: Verification, console: Console, quiet: bool) -> None:
    if not quiet:
        console.print(_table(result.verdicts))
    sparse, dense, total = result.count("N:M"), result.count("dense"), len(result.matrices)
    verb = "is" if dense == 1 else "are"
    text = f"{sparse} of {total} matrices are N:M, with {result.share:.1%} of all entries; {dense} {verb} dense"
    console.print(text, highlight=False, soft_wrap=True)
    for warning in result.warnings:
        console.print(f"WARNING: {warning}", highlight=False, markup=False, soft_wrap=True)
    for problem in result.problems:
        console.print(f"FAILED: {problem}", highlight=False, markup=False, soft_wrap=True)
    if result.ok:
        good = sum(verdict.verdict == "N:M" for verdict in result.verdicts)
        console.print(f"OK: {good} weights, no block holds more than N of M")


def _content(result: Verification) -> dict[str, Any]:
    counts = {verdict: result.count(verdict) for verdict in ("N:M", "dense", "broken")}
    found = {
        "matrices": counts,
        "share": result.share,
        "problems": result.problems,
        "warnings": result.warnings,
    }
    return {**found, "weights": [asdict(verdict) for verdict in result.verdicts]}


def _dumped(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False)


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(
        title="N:M verification", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("weight", overflow="fold", min_width=20)
    for column in ("pattern", "verdict", "violating", "density"):
        table.add_column(column, no_wrap=True)
    table.add_column("note", overflow="fold", min_width=12)
    styles = {"N:M": "green", "broken": "red", "dense": "dim"}
    rows = [
        (v.key, v.pattern, v.verdict, f"{v.violations} / {v.blocks}", _density(v), v.note)
        for v in verdicts
    ]
    for row in grouped(rows):
        table.add_row(*row, style=styles[row[2]])
    return table


def _density(verdict: Verdict) -> str:
    """The share of nonzeros; that of a dense weight in two places, so that equal layers share a row."""
    return f"{verdict.density:.2f}" if verdict.verdict == "dense" else f"{verdict.density:.4f}"
