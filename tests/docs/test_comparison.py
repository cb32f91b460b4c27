"""The comparison's answers are what the installed tools give, and its table is what the program prints."""

import json
import re
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from benchmarks.peers import model_pruning
from benchmarks.peers.__main__ import RESULTS, answers
from benchmarks.peers.probes import (
    dense_products,
    new_model,
    new_optimizer,
    optimizer_before,
    returns,
)
from benchmarks.peers.table import FACTS, TOOLS, table
from benchmarks.peers.tools import (
    PAT,
    ModelOpt,
    Ours,
    TorchAO,
    TorchPrune,
    layers,
    weight,
)
from lightning_nm import STE
from lightning_nm.functional import is_nm
from tests.test_card import QUIET
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


def needs_torchao(test):
    """A test of torchao: it warns when it is imported, and `make slow` runs it in a process of its own."""
    for mark in (
        pytest.mark.slow,
        pytest.mark.skipif(not PAT.installed(), reason="torchao is not installed"),
        pytest.mark.filterwarnings("ignore"),
    ):
        test = mark(test)
    return test


@needs_torchao
def test_what_torchao_pat_does():
    assert answers(PAT) == RAN[PAT.name]


@needs_torchao
@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_torchao_pat_trains_as_ste_with_a_dense_start(pattern, warm_up):
    """The same weights after each step, and the same dense ones behind them."""

    def train(tool):
        model = new_model()
        optimizer = new_optimizer(model)
        tool.apply(model, optimizer, pattern)
        for step in range(6):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(x) - x[:, :16]).square().mean().backward()
            tool.step(optimizer)
            yield model, optimizer

    theirs, ours = PAT(warmup_steps=warm_up), Ours(STE(dense_start=warm_up + 1))
    for step, ((pruned, optimizer), (model, _)) in enumerate(
        zip(train(theirs), train(ours), strict=True)
    ):
        for left, right in zip(layers(pruned), layers(model), strict=True):
            assert torch.equal(left.weight, weight(right))
            assert torch.equal(left.bias, right.bias)
            assert is_nm(left.weight, pattern, dim=1) == (step >= warm_up)
            if step >= warm_up:
                assert torch.equal(optimizer.state[left.weight]["latent"], right.weight)


@needs_torchao
def test_torchao_pat_with_a_warm_up_takes_an_optimizer_that_has_stepped():
    assert optimizer_before(partial(PAT, warmup_steps=1))


class Fitted(pl.LightningModule):
    """Imitates its inputs; keeps the losses and whether the weights that they are of are 2:4."""

    def __init__(self, pat, automatic=True):
        super().__init__()
        self.net, self.pat, self.automatic_optimization = new_model(), pat, automatic
        self.losses, self.sparse = [], []

    def training_step(self, x):
        loss = (self.net(x) - x[:, :16]).square().mean()
        self.losses.append(loss.item())
        self.sparse.append(is_nm(weight(self.net[0]), "2:4", dim=1))
        if not self.automatic_optimization:
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        optimizer = new_optimizer(self.net)
        if not self.pat:
            return optimizer
        tool = PAT()
        tool.apply(self.net, optimizer, "2:4")
        return tool.wrapped

    def fit(self):
        data = torch.utils.data.DataLoader(
            torch.randn(48, 32, generator=torch.Generator().manual_seed(0)), batch_size=8
        )
        trainer = pl.Trainer(**QUIET, max_epochs=1, logger=False, enable_checkpointing=False)
        trainer.fit(self, data)
        self.state = trainer.optimizers[0].state
        return self


@needs_torchao
def test_torchao_pat_under_a_trainer_trains_dense():
    plain, pat, manual = Fitted(False).fit(), Fitted(True).fit(), Fitted(True, False).fit()
    assert pat.losses == plain.losses
    assert not any(pat.sparse)
    for left, right in zip(layers(pat.net), layers(plain.net), strict=True):
        assert torch.equal(pat.state[left.weight]["latent"], right.weight)
        assert is_nm(left.weight, "2:4", dim=1)
    assert manual.losses != plain.losses
    assert manual.sparse == [False] + [True] * 5


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
