"""What the monitor draws and writes, against numpy: heat maps, their columns, histograms, the table of layers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import NMSparsifier
from lightning_nm.callbacks.tables import layers_markdown
from lightning_nm.callbacks.tensorboard import (
    COLUMNS,
    EDGES,
    MAPS,
    LayerHistory,
    draw_histogram,
    heat_map,
    layer_column,
    margin_histogram,
)
from lightning_nm.functional import mask_margin
from lightning_nm.kernels import Router
from lightning_nm.kernels.router import routing


def masked(model, method, **options):
    torch.manual_seed(0)
    options = {"skip_first_last": False, **options}
    return NMSparsifier(model, "2:4", method, **options).attach()


# ----------------------------------------------------------------------------------------------- columns of heat maps


@pytest.mark.parametrize("conv_layout", ["channels", "flat"])
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "transposable", "asp", "dense"])
def test_a_column_holds_the_statistics_of_each_layer(method, conv_layout):
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(64, 12))
    sparsifier = masked(model, method, conv_layout=conv_layout, planned_steps=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sparsifier.register(optimizer)
    for _ in range(2):
        model(torch.randn(4, 8, 4, 4)).square().sum().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    column = layer_column(list(sparsifier.layers.values()))
    for place, (name, stats) in enumerate(sparsifier.layer_stats().items()):
        found = dict(zip(MAPS, column[:, place].tolist(), strict=True))
        assert found["kept_magnitude"] == pytest.approx(stats["kept_magnitude"])
        if method == "dense":
            assert np.isnan([found["flip_rate"], found["margin"]]).all()
            continue
        layer = sparsifier.layers[name]
        weight, mask = layer.view.rows(layer.weight), layer.view.rows(layer.forward_mask)
        margins = mask_margin(weight, mask, "2:4", 1).detach().numpy()
        assert found["flip_rate"] == pytest.approx(stats["flip_rate"])
        assert found["margin"] == pytest.approx(np.nanmean(margins), rel=1e-5)
    assert method not in ("sr-ste", "bi-mask") or column[0].max() > 0


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 130, 256, 257, 300, 1111])
def test_columns_are_means_of_equally_many_logs(length):
    values = torch.rand(length, 3, 2, generator=torch.Generator().manual_seed(length))
    steps, history = [5 * k + 4 for k in range(length)], LayerHistory()
    for step, column in zip(steps, values, strict=True):
        history.add(step, ["a", "b"], column)
    stride = 1
    while stride * COLUMNS < length:
        stride *= 2
    assert history.steps == [*steps[stride - 1 : -1 : stride], steps[-1]]
    means = [part.mean(0) for part in values.split(stride)]
    torch.testing.assert_close(history.values, torch.stack(means))
    assert history.state_dict()["values"].nbytes <= 1536 * 2


def test_a_run_that_goes_back_replaces_what_it_trains_again():
    history = LayerHistory()
    for step, value in ((9, 9), (19, 19), (29, 29), (39, 39), (19, 0), (24, 1)):
        history.add(step, ["a"], torch.full((3, 1), float(value)))
    assert history.steps == [9, 19, 24]
    assert history.values[:, 0, 0].tolist() == [9, 0, 1]


def test_layers_that_join_later_keep_the_models_order():
    history = LayerHistory()
    history.add(1, ["b"], torch.full((3, 1), 0.5))
    history.add(2, ["a", "b"], torch.tensor([[0.25, 0.75]] * 3))
    for each in (history, LayerHistory.from_state(history.state_dict())):
        assert (each.layers, each.steps) == (["a", "b"], [1, 2])
        assert each.values[:, 0].nan_to_num(-1).tolist() == [[-1, 0.5], [0.25, 0.75]]


def test_columns_of_version_0_3_are_continued():
    """They were float16, with the mean of the last column next to them."""
    state = {"layers": ["a"], "steps": [3], "values": torch.full((1, 3, 1), 0.5).half()}
    history = LayerHistory.from_state(state | {"stride": 2, "filled": 1, "mean": torch.rand(3, 1)})
    history.add(5, ["a"], torch.full((3, 1), 1.0))
    assert (history.steps, history.values.flatten().tolist()) == ([5], [0.75] * 3)


# ------------------------------------------------------------------------------------------------------ their pictures


def pixels(figure):
    """The drawn figure, uint8 [height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]


