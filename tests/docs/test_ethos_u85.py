"""The section on Ethos-U85: its commands are understood, and where ExecuTorch is installed it prints what it says."""

import shlex
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from lightning_nm.cli import main
from lightning_nm.export.executorch import targets
from tests.docs.blocks import ROOT, blocks, execute, read, section

PAGE = section(read("devices.md"), "Ethos-U85")
INSTALL, BEFORE, EXPORT = blocks("", PAGE)
(EXAMPLE_PRINTS,) = blocks("text", PAGE)

compiles = pytest.mark.skipif(
    find_spec("executorch") is None or find_spec("ethosu") is None,
    reason="executorch or ethos-u-vela is not installed: make ethos",
)


def words_of(text):
    """What a block of output says, without the lines and words that it leaves out."""
    return [line.split() for line in text.splitlines() if line.strip() != "..."]


def test_the_extra_exists():
    extra = INSTALL.partition("[")[2].partition("]")[0]
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"'.[{extra}]'" in targets.EXTRA


def test_export_commands_are_complete(monkeypatch, tmp_path, capsys):
    """Nothing is missing but the files and the packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    fit, before = BEFORE.splitlines()
    assert shlex.split(fit)[:2] == ["lightning-nm", "fit"]
    lines = [before, *EXPORT.splitlines()]
    for line in lines:
        assert main(shlex.split(line)[1:]) == 2
        assert targets.EXTRA in capsys.readouterr().err
    monkeypatch.setattr(targets, "find_spec", lambda name: True)
    for line in lines:
        assert main(shlex.split(line)[1:]) == 2
        assert ".ckpt' is neither" in capsys.readouterr().err


def test_targets_are_all_named():
    for target in targets.TARGETS:
        assert f"`{target}`" in PAGE or f"`-{target.rpartition('-')[2]}`" in PAGE


def test_the_table_is_as_the_rules():
    rows = [line.split(" | ") for line in PAGE.splitlines() if "| 200020 |" in line]
    assert len(rows) == 6
    for pattern, weight, cycles, dense_cycles, *_ in rows:
        n, m = map(int, pattern.strip("| ").split(":"))
        is_sparse = n <= 2 and m % 4 == 0
        assert (weight == "2:4") == is_sparse
        assert (int(cycles) < int(dense_cycles)) == is_sparse


@compiles
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names = execute(PAGE)
    assert (tmp_path / "model.pte").stat().st_size == names["result"].bytes
    out = capsys.readouterr().out
    assert "cycles, " in out
    if version("ethos-u-vela") == "5.1.0":
        for words in words_of(EXAMPLE_PRINTS):
            assert words in words_of(out)
