"""MaskMonitor: what it writes, when, and where it is refused."""

import csv
import re
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_nm import BAME, LBC, MVUE, STE, MaskMonitor, NMSparsifier, NMSparsityCallback
from lightning_nm.callbacks import monitor as monitor_file
from lightning_nm.functional import mask_margin
from tests.support.event_files import Events
from tests.support.lightning_models import Data, Inspect, Net, callback, make_trainer, new_model


def fit(path, *callbacks, model=None, data=None, logger=None, ckpt_path=None, **options):
    logger = TensorBoardLogger(str(path), name="logs") if logger is None else logger
    options = {"limit_val_batches": 0, **options}
    trainer = make_trainer(path, callbacks, logger=logger, **options)
    trainer.fit(model or new_model(), data or Data(), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A fit with everything on, its events, and the margins as they were at each batch's end."""
    path = tmp_path_factory.mktemp("monitor")
    settings = {
        "histograms_every": 4,
        "log_layers": True,
    }
    nm = callback("bi-mask", monitor=MaskMonitor(**settings))
    seen = []

    def look(trainer, module):
        layers = nm.sparsifier.layers
        with torch.no_grad():
            seen.append(
                {
                    name: mask_margin(layer.weight, layer.forward_mask, "2:4", 1)
                    for name, layer in layers.items()
                }
            )

    fit(path, nm, Inspect(look))
    return Events(path / "logs" / "version_0"), seen


def test_histograms_hold_the_margins(run):
    events, seen = run
    assert events.steps("nm/margin") == [1, 5, 9]
    for tag, names in (("nm/margin/net.6", ["net.6"]), ("nm/margin", ["net.3", "net.6"])):
        for event in events.histograms[tag]:
            margins = torch.cat([seen[event.step][name].flatten() for name in names]).double()
            found = event.histogram_value
            assert found.num == len(margins)
            assert found.min == pytest.approx(margins.min().item())
            assert found.max == pytest.approx(margins.max().item())
            assert found.sum == pytest.approx(margins.sum().item())
            assert found.sum_squares == pytest.approx(margins.square().sum().item())
            # TensorBoard leaves out empty buckets at both ends
            counts = dict(zip(np.round(found.bucket_limit, 6), found.bucket, strict=True))
            expected, edges = np.histogram(margins.numpy(), np.linspace(-1, 1, 41))
            for upper, count in zip(np.round(edges[1:], 6), expected, strict=True):
                assert counts.get(upper, 0) == count


def test_the_table_of_layers_is_a_text(run):
    (text,) = run[0].texts["nm/layers"]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
    assert rows[0] == [
        "layer",
        "shape",
        "pattern",
        "method",
        "fwd",
        "dgrad",
        "wgrad",
        "why",
        "kernel",
    ]
    assert [
        "net.3",
        "16x16x3x3",
        "2:4",
        "bi-mask",
        "2:4",
        "2:4",
        "dense",
        "",
        "dense product",
    ] in rows
    last = next(row for row in rows if row[0] == "net.8")
    assert last[1:7] == ["4x32", "-", "-", "dense", "dense", "dense"]
    assert last[7].startswith("last linear layer")


def test_the_layout_has_every_scalar_once(run):
    events, layout = run[0], run[0].layout()
    charts = [tags for part in layout.values() for tags in part.values()]
    assert layout["N:M masks"]["kept"] == [
        f"^(.+-)?nm/{name}$" for name in ("density", "kept_magnitude", "overlap")
    ]
    scalars = [tag for tag in events.scalars if tag.startswith("nm/")]
    for tag in scalars:
        assert sum(bool(re.match(one, tag)) for tags in charts for one in tags) == 1, tag
    for tags in charts:
        for one in tags:
            assert any(re.match(one, tag) for tag in scalars), one
            assert any(re.match(one, f"mine-{tag}") for tag in scalars), one


def test_nothing_is_computed_between_two_logs(tmp_path, monkeypatch):
    calls = []
    for owner, name in (
        (NMSparsifier, "stats"),
        (NMSparsifier, "layer_stats"),
        (monitor_file, "layer_column"),
        (monitor_file, "margin_histogram"),
    ):
        real = getattr(owner, name)

        def counted(*args, _real=real, _name=name, **kwargs):
            calls.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    seen = []
    nm = callback(
        "bi-mask", monitor=MaskMonitor(log_layers=True, histograms_every=1, images_every=1)
    )
    fit(
        tmp_path,
        nm,
        Inspect(lambda *args: seen.append(list(calls)) or calls.clear()),
        log_every_n_steps=4,
    )
    every = [
        "stats",
        "layer_stats",
        "layer_column",
        "margin_histogram",
        "margin_histogram",
    ]
    assert seen == [every if step % 4 == 3 else [] for step in range(12)]


@pytest.mark.parametrize(
    "method", ["dense", "sr-ste", "asp-late", "transposable", "bame", "three-gemms"]
)
def test_every_method_has_what_it_has(tmp_path, method):
    monitor = MaskMonitor(histograms_every=1, images_every=1)
    fit(tmp_path, callback(method, monitor=monitor))
    events = Events(tmp_path / "logs" / "version_0")
    assert {"nm/density", "nm/layers"} <= events.tags()
    assert ("nm/margin" in events.tags()) == (method != "dense")
    assert not any("mask/" in tag for tag in events.images), "masks as images are noise"
    if method == "dense":
        return
    last = events.histograms["nm/margin"][-1].histogram_value
    if method in ("bame", "asp-late"):
        assert last.min == last.max == 1, "dropped weights are zero"
    if method == "sr-ste":
        assert last.min >= 0
    if method == "transposable":
        assert last.min < 0
    if method == "asp-late":  # its masks come with the fourth step
        assert events.steps("nm/margin")[0] == 3


def test_manual_optimization_logs_at_the_same_steps(tmp_path, monkeypatch):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(self.step(batch, "train"))
            for optimizer in optimizers:
                if batch_idx % 3 == 0:
                    optimizer.step()

        def configure_optimizers(self):
            return [
                torch.optim.SGD(self.net[:4].parameters(), 0.05),
                torch.optim.SGD(self.net[4:].parameters(), 0.05),
            ]

    nm = callback("sr-ste", monitor=MaskMonitor(histograms_every=4, images_every=4))
    calls, real = [], monitor_file.Watch._log
    monkeypatch.setattr(monitor_file.Watch, "_log", lambda *a: calls.append(1) or real(*a))
    fit(tmp_path, nm, model=Manual())
    events = Events(tmp_path / "logs" / "version_0")
    assert events.steps("nm/density") == [1, 3, 5, 7, 9, 11]
    assert len(calls) == 6
    assert events.steps("nm/margin") == [1, 5, 9]


def test_accumulation_and_resume_go_on_where_they_were(tmp_path):
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "data": Data(192)}

    def steps(version):
        events = Events(tmp_path / "logs" / f"version_{version}")
        assert len(events.texts["nm/layers"]) == 1
        return events.steps("nm/density"), events.steps("nm/margin")

    def nm():
        return callback("sr-ste", monitor=MaskMonitor(histograms_every=4))

    trainer = fit(tmp_path, nm(), max_epochs=1, **options)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert steps(0) == ([0, 1, 2, 3, 4, 5], [0, 4])
    fit(tmp_path, nm(), max_epochs=2, ckpt_path=tmp_path / "half.ckpt", **options)
    assert steps(1) == ([6, 7, 8, 9, 10, 11], [8])


