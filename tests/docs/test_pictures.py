"""The pictures of the pages were drawn from the present data, and each is shown."""

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks.pictures import __main__ as program
from benchmarks.pictures import evidence, inference, permutation
from benchmarks.pictures.style import Picture, stamp_of
from benchmarks.tables import markdown
from benchmarks.tables.regions import pages


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
    kept = {title: sum(map(sum, order["kept"])) for title, order in found.items() if title != "forward"}
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
    ms = {"dense fp32": 10.0, "dense bf16": 6.0, "openvino bf16": 4.0, "packed 1:16 fp32": 2.0, "packed 1:16 bf16": 1.0}
    ms["packed 1:16 fp32, compiled"] = 1.5
    sizes = {name: [int(1e6 * value), None] for name, value in ms.items() if "openvino" not in name and "," not in name}
    (tmp_path / "inference-minilm.json").write_text(json.dumps({"ms": {"1x1": ms}, "bytes": sizes}))
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    monkeypatch.setattr(inference, "RESULTS", tmp_path)
    pictures = inference.pictures()
    assert list(pictures) == ["inference-minilm"]
    points = pictures["inference-minilm"].data()["1x1"]
    assert ["openvino bf16", 6.0, 4.0] in points
    assert [point for point in points if "1:16 fp32" in point[0]] == [["packed 1:16 fp32", 2.0, 1.5]]
    pictures["inference-minilm"].save(tmp_path / "a.png")
    assert stamp_of(tmp_path / "a.png") == pictures["inference-minilm"].stamp()
