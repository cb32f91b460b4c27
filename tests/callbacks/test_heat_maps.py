"""Heat maps of layers over steps: their numbers, their columns, their pictures, and where they are written."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from PIL import Image
from torch import nn

from lightning_nm import MaskMonitor, NMSparsifier, NMSparsityCallback
from lightning_nm.callbacks import monitor as monitor_file
from lightning_nm.callbacks.tensorboard import (
    COLUMNS,
    MAPS,
    LayerHistory,
    heat_map,
    layer_column,
)
from lightning_nm.functional import mask_margin
from tests.callbacks.test_monitor import fit
from tests.support.event_files import Events
from tests.support.lightning_models import Data, Inspect, callback, new_model

TAGS = [f"nm/{name}_map" for name in MAPS]


# ------------------------------------------------------------------------------------------------ numbers of a column


@pytest.mark.parametrize("conv_layout", ["channels", "flat"])
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "transposable", "asp"])
def test_a_column_holds_the_statistics_of_each_layer(method, conv_layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(64, 12))
    options = {"skip_first_last": False, "conv_layout": conv_layout, "planned_steps": 10}
    sparsifier = NMSparsifier(model, "2:4", method, **options).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sparsifier.register(optimizer)
    for _ in range(2):
        model(torch.randn(4, 8, 4, 4)).square().sum().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    column = layer_column(list(sparsifier.layers.values()))
    for place, (name, stats) in enumerate(sparsifier.layer_stats().items()):
        layer = sparsifier.layers[name]
        margins = mask_margin(
            layer.view.rows(layer.weight), layer.view.rows(layer.forward_mask), "2:4", 1
        )
        found = dict(zip(MAPS, column[:, place].tolist(), strict=True))
        assert found["flip_rate"] == pytest.approx(stats["flip_rate"])
        assert found["kept_magnitude"] == pytest.approx(stats["kept_magnitude"])
        assert found["margin"] == pytest.approx(np.nanmean(margins.detach().numpy()), rel=1e-5)
    assert method not in ("sr-ste", "bi-mask") or column[0].max() > 0


def test_a_layer_without_a_mask_has_no_flips_and_no_margin():
    sparsifier = NMSparsifier(nn.Linear(8, 8), "2:4", "dense", skip_first_last=False).attach()
    flips, margin, kept = layer_column(list(sparsifier.layers.values()))
    assert flips.isnan().all()
    assert margin.isnan().all()
    assert kept.tolist() == [1.0]


# ------------------------------------------------------------------------------------------------------- the columns


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
    for k in range(len(history.steps)):
        expected = values[k * stride : (k + 1) * stride].mean(0)
        torch.testing.assert_close(history.values[k], expected)
    assert history.state_dict()["values"].nbytes <= 1536 * 2


def test_a_run_that_goes_back_replaces_what_it_trains_again():
    history = LayerHistory()
    for step in (9, 19, 29, 39):
        history.add(step, ["a"], torch.full((3, 1), float(step)))
    history.add(19, ["a"], torch.zeros(3, 1))
    history.add(24, ["a"], torch.ones(3, 1))
    assert history.steps == [9, 19, 24]
    assert history.values[:, 0, 0].tolist() == [9, 0, 1]


def test_layers_that_join_later_keep_the_models_order():
    history = LayerHistory()
    history.add(1, ["b"], torch.full((3, 1), 0.5))
    history.add(2, ["a", "b"], torch.tensor([[0.25, 0.75]] * 3))
    assert history.layers == ["a", "b"]
    assert torch.equal(history.values[:, 0].nan_to_num(-1), torch.tensor([[-1, 0.5], [0.25, 0.75]]))
    again = LayerHistory.from_state(history.state_dict())
    assert (again.layers, again.steps) == (history.layers, history.steps)
    assert torch.equal(again.values.nan_to_num(-1), history.values.nan_to_num(-1))


def test_columns_of_version_0_3_are_continued():
    """They were float16, with the mean of the last column beside them."""
    state = {"layers": ["a"], "steps": [3], "values": torch.full((1, 3, 1), 0.5).half()}
    history = LayerHistory.from_state(state | {"stride": 2, "filled": 1, "mean": torch.rand(3, 1)})
    history.add(5, ["a"], torch.full((3, 1), 1.0))
    assert (history.steps, history.values.flatten().tolist()) == ([5], [0.75] * 3)


# ------------------------------------------------------------------------------------------------------- the picture


def pixels(figure):
    """The drawn figure, uint8 [height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]


