"""Print the comparison of docs/comparison.md.

``python -m benchmarks.peers`` prints the table from benchmarks/results/peers.json.
``--run`` asks the installed tools again, and writes their answers into that file first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.probes import PROBES
from benchmarks.peers.table import table
from benchmarks.peers.tools import IN_A_LOOP, Tool

RESULTS = Path(__file__).parent.parent / "results" / "peers.json"
PACKAGES = {"modelopt": "nvidia-modelopt", "torchao PAT": "torchao"}


def answers(kind: type[Tool]) -> dict[str, bool]:
    """The answers of a tool to all questions but those for an option that it does not have."""
    calibrates = kind.calibrate is not Tool.calibrate
    return {
        name: probe(kind) for name, probe in PROBES.items() if name != "calibrated" or calibrates
    }


def ask() -> dict[str, dict[str, bool]]:
    """The answers of every tool that is installed."""
    from benchmarks.peers import model_pruning

    found = {kind.name: answers(kind) for kind in IN_A_LOOP if kind.installed()}
    return {**found, "ModelPruning": model_pruning.answers()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args(argv)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": {}, "ran": {}}
    if options.run:
        found = ask()
        packages = ["torch", "lightning", *(PACKAGES[tool] for tool in found if tool in PACKAGES)]
        results["versions"] |= {
            package: importlib.metadata.version(package) for package in packages
        }
        results["ran"] |= found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results["ran"]))


if __name__ == "__main__":
    main()