# ------------------------------------------------------------------------------------------------------ loggers


def header(folder):
    with (Path(folder) / "metrics.csv").open() as file:
        return set(next(csv.reader(file)))


def test_other_loggers_get_the_scalars(tmp_path):
    loggers = [CSVLogger(str(tmp_path), name="csv"), TensorBoardLogger(str(tmp_path), name="board")]
    fit(tmp_path, callback("sr-ste"), logger=loggers)
    scalars = {tag for tag in header(loggers[0].log_dir) if tag.startswith("nm/")}
    events = Events(loggers[1].log_dir)
    constant = {"nm/train_flops_ratio"}  # a text in TensorBoard
    assert scalars == {tag for tag in events.scalars if tag.startswith("nm/")} | constant
    assert len(scalars) == 5
    assert events.images
    assert not any(tag.startswith("nm_") for tag in {*header(loggers[0].log_dir), *events.scalars})


COSTS = {
    "dense-start": {"method": STE(dense_start=3)},
    "schedule": {"method": "sr-ste", "schedule": {"dense_end": 3}},
    "estimator": {"method": "sr-ste", "grad_estimator": MVUE(dense_end=3)},
    "pattern": {"method": LBC(stop=6)},
    # Dense gradients are no N:M products, so that they change nothing.
    "gradient": {"method": BAME(stop=6, every=2)},
}
COSTS |= {name: {"method": name} for name in ("ste", "asp", "bi-mask", "transposable")}


