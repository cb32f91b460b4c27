"""lightning-nm report: what the page of a run says, and what it says of what is missing."""

import html
import json
import re
import shlex
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from lightning_nm import MaskMonitor, NMPrecision
from lightning_nm.callbacks.report.tensorboard import (
    markdown_table,
    write_map_column,
    write_map_rows,
)
from lightning_nm.cli import main
from lightning_nm.commands.report.run import read_run
from lightning_nm.kernels import SimulatedSparseKernel
from tests.support.lightning_models import Data, Net, callback, make_trainer

BAD = "<img src=x onerror=alert(1)>&amp;</script>"


class Named(Net):
    def __init__(self, width=16, note=BAD):
        super().__init__(width=width)
        self.save_hyperparameters()


def train(folder, *callbacks, model=None, **options):
    pl.seed_everything(0, verbose=False)
    logger = TensorBoardLogger(
        str(folder.parent), name=folder.name, version="", default_hp_metric=False
    )
    trainer = make_trainer(folder, callbacks, logger=logger, **options)
    trainer.fit(model or Named(), Data())
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with everything, one of another method without a checkpoint, and a dense one."""
    path = tmp_path_factory.mktemp("runs")
    plugin = NMPrecision(kernels="sparse", backends=[SimulatedSparseKernel()], decisions=None)
    full = callback("bi-mask", monitor=MaskMonitor(log_layers=True))
    return [
        train(
            path / "full", full, ModelCheckpoint(path / "full" / "checkpoints"), plugins=[plugin]
        ),
        train(path / "ste", callback("sr-ste")),
        train(path / "dense", model=Named(width=8)),
    ]


class Page(HTMLParser):
    """The tables below each heading, the charts, and every address that the page names."""

    def __init__(self, path):
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.tables, self.charts, self.addresses, self.missing = {}, {}, [], []
        self._heading, self._open, self._words, self._chart = "", "", "", ""
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [attributes[name] for name in ("src", "href") if name in attributes]
        self._open = "json" if attributes.get("type") == "application/json" else tag
        self._words = ""
        if tag == "tr":
            self.tables.setdefault(self._heading, []).append([])

    def handle_data(self, data):
        self._words += data

    def handle_endtag(self, tag):
        if tag in ("h2", "h3"):
            self._heading = self._words
        elif tag in ("td", "th"):
            self.tables[self._heading][-1].append(self._words)
        elif tag == "figcaption":
            self._chart = self._words
        elif tag == "li":
            self.missing.append(self._words)
        elif tag == "script" and self._open == "json":
            self.charts[self._chart] = json.loads(self._words)
        self._open = ""


def report(tmp_path, *folders):
    page = tmp_path / "report.html"
    assert main(["report", *map(str, folders), "-o", str(page)]) == 0
    return Page(page)


def test_the_page_of_a_run_has_everything(tmp_path, runs, capsys):
    page = report(tmp_path, runs[0])
    assert re.search(r"Written to .*report.html \(4\.\d MB\)", capsys.readouterr().out)
    assert not page.missing
    layers = {row[0]: row for row in page.tables["Layers"]}
    assert layers["layer"][-4:] == ["flip rate", "margin", "kept magnitude", "checkpoint"]
    assert layers["net.3"][1:4] == ["16x16x3x3", "2:4", "bi-mask"]
    assert layers["net.3"][-1] == "N:M"
    assert 0 < float(layers["net.3"][-3]) < 1
    assert layers["net.8"][-4:] == ["-", "-", "-", "-"]
    assert dict(page.tables["Environment"])["precision"] == "32-true"
    assert ["N:M violations", "0", "blocks with more than N nonzeros"] in page.tables[
        "Summary at the end of the fit"
    ]
    assert "simulated" in {row[-2] for row in page.tables["Kernels that ran"]}
    assert dict(page.tables["Settings"])["nm/method"] == "bi-mask"
    assert dict(page.tables["Settings"])["note"] == BAD
    assert "2 N:M" in dict(page.tables["Run"])["its masked weights"]
    assert {"loss", "kept", "flip rate", "margin", "kept magnitude", "overlap"} <= set(page.charts)


def test_charts_hold_the_logged_values(tmp_path, runs):
    page = report(tmp_path, runs[0])
    train_loss, val_loss = page.charts["loss"]["data"]
    assert (train_loss["name"], val_loss["name"]) == ("train_loss", "val_loss")
    logged = {row[0]: row for row in page.tables["All logged values"]}
    assert train_loss["x"] == [1, 3, 5, 7, 9, 11]
    assert f"{train_loss['y'][-1]:g}" == logged["train_loss"][1]
    flips = page.charts["flip rate"]["data"][0]
    assert flips["y"] == ["net.3", "net.6"]
    assert flips["x"] == [-1, 1, 3, 5, 7, 9, 11]
    by_layer = {row[0]: row[1] for row in page.tables["Layers"]}
    assert set(flips["y"]) <= set(by_layer)
    highest = max(max(row) for row in flips["customdata"])
    for shown, value in zip(flips["z"][0], flips["customdata"][0], strict=True):
        assert shown == pytest.approx((value / highest) ** 0.5, rel=1e-3)


def test_nothing_is_loaded(tmp_path, runs):
    page = report(tmp_path, *runs)
    assert all(address.startswith("#") for address in page.addresses)
    assert "default-src 'none'" in page.text


def test_several_runs_are_compared(tmp_path, runs):
    page = report(tmp_path, *runs)
    names = [f"{runs[0].parent.name}/{run.name}" for run in runs]
    values = {row[0]: row[1:] for row in page.tables["Last values"]}
    assert values[""] == names
    assert all(float(value) > 0 for value in values["train_loss"])
    assert values["nm/density"] == ["0.5", "0.5", "-"]
    flops = {
        row[0]: row[1:]
        for row in page.tables["Multiply-adds of training, over those of dense training"]
    }
    full, ste, dense = (cell.rstrip("x") for cell in flops["training FLOPs, eligible"])
    assert float(full) < float(ste) < 1
    assert dense == "-"
    differ = {row[0]: row[1:] for row in page.tables["Settings that differ"]}
    assert differ["width"] == ["16", "16", "8"]
    assert differ["nm/method"] == ["bi-mask", "sr-ste", "-"]
    assert "note" not in differ
    assert [trace["name"] for trace in page.charts["flip_rate"]["data"]][:1]
    assert page.text.count("One run of each: a difference may be chance") == 1


def test_a_dense_run_says_so(tmp_path, runs):
    page = report(tmp_path, runs[2])
    assert any("no statistics of masks (nm/*): a dense run" in line for line in page.missing)
    assert any("no checkpoint" in line for line in page.missing)
    assert "loss" in page.charts
    assert "Layers" not in page.tables


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "hparams.yaml").unlink(), "there is no hparams.yaml"),
        (lambda folder: (folder / "hparams.yaml").write_text("{"), "hparams.yaml cannot be read"),
        (lambda folder: (folder / "hparams.yaml").write_text(""), "hparams.yaml is empty"),
        (lambda folder: shutil.rmtree(folder / "checkpoints"), "there is no checkpoint"),
        (lambda folder: next(folder.rglob("*.ckpt")).write_bytes(b"no"), "ckpt are not verified: "),
    ],
)
def test_what_is_missing_is_said(tmp_path, runs, change, said):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    change(folder)
    (line,) = report(tmp_path, folder).missing
    assert said in line


def test_settings_of_any_class_are_shown_and_not_made(tmp_path, runs):
    folder = shutil.copytree(runs[1], tmp_path / "run")
    text = "a: !!python/object/apply:os.system ['false']\nb: {c: [1, 2]}\nd: !!python/name:torch.nn.ReLU ''\n"
    (folder / "hparams.yaml").write_text(text)
    found = dict(report(tmp_path, folder).tables["Settings"])
    assert found["b.c"] == "[1, 2]"
    assert "os.system" in found["a"]
    assert "torch.nn.ReLU" in found["d"]


def test_an_interrupted_run_with_nan_has_a_page(tmp_path):
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 7:
                raise KeyError("stop")

    class Nan(Named):
        def step(self, batch, stage):
            loss = super().step(batch, stage)
            self.log("odd", torch.tensor(float("nan")) if self.global_step > 3 else loss)
            return loss

    with pytest.raises(KeyError):
        train(tmp_path / "run", callback("sr-ste"), Stops(), model=Nan(), limit_val_batches=0)
    page = report(tmp_path, tmp_path / "run")
    assert any(
        "there is no summary (nm/summary): the fit was interrupted" in line for line in page.missing
    )
    assert any("odd is not finite from step 5" in line for line in page.missing)
    assert page.charts["odd"]["data"][0]["y"][-1] is None
    assert (
        "last finite" in next(row for row in page.tables["All logged values"] if row[0] == "odd")[1]
    )
    assert "flip rate" in page.charts


def test_names_are_text_everywhere(tmp_path):
    folder = tmp_path / BAD.replace("/", "")
    writer = SummaryWriter(str(folder))
    row = [BAD, "4x4", "2:4", BAD, "2:4", "dense", "dense", BAD, BAD]
    writer.add_text(
        "nm/layers",
        markdown_table(("layer", "shape", "pattern", "method", *"abcd", "kernel"), [row]),
    )
    write_map_rows(writer, [BAD, "b"], 1)
    for step in (1, 2):
        write_map_column(writer, torch.rand(3, 2), step)
        for tag in ("nm/density", "loss", BAD):
            writer.add_scalar(tag, 0.5, step)
    writer.close()
    (folder / "hparams.yaml").write_text(json.dumps({BAD: BAD}))
    (folder / "config.yaml").write_text(BAD)
    page = report(tmp_path, folder, folder)
    assert "<img" not in page.text[: page.text.rindex("<footer")]
    assert page.text.count("</script>") == page.text.count("<script")
    assert page.charts["margin"]["data"][0]["y"] == [html.escape(BAD), "b"]
    figures = re.findall(r'<script type="application/json">(.*?)</script>', page.text)
    assert len(figures) > 4
    assert not any("<" in figure for figure in figures)
    assert page.tables["Layers"][1][0] == BAD


def test_the_commands_of_the_documentation_run(tmp_path, runs, monkeypatch, capsys):
    page = Path(__file__).parents[3] / "docs" / "report.md"
    commands = [
        shlex.split(line)
        for line in page.read_text().splitlines()
        if line.startswith("lightning-nm report ")
    ]
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    for _, *words in commands:
        for word in words[1:]:
            if word.startswith("runs/") and not Path(word).exists():
                shutil.copytree(runs[1], word)
        assert main(words) == 0
    assert Path("report.html").is_file()
    assert Path("comparison.html").is_file()


def test_what_cannot_be_reported_is_a_usage_error(tmp_path, capsys, runs):
    assert main(["report", str(tmp_path)]) == 2
    assert (
        f"lightning-nm report: '{tmp_path}' holds no event files: expected"
        in capsys.readouterr().err
    )
    assert main(["report", str(runs[1]), "-o", str(tmp_path)]) == 2
    assert "is a folder: name a file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report"])


@pytest.mark.parametrize("package", ["jinja2", "plotly", "tensorboard"])
def test_without_the_extra_it_is_named(tmp_path, monkeypatch, capsys, runs, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["report", str(runs[1]), "-o", str(tmp_path / "page.html")]) == 2
    assert "pip install -e '.[report]'" in capsys.readouterr().err


@pytest.mark.parametrize(("values", "shown"), [([-1.0], False), ([-1.0, 0.5], True)])
def test_the_placeholder_of_lightnings_hyperparameters_is_no_metric(tmp_path, values, shown):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("train_loss", 1.0, 0)
        for step, value in enumerate(values):
            writer.add_scalar("hp_metric", value, step)
    assert set(read_run(tmp_path).metrics) == (
        {"train_loss", "hp_metric"} if shown else {"train_loss"}
    )
