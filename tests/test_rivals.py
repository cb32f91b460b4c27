"""Dense int8 models of other runtimes: they compute the model, and the benchmark does without what is missing."""

import importlib.util

import pytest
import torch
from torch import nn

from benchmarks import rivals


class Tokens(nn.Module):
    """From ids to features, through linear layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 64)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, ids):
        return self.layers(self.embed(ids))


IDS = torch.arange(8).view(1, 8)


def nothing_is_found(monkeypatch):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)


def fails(model, folder, ids):
    raise RuntimeError("first line\nsecond line")


def test_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    nothing_is_found(monkeypatch)
    monkeypatch.setattr(rivals, "by_torch_ao", fails)
    assert list(rivals.variants(Tokens(), tmp_path, IDS)) == []
    assert capsys.readouterr().err.splitlines() == [
        "onnxruntime int8 is left out: pip install onnxruntime onnx onnxscript",
        "openvino int8 is left out: pip install openvino nncf onnx onnxscript",
        "torchao int8 is left out: pip install torchao",
        # Of a function that stands for the last one.
        "fails int8 is left out: RuntimeError: first line",
    ]


def test_a_variant_that_computes_something_else_is_left_out(tmp_path, monkeypatch, capsys):
    nothing_is_found(monkeypatch)
    model = Tokens()
    factors = {"good": 1.1, "wrong": 2.0, "none": float("nan")}

    def by_scale(model, folder, ids):
        for name, factor in factors.items():
            yield name, lambda x, factor=factor: factor * model(x), folder / name

    monkeypatch.setattr(rivals, "by_torch_ao", by_scale)
    assert [name for name, *_ in rivals.variants(model, tmp_path, IDS)] == ["good"]
    said = capsys.readouterr().err
    assert "wrong is left out: its output differs by 1.00 of dense fp32's" in said
    assert "none is left out: its output differs by nan" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporter's and the runtimes' own
@pytest.mark.parametrize(
    ("make", "packages", "names"),
    [
        (rivals.by_onnxruntime, ("onnxruntime", "onnxscript"), ["onnxruntime int8"]),
        (rivals.by_openvino, ("openvino", "nncf"), ["openvino int8", "openvino int8 weights"]),
        (rivals.by_torchao, ("torchao",), ["torchao int8", "torchao int8, compiled"]),
        (rivals.by_torch_ao, (), ["torch.ao int8"]),
    ],
)
def test_rivals_compute_the_model(tmp_path, make, packages, names):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    model = Tokens().eval()
    with torch.inference_mode():
        expected = model(IDS)
    made = list(make(model, tmp_path, IDS))
    assert [name for name, *_ in made] == names
    for name, run, file in made:
        assert rivals.is_rival(name)
        assert file.stat().st_size
        # Rounded, but the same function.
        assert 0 < rivals.difference(run, IDS, expected) < 0.1, name
