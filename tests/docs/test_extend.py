"""The examples of docs/extend run as they stand, and pass tests of the contract as rows of its tables."""

import re

import pytest

from lightning_nm.methods import Method
from lightning_nm.nn.adapters import base
from tests import test_contract
from tests.docs.blocks import ROOT, blocks, execute, read
from tests.estimators import test_gradient_estimators
from tests.nn import test_routing
from tests.support import contract, kinds
from tools import hooks

PAGES = {page: read(f"extend/{page}.md") for page in ("method", "estimator", "kernel", "adapter")}
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


def test_hooks_of_a_method_are_listed_as_they_are():
    assert hooks.PAGE.read_text(encoding="utf-8") == hooks.page(), "run `python -m tools.hooks`"
    listed = {signature.partition("(")[0] for signature, _ in hooks.hooks()} | {
        name for name, *_ in hooks.flags()
    }
    assert listed == {name for name in dir(Method) if not name.startswith("_")} - hooks.NOT_HOOKS
    assert all(meaning for _, meaning in hooks.hooks())
