"""The pictures of the pages were drawn from the present data, and each is shown."""

import json

import pytest
import yaml
from torch import nn

pytest.importorskip("matplotlib")

from benchmarks import ethos_u85
from benchmarks.pictures import __main__ as program
from benchmarks.pictures import cycles, inference, permutation, speed, style
from benchmarks.pictures.style import Picture, stamp_of
from benchmarks.tables import markdown
from benchmarks.tables.regions import pages
from lightning_nm.functional import is_nm
from studies.speed.curves import Curve
from studies.speed.report import machine, write_json
from studies.speed.side import Setting
from tests.docs.blocks import ROOT


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


def test_accuracy_over_cycles(tmp_path, monkeypatch):
    """By a study that was made up: lines by method, points by cycles, the failed training left out."""
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    monkeypatch.setattr(style, "RESULTS", tmp_path)
    assert cycles.pictures() == {}
    rows = [
        *("dense-32,0,complete,0.9,0", "dense-16,0,complete,0.8,0", "dense-16,1,complete,0.84,0"),
        *("sr-ste-2:4-16,0,complete,0.81,0", "sr-ste-2:4-16,1,failed,,"),
    ]
    study = tmp_path / "study-cycles-fashion-mnist-mobile.csv"
    study.write_text("\n".join(["variant,seed,state,test_acc_int8,test_acc", *rows]))
    by_name = {"dense-16": 4000, "dense-32": 9000, "sr-ste-2:4-16": 2500}
    estimated = {name: {"cycles": each, "bytes": 1} for name, each in by_name.items()}
    (tmp_path / "cycles-fashion-mnist-mobile.json").write_text(json.dumps({"variants": estimated}))
    (name,) = cycles.pictures()
    assert name == "cycles-mobile"
    picture = cycles.pictures()[name]
    found = picture.data()
    assert [row[0] for row in found["dense"]] == [4.0, 9.0]
    assert found["dense"][0][1] == pytest.approx(82.0)
    assert found["dense"][0][2] > 2.0
    assert found["sr-ste"] == [[2.5, pytest.approx(81.0), 0.0]]
    picture.save(tmp_path / "a.png")
    assert stamp_of(tmp_path / "a.png") == picture.stamp()


@pytest.mark.parametrize("kind", ["residual", "mobile"])
def test_models_of_the_studies_of_cycles(kind):
    """Each variant of the study has a model, whose sparse weights are those that the training masks."""
    variants = yaml.safe_load((ROOT / f"studies/cycles/fashion-mnist-{kind}.yaml").read_text())
    names = list(variants["variants"])
    read = [ethos_u85.Variant.of(name) for name in names]
    assert {(each.method, each.pattern) for each in read} == {
        ("dense", ""),
        ("sr-ste", "2:4"),
        ("bi-mask", "2:4"),
    }
    assert len({each.width for each in read}) >= 4
    sparse = next(each for each in read if each.pattern and each.width == 16)
    model = ethos_u85.build(kind, sparse)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Conv2d):
            continue
        if name.startswith("stem") or layer.groups > 1:
            assert layer.weight.count_nonzero() == layer.weight.numel(), name
        else:
            assert is_nm(layer.weight, "2:4", 1), name


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
