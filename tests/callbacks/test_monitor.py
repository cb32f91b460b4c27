"""MaskMonitor in a fit: what it logs, when, for whom; its settings, and where it is refused."""

import csv
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from lightning_nm import BAME, LBC, MVUE, STE, MaskMonitor, NMSparsifier, NMSparsityCallback
from lightning_nm.callbacks import monitor as monitor_file
from lightning_nm.callbacks.tensorboard import EDGES, MAPS, layer_column
from lightning_nm.functional import mask_margin
from tests.support import lightning_models
from tests.support.event_files import Events
from tests.support.lightning_models import (
    Data,
    FailsAt,
    Inspect,
    Net,
    TwoOptimizers,
    callback,
    is_plain,
    new_model,
)

MAP_TAGS = [f"nm/{name}_map" for name in MAPS]
RATIO = "nm/train_flops_ratio"


def fit(path, *callbacks, **options):
    options = {"limit_val_batches": 0, **options}
    return lightning_models.fit(path, callbacks, **options)[0]


def logged(path, *callbacks, name="board", **options):
    """The events of a fit."""
    logger = TensorBoardLogger(str(path), name=name)
    fit(path, *callbacks, logger=logger, **options)
    return Events(logger.log_dir)


def watched(method="sr-ste", **settings):
    """A callback with a monitor of its own, which draws no heat maps by default: they take long."""
    return callback(method, monitor=MaskMonitor(**{"images_every": 0} | settings))


def one_each():
    """Two callbacks, each with a layer."""
    return [callback("ste", include=name, name=name) for name in ("net.3", "net.6")]


def columns_of(nm):
    """The columns of the last fit, as its state has them."""
    return nm.state_dict().get("history", {"steps": []})


def of_the_masks(metrics):
    return {name for name in metrics if name.startswith("nm")}


def rows_of(logger):
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------------------- what is written


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The events of a fit with everything on, its callback, and the margins and columns at each batch's end."""
    nm = watched("bi-mask", histograms_every=4, images_every=4, log_layers=True)

    def look(trainer, module):
        layers = nm.sparsifier.layers
        margins = {
            name: mask_margin(layer.weight.detach(), layer.forward_mask, "2:4", 1).flatten()
            for name, layer in layers.items()
        }
        return margins, layer_column(list(layers.values())).float()

    inspect = Inspect(look)
    return logged(tmp_path_factory.mktemp("monitor"), nm, inspect), nm, inspect.seen


def test_histograms_hold_the_margins(run):
    events, _, seen = run
    assert events.steps("nm/margin") == [1, 5, 9]
    for tag, names in (("nm/margin/net.6", ["net.6"]), ("nm/margin", ["net.3", "net.6"])):
        for event in events.histograms[tag]:
            margins = torch.cat([seen[event.step][0][name] for name in names]).double()
            found = event.histogram_value
            moments = [found.num, found.min, found.max, found.sum, found.sum_squares]
            expected = [margins.min(), margins.max(), margins.sum(), margins.square().sum()]
            assert moments == pytest.approx([len(margins), *map(float, expected)])
            # TensorBoard leaves out empty buckets at both ends
            counts = dict(zip(np.round(found.bucket_limit, 6), found.bucket, strict=True))
            numbers, _ = np.histogram(margins.numpy(), EDGES.numpy())
            limits = np.round(EDGES[1:].numpy(), 6)
            assert [counts.get(limit, 0) for limit in limits] == numbers.tolist()


def test_heat_maps_show_the_run_at_intervals_and_at_its_end(run):
    events, nm, seen = run
    assert [events.steps(tag) for tag in MAP_TAGS] == [[1, 5, 9, 11]] * 3
    kept = columns_of(nm)
    assert kept["layers"] == ["net.3", "net.6"]
    assert kept["steps"] == [1, 3, 5, 7, 9, 11]
    assert torch.equal(kept["values"], torch.stack([seen[step][1] for step in kept["steps"]]))
    for tag in MAP_TAGS:
        picture = Image.open(io.BytesIO(events.images[tag][-1].encoded_image_string))
        assert len(picture.getcolors(1 << 16)) > 20


