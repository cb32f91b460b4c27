"""BAME in a Trainer: the training length, its statistics, manual optimization, averaging."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_nm import BAME, NMSparsityCallback
from lightning_nm.demo import ExactResume
from lightning_nm.nn.adapters import Adapter
from tests.support.lightning_models import Data, Net, make_trainer, new_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
)


def callback(method=None, **options):
    method = method or BAME(stop=0.75, every=2, budget=1.0, evidence_rate=0.5)
    return NMSparsityCallback("2:4", method, show_tables=False, **options)


class Look(pl.Callback):
    """Notes what the layers hold after each batch; placed after the callback that moves the masks."""

    def __init__(self, nm, what):
        self.nm, self.what, self.seen = nm, what, []

    def on_train_batch_end(self, trainer, *args):
        self.seen.append(self.what(self.nm.sparsifier))


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({"max_epochs": 2}, 12),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 4),
        ({"max_epochs": -1, "max_steps": 8}, 8),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
    ],
)
def test_shares_become_steps_of_the_trainers_plan(tmp_path, options, planned):
    nm = callback()
    look = Look(
        nm, lambda s: [(s.planned_steps, *layer.progress.schedule) for layer in s.layers.values()]
    )
    clock = Look(nm, lambda s: s.clock)
    make_trainer(tmp_path, [nm, look, clock], **options).fit(new_model(), Data())
    assert all(seen == [(planned, 0, planned * 3 // 4)] * 2 for seen in look.seen)
    assert clock.seen[-1] == planned, "the plan came true"


def test_an_endless_plan_needs_integers_and_leaves_the_model_alone(tmp_path):
    model = new_model()
    endless = {"max_epochs": -1, "max_time": "00:00:00:05"}
    advice = r"stop=0\.75 is a share.*write BAME\(stop=10000\).*or give the Trainer max_steps"
    with pytest.raises(ValueError, match=advice) as told:
        make_trainer(tmp_path, [callback()], **endless).fit(model, Data())
    assert "NMSparsifier" not in str(told.value), "the user of a Trainer has none"
    assert not any(isinstance(m, Adapter) for m in model.modules())

    make_trainer(tmp_path, [callback(BAME(stop=4, every=2)), Enough(5)], **endless).fit(
        model, Data()
    )


class Enough(pl.Callback):
    """Ends an endless training."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step >= self.steps


def test_a_resumed_run_of_another_length_keeps_its_schedule_and_says_so(tmp_path):
    def method():
        return BAME(start=3, stop=0.75, every=2)

    nm = callback(method())
    trainer = make_trainer(tmp_path, [nm, ExactResume()], max_epochs=2)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    def resume(method, *callbacks, **options):
        nm = callback(method)
        look = Look(nm, lambda s: s.layers["net.6"].progress.schedule)
        trainer = make_trainer(tmp_path, [nm, look, *callbacks], **options)
        trainer.fit(new_model(1), Data(), ckpt_path=tmp_path / "a.ckpt")
        assert set(look.seen) == {(3, 9)}

    with pytest.warns(
        UserWarning, match=r"BAME scheduled at steps \(3, 9\), which stays; .* \(3, 18\)"
    ):
        resume(method(), max_epochs=4)
    with pytest.warns(
        UserWarning, match=r"\(3, 9\), which stays; .* \(3, 12\)"
    ):  # the mask is frozen and stays so
        resume(BAME(start=3, stop=12, every=2), max_epochs=3)
    resume(
        method(), Enough(15), max_epochs=-1
    )  # an endless plan is no obstacle: the steps are known


def test_a_resumed_run_is_not_refused_for_a_plan_that_it_does_not_use(tmp_path):
    nm = callback(BAME(start=3, stop=0.5, every=2))
    trainer = make_trainer(tmp_path, [nm, ExactResume()], max_epochs=3, limit_train_batches=4)
    trainer.fit(new_model(), Data())  # planned: 12 steps
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    nm = callback(BAME(start=3, stop=0.1, every=2))
    with pytest.warns(UserWarning, match=r"\(3, 6\), which stays; .* \(3, 1\)"):
        make_trainer(tmp_path, [nm], max_epochs=-1, max_steps=14).fit(
            new_model(1), Data(), ckpt_path=tmp_path / "a.ckpt"
        )


class Stream(torch.utils.data.IterableDataset):
    """Batches without a length."""

    def __iter__(self):
        data = Data().train_set
        for first in range(0, 96, 16):
            yield data.__getitems__(torch.arange(first, first + 16))


