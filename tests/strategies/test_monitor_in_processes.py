"""MaskMonitor where several processes train: all compute, the first writes."""

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_nm import MaskMonitor
from tests.support.event_files import Events
from tests.support.lightning_models import callback
from tests.support.parallel import Net, fit
from tests.support.processes import in_processes


def no(*args, **kwargs):
    raise OSError("disk full")


def density(folder, name, world=1, strategy="auto", method="sr-ste", refuses=False):
    logger = TensorBoardLogger(folder, name="", version=name)
    monitor = MaskMonitor(log_layers=True, histograms_every=2, images_every=2)
    nm, model = callback(method, skip_first_last=False, monitor=monitor), Net()
    if refuses:
        logger.experiment.add_histogram_raw = no
    trainer, _ = fit([nm], model, world, strategy, logger=logger, log_every_n_steps=2)
    return float(trainer.callback_metrics["nm/density"])


def in_two(folder):
    """Everything that takes two processes, at the cost of one start."""
    return [
        density(folder, "sharded", 2, ModelParallelStrategy(2, 1)),
        density(folder, "refusing", 2, ModelParallelStrategy(2, 1), refuses=True),
        density(folder, "ddp", 2, "nm_ddp", "asp"),
    ]


@pytest.mark.slow
def test_all_processes_compute_and_the_first_writes(tmp_path):
    folder, names = tmp_path / "logs", ("sharded", "refusing", "ddp")
    density(folder, "alone")
    assert in_processes(2, tmp_path / "run", in_two, folder) == [[0.5] * 3] * 2
    assert all(len(list((folder / name).glob("events*"))) == 1 for name in names)
    alone, sharded, refusing, ddp = (Events(folder / name) for name in ("alone", *names))
    assert sharded.tags() == alone.tags()
    for tag in ("nm/margin", "nm/margin/net.0", "nm/margin/net.3"):
        assert sharded.steps(tag) == alone.steps(tag) == [1, 3, 5, 7]
        for one, other in zip(sharded.histograms[tag], alone.histograms[tag], strict=True):
            assert one.histogram_value.bucket == other.histogram_value.bucket
            assert one.histogram_value.sum == pytest.approx(other.histogram_value.sum)
    assert len(alone.images) == 3, "heat maps"
    for tag in alone.images:
        assert all(map(np.array_equal, sharded.pictures(tag), alone.pictures(tag)))
    assert refusing.steps("nm/density") == [1, 3, 5, 7]
    assert not refusing.images
    assert "nm/grad_bytes_ratio" in ddp.tags()