def test_texts_are_the_table_of_layers_the_environment_and_the_summary(run):
    texts = run[0].texts
    (table,), (environment,), (summary,) = (
        texts[f"nm/{name}"] for name in ("layers", "environment", "summary")
    )
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    assert " ".join(rows[0]) == "layer shape pattern method fwd dgrad wgrad why kernel"
    masked = ["16x16x3x3", "2:4", "bi-mask", "2:4", "2:4", "dense", "", "dense GEMM"]
    assert ["net.3", *masked] in rows
    last = next(row for row in rows if row[0] == "net.8")
    assert last[1:7] == ["4x32", "-", "-", "dense", "dense", "dense"]
    assert last[7].startswith("last linear layer")
    assert "| torch | 2." in environment
    assert "| N:M violations | 0 |" in summary


def test_the_layout_has_every_scalar_once(run):
    layout = run[0].layout()
    charts = [one for part in layout.values() for tags in part.values() for one in tags]
    kept = ("density", "kept_magnitude", "overlap")
    assert layout["N:M masks"]["kept"] == [f"^(.+-)?nm/{name}$" for name in kept]
    scalars = [tag for tag in run[0].scalars if tag.startswith("nm/")]
    for prefix in ("", "mine-"):
        found = [[one for one in charts if re.match(one, prefix + tag)] for tag in scalars]
        assert {len(each) for each in found} == {1}
        assert {each[0] for each in found} == set(charts)


COSTS = {
    "dense-start": {"method": STE(dense_start=3)},
    "schedule": {"method": "sr-ste", "schedule": {"dense_end": 3}},
    "estimator": {"method": "sr-ste", "grad_estimator": MVUE(dense_end=3)},
    "pattern": {"method": LBC(stop=6)},
    # Dense gradients are no N:M GEMMs, so that they change nothing.
    "gradient": {"method": BAME(stop=6, every=2)},
    "bi-mask": {},
    "asp": {"method": "asp"},
}


@pytest.mark.parametrize("name", COSTS)
def test_costs_are_a_curve_where_they_change_and_else_a_text(tmp_path, name):
    nm = NMSparsityCallback("2:4", **COSTS[name], show_tables=False)
    loggers = [TensorBoardLogger(tmp_path, "board"), CSVLogger(tmp_path, "csv")]
    look = Inspect(lambda *_: nm.sparsifier.flops_ratios()["eligible"])
    trainer = fit(tmp_path, nm, look, logger=loggers, log_every_n_steps=1)
    events, ratios = Events(loggers[0].log_dir), look.seen
    values = [float(row[RATIO]) for row in rows_of(loggers[1]) if row[RATIO]]
    (text,) = events.texts[RATIO]
    assert text.startswith(f"{ratios[0]:.4g} of the multiply-adds")
    changes = [step for step, ratio in enumerate(ratios) if ratio != ratios[0]]
    assert bool(changes) == (name in ("dense-start", "schedule", "estimator", "pattern"))
    # The curve begins with the last step before the change.
    curve = ratios[changes[0] - 1 :] if changes else []
    assert values == pytest.approx([ratios[0], *curve])
    assert [event.value for event in events.scalars.get(RATIO, [])] == pytest.approx(curve)
    if curve:
        assert events.steps(RATIO) == list(range(len(ratios)))[-len(curve) :]
    assert trainer.callback_metrics[RATIO] == pytest.approx(ratios[-1])


# --------------------------------------------------------------------------------------------------------------- when