@pytest.mark.parametrize("name", COSTS)
def test_costs_are_a_curve_where_they_change_and_else_a_text(tmp_path, name):
    tag = "nm/train_flops_ratio"
    nm = NMSparsityCallback("2:4", **COSTS[name], show_tables=False)
    ratios = []
    loggers = [TensorBoardLogger(tmp_path, "board"), CSVLogger(tmp_path, "csv")]
    look = Inspect(lambda trainer, module: ratios.append(nm.sparsifier.flops_ratios()["eligible"]))
    trainer = fit(tmp_path, nm, look, logger=loggers, log_every_n_steps=1)
    events = Events(loggers[0].log_dir)
    with (Path(loggers[1].log_dir) / "metrics.csv").open() as file:
        values = [float(row[tag]) for row in csv.DictReader(file) if row[tag]]
    (text,) = events.texts[tag]
    assert text.startswith(f"{ratios[0]:.4g} of the multiply-adds")
    changes = [step for step, ratio in enumerate(ratios) if ratio != ratios[0]]
    assert bool(changes) == (name in ("dense-start", "schedule", "estimator", "pattern"))
    if changes:
        # The curve begins with the last step before the change.
        first = changes[0] - 1
        assert events.steps(tag) == list(range(first, len(ratios)))
        assert [event.value for event in events.scalars[tag]] == pytest.approx(ratios[first:])
        assert values == pytest.approx([ratios[0], *ratios[first:]])
    else:
        assert tag not in events.scalars
        assert values == pytest.approx(ratios[:1]), "one value, no curve"
    assert trainer.callback_metrics[tag] == pytest.approx(ratios[-1])


def test_two_boards_get_the_same(tmp_path):
    loggers = [TensorBoardLogger(str(tmp_path), name=name) for name in ("one", "two")]
    fit(tmp_path, callback("sr-ste"), logger=loggers)
    one, two = (Events(logger.log_dir).tags() for logger in loggers)
    assert one == two
    assert "nm/margin" in one


def test_without_tensorboard(tmp_path, monkeypatch):
    for name in [*sys.modules]:
        if name.split(".")[0] == "tensorboard" or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    logger = CSVLogger(str(tmp_path))
    fit(
        tmp_path,
        callback("sr-ste", monitor=MaskMonitor(histograms_every=1, images_every=1)),
        logger=logger,
    )
    assert "nm/density" in header(logger.log_dir)


@pytest.mark.parametrize("refused", ["add_figure", "add_histogram_raw", "add_text"])
def test_a_logger_that_refuses_costs_one_warning(tmp_path, monkeypatch, refused):
    class Refuses(TensorBoardLogger):
        pass

    logger, other = (
        Refuses(str(tmp_path), name="refuses"),
        TensorBoardLogger(str(tmp_path), name="takes"),
    )

    def no(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(logger.experiment, refused, no)
    nm = callback("sr-ste", monitor=MaskMonitor(histograms_every=1, images_every=1))
    with pytest.warns(
        UserWarning, match=r"Refuses gets scalars alone from now on.*OSError: disk full"
    ) as warned:
        fit(tmp_path, nm, logger=[logger, other])
    assert len([one for one in warned if "scalars alone" in str(one.message)]) == 1
    assert len(Events(logger.log_dir).scalars["nm/density"]) == 6
    assert len(Events(other.log_dir).histograms["nm/margin"]) == 6


# ----------------------------------------------------------------------------------------------- configuration


# ------------------------------------------------------------------------------------------------ the terminal


def test_a_run_too_short_to_log_has_its_table(tmp_path):
    fit(tmp_path, callback("sr-ste"), max_steps=1, log_every_n_steps=4)
    assert "nm/layers" in Events(tmp_path / "logs" / "version_0").texts


def test_a_failed_fit_leaves_nothing_behind(tmp_path):
    class Fails(pl.Callback):
        def on_train_batch_end(self, *args):
            raise RuntimeError("stop")

    monitor = MaskMonitor()
    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path, callback(), Fails(), monitor)
    assert not monitor._watched
    fit(tmp_path, callback(), monitor, max_epochs=1)
