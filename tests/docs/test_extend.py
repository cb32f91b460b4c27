"""The examples of docs/extend run as they stand, and pass the contract in the way that the pages describe."""

import os
import re
import subprocess
import sys

import pytest

from lightning_nm.nn.adapters import base
from tests import contract, kinds
from tests.docs.blocks import ROOT, blocks, execute, read

PAGES = {page: read(f"extend/{page}.md") for page in ("method", "estimator", "kernel", "adapter")}


@pytest.fixture(autouse=True)
def _tables_as_they_were(monkeypatch):
    """What the examples register is known within a test alone."""
    monkeypatch.setattr(base, "_ADAPTERS", list(base._ADAPTERS))
    monkeypatch.setattr(base, "_CLASSES", {})
    monkeypatch.setattr(contract, "KERNEL", contract.KERNEL)
    for module, table in ((contract, "METHODS"), (contract, "ESTIMATORS"), (kinds, "KINDS")):
        monkeypatch.setattr(module, table, dict(getattr(module, table)))


@pytest.mark.parametrize("page", PAGES)
def test_examples_and_their_tests(page):
    execute(PAGES[page])


@pytest.mark.slow
def test_contracts(tmp_path):
    """The modules and commands of the pages, in one process, on some of the tests."""
    plugins, files = [], []
    for page in PAGES.values():
        (command,) = (block for block in blocks("", page) if block.startswith("python -m pytest "))
        plugin, *tests = re.fullmatch(r"python -m pytest -p (\w+) (.+) -k [\w-]+\n", command).groups()
        assert f"`{plugin}.py`" in page
        example, *others = blocks("python", page)
        (rows,) = (block for block in others if "# from my_package" in block)
        (tmp_path / f"{plugin}.py").write_text(example + rows)
        plugins += ["-p", plugin]
        files += " ".join(tests).split()
    rows = "(lazy or gated or random-n) and (round_trip or blocks_lie)"
    chosen = f"{rows} or (same_numbers and sr-ste and linear)"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *dict.fromkeys(files), "-k", chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 15