def test_nothing_is_computed_between_two_logs(tmp_path, monkeypatch):
    calls = []

    def count(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: calls.append(name) or real(*args))

    for owner, name in (
        (NMSparsifier, "stats"),
        (NMSparsifier, "layer_stats"),
        (monitor_file, "layer_column"),
        (monitor_file, "margin_histogram"),
    ):
        count(owner, name)
    look = Inspect(lambda *_: [calls.pop(0) for _ in list(calls)])
    nm = watched("bi-mask", log_layers=True, histograms_every=1, images_every=1)
    logged(tmp_path, nm, look, log_every_n_steps=4)
    every = ["stats", "layer_stats", "layer_column", "margin_histogram", "margin_histogram"]
    assert look.seen == [every if step % 4 == 3 else [] for step in range(12)]


def test_manual_optimization_logs_at_the_same_steps(tmp_path):
    events = logged(tmp_path, watched(histograms_every=4), model=TwoOptimizers())
    assert events.steps("nm/density") == [1, 3, 5, 7, 9, 11]
    assert events.steps("nm/margin") == [1, 5, 9]


def test_accumulation_and_resume_go_on_where_they_were(tmp_path):
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "data": Data(192)}

    def run(name, epochs, **more):
        nm = watched(histograms_every=4)
        model = new_model(dropout=0.0)
        events = logged(tmp_path, nm, name=name, max_epochs=epochs, model=model, **options, **more)
        assert not events.images, "heat maps are left out"
        assert len(events.texts["nm/layers"]) == 1
        return (events.steps("nm/density"), events.steps("nm/margin")), columns_of(nm), nm

    steps, whole, _ = run("whole", 2)
    assert steps == (list(range(12)), [0, 4, 8])
    path = tmp_path / "half.ckpt"
    save = lightning_models.SaveAt(path, 12)
    nm = watched(histograms_every=4)
    logged(tmp_path, nm, save, max_epochs=1, model=new_model(dropout=0.0), **options)
    assert torch.load(path)["callbacks"]["NMSparsityCallback"]["history"]["steps"] == [*range(6)]
    steps, resumed, _ = run("resumed", 2, ckpt_path=path)
    assert steps == (list(range(6, 12)), [8])
    assert resumed["steps"] == whole["steps"] == list(range(12))
    assert torch.equal(resumed["values"], whole["values"])


def test_a_checkpoint_without_columns_resumes(tmp_path):
    path, nm = tmp_path / "one.ckpt", watched()
    fit(tmp_path, callback("sr-ste", monitor=False), max_epochs=1).save_checkpoint(path)
    assert "history" not in torch.load(path)["callbacks"]["NMSparsityCallback"]
    logged(tmp_path, nm, ckpt_path=path)
    assert columns_of(nm)["steps"] == [7, 9, 11]


def test_the_last_step_has_a_column_and_a_short_run_its_table_even_if_it_is_not_logged(tmp_path):
    nm = watched()
    logged(tmp_path, nm, max_steps=5, log_every_n_steps=3)
    assert columns_of(nm)["steps"] == [2, 4]
    assert "nm/layers" in logged(tmp_path, watched(), max_steps=1, log_every_n_steps=4).texts


def test_maps_are_drawn_again_when_the_run_is_a_quarter_longer(tmp_path):
    events = logged(tmp_path, watched(images_every=2), max_epochs=4)
    assert [events.steps(tag) for tag in MAP_TAGS] == [[1, 3, 5, 7, 9, 13, 17, 23]] * 3


# ----------------------------------------------------------------------------------------------------------- for whom


def test_two_boards_get_the_same_and_another_logger_the_scalars(tmp_path):
    """Of two callbacks, each of which has maps of its own."""
    boards = [TensorBoardLogger(str(tmp_path), name=name) for name in ("one", "two")]
    table, monitor = CSVLogger(str(tmp_path)), MaskMonitor(log_layers=True)
    fit(tmp_path, *one_each(), monitor, logger=[*boards, table])
    one, two = (Events(logger.log_dir) for logger in boards)
    assert one.tags() == two.tags()
    for layer in ("net.3", "net.6"):
        assert {f"nm/density/{layer}", f"nm/margin/{layer}"} <= one.tags()
        for tag in MAP_TAGS:
            pictures = [log.images[f"{tag}/{layer}"] for log in (one, two)]
            first, second = ([each.encoded_image_string for each in log] for log in pictures)
            assert first == second != []
    scalars = {tag for tag in one.scalars if tag.startswith("nm/")}
    assert of_the_masks(rows_of(table)[0]) == scalars | {RATIO}  # a text in TensorBoard
    assert "nm/flip_rate" in scalars
    assert not monitor._watched