def expected_colour(value, low, high, root):
    if np.isnan(value):
        return np.array(to_rgb("#d0d0d0")) * 255
    # The bar of a constant goes around it.
    share = (value - low) / (high - low) if high > low else (0 if root else 0.5)
    return np.array(colormaps["viridis"](share**0.5 if root else share)[:3]) * 255


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 2**16),
    st.sampled_from(["any", "any", 0.0, 0.5, np.nan]),
)
def test_a_figure_shows_every_value_at_its_place(layers, columns, root, seed, constant):
    rng = np.random.default_rng(seed)
    values = rng.random((columns, layers))
    values[rng.random((columns, layers)) < 0.1] = np.nan
    if constant != "any":
        values[:] = constant
    steps = np.cumsum(rng.integers(1, 9, columns)).tolist()
    names = [f"层.{k} <b> $x$ $^" for k in range(layers)]  # any characters
    figure = heat_map("title", names, steps, torch.tensor(values), root=root)
    picture, (axes, _) = pixels(figure), figure.axes
    known = values[~np.isnan(values)]
    low, high = (0 if root else known.min(), known.max()) if known.size else (0, 1)
    edges = np.array([2 * steps[0] - steps[1] if columns > 1 else steps[0] - 1, *steps])
    for column, share in enumerate(np.diff(edges) / np.ptp(edges)):
        if share * axes.bbox.width < 5:  # the frame covers a part of it
            continue
        for row in range(layers):
            middle = edges[column : column + 2].mean(), row + 0.5
            across, up = axes.transData.transform(middle)
            shown = picture[len(picture) - 1 - int(up), int(across)]
            expected = expected_colour(values[column, row], low, high, root)
            assert np.abs(shown - expected).max() <= 2  # a colour map has 256 colours


@pytest.mark.parametrize("layers", [1, 37, 38, 90, 2500])
def test_figures_stay_small_and_names_are_thinned(layers):
    names = [f"model.layers.{k}.a_block_with_a_long_name.q_projection" for k in range(layers)]
    figure = heat_map("title", names, [1, 2], torch.rand(2, layers), root=False)
    picture, axes = pixels(figure), figure.axes[0]
    assert picture.shape[0] <= 640
    assert picture.shape[1] <= 540, "TensorBoard's card of 400 pixels shrinks it by a quarter"
    assert axes.bbox.width > 150
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert len(shown) * 15 <= max(axes.bbox.height, 15)
    assert len(shown[0]) <= 32
    assert names[0].endswith(shown[0][3:])
    assert ("one name for" in axes.get_xlabel()) == (layers > 37)
    assert all(label.get_size() >= 8 for label in axes.get_yticklabels())
    assert (picture[:, :2] == 255).all(), "names begin within the figure"


# ---------------------------------------------------------------------------------------------- histograms and tables


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(["sr-ste", "transposable"]), st.sampled_from(["any", "rounded", "zero"]))
def test_histograms_are_those_of_numpy(method, values):
    (layer,) = masked(nn.Linear(16, 8), method).layers.values()
    factor = {"any": 1, "rounded": 4, "zero": 0}[values]
    layer.weight.data.mul_(factor)
    if values == "rounded":
        layer.weight.data.round_()
    margins = mask_margin(layer.weight, layer.forward_mask, "2:4").double().numpy().flatten()
    found = margin_histogram(layer)
    assert found[4:].tolist() == np.histogram(margins, EDGES.numpy())[0].tolist()
    expected = margins.min(), margins.max(), margins.sum(), (margins**2).sum()
    np.testing.assert_allclose(found[:4], expected)


class Writer(dict):
    """Keeps what a writer is told."""

    def add_histogram_raw(self, tag, **numbers):
        self[tag] = numbers


def test_histograms_of_layers_are_added_and_blocks_with_nan_left_out():
    (layer,) = masked(nn.Linear(8, 8, bias=False), "sr-ste").layers.values()
    layer.weight.data[0, 0] = torch.nan
    found, writer = margin_histogram(layer), Writer()
    draw_histogram(writer, "one", [found], 3)
    draw_histogram(writer, "two", [found, found], 3)
    layer.weight.data.fill_(torch.nan)
    draw_histogram(writer, "none", [margin_histogram(layer)], 3)
    assert set(writer) == {"one", "two"}
    one, two = writer["one"], writer["two"]
    assert one["num"] == 15
    assert two["bucket_counts"] == [2 * count for count in one["bucket_counts"]]
    assert [two["min"], two["max"]] == [one["min"], one["max"]]
    for part in ("num", "sum", "sum_squares"):
        assert two[part] == pytest.approx(2 * one[part])


def rows_of(sparsifier, router=None):
    """The table's rows by their first cell."""
    lines = layers_markdown(sparsifier, router).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_the_table_names_the_kernels_that_ran():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 3))
    sparsifier = masked(model, "transposable", exclude="2")
    router = Router("sparse", backends=[SimulatedSparseKernel()])
    with routing(router):
        model(torch.randn(16, 32)).sum().backward()
    rows = rows_of(sparsifier, router)
    assert "forward: simulated" in rows["0"][-1]
    assert "wgrad: reference" in rows["0"][-1]
    assert rows["2"][-1] == "dense GEMM"
    assert all(len(row) == 8 for row in rows.values())


def test_names_are_no_markdown():
    assert "a\\_b\\_c" in rows_of(masked(nn.ModuleDict({"a_b_c": nn.Linear(8, 8)}), "ste"))