def cell_colour(figure, picture, x, row):
    """The colour of a row at a step."""
    across, up = figure.axes[0].transData.transform((x, row + 0.5))
    return picture[len(picture) - 1 - int(up), int(across)]


def expected_colour(value, low, high, root):
    if np.isnan(value):
        return np.array(to_rgb("#d0d0d0")) * 255
    # The bar of a constant goes around it.
    share = (value - low) / (high - low) if high > low else (0 if root else 0.5)
    return np.array(colormaps["viridis"](share**0.5 if root else share)[:3]) * 255


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.booleans(), st.integers(0, 2**16))
def test_a_figure_shows_every_value_at_its_place(layers, columns, root, seed):
    rng = np.random.default_rng(seed)
    values = rng.random((columns, layers))
    values[rng.random((columns, layers)) < 0.1] = np.nan
    steps = np.cumsum(rng.integers(1, 9, columns)).tolist()
    names = [f"layer.{k}" for k in range(layers)]
    figure = heat_map("title", names, steps, torch.tensor(values), root=root)
    picture = pixels(figure)
    known = values[~np.isnan(values)]
    low, high = (0 if root else known.min(), known.max()) if known.size else (0, 1)
    edges = [2 * steps[0] - steps[1] if columns > 1 else steps[0] - 1, *steps]
    width = figure.axes[0].bbox.width
    for column in range(columns):
        middle, share = (
            (edges[column] + edges[column + 1]) / 2,
            (edges[column + 1] - edges[column]) / np.ptp(edges),
        )
        if share * width < 5:  # the frame covers a part of it
            continue
        for row in range(layers):
            shown = cell_colour(figure, picture, middle, row)
            expected = expected_colour(values[column, row], low, high, root)
            assert np.abs(shown - expected).max() <= 2  # a colour map has 256 colours


@pytest.mark.parametrize("layers", [1, 37, 38, 90, 2500])
def test_figures_stay_small_and_names_are_thinned(layers):
    names = [
        f"model.layers.{k}.some_block_with_a_long_name.attention.q_projection"
        for k in range(layers)
    ]
    figure = heat_map("title", names, [1, 2], torch.rand(2, layers), root=False)
    picture = pixels(figure)
    assert picture.shape[0] <= 640
    assert picture.shape[1] <= 540, "TensorBoard's card of 400 pixels shrinks it by a quarter"
    axes = figure.axes[0]
    assert axes.bbox.width > 150
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert len(shown) * 15 <= max(axes.bbox.height, 15)
    assert all(len(name) <= 32 and names[0].endswith(name[3:]) for name in shown[:1])
    assert ("one name for" in axes.get_xlabel()) == (layers > 37)
    assert all(label.get_size() >= 8 for label in axes.get_yticklabels())
    assert (picture[:, :2] == 255).all(), "names begin within the figure"


@pytest.mark.parametrize("value", [0.0, 0.5, float("nan")])
@pytest.mark.parametrize("root", [True, False])
def test_a_constant_map_is_drawn(value, root):
    figure = heat_map("title", ["a", "b"], [1, 2, 3], torch.full((3, 2), value), root=root)
    shown = cell_colour(figure, pixels(figure), 1.5, 0)
    low = 0 if root else value
    assert np.abs(shown - expected_colour(value, low, value, root)).max() <= 2


def test_names_may_hold_any_character():
    names = ["层.é", "<b>", "$x$", "$^"]
    pixels(heat_map("title", names, [1], torch.zeros(1, 4), root=False))


# -------------------------------------------------------------------------------------------------- in the log


def columns_of(nm):
    """The columns of the last fit, as its state has them."""
    return nm.state_dict().get("history", {})


def test_maps_are_written_at_intervals_and_at_the_end(tmp_path):
    seen = {}

    def look(trainer, module):
        layers = list(nm.sparsifier.layers.values())
        seen[trainer.global_step - 1] = layer_column(layers).float().numpy()

    nm = callback("bi-mask", monitor=MaskMonitor(images_every=4))
    fit(tmp_path, nm, Inspect(look), max_epochs=2)
    events = Events(tmp_path / "logs" / "version_0")
    assert [events.steps(tag) for tag in TAGS] == [[1, 5, 9, 11]] * 3
    kept = columns_of(nm)
    assert kept["layers"] == ["net.3", "net.6"]
    assert kept["steps"] == [1, 3, 5, 7, 9, 11]
    for step, column in zip(kept["steps"], kept["values"], strict=True):
        np.testing.assert_array_equal(column, seen[step])
    for tag in TAGS:
        picture = Image.open(io.BytesIO(events.images[tag][-1].encoded_image_string))
        assert len(picture.getcolors(1 << 16)) > 20
    for text in ("nm/environment", "nm/summary"):
        assert len(events.texts[text]) == 1
    assert "| torch | 2." in events.texts["nm/environment"][0]
    assert "| N:M violations | 0 |" in events.texts["nm/summary"][0]


