"""BAME in a Trainer: the training length, its statistics, manual optimization."""

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger

from lightning_nm import BAME
from lightning_nm.demo import ExactResume
from tests.support import lightning_models
from tests.support.lightning_models import Data, Inspect, TwoOptimizers, fit, is_plain, new_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
)
ENDLESS = {"max_epochs": -1, "max_time": "00:00:00:05"}


def callback(**options):
    options = {"stop": 0.75, "every": 2, "budget": 1.0, "evidence_rate": 0.5} | options
    return lightning_models.callback(BAME(**options))


def plan(nm):
    """Looks at the plan of the training, that of a layer, and the clock."""
    return Inspect(
        lambda *_: (
            nm.sparsifier.planned_steps,
            nm.sparsifier.layers["net.6"].progress.schedule,
            nm.sparsifier.clock,
        )
    )


class Enough(pl.Callback):
    """Ends an endless training."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step >= self.steps


class Stream(torch.utils.data.IterableDataset):
    """Batches without a length."""

    def __iter__(self):
        data = Data().train_set
        for first in range(0, 96, 16):
            yield data.__getitems__(torch.arange(first, first + 16))


def changing():
    return GradientAccumulationScheduler({0: 1, 1: 6})


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({"max_epochs": 2}, 12),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 4),
        ({"max_epochs": -1, "max_steps": 8}, 8),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
        ({"max_epochs": -1, "max_steps": 8, "callbacks": changing}, 8),
    ],
)
def test_fractions_become_steps_of_the_trainers_plan(tmp_path, options, planned):
    options, nm = dict(options), callback()
    other, look = options.pop("callbacks", pl.Callback)(), plan(nm)
    fit(tmp_path, [other, nm, look], **options)
    assert {seen[:2] for seen in look.seen} == {(planned, (0, planned * 3 // 4))}
    assert look.seen[-1][2] == planned, "the plan came true"


@pytest.mark.parametrize(
    ("other", "options", "reason"),
    [
        (lambda: Enough(5), ENDLESS, "or give the Trainer max_steps"),
        (pl.Callback, {"data": Stream}, ""),
        (changing, {}, "gradient accumulation changes"),
        (pl.Callback, {"model": TwoOptimizers}, "Under manual optim"),
    ],
    ids=["endless", "stream", "changing", "manual"],
)
def test_a_plan_that_the_trainer_cannot_tell_needs_integers(tmp_path, other, options, reason):
    options = dict(options)
    model = new_model(of=options.pop("model", lightning_models.Net))
    if "data" in options:
        loader = torch.utils.data.DataLoader(options["data"](), batch_size=None)
        options |= {"data": loader, "limit_val_batches": 0}
    with pytest.raises(
        ValueError, match=rf"stop=0\.75 is a fraction.*write BAME\(stop=10000\).*{reason}"
    ) as told:
        fit(tmp_path, [other(), callback()], model, **options)
    assert "NMSparsifier" not in str(told.value), "the user of a Trainer has none"
    assert is_plain(model)
    nm = callback(stop=4)
    look = plan(nm)
    fit(tmp_path, [other(), nm, look], model, **options)
    assert look.seen[-1][1] == (0, 4)
    flips = [layer["total_flips"] for layer in nm.state_dict()["layers"].values()]
    assert all(flips), "it adapts"


@pytest.mark.parametrize(
    ("now", "options", "text"),
    [
        ({}, {"max_epochs": 4}, r"BAME scheduled at steps \(3, 9\), which stays; .* \(3, 18\)"),
        ({"stop": 12}, {"max_epochs": 3}, r"\(3, 9\), which stays; .* \(3, 12\)"),  # it is frozen
        # A plan that it does not use is no reason to refuse.
        ({"stop": 0.1}, {"max_epochs": -1, "max_steps": 14}, r"\(3, 9\), .* \(3, 1\)"),
        # Nor an endless one: the steps are known.
        ({}, {"max_epochs": -1}, None),
    ],
)
def test_a_resumed_run_of_another_length_keeps_its_schedule_and_says_so(
    tmp_path, now, options, text
):
    trainer, _ = fit(tmp_path, [callback(start=3), ExactResume()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    nm = callback(start=3, **now)
    look = plan(nm)

    def resume():
        fit(tmp_path, [nm, look, Enough(15)], ckpt_path=tmp_path / "a.ckpt", **options)

    if text is None:
        resume()
    else:
        with pytest.warns(UserWarning, match=text):
            resume()
    assert {seen[1] for seen in look.seen} == {(3, 9)}


def test_the_adaptation_sees_the_gradient_before_clipping(tmp_path):
    def masks(clip):
        nm = callback(stop=10, every=1, evidence="batch")
        look = Inspect(
            lambda *_: torch.cat([x.forward_mask.flatten() for x in nm.sparsifier.layers.values()])
        )
        fit(tmp_path, [nm, look], max_steps=2, gradient_clip_val=clip)
        assert all(layer["total_flips"] > 0 for layer in nm.state_dict()["layers"].values())
        return look.seen[0]

    assert torch.equal(masks(None), masks(1e-6))


def test_statistics_hold_until_the_next_adaptation(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(tmp_path, [callback(evidence="batch")], logger=logger, log_every_n_steps=1)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"nm/oscillation", "nm/adapted_blocks", "nm/frozen_blocks"} <= set(rows[0])
    values = [value for row in rows if (value := row["nm/predicted_loss_change"])]
    assert len(values) == 12, "the value of the last adaptation is logged until the next"
    assert len(set(values[:9])) == 5, "steps 0, 2, 4, 6 and 8 adapt"
    assert {float(value) for value in values[9:]} == {0.0}, "the masks are frozen"
