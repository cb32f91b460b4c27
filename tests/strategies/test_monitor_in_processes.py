"""MaskMonitor where several processes train: all compute, the first writes."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_nm import MaskMonitor, NMDDPStrategy, NMSparsityCallback
from tests.strategies.test_fsdp import Net, data
from tests.support.event_files import Events
from tests.support.processes import in_processes

pytestmark = pytest.mark.slow


def fit(folder, name, strategy="auto", devices=1, shard=False, method="sr-ste", refuses=False):
    logger = TensorBoardLogger(folder, name="", version=name)
    monitor = MaskMonitor(log_layers=True, histograms_every=2, images_every=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, use_distributed_sampler=False, logger=logger,
        callbacks=[NMSparsityCallback("2:4", method, skip_first_last=False, monitor=monitor)],
        max_epochs=1, log_every_n_steps=2,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    if refuses and trainer.is_global_zero:

        def no(*args, **kwargs):
            raise OSError("disk full")

        logger.experiment.add_histogram_raw = no
    model = Net(shard)
    model.validation_step = None
    trainer.fit(model, data())
    return float(trainer.callback_metrics["nm/density"])


def in_two(folder):
    """Everything that takes two processes, at the cost of one start."""
    found = [fit(folder, "sharded", ModelParallelStrategy(2, 1), 2, True)]
    found.append(fit(folder, "refusing", ModelParallelStrategy(2, 1), 2, True, refuses=True))
    found.append(fit(folder, "ddp", NMDDPStrategy(), 2, method="asp"))
    return torch.tensor(found)


def test_all_processes_compute_and_the_first_writes(tmp_path):
    folder = str(tmp_path / "logs")
    fit(folder, "alone")
    for densities in in_processes(2, tmp_path / "run", in_two, folder):
        assert densities.tolist() == [0.5] * 3
    alone, sharded, refusing, ddp = (
        Events(f"{folder}/{name}") for name in ("alone", "sharded", "refusing", "ddp")
    )
    assert all(
        len(list((tmp_path / "logs" / name).glob("events*"))) == 1
        for name in ("sharded", "refusing", "ddp")
    )
    assert sharded.tags() == alone.tags()
    for tag in ("nm/margin", "nm/margin/net.0", "nm/margin/net.3"):
        assert sharded.steps(tag) == alone.steps(tag) == [1, 3, 5, 7]
        for one, other in zip(sharded.histograms[tag], alone.histograms[tag], strict=True):
            assert one.histogram_value.bucket == other.histogram_value.bucket
            assert one.histogram_value.sum == pytest.approx(other.histogram_value.sum)
    for tag in alone.images:
        for one, other in zip(sharded.pictures(tag), alone.pictures(tag), strict=True):
            assert np.array_equal(one, other)
    assert len(alone.images) == 3, "heat maps"
    assert refusing.steps("nm/density") == [1, 3, 5, 7]
    assert not refusing.images
    assert "nm/grad_bytes_ratio" in ddp.tags()
