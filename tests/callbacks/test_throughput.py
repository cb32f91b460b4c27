"""ThroughputMonitor beside the plugin: one denominator, named, and never above it."""

import logging

import pytest
import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

from lightning_nm import NMMixedPrecision, NMPrecision, NMSparsifier
from lightning_nm.callbacks import throughput
from lightning_nm.kernels import SimulatedSparseKernel
from tests.lightning_models import Data, callback, make_trainer, new_model


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 1979),
        ("NVIDIA H200 NVL", 1671),
        ("NVIDIA H100 PCIe", 1513),
        ("NVIDIA A100-PCIE-40GB", 624),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 733),
        ("NVIDIA L4", 242),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peaks_are_those_of_the_very_gpu(name, peak):
    assert throughput.sparse_peak(name) == peak


class Cuda:
    type = "cuda"


def fit(tmp_path, monkeypatch, plugin, name):
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    trainer = make_trainer(
        tmp_path, [monitor, callback()], plugins=[plugin], logger=Recorder(tmp_path), log_every_n_steps=1
    )
    model = new_model()
    model.flops_per_batch = 10**9
    settle = throughput.settle_throughput

    def as_on_a_gpu(trainer):
        monitor.available_flops = 1  # as Lightning's table would have it
        for each in monitor._throughputs.values():
            each.available_flops = 1
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.strategy), "root_device", Cuda())
            patch.setattr(torch.cuda, "get_device_name", lambda device: name)
            settle(trainer)

    monkeypatch.setattr("lightning_nm.callbacks.sparsity.settle_throughput", as_on_a_gpu)
    trainer.fit(model, Data())
    return trainer, monitor


class Recorder(CSVLogger):
    def __init__(self, path):
        super().__init__(path)
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)


def plugin(cls=NMMixedPrecision, **options):
    return cls(backends=[SimulatedSparseKernel()], decisions=None, **{"kernels": "sparse", **options})


def test_mfu_is_over_the_sparse_peak(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        trainer, monitor = fit(tmp_path, monkeypatch, plugin(), "NVIDIA H200")
    assert monitor.available_flops == 1979 * 10**12
    assert "mfu is dense-equivalent FLOPs over 1979 TFLOP/s, the 2:4 peak of NVIDIA H200" in caplog.text
    logged = [row for row in trainer.logger.rows if row.get("train/device/mfu")]
    assert logged, trainer.logger.rows[-3:]
    for row in logged:
        assert 0 < row["train/device/mfu"] < 1
        assert row["train/device/mfu"] == pytest.approx(row["train/device/flops_per_sec"] / 1979e12)


def test_no_mfu_without_a_known_peak(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        trainer, monitor = fit(tmp_path, monkeypatch, plugin(), "NVIDIA Thing")
    assert monitor.available_flops is None
    assert "no 2:4 peak is known for NVIDIA Thing" in caplog.text
    assert trainer.logger.rows
    assert not any("mfu" in key for row in trainer.logger.rows for key in row)


@pytest.mark.parametrize(("cls", "kernels"), [(NMPrecision, "sparse"), (NMMixedPrecision, "reference")])
def test_lightnings_own_figure_stays_where_nothing_is_routed(cls, kernels, tmp_path, monkeypatch):
    _, monitor = fit(tmp_path, monkeypatch, plugin(cls, kernels=kernels), "NVIDIA H200")
    assert monitor.available_flops == 1


def test_model_flops_do_not_depend_on_kernels():
    counts = []
    for install in (False, True):
        model = new_model()
        if install:
            NMSparsifier(model, "2:4", "bi-mask", "mvue", grad_snr_every=0).attach()
        x = torch.randn(4, 1, 8, 8)
        counts.append(measure_flops(model, lambda: model(x), loss_fn=lambda y: y.sum()))  # noqa: B023
    assert counts[0] == counts[1]
