"""The pictures of the pages were drawn from the present data, and each is shown."""

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks.pictures import __main__ as program
from benchmarks.pictures import evidence, inference, permutation, speed, style
from benchmarks.pictures.style import Picture, stamp_of
from benchmarks.tables import markdown
from benchmarks.tables.regions import pages
from studies.speed.curves import Curve
from studies.speed.report import machine, write_json
from studies.speed.side import Setting


def test_pictures_show_the_present_data(capsys):
    assert program.main(["--check"]) == 0, capsys.readouterr().err


def test_every_picture_is_shown():
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages())
    assert [name for name in program.PICTURES if f"{name}.png)" not in text] == []


def test_a_picture_of_other_data(tmp_path):
    path = tmp_path / "a.png"
    picture = Picture(lambda: [1.0, 2], lambda figure, data: figure.text(0, 0, str(data)), (2, 1))
    picture.save(path)
    assert stamp_of(path) == picture.stamp()
    assert picture._replace(data=lambda: [1.00000001, 2]).stamp() == picture.stamp()
    assert picture._replace(data=lambda: [1.1, 2]).stamp() != picture.stamp()


def test_the_permutation_loses_less():
    found = permutation.data()
    kept = {
        title: sum(map(sum, order["kept"])) for title, order in found.items() if title != "forward"
    }
    assert kept["rows permuted"] > kept["rows as they are"]
    for order in (found[title] for title in kept):
        permuted = [order["kept"][row] for row in order["rows"]]
        for column in range(permutation.SIZE):
            for block in (0, 4):
                assert sum(permuted[row][column] for row in range(block, block + 4)) <= 2


def test_evidence_passes_the_kept_weight():
    """Only that of the entry whose gradients have a mean."""
    last = evidence.data()["block"][-1]
    assert [value > evidence.KEPT_WEIGHT for value in last] == [False, True, False]


def test_inference(tmp_path, monkeypatch):
    ms = {
        "dense fp32": 10.0,
        "dense bf16": 6.0,
        "openvino bf16": 4.0,
        "packed 1:16 fp32": 2.0,
        "packed 1:16 bf16": 1.0,
    }
    ms["packed 1:16 fp32, compiled"] = 1.5
    sizes = {
        name: [int(1e6 * value), None]
        for name, value in ms.items()
        if "openvino" not in name and "," not in name
    }
    (tmp_path / "inference-minilm.json").write_text(json.dumps({"ms": {"1x1": ms}, "bytes": sizes}))
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    monkeypatch.setattr(style, "RESULTS", tmp_path)
    pictures = inference.pictures()
    assert [name for name, picture in pictures.items() if picture.can_be_drawn()] == [
        "inference-minilm"
    ]
    points = pictures["inference-minilm"].data()["1x1"]
    assert ["openvino bf16", 6.0, 4.0] in points
    assert [point for point in points if "1:16 fp32" in point[0]] == [
        ["packed 1:16 fp32", 2.0, 1.5]
    ]
    pictures["inference-minilm"].save(tmp_path / "a.png")
    assert stamp_of(tmp_path / "a.png") == pictures["inference-minilm"].stamp()


def test_speed(tmp_path, monkeypatch, capsys):
    """Of the file that studies.speed writes; without it the committed picture stays."""
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    monkeypatch.setattr(style, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    assert program.main(["speed"]) == program.main(["speed", "--check"]) == 0
    assert (
        capsys.readouterr().out.count(
            "skipped: docs/speed.png, because benchmarks/results/speed.json is not"
        )
        == 2
    )
    assert not list(tmp_path.iterdir())

    sparse = Curve(
        "sparse", "32-true", 100, 1.0, [0.5] * 20, [float(k) for k in range(20, 0, -1)], 1.2
    )
    dense = Curve(
        "dense", "32-true", 100, 1.0, [1.0] * 10, [float(k) for k in range(10, 0, -1)], 1.4
    )
    facts = {"machine": machine(1), "setting": Setting()._asdict()}
    write_json(tmp_path / "speed.json", sparse, dense, facts)
    shown = speed.data()["sides"]
    assert shown["sparse"]["label"] == "sparse, 1:16 asp: 200 tokens/s"
    assert shown["sparse"]["ends"][:2] == [0.5, 1.0]
    assert shown["sparse"]["over seconds"][-1] == 2.5  # of those that end from 8.5 s to 10 s
    assert shown["dense"]["over steps"][-1] == 1.5  # the last 15 % of 10 steps are 2
    (tmp_path / "docs").mkdir()
    assert program.main(["speed"]) == 0
    assert stamp_of(tmp_path / "docs" / "speed.png") == speed.PICTURE.stamp()
    assert program.main(["speed", "--check"]) == 0
    dense.losses[3] += 1
    write_json(tmp_path / "speed.json", sparse, dense, facts)
    assert program.main(["speed", "--check"]) == 1
