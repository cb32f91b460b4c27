"""``lightning-nm study``: train the variants of a study file on paired seeds, and report their differences."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_nm.commands.from_config import add_classes

EXTRA = "Studies need the extra `study`: pip install -e '.[study]' in a checkout of lightning_nm"


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm study``.

    Returns:
        0 if every training is complete; 1 if one failed or is missing; 2 if the study file or an option cannot be
        used, stderr says why; 130 after Ctrl-C.
    """
    try:
        # The parser is made here because it imports jsonargparse, whose absence is explained below.
        return _study(_parser().parse_args(list(args)))
    except KeyboardInterrupt:
        print("lightning-nm study: stopped; the same command goes on from here", file=sys.stderr)
        return 130  # 128 + SIGINT, as of a shell
    except (ImportError, OSError, ValueError) as error:
        advice = f"\n{EXTRA}" if isinstance(error, ImportError) else ""
        print(f"lightning-nm study: {error}{advice}", file=sys.stderr)
        return 2


def _study(options: argparse.Namespace) -> int:
    # All packages of the extra are imported here: a study that cannot be reported should not start.
    from lightning_nm.commands.study.analysis import write
    from lightning_nm.commands.study.runner import Store, check, run
    from lightning_nm.commands.study.spec import read

    spec = read(options.study)
    spec = replace(spec, model=options.model or spec.model, data=options.data or spec.data)
    folder = options.output or Path("runs/studies") / spec.name
    if (folder / "journal.log").exists():
        fault = "holds a study of lightning_nm 0.3, whose results.csv would be replaced"
        raise ValueError(f"{folder}: {fault}; take another --output")
    if not options.report_only:
        # Before a Store makes the folder: a study file with a mistake leaves nothing behind.
        check(spec)
        if options.retry_failed:
            # Before the trainings start, which read this mark from the storage.
            Store(spec, folder).retry_failed()
        threads = options.threads or max(1, (os.cpu_count() or 1) // options.workers)
        run(spec, folder, options.workers, threads)
    # From the storage: other processes with the same folder may have finished trainings, too.
    rows = Store(spec, folder).rows()
    print(f"{write(folder, spec, rows)}\nWritten to {folder}")
    return 0 if all(row["state"] == "complete" for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    from jsonargparse.typing import PositiveInt

    parser = argparse.ArgumentParser(
        prog="lightning-nm study",
        description="Train every variant of a study file with every seed, and report paired differences with 95 % "
        "intervals. Started again, it goes on; started several times with one output folder, they share the trainings.",
        epilog="Exit status: 0 if every training is complete, 1 if one is not, 2 if a file or an option is wrong.",
    )
    parser.add_argument("study", type=Path, help="the study file, see docs/studies.md")
    add_classes(parser)
    output = "folder of the trainings and the report; runs/studies/NAME by default"
    parser.add_argument("--output", type=Path, help=output)
    workers = "processes that train; 1 by default"
    parser.add_argument("--workers", type=PositiveInt, default=1, help=workers)
    threads = "threads of each process; by default the cores divided by the processes"
    parser.add_argument("--threads", type=PositiveInt, help=threads)
    parser.add_argument(
        "--report-only", action="store_true", help="train nothing, report what is there"
    )
    parser.add_argument("--retry-failed", action="store_true", help="train failed trainings again")
    return parser
