"""The examples of docs/extend run as they stand, and pass tests of the contract as rows of its tables."""

import re

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.methods import Method
from lightning_nm.nn.adapters import base
from tests import test_contract
from tests.docs.blocks import ROOT, blocks, execute, read, section
from tests.estimators import test_gradient_estimators
from tests.nn import test_routing
from tests.support import contract, kinds
from tools import hooks

OTHER = read("extend/other.md")
PAGES = {
    "method": read("extend/method.md"),
    "estimator": section(OTHER, "A gradient estimator"),
    "kernel": section(OTHER, "A kernel"),
    "adapter": section(OTHER, "An adapter"),
}
TABLES = (contract.METHODS, contract.ESTIMATORS, kinds.KINDS)


@pytest.fixture(autouse=True)
def _tables_as_they_were(monkeypatch):
    """What the examples register is known within a test alone."""
    monkeypatch.setattr(base, "_ADAPTERS", list(base._ADAPTERS))
    monkeypatch.setattr(base, "_CLASSES", {})
    monkeypatch.setattr(contract, "KERNEL", contract.KERNEL)
    before = [dict(table) for table in TABLES]
    yield
    for table, rows in zip(TABLES, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.parametrize("page", PAGES)
def test_examples_and_their_tests(page):
    execute(PAGES[page])


CONTRACTS = {
    "method": lambda: [
        test_contract.test_trains_sparse_and_leaves_no_trace("lazy", "linear", "2:4"),
        test_contract.test_state_round_trip_is_exact("lazy", "linear", "adamw"),
    ],
    "estimator": lambda: [
        test_gradient_estimators.test_blocks_lie_along_tokens_and_are_padded_with_zeros(
            "random-n", 6
        ),
        test_gradient_estimators.test_what_is_not_finite_stays_visible("random-n", float("nan")),
    ],
    "kernel": lambda: test_routing.test_the_same_numbers("bi-mask", "linear", "3:8"),
    "adapter": lambda: [
        test_contract.test_gradients_follow_the_formulas("bi-mask", "gated"),
        test_routing.test_the_same_numbers("bi-mask", "gated", "2:4"),
    ],
}


@pytest.mark.parametrize("page", PAGES)
def test_contracts(page):
    """The module that pytest loads with ``-p``, on some of the tests that the command runs."""
    example, *others = blocks("python", PAGES[page])
    (rows,) = (block for block in others if "# from my_package" in block)
    exec(example + rows, {})
    CONTRACTS[page]()
    (command,) = (
        block for block in blocks("", PAGES[page]) if block.startswith("python -m pytest ")
    )
    plugin, files = re.fullmatch(r"python -m pytest -p (\w+) (.+) -k [\w-]+\n", command).groups()
    assert f"`{plugin}.py`" in PAGES[page]
    assert all((ROOT / file).is_file() for file in files.split())


def test_the_masks_of_the_method_move_when_it_says():
    lazy = execute(PAGES["method"])["LazyMask"]
    model = nn.Linear(32, 64)
    sparsifier = NMSparsifier(model, "2:4", lazy(every=4), skip_first_last=False).attach()
    layer = sparsifier.layers["weight"]
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sparsifier.register(optimizer)
    moved = []
    for step in range(1, 13):
        before = layer.forward_mask.clone()
        optimizer.zero_grad()
        model(torch.randn(64, 32)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        if not torch.equal(layer.forward_mask, before):
            moved.append(step)
    assert moved == [4, 8, 12]
    assert sparsifier.violations() == 0


def test_hooks_of_a_method_are_listed_as_they_are():
    assert hooks.PAGE.read_text(encoding="utf-8") == hooks.page(), "run `python -m tools.hooks`"
    listed = {signature.partition("(")[0] for _, signature, _ in hooks.hooks()}
    attributes = {name for name, *_ in hooks.attributes()}
    public = {name for name in dir(Method) if not name.startswith("_")}
    assert listed | attributes == public - hooks.DERIVED
    assert all(section and meaning for section, _, meaning in hooks.hooks())
    # A method from outside the package must fit on a page, and so must all that it may define.
    assert len(listed) <= 24
    assert len(attributes) <= 10
    assert len(PAGES["method"].splitlines()) <= 90
    assert len(blocks("python", PAGES["method"])[0].splitlines()) < 60
