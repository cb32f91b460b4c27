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

SCHEMA = 1  # the version of the JSON document


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm verify`` and return its exit status."""
    options = _parser().parse_args(list(args))
    # With --json stdout holds one document and nothing else, so errors go to stderr.
    console = Console(quiet=options.json)
    errors = Console(stderr=options.json)
    is_list = len(options.checkpoint) > 1
    # 0 for N:M, 1 for not N:M, 2 for a file that cannot be read: the worst is the exit status.
    statuses = []
    documents = []
    for checkpoint in options.checkpoint:
        if is_list:
            _print_line(console, f"{checkpoint}:", style="bold")
        try:
            result = _verify(checkpoint, options)
        except Exception as error:  # a traceback would exit with 1, which means "not N:M"
            text = str(error)
            if not isinstance(error, ValueError):
                text = f"cannot read '{checkpoint}': {type(error).__name__}: {text}"
            _print_line(errors, f"lightning-nm verify: {text}")
            documents.append({"checkpoint": checkpoint, "ok": False, "error": text})
            statuses.append(2)
        else:
            _print(result, console, options.quiet)
            documents.append({"checkpoint": checkpoint, "ok": result.ok, **_content(result)})
            statuses.append(0 if result.ok else 1)

    if is_list:
        console.print(f"{statuses.count(0)} of {len(statuses)} checkpoints OK", highlight=False)
    if options.json and is_list:
        are_ok = not any(statuses)
        print(_dumped({"schema": SCHEMA, "ok": are_ok, "checkpoints": documents}))
    elif options.json and statuses[0] != 2:  # else stderr alone says what is wrong
        print(_dumped({"schema": SCHEMA, **documents[0]}))
    return max(statuses)


def _verify(checkpoint: str, options: argparse.Namespace) -> Verification:
    return verify(
        checkpoint,
        options.pattern,
        options.include,
        options.min_share,
        allow_dense=options.allow_dense,
        base=options.base,
    )


def _print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a text that holds names: square brackets in them are no markup, and long lines are not wrapped."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


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
        help="Lightning checkpoint, state dict, .safetensors file, packed model, folder of a transformers model, "
        ".onnx, .pt2 of torch.export, or .mlpackage",
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
    sparse = result.count("N:M")
    dense = result.count("dense")
    total = len(result.matrices)
    verb = "is" if dense == 1 else "are"
    text = f"{sparse} of {total} matrices are N:M, with {result.share:.1%} of all entries; {dense} {verb} dense"
    console.print(text, highlight=False, soft_wrap=True)
    for warning in result.warnings:
        _print_line(console, f"WARNING: {warning}")
    for problem in result.problems:
        _print_line(console, f"FAILED: {problem}")
    if result.ok:
        # All weights, not only the matrices that are counted above.
        good = sum(verdict.verdict == "N:M" for verdict in result.verdicts)
        console.print(f"OK: {good} weights, no block holds more than N of M")


def _content(result: Verification) -> dict[str, Any]:
    """A result as primitives, for JSON."""
    counts = {verdict: result.count(verdict) for verdict in ("N:M", "dense", "broken")}
    weights = [asdict(verdict) for verdict in result.verdicts]
    return {
        "matrices": counts,
        "share": result.share,
        "problems": result.problems,
        "warnings": result.warnings,
        "weights": weights,
    }


def _dumped(content: dict[str, Any]) -> str:
    # NaN, which JSON does not know, would be a mistake of ours.
    return json.dumps(content, indent=1, allow_nan=False)


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(
        title="N:M verification", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    # Names fold in a narrow terminal; numbers that fold could not be read.
    table.add_column("weight", overflow="fold", min_width=20)
    for column in ("pattern", "verdict", "violating", "density"):
        table.add_column(column, no_wrap=True)
    table.add_column("note", overflow="fold", min_width=12)
    styles = {"N:M": "green", "broken": "red", "dense": "dim"}
    rows = []
    for weight in verdicts:
        violating = f"{weight.violations} / {weight.blocks}"
        density = _density(weight)
        rows.append((weight.key, weight.pattern, weight.verdict, violating, density, weight.note))
    # Layers that differ in a number of their names alone share a row.
    for row in grouped(rows):
        verdict = row[2]
        table.add_row(*row, style=styles[verdict])
    return table


def _density(verdict: Verdict) -> str:
    """The share of nonzeros; that of a dense weight in two places, so that equal layers share a row."""
    digits = 2 if verdict.verdict == "dense" else 4
    return f"{verdict.density:.{digits}f}"