def test_a_plan_that_the_trainer_cannot_tell_needs_integers(tmp_path):
    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    with pytest.raises(ValueError, match=r"stop=0\.75 is a share.*write BAME\(stop=10000\)"):
        make_trainer(tmp_path, [callback()], limit_val_batches=0).fit(new_model(), loader)
    make_trainer(tmp_path, [callback(BAME(stop=4, every=2))], limit_val_batches=0).fit(
        new_model(), loader
    )

    changing = GradientAccumulationScheduler({0: 1, 1: 6})
    with pytest.raises(
        ValueError, match=r"write BAME\(stop=10000\).*gradient accumulation changes"
    ):
        make_trainer(tmp_path, [changing, callback()]).fit(new_model(), Data())
    nm = callback()
    look = Look(nm, lambda s: s.planned_steps)
    make_trainer(tmp_path, [changing, nm, look], max_epochs=-1, max_steps=8).fit(
        new_model(), Data()
    )
    assert set(look.seen) == {8}

    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self):
            return [
                torch.optim.SGD(part.parameters(), 0.05) for part in (self.net[:6], self.net[6:])
            ]

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.step(batch, "train"))
                optimizer.step()

    with pytest.raises(ValueError, match=r"write BAME\(stop=10000\).*Under manual optim"):
        make_trainer(tmp_path, [callback()]).fit(Two(), Data())
    nm = callback(BAME(stop=9, every=2))
    look = Look(
        nm, lambda s: (s.clock, s.layers["net.6"].step, s.layers["net.6"].progress.schedule)
    )
    make_trainer(tmp_path, [nm, look]).fit(Two(), Data())
    assert look.seen[-1] == (12, 12, (0, 9))


@pytest.mark.parametrize("first", ["finder", "masks"])
def test_the_learning_rate_finder_does_not_shorten_the_plan(tmp_path, first):
    class Tunable(Net):
        lr = 0.05

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)

    nm = callback()
    finder = LearningRateFinder(num_training_steps=5)
    look = Look(nm, lambda s: (s.planned_steps, s.layers["net.6"].step))
    callbacks = [finder, nm] if first == "finder" else [nm, finder]
    make_trainer(tmp_path, [*callbacks, look]).fit(Tunable(), Data())
    assert look.seen[-12:] == [(12, step) for step in range(1, 13)]


def test_the_adaptation_sees_the_gradient_before_clipping(tmp_path):
    def masks(clip):
        nm = callback(BAME(stop=10, every=1, budget=1.0, evidence="batch"))
        look = Look(nm, lambda s: {name: layer.forward_mask for name, layer in s.layers.items()})
        options = {"gradient_clip_val": clip} if clip else {}
        make_trainer(tmp_path, [nm, look], max_steps=2, **options).fit(new_model(), Data())
        assert all(layer["total_flips"] > 0 for layer in nm.state_dict()["layers"].values())
        return look.seen[0]

    unclipped, clipped = masks(None), masks(1e-6)
    assert all(torch.equal(mask, clipped[name]) for name, mask in unclipped.items())


def test_bame_adapts_with_manual_optimization(tmp_path):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.step(batch, "train"))
            optimizer.step()

    nm = callback(BAME(stop=9, every=2, evidence_rate=0.5))
    look = Look(nm, lambda s: s.layers["net.6"].masks.total_flips)
    make_trainer(tmp_path, [nm, look]).fit(Manual(), Data())
    assert look.seen[-1] > 0


def test_statistics_hold_until_the_next_adaptation(tmp_path):
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(
        tmp_path,
        [callback(BAME(stop=0.75, every=2, budget=1.0, evidence="batch"))],
        logger=logger,
        log_every_n_steps=1,
    )
    trainer.fit(new_model(), Data())
    header, *rows = (
        line.split(",") for line in Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    )
    for name in ("oscillation", "adapted_blocks", "frozen_blocks"):
        assert f"nm/{name}" in header
    column = header.index("nm/predicted_loss_change")
    values = [row[column] for row in rows if row[column]]
    assert len(values) == 12, "the value of the last adaptation is logged until the next"
    assert len(set(values[:9])) == 5, "steps 0, 2, 4, 6 and 8 adapt"
    assert {float(value) for value in values[9:]} == {0.0}, "the masks are frozen"


def test_a_subclass_that_calls_its_bases_step_counts_once(tmp_path):
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Wrapped(Net):
        def configure_optimizers(self):
            return Twice(self.parameters(), 0.05)

    torch.optim.SGD(
        [nn.Parameter(torch.zeros(1))], 0.1
    )  # torch hooks a class when it is first used
    nm = callback()
    look = Look(nm, lambda s: (s.clock, s.layers["net.6"].step))
    make_trainer(tmp_path, [nm, look]).fit(Wrapped(), Data())
    assert look.seen[-1] == (12, 12)


def test_a_first_step_that_fails_costs_no_weight(tmp_path):
    class Fails(pl.Callback):
        def on_before_optimizer_step(self, *args):
            raise RuntimeError("a typo")

    model = new_model()
    before = model.net[6].weight.detach().clone()
    with pytest.raises(RuntimeError, match="a typo"):
        make_trainer(tmp_path, [callback(), Fails()]).fit(model, Data())
    assert torch.equal(model.net[6].weight, before)


def test_averaging_leaves_no_latent_values(tmp_path):
    nm = callback()
    averaging = EMAWeightAveraging(decay=0.5)
    trainer = make_trainer(tmp_path, [averaging, nm])
    model = new_model()
    trainer.fit(model, Data())
    state = nm.state_dict()["layers"]["net.6"]
    assert state["latent"] is None
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    look = Look(
        nm, lambda s: int(s.layers["net.6"].weight[~s.layers["net.6"].forward_mask].count_nonzero())
    )
    make_trainer(tmp_path, [nm, look], max_epochs=2).fit(model, Data())
    assert set(look.seen) == {0}
