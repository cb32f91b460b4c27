"""``lightning-nm verify``: check that the weights of checkpoints are N:M."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from lightning_nm.callbacks.tables import columns_table
from lightning_nm.commands.output import add_json, print_json, print_line
from lightning_nm.export.verification import Verification, verify
from lightning_nm.spelling import grouped


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm verify`` and return its exit status."""
    options = _parser().parse_args(list(args))
    # With --json stdout holds one document and nothing else, so errors go to stderr.
    console = Console(quiet=options.json)
    errors = Console(stderr=options.json)
    is_list = len(options.checkpoint) > 1
    # 0 for N:M, 1 for not N:M, 2 for a file that cannot be read: the worst is the exit status.
    statuses = []
    documents: list[dict[str, Any]] = []
    for checkpoint in options.checkpoint:
        if is_list:
            print_line(console, f"{checkpoint}:", style="bold")
        try:
            result = verify(
                checkpoint,
                options.pattern,
                options.include,
                options.min_share,
                allow_dense=options.allow_dense,
                base=options.base,
            )
        except Exception as error:  # a traceback would exit with 1, which means "not N:M"
            text = str(error)
            # A ValueError of verify() is a whole message; other errors need not name the file.
            if not isinstance(error, ValueError):
                text = f"cannot read '{checkpoint}': {type(error).__name__}: {text}"
            print_line(errors, f"lightning-nm verify: {text}")
            documents.append({"checkpoint": checkpoint, "ok": False, "error": text})
            statuses.append(2)
            # The other files are still checked: the exit status is the worst of all.
            continue
        _print(result, console, options.quiet)
        statuses.append(0 if result.ok else 1)
        kinds = ("N:M", "dense", "broken")
        documents.append(
            {
                "checkpoint": checkpoint,
                "ok": result.ok,
                # Also counts matrices that the sparsifier state does not name; these have no entry in `weights`.
                "matrices": {verdict: result.count(verdict) for verdict in kinds},
                "share": result.share,
                "problems": result.problems,
                "warnings": result.warnings,
                "weights": [asdict(verdict) for verdict in result.verdicts],
            }
        )
    if is_list:
        console.print(f"{statuses.count(0)} of {len(statuses)} checkpoints OK", highlight=False)
    if options.json:
        print_json("verify", ok=not any(statuses), checkpoints=documents)
    return max(statuses)


def _print(result: Verification, console: Console, quiet: bool) -> None:
    if not quiet:
        heads = ("weight", "pattern", "verdict", "violating", "density", "note")
        # The numbers are the least widths of the two columns that may take several lines.
        table = columns_table("N:M verification", heads, {"weight": 20, "note": 12})
        rows = []
        for each in result.verdicts:
            # That of a dense weight in two places, so that equal layers share a row.
            density = f"{each.density:.{2 if each.verdict == 'dense' else 4}f}"
            violating = f"{each.violations} / {each.blocks}"
            rows.append((each.key, each.pattern, each.verdict, violating, density, each.note))
        styles = {"N:M": "green", "broken": "red", "dense": "dim"}
        # Layers that differ in a number of their names alone share a row.
        for row in grouped(rows):
            table.add_row(*row, style=styles[row[2]])
        console.print(table)
    dense = result.count("dense")
    print_line(
        console,
        f"{result.count('N:M')} of {len(result.matrices)} matrices are N:M, with {result.share:.1%} of all entries; "
        f"{dense} {'is' if dense == 1 else 'are'} dense",
    )
    for warning in result.warnings:
        print_line(console, f"WARNING: {warning}")
    for problem in result.problems:
        print_line(console, f"FAILED: {problem}")
    if result.ok:
        # All weights, not only the matrices that are counted above.
        good = sum(verdict.verdict == "N:M" for verdict in result.verdicts)
        console.print(f"OK: {good} weights, no block holds more than N of M")


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
        # argparse appends to a copy, so that this list stays empty.
        default=[],
        help="weights (by key or module name) that must be N:M; may be given several times",
    )
    parser.add_argument(
        "--min-share",
        metavar="S",
        type=float,
        help="the least fraction, from 0 to 1, of the entries of all matrices that must be in N:M matrices",
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
    add_json(parser)
    return parser
