"""Write the generated tables into the pages and into CSV files, or check them: ``python -m benchmarks.tables``.

README.md and the pages of docs/ mark the place of a table by ``<!-- table: name -->`` and ``<!-- /table -->``. Every
table is also the file ``benchmarks/results/tables/<name>.csv``. The tables are made from the files in
``benchmarks/results``, nothing is measured. ``--check`` writes nothing, and exits with 1 if a page or a CSV file
differs from its data. ``--list`` prints the names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.tables import (
    accuracy,
    cpu,
    cycles,
    default,
    depth,
    fronts,
    inference,
    length,
    matrices,
    methods,
    minilm,
    overhead,
    recipes,
    scale,
    smollm2,
    studies,
)
from benchmarks.tables.files import FOLDER, contents
from benchmarks.tables.markdown import ROOT, Tables
from benchmarks.tables.regions import filled, pages

TABLES: Tables = {
    name: make
    for module in (
        cpu,
        studies,
        scale,
        default,
        length,
        fronts,
        accuracy,
        overhead,
        inference,
        recipes,
        matrices,
        methods,
        cycles,
        depth,
        minilm,
        smollm2,
    )
    for name, make in module.TABLES.items()
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages and the CSV files; 1 if a check fails."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.tables", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if a page or a CSV file differs",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the tables")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(TABLES))
        return 0
    try:
        tables = {name: make() for name, make in TABLES.items()}
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    wanted = contents(tables)
    unknown = sorted(path.name for path in FOLDER.glob("*.csv") if path not in wanted)
    if unknown:
        print(f"No table has this name, delete: {', '.join(unknown)}", file=sys.stderr)
        return 1
    for page in pages():
        try:
            wanted[page] = filled(page.read_text(encoding="utf-8"), tables)
        except (ValueError, OSError) as error:
            print(f"{page.relative_to(ROOT).as_posix()}: {error}", file=sys.stderr)
            return 1
    stale = []
    for path, text in wanted.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT).as_posix())
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
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
