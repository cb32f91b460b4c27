"""ThroughputMonitor beside the plugin: no mfu whose denominator has no meaning."""

import logging

import pytest
import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

from lightning_nm import NMMixedPrecision, NMPrecision, NMSparsifier
from lightning_nm.callbacks import throughput
from lightning_nm.kernels import SimulatedSparseKernel
from tests.support.lightning_models import Data, callback, make_trainer, new_model

TABLE = 989_400_000_000_000
"""Lightning's figure for an H100."""


class Cuda:
    type = "cuda"


def fit(tmp_path, monkeypatch, plugin, name="NVIDIA H100 80GB HBM3", given=None):
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    trainer = make_trainer(
        tmp_path,
        [monitor, callback()],
        plugins=[plugin],
        logger=Recorder(tmp_path),
        log_every_n_steps=1,
    )
    model = new_model()
    model.flops_per_batch = 10**9
    settle = throughput.turn_off_mfu

    def as_on_a_gpu(trainer):
        monitor.available_flops = given or TABLE
        for each in monitor._throughputs.values():
            each.available_flops = monitor.available_flops
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.strategy), "root_device", Cuda())
            patch.setattr(torch.cuda, "get_device_name", lambda device: name)
            settle(trainer)

    monkeypatch.setattr("lightning_nm.callbacks.sparsity.turn_off_mfu", as_on_a_gpu)
    trainer.fit(model, Data())
    return trainer, monitor


class Recorder(CSVLogger):
    def __init__(self, path):
        super().__init__(path)
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)


def plugin(cls=NMMixedPrecision, **options):
    return cls(
        backends=[SimulatedSparseKernel()], decisions=None, **{"kernels": "sparse", **options}
    )


def logs_mfu(trainer):
    assert trainer.logger.rows
    return any("mfu" in key for row in trainer.logger.rows for key in row)


def test_no_mfu_while_products_are_routed(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        trainer, monitor = fit(tmp_path, monkeypatch, plugin())
    assert monitor.available_flops is None
    assert "no mfu is logged while sparse kernels may run" in caplog.text
    assert not logs_mfu(trainer)


def test_a_peak_that_was_given_stays(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        trainer, monitor = fit(tmp_path, monkeypatch, plugin(), given=10**15)
    assert monitor.available_flops == 10**15
    assert "no mfu" not in caplog.text
    assert logs_mfu(trainer)


@pytest.mark.parametrize(
    ("cls", "kernels"), [(NMPrecision, "sparse"), (NMMixedPrecision, "reference")]
)
def test_mfu_stays_where_nothing_is_routed(cls, kernels, tmp_path, monkeypatch):
    trainer, monitor = fit(tmp_path, monkeypatch, plugin(cls, kernels=kernels))
    assert monitor.available_flops == TABLE
    assert logs_mfu(trainer)


def test_model_flops_do_not_depend_on_kernels():
    counts = []
    for install in (False, True):
        model = new_model()
        if install:
            NMSparsifier(model, "2:4", "bi-mask", "mvue", grad_snr_every=0).attach()
        x = torch.randn(4, 1, 8, 8)
        counts.append(measure_flops(model, lambda: model(x), loss_fn=lambda y: y.sum()))  # noqa: B023
    assert counts[0] == counts[1]
