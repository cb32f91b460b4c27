"""What the commands share in their output: one form of JSON, and the style of lines."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

SCHEMA = 1
"""The version of the JSON documents of all commands."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else to stdout"
    )


def print_json(command: str, **result: Any) -> None:
    """Print the result of a command, as primitives, with the command's name and the :data:`SCHEMA`.

    Example:
        >>> print_json("verify", ok=True)
        {
         "schema": 1,
         "command": "verify",
         "ok": true
        }
    """
    content = {"schema": SCHEMA, "command": command, **result}
    # NaN, which JSON does not know, would be a mistake of ours.
    # By print, as rich would break long lines at the width of the terminal.
    print(json.dumps(content, indent=1, allow_nan=False))


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a text as it is: square brackets in names are no markup, and long lines are not broken."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
