"""MaskMonitor: settings, the progress bar and YAML."""

import re
import sys

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_nm import BAME, MaskMonitor, NMSparsityCallback
from lightning_nm.nn.adapters import Adapter
from tests.callbacks.test_monitor import fit, header
from tests.support.event_files import Events
from tests.support.lightning_models import Net, callback


def test_what_is_switched_off_is_not_written(tmp_path):
    settings = {
        "histograms_every": 0,
        "images_every": 0,
        "custom_scalars": False,
        "layer_table": False,
    }
    settings["heat_maps"] = False
    fit(tmp_path, callback("sr-ste", monitor=MaskMonitor(["density", "overlap"], True, **settings)))
    events = Events(tmp_path / "logs" / "version_0")
    layers = {
        f"nm/{name}/{layer}" for name in ("density", "overlap") for layer in ("net.3", "net.6")
    }
    assert events.tags() == {"nm/density", "nm/overlap", *layers}
    assert "custom_scalars__config__" not in events.accumulator.Tags()["tensors"]


@pytest.mark.parametrize("first", [True, False])
def test_one_among_the_trainers_callbacks_takes_the_place_of_the_default(tmp_path, first):
    callbacks = [MaskMonitor(["density"]), callback("sr-ste")]
    trainer = fit(tmp_path, *(callbacks if first else callbacks[::-1]), logger=False)
    assert {name for name in trainer.callback_metrics if name.startswith("nm")} == {"nm/density"}


@pytest.mark.parametrize("monitor", [False, None])
def test_without_a_monitor_nothing_is_logged(tmp_path, monitor):
    trainer = fit(tmp_path, callback("sr-ste", monitor=monitor))
    assert not [name for name in trainer.callback_metrics if name.startswith("nm")]
    assert not Events(tmp_path / "logs" / "version_0").tags()


def test_every_callback_of_a_trainer_is_watched(tmp_path):
    a, b = (
        NMSparsityCallback(method="ste", include=x, name=x, show_tables=False)
        for x in ("net.3", "net.6")
    )
    monitor = MaskMonitor(log_layers=True, histograms_every=1, images_every=1)
    fit(tmp_path, a, b, monitor)
    tags = Events(tmp_path / "logs" / "version_0").tags()
    for layer in ("net.3", "net.6"):
        assert {f"nm/density/{layer}", f"nm/margin/{layer}"} <= tags
    assert not monitor._watched


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda: [MaskMonitor()], "no masks for it to watch: add an NMSparsityCallback"),
        (lambda: [callback(monitor=False), MaskMonitor()], "no masks for it to watch"),
        (
            lambda: [callback(monitor=MaskMonitor()), MaskMonitor()],
            "without a `monitor` of its own",
        ),
        (lambda: [callback(), MaskMonitor(), MaskMonitor()], "there are 2 MaskMonitors"),
        (
            lambda: [callback(log_layers=True), MaskMonitor()],
            r"write MaskMonitor\(log_layers=True\)",
        ),
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
    seen = []
    model.on_train_batch_start = lambda *args: seen.append(args)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, *callbacks(), model=model, logger=False)
    assert not seen
    assert not any(isinstance(m, Adapter) for m in model.modules())


def test_bad_settings_are_refused_at_once():
    for name in ("histograms_every", "images_every"):
        for bad in (-1, 1.5, None, True):
            with pytest.raises(ValueError, match=f"{name}={bad}"):
                MaskMonitor(**{name: bad})
    with pytest.raises(
        TypeError, match=r"statistics='density' must be a list of names, as in \['density'\]"
    ):
        MaskMonitor("density")
    for monitor in (False, None, MaskMonitor()):
        with pytest.raises(ValueError, match=r"write MaskMonitor\(log_layers=True\)"):
            NMSparsityCallback(log_layers=True, monitor=monitor)


def test_statistics_of_the_method_and_the_estimator_can_be_asked_for(tmp_path):
    names = ["adapted_blocks", "predicted_loss_change", "grad_snr"]
    nm = callback(
        BAME(start=0, stop=9, every=2, evidence="batch"),
        grad_estimator="mvue",
        grad_snr_every=1,
        monitor=MaskMonitor(names),
    )
    trainer = fit(tmp_path, nm, logger=False)
    assert {name for name in trainer.callback_metrics if name.startswith("nm")} == {
        f"nm/{name}" for name in names
    }


@pytest.mark.parametrize(
    ("bar", "method", "figures"),
    [
        (RichProgressBar, "bi-mask", {"nm_density", "nm_flips", "nm_overlap"}),
        (RichProgressBar, "dense", {"nm_density", "nm_flips"}),
        (TQDMProgressBar, "bame", {"nm_density", "nm_flips", "nm_adapted_blocks"}),
        (TQDMProgressBar, "sr-ste", {"nm_density", "nm_flips", "nm_kept_magnitude"}),
    ],
)
def test_the_bar_and_the_tables(tmp_path, capsys, bar, method, figures):
    nm = callback(method)
    nm.show_tables = True
    seen = []

    class Bar(bar):
        def get_metrics(self, trainer, pl_module):
            found = super().get_metrics(trainer, pl_module)
            seen.append({name for name in found if name.startswith("nm")})
            return found

    logger = CSVLogger(str(tmp_path))
    trainer = fit(tmp_path, nm, Bar(), logger=logger, enable_progress_bar=True, max_epochs=1)
    assert seen[-1] == figures
    out = capsys.readouterr().out
    assert out.index("N:M layers") < out.index("N:M summary")
    assert not re.search(r"\x1b\[[\d;]*m", out), "no terminal: no colours"
    assert re.search(r"train_loss .*last value", out)
    assert not re.search(r"nm_\w+ .*last value", out)
    assert not any(name.startswith("nm_") for name in header(logger.log_dir))
    assert trainer.callback_metrics["nm/density"] == trainer.progress_bar_metrics["nm_density"]


def test_the_bar_can_do_without(tmp_path):
    trainer = fit(
        tmp_path,
        callback(monitor=MaskMonitor(progress_bar=False)),
        enable_progress_bar=True,
        max_epochs=1,
    )
    assert not any(name.startswith("nm") for name in trainer.progress_bar_metrics)


def test_it_comes_from_yaml(tmp_path, capsys, monkeypatch):
    import yaml

    from lightning_nm.cli import main

    monkeypatch.setattr(sys, "argv", ["lightning-nm"])
    file = tmp_path / "config.yaml"
    file.write_text(
        """
trainer:
  callbacks:
    - class_path: lightning_nm.NMSparsityCallback
      init_args:
        pattern: 2:4
        monitor:
          class_path: lightning_nm.MaskMonitor
          init_args: {statistics: [density], log_layers: true, histograms_every: 50}
model: lightning_nm.demo.ResidualCNN
data: lightning_nm.demo.Digits
"""
    )
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(file), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"][0]["init_args"][
        "monitor"
    ]
    assert printed["class_path"].endswith("MaskMonitor")
    assert printed["init_args"]["statistics"] == ["density"]
    assert printed["init_args"]["images_every"] == 500
