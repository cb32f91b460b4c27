"""Write the generated tables into README.md and the pages of docs/, or check them: ``python -m benchmarks.tables``.

A page marks the place of a table by ``<!-- table: name -->`` and ``<!-- /table -->``. The tables are made from the
files in ``benchmarks/results``, nothing is measured. ``--check`` writes nothing, and exits with 1 if a page differs
from its data. ``--list`` prints the names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.tables import (
    accuracy,
    cpu,
    cycles,
    depth,
    fronts,
    inference,
    matrices,
    methods,
    overhead,
    peers,
    recipes,
    scale,
    studies,
)
from benchmarks.tables.markdown import ROOT, Tables
from benchmarks.tables.regions import filled, pages

TABLES: Tables = {
    name: make
    for module in (
        cpu,
        studies,
        scale,
        fronts,
        accuracy,
        overhead,
        inference,
        recipes,
        peers,
        matrices,
        methods,
        cycles,
        depth,
    )
    for name, make in module.TABLES.items()
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages; 1 if a check fails."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.tables", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page differs"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the tables")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(TABLES))
        return 0
    stale = []
    for page in pages():
        text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
        try:
            made = filled(text, TABLES)
        except (ValueError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if made != text:
            stale.append(name)
            if not options.check:
                page.write_text(made, encoding="utf-8")
    if options.check and stale:
        print(
            f"Differ from their data: {', '.join(stale)}. Run `python -m benchmarks.tables`",
            file=sys.stderr,
        )
        return 1
    print("\n".join(f"written: {name}" for name in stale) or "every table agrees with its data")
    return 0


if __name__ == "__main__":
    sys.exit(main())
