"""The page on CPUs: its training runs on the kernels that it names, and its figures are those of the benchmarks."""

import importlib
import re

import lightning.pytorch as pl
import pytest
import yaml

from lightning_nm import functional as nmf
from lightning_nm.kernels.cpu import library
from tests.docs.blocks import QuietTrainer, blocks, execute, read

PAGE, BENCHMARKS = read("cpu.md"), read("benchmarks.md")


@pytest.mark.slow
def test_switched_on(tmp_path, monkeypatch, capsys):
    """In the mode ``auto``, which measures for seconds: what it chooses depends on the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(pl, "Trainer", QuietTrainer)
    names = execute(PAGE)
    trainer = names["trainer"]
    assert nmf.is_nm(trainer.lightning_module.net[2].weight, "1:16")
    assert "N:M kernels" in capsys.readouterr().out
    router = trainer.precision_plugin.router
    assert {used.product.key.gemm for used in router.used()} == {"forward", "dgrad", "wgrad"}
    if not library.unavailable():
        assert any(used.decision is not None and used.decision.source == "measured" for used in router.used())
        assert (tmp_path / ".cache/lightning_nm/kernels.json").is_file()


def test_the_yaml_names_what_is_there():
    (block,) = blocks("yaml", PAGE)
    settings = yaml.safe_load(block)["trainer"]
    made = []
    for entry in settings["plugins"] + settings["callbacks"]:
        module, _, name = entry["class_path"].rpartition(".")
        made.append(getattr(importlib.import_module(module), name)(**entry["init_args"]))
    plugin, callback = made
    assert plugin.router.kernels == "auto"
    assert str(callback.options["pattern"]) == "1:16"


def test_steps_are_those_of_the_benchmarks():
    rows = re.findall(r"^\| (\d+) \| (\d:\d+) \| ([\w-]+) \| \d+ \| \d+ \| ([\d.]+x) \|", BENCHMARKS, re.MULTILINE)
    gains = {}
    for *setting, gain in rows:  # the first machine's table comes first
        gains.setdefault(tuple(setting), []).append(gain)
    names = {"`bame`, while masks adapt": "bame", "`bame`, afterwards": "bame-frozen"}
    shown = re.findall(r"^\| (\d+) \| (\d:\d+) \| (`.*) \| ([\d.]+x) \| ([\d.]+x) \|$", PAGE, re.MULTILINE)
    assert len(shown) == 9
    for width, pattern, method, *found in shown:
        assert gains[width, pattern, names.get(method, method.strip("`"))] == found


def test_products_are_those_of_the_benchmarks():
    rows = re.findall(r"^\| (\w+) \| (\d:\d+) \| [\d.]+ / [\d.]+: ([\d.]+x) \|", BENCHMARKS, re.MULTILINE)
    shown = re.findall(
        r"^\| (forward|dgrad|wgrad)[\w ]* \| ([\d:/ ]+) \| ([\d.x/ ]+) \| ([\d.x/ ]+) \|$", PAGE, re.MULTILINE
    )
    assert len(shown) == 3
    for product, patterns, *machines in shown:
        tables = [[gain for *row, gain in rows if row == [product, pattern]] for pattern in patterns.split(" / ")]
        first, last = ([gains[place] for gains in tables] for place in (0, -1))
        assert [machine.split(" / ") for machine in machines] == [first, last]
