"""One row of the table in a process of its own: it loads a model, and answers requests, each a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.smollm2.engines import ROWS, Engine, Settings


def answer(engine: Engine, request: dict[str, Any]) -> Any:
    """What one request asks for."""
    if request["do"] == "generate":
        return engine.generate(request["ids"], request["new"])
    return engine.loss(request["ids"])


def serve(name: str, settings: Settings, requests: TextIO, replies: TextIO) -> None:
    """Load the model of a row, and answer until there are no more requests; an error is an answer, too."""

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        engine = ROWS[name](settings)
    except Exception as error:  # of any runtime: the row says so
        reply({"reason": reason_of(error)})
        return
    reply({"bytes": engine.bytes, "one_batch": engine.one_batch})
    for line in requests:
        try:
            reply({"found": answer(engine, json.loads(line))})
        except Exception as error:
            reply({"reason": reason_of(error)})
            return


def reason_of(error: Exception) -> str:
    """The kind and first line of an error.

    Example:
        >>> reason_of(ImportError("No module named 'nncf'"))
        "ImportError: No module named 'nncf'"
    """
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a row on the standard streams; what the runtimes print goes to the standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("dense", type=Path)
    parser.add_argument("sparse", type=json.loads)
    parser.add_argument("folder", type=Path)
    parser.add_argument("threads", type=int)
    args = parser.parse_args(argv)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(args.threads)
    sparse = {pattern: Path(folder) for pattern, folder in args.sparse.items()}
    settings = Settings(args.dense, sparse, args.folder, args.threads)
    serve(args.name, settings, sys.stdin, replies)


if __name__ == "__main__":
    main()
