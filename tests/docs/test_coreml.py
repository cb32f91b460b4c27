"""The section of docs/devices.md on Core ML runs as it stands, and its table of sizes is that of the format."""

import re

import pytest
import torch
from torch import nn

from lightning_nm.export import export_coreml
from lightning_nm.functional import nm_prune
from lightning_nm.pattern import NMPattern
from tests.docs.blocks import blocks, execute, read, run_commands, section

PAGE = section(read("devices.md"), "Core ML")
ROW = re.compile(r"^\| (float32|float16) \| (.*) \|$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of coremltools and torch.export
def test_the_page(monkeypatch, tmp_path, capsys):
    pytest.importorskip("coremltools", reason="coremltools is not installed: the extra coreml")
    monkeypatch.chdir(tmp_path)
    train, convert = blocks("python", PAGE)
    names = execute(f"```python\n{train}```\n")
    capsys.readouterr()
    run_commands(blocks("", PAGE)[0])
    said = capsys.readouterr().out
    (printed,) = blocks("text", PAGE)
    # Sizes of the program's description differ with names and versions; those of weights do not.
    numbers = re.compile(r"\d+ bytes, |'s \d+")
    assert numbers.sub("", printed) in numbers.sub("", said)
    assert "OK: 4 weights" in said
    execute(f"```python\n{convert}```\n", torch=torch, model=names["model"])
    size, dense_size, _ = capsys.readouterr().out.split(maxsplit=2)
    assert int(size) / int(dense_size) < 0.33


def test_sizes():
    header = re.search(r"^\| \| (2:4 .*) \|$", PAGE, re.MULTILINE)[1].split(" | ")
    rows = ROW.findall(PAGE)
    assert {precision for precision, _ in rows} == {"float32", "float16"}
    for precision, cells in rows:
        bits = torch.finfo(getattr(torch, precision)).bits
        expected = [NMPattern.parse(pattern).density + 1 / bits for pattern in header]
        assert cells.split(" | ") == [f"{share + 1e-9:.3f}" for share in expected]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_sizes_are_those_of_files(tmp_path, precision):
    pytest.importorskip("coremltools", reason="coremltools is not installed: the extra coreml")
    layer = nn.Linear(256, 64)
    layer.weight.data = nm_prune(layer.weight.data, "1:8")
    example = (torch.randn(1, 256),)
    (weight,) = export_coreml(layer, example, tmp_path / "a.mlpackage", precision=precision).weights
    (cells,) = [cells for name, cells in ROW.findall(PAGE) if name == precision]
    assert f"{weight.bytes / weight.dense_bytes + 1e-9:.3f}" == cells.split(" | ")[2]
