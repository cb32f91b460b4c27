"""The benchmark of the memory between two steps prints the committed figures again, which no machine changes."""

import json
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT


@pytest.mark.slow
def test_the_committed_figures_are_those_of_the_code(tmp_path):
    # In a process of its own: all living tensors are counted, also those of other tests.
    again = tmp_path / "memory.json"
    command = [sys.executable, "-m", "benchmarks.state_memory", "--json", str(again)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    found = json.loads(again.read_text(encoding="utf-8"))["bytes per weight"]
    path = ROOT / "benchmarks" / "results" / "state-memory.json"
    committed = json.loads(path.read_text(encoding="utf-8"))["bytes per weight"]
    assert list(found) == list(committed)
    for name, by_pattern in committed.items():
        assert found[name] == pytest.approx(by_pattern, rel=0.02), name
    # Weight, gradient and two moments in float32.
    assert found["dense"]["2:4"] == pytest.approx(4 * 4, rel=0.01)
