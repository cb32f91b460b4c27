"""The generated tables of the pages agree with the committed data, and a page that differs is found."""

import csv
import doctest
import json
import re
from fnmatch import fnmatch

import pytest
import torch

from benchmarks import estimators, fronts, masks, transposable
from benchmarks.tables import __main__ as program
from benchmarks.tables import cycles, files, inference, markdown, methods, regions, studies
from benchmarks.tables.regions import filled
from tests.docs.blocks import DOCS, benchmark_tables, read
from tools.site import pages


def test_pages_agree_with_their_data(capsys):
    assert program.main(["--check"]) == 0, capsys.readouterr().err


def test_every_table_is_a_file_and_the_page_links_to_their_list():
    assert sorted(path.stem for path in benchmark_tables()) == sorted(program.TABLES)
    assert "](../benchmarks/results/tables/README.md)" in read("benchmarks.md")


def test_every_table_has_its_command():
    """A row of the README of the tables names it, by itself or as one of a family such as ``masks-*``."""
    text = (files.FOLDER / "README.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    unnamed = [name for name in program.TABLES if not any(fnmatch(name, each) for each in named)]
    assert unnamed == []
    unknown = [each for each in named if not any(fnmatch(name, each) for name in program.TABLES)]
    assert unknown == []


def test_the_page_on_benchmarks_is_short():
    assert (DOCS / "benchmarks.md").stat().st_size <= 25_000


@pytest.mark.parametrize("name", ["method-costs", "scale-learning-rates", "xeon-few"])
def test_a_file_has_the_cells_of_its_table(name):
    text = program.TABLES[name]()
    with (files.FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert len(rows) == len(text.splitlines()) - 1
    assert {len(row) for row in rows} == {text.splitlines()[0].count("|") - 1}
    for cell in (cell for row in rows for cell in row):
        assert all(word in text for word in cell.split(", "))


@pytest.mark.parametrize(
    "module",
    [markdown, files, regions, inference, methods, fronts, pages],
    ids=lambda module: module.__name__,
)
def test_examples(module):
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_accuracy_at_equal_cycles(tmp_path, monkeypatch):
    """Against a line between the dense models of fewer and of more cycles, by seed; not outside of them."""
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    header = "variant,seed,state,test_acc,test_acc_int8"
    rows = [
        *("dense-8,0,complete,0.9,0.80", "dense-8,1,complete,0.9,0.82"),
        *("dense-16,0,complete,0.9,0.90", "dense-16,1,complete,0.9,0.90"),
        *("sr-ste-2:4-12,0,complete,0.9,0.86", "sr-ste-2:4-12,1,complete,0.9,0.88"),
        *("sr-ste-2:4-32,0,complete,0.9,0.95", "sr-ste-2:4-32,1,failed,,"),
    ]
    study = tmp_path / "study-cycles-fashion-mnist-residual.csv"
    study.write_text("\n".join([header, *rows]))
    estimated = {"dense-8": 10_000, "dense-16": 40_000, "sr-ste-2:4-12": 20_000}
    estimated["sr-ste-2:4-32"] = 41_000
    by_name = {name: {"cycles": each, "bytes": 1} for name, each in estimated.items()}
    (tmp_path / "cycles-fashion-mnist-residual.json").write_text(json.dumps({"variants": by_name}))
    lines = cycles.accuracy("residual").splitlines()[2:]
    assert lines[0] == "| dense | 8 | 10 | 90.00 | 81.00 |  |"
    # Half way in log cycles: 85 and 86.
    assert lines[2].startswith("| 2:4, `sr-ste` | 12 | 20 | 90.00 | 87.00 | +1.50 [")
    assert lines[3].endswith("| no dense model of that cost |")


def test_a_changed_figure_is_found_and_repaired(tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "pages", lambda: [page])
    monkeypatch.setattr(program, "TABLES", {"xeon-few": program.TABLES["xeon-few"]})
    for module in (program, files):
        monkeypatch.setattr(module, "FOLDER", tmp_path / "tables")
    page.write_text("A\n\n<!-- table: xeon-few -->\n<!-- /table -->\n\nB\n")
    assert program.main(["--check"]) == 1
    assert program.main([]) == 0
    assert program.main(["--check"]) == 0
    text = page.read_text()
    assert "| 1:16 | 6.41 / 0.80 | 8.0x |" in text
    assert text.startswith("A\n")
    assert text.endswith("<!-- /table -->\n\nB\n")
    page.write_text(text.replace("8.0x", "8.1x"))
    assert program.main(["--check"]) == 1
    assert "README.md" in capsys.readouterr().err
    assert page.read_text() != text
    page.write_text(text)

    table = tmp_path / "tables" / "xeon-few.csv"
    made = table.read_text()
    assert "1:16,6.41 / 0.80,8.0x\n" in made
    table.write_text(made.replace("8.0x", "8.1x"))
    assert program.main(["--check"]) == 1
    assert "tables/xeon-few.csv" in capsys.readouterr().err
    assert program.main([]) == 0
    assert table.read_text() == made
    table.unlink()
    assert program.main(["--check"]) == 1
    assert not table.exists()
    assert program.main([]) == 0
    table.with_name("xeon-fwe.csv").write_text(made)
    assert program.main(["--check"]) == program.main([]) == 1
    assert "xeon-fwe.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<!-- table: nothing -->\n<!-- /table -->", "no table 'nothing'"),
        ("<!-- table: xeon-fwe -->\n<!-- /table -->", "did you mean 'xeon-few'"),
        ("<!-- table: xeon-few -->\n", "no partner"),
        ("<!-- /table -->\n", "no partner"),
        ("<!-- table xeon-few -->\n<!-- /table -->\n", "no partner"),
    ],
)
def test_bad_markers(text, fault):
    with pytest.raises(ValueError, match=fault):
        filled(text, program.TABLES)