def test_the_last_step_has_a_column_even_if_it_is_not_logged(tmp_path):
    nm = callback("sr-ste", monitor=MaskMonitor())
    fit(tmp_path, nm, max_steps=5, log_every_n_steps=3)
    assert columns_of(nm)["steps"] == [2, 4]


def test_a_resumed_run_goes_on_with_its_columns(tmp_path):
    def run(name, epochs, ckpt=None):
        nm = callback("bi-mask", monitor=MaskMonitor())
        options = {
            "max_epochs": epochs,
            "logger": TensorBoardLogger(str(tmp_path), name=name),
            "ckpt_path": ckpt,
        }
        return fit(
            tmp_path, nm, model=new_model(dropout=0.0), data=Data(96), **options
        ), columns_of(nm)

    _, whole = run("whole", 4)
    first, half = run("half", 2)
    first.save_checkpoint(tmp_path / "half.ckpt")
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["callbacks"]["NMSparsityCallback"]
    assert state["history"]["steps"] == half["steps"] == [1, 3, 5, 7, 9, 11]
    _, resumed = run("resumed", 4, tmp_path / "half.ckpt")
    assert resumed["steps"] == whole["steps"] == list(range(1, 24, 2))
    assert torch.equal(resumed["values"], whole["values"])


def test_a_checkpoint_without_columns_resumes(tmp_path):
    trainer = fit(tmp_path, callback("sr-ste", monitor=False), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert (
        "history"
        not in torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"][
            "NMSparsityCallback"
        ]
    )
    nm = callback("sr-ste", monitor=MaskMonitor())
    fit(tmp_path, nm, max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert columns_of(nm)["steps"] == [7, 9, 11]


@pytest.mark.parametrize("logger", ["none", "csv"])
def test_without_tensorboard_nothing_is_computed(tmp_path, monkeypatch, logger):
    monkeypatch.setattr(monitor_file, "layer_column", lambda layers: pytest.fail("computed"))
    fit(tmp_path, callback("sr-ste"), logger=CSVLogger(str(tmp_path)) if logger == "csv" else False)


def test_without_matplotlib_maps_are_left_out_with_one_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor_file, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="matplotlib is missing") as caught:
        fit(tmp_path, callback("sr-ste", monitor=MaskMonitor(images_every=4)), max_epochs=2)
    assert sum("matplotlib" in str(warning.message) for warning in caught) == 1
    events = Events(tmp_path / "logs" / "version_0")
    assert not set(TAGS) & set(events.images)
    assert len(events.texts["nm/summary"]) == 1


def test_maps_are_drawn_again_when_the_run_is_a_quarter_longer(tmp_path):
    fit(tmp_path, callback("sr-ste", monitor=MaskMonitor(images_every=2)), max_epochs=4)
    events = Events(tmp_path / "logs" / "version_0")
    assert [events.steps(tag) for tag in TAGS] == [[1, 3, 5, 7, 9, 13, 17, 23]] * 3


@pytest.mark.parametrize(
    ("options", "columns"), [({"heat_maps": False}, 0), ({"images_every": 0}, 6)]
)
def test_maps_can_be_left_out(tmp_path, options, columns):
    nm = callback("sr-ste", monitor=MaskMonitor(**options))
    fit(tmp_path, nm)
    events = Events(tmp_path / "logs" / "version_0")
    assert not any(tag in events.images for tag in TAGS)
    assert len(columns_of(nm).get("steps", [])) == columns


def test_two_loggers_get_the_same_maps_and_two_callbacks_maps_of_their_own(tmp_path):
    a, b = (
        NMSparsityCallback(method="ste", include=x, name=x, show_tables=False)
        for x in ("net.3", "net.6")
    )
    loggers = [TensorBoardLogger(str(tmp_path), name=name) for name in ("one", "two")]
    fit(tmp_path, a, b, MaskMonitor(), logger=loggers)
    one, two = (Events(logger.log_dir) for logger in loggers)
    for layer in ("net.3", "net.6"):
        for tag in TAGS:
            pictures = [
                [event.encoded_image_string for event in log.images[f"{tag}/{layer}"]]
                for log in (one, two)
            ]
            assert pictures[0] == pictures[1]
            assert pictures[0]
