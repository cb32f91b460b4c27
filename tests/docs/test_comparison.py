"""The comparison's answers are what the installed tools give, and its table is what the program prints."""

import json
import re

import pytest
import torch
from torch import nn

from benchmarks.peers import model_pruning
from benchmarks.peers.__main__ import RESULTS, answers
from benchmarks.peers.probes import dense_products, new_model, new_optimizer, returns
from benchmarks.peers.table import FACTS, SHORT_TOOLS, TOOLS, cell, table
from benchmarks.peers.tools import ModelOpt, Ours, TorchAO, TorchAOSparsity, TorchPrune
from tests.test_readme import ROOT

PAGE = ROOT / "docs" / "comparison.md"
RAN = json.loads(RESULTS.read_text())["ran"]


@pytest.mark.parametrize("kind", [Ours, TorchPrune, TorchAO], ids=lambda kind: kind.name)
def test_what_a_tool_does(kind):
    assert answers(kind) == RAN[kind.name]


@pytest.mark.filterwarnings("ignore:.*`weights_only` was not set")
def test_what_model_pruning_does():
    assert model_pruning.answers() == RAN["ModelPruning"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its own
def test_what_modelopt_does():
    if not ModelOpt.installed():
        pytest.skip("nvidia-modelopt is not installed")
    assert answers(ModelOpt) == RAN["modelopt"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its own
def test_what_torchao_does():
    if not TorchAOSparsity.installed():
        pytest.skip("torchao is not installed")
    found = answers(TorchAOSparsity, RAN["torchao"])
    assert found == RAN["torchao"]


def test_a_run_of_model_pruning_that_prunes_nothing_resumes(tmp_path, monkeypatch):
    """The question can be answered with yes: what does not resume is the masks."""
    monkeypatch.setattr(
        model_pruning, "pruning", lambda: model_pruning.ModelPruning("l1_unstructured", amount=0.0)
    )
    assert model_pruning.resumes(tmp_path)


def test_the_question_of_products_sees_dense_ones():
    model = new_model()
    assert dense_products(model, (64, 32))
    Ours().apply(model, new_optimizer(model), "2:4")
    assert dense_products(model, (64, 32))  # without a router
    assert not dense_products(nn.Sequential(nn.Identity()), (64, 32))


def test_the_question_of_masks():
    a, b = torch.tensor([True, False]), torch.tensor([True, True])
    assert returns([a, b])
    assert not returns([b, a, a])


def test_the_table_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    shown = re.search(
        r"<!-- begin: python -m benchmarks.peers -->\n(.*?)<!-- end -->", text, re.DOTALL
    ).group(1)
    assert shown.strip() == table(RAN)


def test_the_short_table_has_the_same_answers():
    lines = table(RAN, short=True).splitlines()
    assert len(lines) <= 2 + 12
    full = {fact.text: [cell(fact, tool, RAN) for tool in SHORT_TOOLS] for fact in FACTS}
    for line in lines[2:]:
        text, *found = (part.strip() for part in line.strip("|").split("|"))
        assert found == full[text]


def test_every_answer_is_there_once():
    """What was run is not read as well, and no tool and no question is unknown."""
    names = {fact.name: fact for fact in FACTS}
    for tool, found in RAN.items():
        assert tool in TOOLS
        for name in found:
            assert tool not in names[name].read, (tool, name)
    for fact in FACTS:
        assert set(fact.read) <= set(TOOLS)


def test_versions():
    text = PAGE.read_text(encoding="utf-8")
    for package, version in json.loads(RESULTS.read_text())["versions"].items():
        assert f"{package} {version.partition('+')[0]}" in text
