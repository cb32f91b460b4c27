"""Histograms of single layers, against numpy; the table of layers with kernels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import NMSparsifier
from lightning_nm.callbacks.tables import layers_markdown
from lightning_nm.callbacks.tensorboard import EDGES, draw_histogram, margin_histogram
from lightning_nm.functional import mask_margin
from lightning_nm.kernels import Router
from lightning_nm.kernels.router import routing


def layer_of(module, method="bi-mask", pattern="2:4", **options):
    model = nn.Sequential(module)
    options = {"skip_first_last": False, **options}
    (layer,) = NMSparsifier(model, pattern, method, **options).attach().layers.values()
    return layer


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 2**16),
    st.sampled_from(["sr-ste", "transposable"]),
    st.sampled_from(["any", "rounded", "zero"]),
)
def test_histograms_are_those_of_numpy(seed, method, values):
    torch.manual_seed(seed)
    layer = layer_of(nn.Linear(16, 8), method)
    if values == "rounded":
        layer.weight.data.mul_(4).round_()
    if values == "zero":
        layer.weight.data.zero_()
    margins = mask_margin(layer.weight, layer.forward_mask, "2:4").double().numpy().flatten()
    found = margin_histogram(layer)
    assert found[4:].tolist() == np.histogram(margins, EDGES.numpy())[0].tolist()
    assert found[:2].tolist() == [margins.min(), margins.max()]
    np.testing.assert_allclose(found[2:4], (margins.sum(), (margins**2).sum()))


class Writer(dict):
    """Keeps what a writer is told."""

    def add_histogram_raw(self, tag, **numbers):
        self[tag] = numbers


def test_histograms_of_layers_are_added_and_blocks_with_nan_left_out():
    layer = layer_of(nn.Linear(8, 8, bias=False), "sr-ste")
    layer.weight.data[0, 0] = torch.nan
    found = margin_histogram(layer)
    writer = Writer()
    draw_histogram(writer, "one", [found], 3)
    draw_histogram(writer, "two", [found, found], 3)
    assert writer["one"]["num"] == 15
    assert writer["two"]["num"] == 30
    assert writer["two"]["bucket_counts"] == [2 * n for n in writer["one"]["bucket_counts"]]
    for part in ("min", "max"):
        assert writer["two"][part] == writer["one"][part]
    for part in ("sum", "sum_squares"):
        assert writer["two"][part] == pytest.approx(2 * writer["one"][part])
        assert np.isfinite(writer["one"][part])
    layer.weight.data.fill_(torch.nan)
    draw_histogram(writer, "none", [margin_histogram(layer)], 3)
    assert "none" not in writer


def test_the_table_names_the_kernels_that_ran():
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    sparsifier = NMSparsifier(
        model, method="transposable", skip_first_last=False, exclude="2"
    ).attach()
    router = Router("sparse", backends=[SimulatedSparseKernel()])
    with routing(router):
        model(torch.randn(16, 32)).sum().backward()
    rows = {
        line.split(" | ")[0].strip("| "): line.strip("|").split(" | ")
        for line in layers_markdown(sparsifier, router).splitlines()
    }
    assert "forward: simulated" in rows["0"][-1]
    assert "wgrad: reference" in rows["0"][-1]
    assert rows["2"][-1].strip() == "dense product"
    assert all(len(row) == 9 for row in rows.values())


def test_names_are_no_markdown():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_b_c = nn.Linear(8, 8)

    text = layers_markdown(NMSparsifier(Odd(), skip_first_last=False).attach(), None)
    assert "a\\_b\\_c" in text