def test_a_row_of_another_length():
    with pytest.raises(ValueError, match="2 cells and the header 1"):
        markdown.table(["a"], [["1", "2"]])


def test_differences_are_those_of_the_study():
    """The pair of one seed, computed here."""
    rows = {
        (r["variant"], r["seed"]): r["test_acc"]
        for r in markdown.read_csv("study-bame-fashion-mnist.csv")
    }
    seeds = {seed for _, seed in rows}
    mean = sum(rows["bame", seed] - rows["sr-ste", seed] for seed in seeds) / len(seeds)
    assert f"| bame - sr-ste | {len(seeds)} | {mean:+.4f} |" in studies.differences(
        "bame-fashion-mnist"
    )


def test_inference(tmp_path, monkeypatch):
    ms = {
        "dense fp32": 10.0,
        "dense bf16, compiled": 4.0,
        "onnxruntime fp32": 8.0,
        "packed 1:16 fp32": 2.0,
    }
    sizes = {"dense fp32": [8_000_000, 9_000_000], "packed 1:16 fp32": [1_000_000, None]}
    (tmp_path / "a.json").write_text(json.dumps({"ms": {"1x64": ms}, "bytes": sizes}))
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    latency = inference.latency("a.json").splitlines()
    assert (
        latency[-1]
        == "| 1 x 64 | packed 1:16 fp32 | 2.00 | 2.00x (dense bf16, compiled) | 4.00x (onnxruntime fp32) |"
    )
    assert latency[3] == "| 1 x 64 | dense bf16, compiled | 4.00 | the fastest dense |  |"
    assert inference.summary("a.json").splitlines()[-1] == "| 1:16 fp32 | 2.0 ms: 2.00x, 4.00x |"
    assert inference.sizes("a.json").splitlines()[2:] == [
        "| dense fp32 | 8.0 | 1.00 | 9.0 |",
        "| packed 1:16 fp32 | 1.0 | 0.12 | - |",
    ]


def test_inference_with_rivals(tmp_path, monkeypatch):
    """Dense models in int8 are no fastest dense ones in floating point, and have a column and a table of their own."""
    ms = {
        "dense fp32": 10.0,
        "dense bf16": 4.0,
        "packed 1:16 fp32": 2.0,
        "openvino int8": 3.0,
        "openvino int8 weights": 5.0,
    }
    sizes = {"dense fp32": [8_000_000, None], "dense bf16": [4_000_000, None]}
    sizes["openvino int8"] = [2_000_000, None]
    measured = {"ms": {"1x64": ms}, "bytes": sizes}
    measured["differences"] = {"1x64": {"openvino int8": 0.02, "openvino int8 weights": 0.01}}
    (tmp_path / "a.json").write_text(json.dumps(measured))
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    latency = inference.latency("a.json").splitlines()
    assert latency[0].endswith("| over the fastest dense int8 |")
    assert latency[3] == "| 1 x 64 | dense bf16 | 4.00 | the fastest dense |  |  |"
    gains = "2.00x (dense bf16) | 5.00x (dense fp32) | 1.50x (openvino int8)"
    assert latency[4] == f"| 1 x 64 | packed 1:16 fp32 | 2.00 | {gains} |"
    assert inference.summary("a.json").splitlines()[-1] == "| 1:16 fp32 | 2.0 ms: 2.00x, 5.00x |"
    assert inference.sizes("a.json").splitlines()[-1] == "| openvino int8 | 2.0 | - | - |"
    assert inference.of_rivals("a.json").splitlines() == [
        "| dense in int8 | file, MB | relative difference | 1 x 64, ms |",
        "|---|---|---|---|",
        "| openvino int8 | 2.0 | 0.020 | 3.00 |",
        "| openvino int8 weights |  | 0.010 | 5.00 |",
    ]


@pytest.mark.parametrize(
    ("name", "benchmark", "words"),
    [
        ("masks-columns", masks, ["--dim", "0"]),
        ("transposable", transposable, ["--sample", "3"]),
        ("estimators", estimators, []),
    ],
)
def test_the_costs_of_a_matrix(tmp_path, monkeypatch, capsys, name, benchmark, words):
    """The table of the file is what the benchmark printed besides the load, which is last."""
    path = tmp_path / f"{name}.json"
    benchmark.main(
        ["--size", "32", "--repeats", "1", "--patterns", "2:4", "1:2", "--json", str(path), *words]
    )
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    made = program.TABLES[name]().splitlines()
    assert len(made) == len(printed)
    assert all(
        line.startswith(own.removesuffix("|")) for line, own in zip(printed, made, strict=True)
    )
    content = json.loads(path.read_text())
    assert content["settings"]["size"] == 32
    assert content["machine"]["torch"] == torch.__version__
