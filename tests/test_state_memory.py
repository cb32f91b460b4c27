"""The benchmark of the memory between two steps counts what is there."""

import json

import pytest

from benchmarks.state_memory import held
from benchmarks.step_overhead import METHODS
from tests.docs.blocks import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "asp", "bame", "lbc"])
def test_the_committed_figures_are_those_of_the_code(name):
    path = ROOT / "benchmarks" / "results" / "state-memory.json"
    committed = json.loads(path.read_text(encoding="utf-8"))["bytes per weight"][name]
    method, estimator = METHODS[name]
    assert held(method, estimator, "2:4") == pytest.approx(committed["2:4"], rel=0.02)


@pytest.mark.slow
def test_dense_training_holds_weight_gradient_and_two_moments():
    assert held("dense", None, "2:4") == pytest.approx(4 * 4, rel=0.01)