@pytest.mark.parametrize("logger", ["none", "csv", "csv, and no tensorboard"])
def test_without_tensorboard_nothing_is_computed_for_it(tmp_path, monkeypatch, logger):
    monkeypatch.setattr(monitor_file, "layer_column", lambda layers: pytest.fail("computed"))
    if "no tensorboard" in logger:
        for name in [*sys.modules]:
            if name.split(".")[0] == "tensorboard" or name.startswith("torch.utils.tensorboard"):
                monkeypatch.delitem(sys.modules, name)
        for name in ("tensorboard", "torch.utils.tensorboard"):
            monkeypatch.setitem(sys.modules, name, None)
    table = CSVLogger(str(tmp_path))
    nm = watched(histograms_every=1, images_every=1)
    trainer = fit(tmp_path, nm, logger=False if logger == "none" else table)
    assert "nm/density" in trainer.callback_metrics
    assert logger == "none" or "nm/density" in rows_of(table)[0]


@pytest.mark.parametrize("refused", ["add_figure", "add_histogram_raw", "add_text"])
def test_a_logger_that_refuses_costs_one_warning(tmp_path, monkeypatch, refused):
    class Refuses(TensorBoardLogger):
        pass

    logger, other = (
        kind(str(tmp_path), name=kind.__name__) for kind in (Refuses, TensorBoardLogger)
    )

    def no(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(logger.experiment, refused, no)
    nm = watched(histograms_every=1, images_every=1)
    with pytest.warns(
        UserWarning, match=r"Refuses gets scalars alone from now on.*OSError: disk full"
    ) as warned:
        fit(tmp_path, nm, logger=[logger, other])
    assert sum("scalars alone" in str(one.message) for one in warned) == 1
    assert len(Events(logger.log_dir).scalars["nm/density"]) == 6
    assert len(Events(other.log_dir).histograms["nm/margin"]) == 6


def test_without_matplotlib_maps_are_left_out_with_one_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor_file, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="matplotlib is missing") as caught:
        events = logged(tmp_path, watched(images_every=4))
    assert sum("matplotlib" in str(warning.message) for warning in caught) == 1
    assert not events.images
    assert len(events.texts["nm/summary"]) == 1


def test_a_failed_fit_leaves_nothing_behind(tmp_path):
    monitor = MaskMonitor()
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, callback(), FailsAt("on_train_batch_end", 1), monitor)
    assert not monitor._watched
    fit(tmp_path, callback(), monitor, max_epochs=1)


# ------------------------------------------------------------------------------------------------------------ settings


def test_what_is_switched_off_is_not_written(tmp_path):
    off = {"histograms_every": 0, "images_every": 0}
    off |= dict.fromkeys(["custom_scalars", "layer_table", "heat_maps"], False)
    names = ["density", "overlap"]
    nm = watched(statistics=names, log_layers=True, **off)
    events = logged(tmp_path, nm)
    assert not columns_of(nm)["steps"]
    suffixes = ("", "/net.3", "/net.6")
    assert events.tags() == {f"nm/{name}{suffix}" for name in names for suffix in suffixes}
    assert "custom_scalars__config__" not in events.accumulator.Tags()["tensors"]


