"""The page on sparse tensor cores: its table of methods is what the layers say, its YAML names what is there."""

import json
import re
from pathlib import Path

import pytest
from torch import nn

import lightning_nm
from lightning_nm import BAME, NMSparsifier
from tests.docs.blocks import read

PAGE = read("gpu.md")
ROWS = re.findall(
    r"^\| (`.*`) \| (2:4|dense) \| (2:4|dense) \| (2:4|dense) \|$", PAGE, re.MULTILINE
)


@pytest.mark.parametrize(("names", "forward", "dgrad", "wgrad"), ROWS)
@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_operands_that_are_2_4(names, forward, dgrad, wgrad, estimator):
    assert wgrad == "dense"
    for name in re.findall(r"`([^`]+)`", names):
        method = BAME(dgrad="bi-mask", stop=10) if name.startswith("BAME") else name
        layers = NMSparsifier(
            nn.Linear(32, 32), "2:4", method, estimator, skip_first_last=False, planned_steps=1000
        )
        (layer,) = layers.attach().layers.values()
        found = [gemm.label if gemm.label == "2:4" else "dense" for gemm in layer.gemms()]
        assert found == [forward, dgrad, "2:4" if estimator else wgrad], name


def test_every_method_is_in_the_table():
    assert len(ROWS) == 2


def test_its_settings_can_be_made():
    settings = re.findall(r"`(NM\w+\([^`]*\))`", PAGE)
    assert len(settings) == 2
    for setting in settings:
        assert eval(setting, vars(lightning_nm).copy()) is not None


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu"
H200 = "nvidia-h200-torch-2.11.0-cu130"


def answers(part, file):
    return json.loads((RESULTS / f"{H200}-{file}.json").read_text())["parts"][part]["answers"]


def test_the_times_of_the_table_are_those_of_the_file():
    times = answers("checks", "checks")["V2 bfloat16"]["value"]
    names = ["4096^3", "8192^3", "7b up, 16k", "7b down, 16k", "vit-l fc1, 50k"]
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
    assert len(rows) == len(names)
    for name, row in zip(names, rows, strict=True):
        measured = [times[name]["graph ms"][way] for way in ("dense", "algorithm 0", "searched")]
        assert [float(number) for number in row[:3]] == pytest.approx(measured, abs=5.1e-4)
        assert float(row[3]) == pytest.approx(measured[0] / measured[2], abs=0.0051)


def test_the_layer_and_the_choices_are_those_of_the_file():
    layers = answers("layers", "gemms-layers-train-preprocess")
    mlp = layers["V15 7b swiglu, 16k"]["value"]
    for name, said in (
        ("dense", "dense 21.7 ms"),
        ("transposable, sparse", "24.1 ms (0.90x)"),
        ("transposable, sparse, packs kept", "**16.5 ms (1.31x)**"),
    ):
        assert f"{mlp[name]['ms']:.1f} ms" in said
        assert said in PAGE
        assert f"{mlp['dense']['ms'] / mlp[name]['ms']:.2f}x" in said or name == "dense"
    vit = layers["V15 vit-l, 50k"]["value"]
    slow = vit["dense"]["ms"], vit["transposable, sparse"]["ms"]
    assert f"takes {slow[0]:.1f} ms dense and {slow[1]:.1f} ms by 2:4" in PAGE
    said = re.search(
        r"take (\d+) to (\d+) % longer under a router, .*? with `mvue` (\d+) to (\d+) %; without a router, .*?, "
        r"(\d+) to (\d+) %\s+and (\d+) to (\d+) %",
        PAGE,
        re.DOTALL,
    )
    expected = []
    for mode in ("auto", "reference"):
        for estimator in ("", "+mvue"):
            rows = [
                100 / layer[f"{method}{estimator}, {mode}"]["x"] - 100
                for layer in (mlp, vit)
                for method in ("transposable", "bi-mask")
            ]
            expected += [min(rows), max(rows)]
    assert [int(number) for number in said.groups()] == pytest.approx(expected, abs=0.51)
    compiled = layers["V15 7b swiglu, 16k, compiled"]["value"]["transposable, auto"]["x"]
    assert f"took {100 / compiled - 100:.0f} % longer under a router" in PAGE
    training = answers("train", "gemms-layers-train-preprocess")
    steps = [training[name]["value"]["step ms"] for name in ("transposable+mvue:auto", "dense")]
    assert f"took {steps[0]:.0f} ms instead of {steps[1]:.0f}" in PAGE
    verdict = answers("gemms", "gemms-layers-train-preprocess")["verdict"]["value"]
    assert verdict["products"] == 30
    assert len(verdict["auto is sparse"]) == 4
    assert all("32k" in name for name in verdict["auto is sparse"])
    gains = [
        kernel["bare x"]
        for name, layer in answers("gemms", "gemms-layers-train-preprocess").items()
        if name.startswith("7b")
        for gemm, row in layer["value"].items()
        if "kernels" in row
        for kernel_name, kernel in row["kernels"].items()
        if ":" in kernel_name
    ]
    assert f"gain {min(gains):.2f} to {max(gains):.2f}x (part `gemms`)" in PAGE