@pytest.mark.parametrize(
    ("callbacks", "logged"),
    [
        (lambda: [MaskMonitor(["density"]), callback()], {"density"}),
        (lambda: [callback(), MaskMonitor(["density"])], {"density"}),
        (lambda: [callback(monitor=False)], set()),
        (lambda: [callback(monitor=None)], set()),
        (
            lambda: [
                callback(
                    BAME(start=0, stop=9, every=2, evidence="batch"),
                    grad_estimator="mvue",
                    grad_snr_every=1,
                    monitor=MaskMonitor(["adapted_blocks", "predicted_loss_change", "grad_snr"]),
                )
            ],
            {"adapted_blocks", "predicted_loss_change", "grad_snr"},
        ),
    ],
)
def test_the_monitor_decides_what_is_logged(tmp_path, callbacks, logged):
    trainer = fit(tmp_path, *callbacks())
    assert of_the_masks(trainer.callback_metrics) == {f"nm/{name}" for name in logged}


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda: [MaskMonitor()], "no masks for it to watch: add an NMSparsityCallback"),
        (lambda: [callback(monitor=False), MaskMonitor()], "no masks for it to watch"),
        (lambda: [watched(), MaskMonitor()], "without a `monitor` of its own"),
        (lambda: [callback(), MaskMonitor(), MaskMonitor()], "there are 2 MaskMonitors"),
        (lambda: [callback(log_layers=True), MaskMonitor()], r"MaskMonitor\(log_layers=True\)"),
        (
            lambda: [callback(), MaskMonitor(["density", "flips"])],
            r"no statistic 'flips' in this training, only \['density', 'flip_rate'",
        ),
        (lambda: [callback(), MaskMonitor(["grad_snr"])], "no statistic 'grad_snr'"),
        (lambda: [callback(), MaskMonitor(["oscillation"])], "no statistic 'oscillation'"),
    ],
)
def test_what_cannot_be_is_refused_before_training(tmp_path, callbacks, message):
    model = Net()
    model.on_train_batch_start = lambda *args: pytest.fail("it trains")
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, *callbacks(), model=model)
    assert is_plain(model)


@pytest.mark.parametrize("name", ["histograms_every", "images_every"])
@pytest.mark.parametrize("bad", [-1, 1.5, None, True])
def test_bad_intervals_are_refused_at_once(name, bad):
    with pytest.raises(ValueError, match=f"{name}={bad}"):
        MaskMonitor(**{name: bad})


def test_a_name_is_no_list():
    with pytest.raises(
        TypeError, match=r"statistics='density' must be a list of names, as in \['density'\]"
    ):
        MaskMonitor("density")


@pytest.mark.parametrize(
    ("bar", "nm", "figures"),
    [
        (RichProgressBar, lambda: callback("bi-mask"), {"density", "flips", "overlap"}),
        (RichProgressBar, lambda: callback("dense"), {"density", "flips"}),
        (TQDMProgressBar, lambda: callback("bame"), {"density", "flips", "adapted_blocks"}),
        (TQDMProgressBar, lambda: callback("sr-ste"), {"density", "flips", "kept_magnitude"}),
        (TQDMProgressBar, lambda: watched(progress_bar=False), set()),
    ],
)
def test_the_bar_and_the_tables(tmp_path, capsys, bar, nm, figures):
    nm, logger = nm(), CSVLogger(str(tmp_path))
    nm.show_tables = True
    options = {"logger": logger, "enable_progress_bar": True, "max_epochs": 1}
    trainer = fit(tmp_path, nm, bar(), **options)
    shown, metrics = trainer.progress_bar_metrics, trainer.callback_metrics
    assert of_the_masks(shown) == {f"nm_{name}" for name in figures}
    assert shown.get("nm_density", 0.5) == metrics["nm/density"]
    assert not any(name.startswith("nm_") for name in rows_of(logger)[0])
    out = capsys.readouterr().out
    assert out.index("N:M layers") < out.index("N:M summary")
    assert not re.search(r"\x1b\[[\d;]*m", out), "no terminal: no colours"
    assert re.search(r"train_loss .*last value", out)
    assert not re.search(r"nm_\w+ .*last value", out)
