"""BAME in a Trainer: its plan, its figures, and what the loss really did."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_nm import BAME, NMSparsityCallback
from lightning_nm.demo import ExactResume
from lightning_nm.nn.adapters import Adapter
from tests.lightning_models import Data, Net, make_trainer, new_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


def callback(method=None, **options):
    method = method or BAME(stop=0.75, every=2, budget=1.0, score="taylor-abs")
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
    look = Look(nm, lambda s: (s.planned_steps, {layer.planned_steps for layer in s.layers.values()}))
    make_trainer(tmp_path, [nm, look], **options).fit(new_model(), Data())
    assert look.seen == [(planned, {planned})] * len(look.seen)
    assert look.seen


def test_an_endless_plan_needs_integers_and_leaves_the_model_alone(tmp_path):
    model = new_model()
    endless = {"max_epochs": -1, "max_time": "00:00:00:05"}
    with pytest.raises(ValueError, match=r"stop=0\.75 is a share.*limit the training.*or give stop as an integer"):
        make_trainer(tmp_path, [callback()], **endless).fit(model, Data())
    assert not any(isinstance(m, Adapter) for m in model.modules())

    class Enough(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step >= 5

    make_trainer(tmp_path, [callback(BAME(stop=4, every=2)), Enough()], **endless).fit(model, Data())


def test_a_longer_resumed_run_keeps_its_schedule_and_says_so(tmp_path):
    nm = callback()
    trainer = make_trainer(tmp_path, [nm, ExactResume()], max_epochs=2)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    nm = callback()
    look = Look(nm, lambda s: s.planned_steps)
    with pytest.warns(UserWarning, match=r"scheduled for 12 steps .* \(0, 9\).* 24 steps .* \(0, 18\)"):
        make_trainer(tmp_path, [nm, look], max_epochs=4).fit(new_model(1), Data(), ckpt_path=tmp_path / "a.ckpt")
    assert set(look.seen) == {12}

    class Enough(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step >= 15

    nm = callback()  # an endless plan is no obstacle: the steps were resolved when training began
    trainer = make_trainer(tmp_path, [nm, Look(nm, lambda s: s.planned_steps), Enough()], max_epochs=-1)
    trainer.fit(new_model(1), Data(), ckpt_path=tmp_path / "a.ckpt")
    assert set(trainer.callbacks[1].seen) == {12}


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
        nm = callback(BAME(stop=10, every=1, budget=1.0, max_swaps_per_block=2))
        look = Look(nm, lambda s: {name: layer.forward_mask for name, layer in s.layers.items()})
        options = {"gradient_clip_val": clip} if clip else {}
        make_trainer(tmp_path, [nm, look], max_steps=2, **options).fit(new_model(), Data())
        assert all(layer["total_flips"] > 0 for layer in nm.state_dict()["layers"].values())
        return look.seen[0]

    unclipped, clipped = masks(None), masks(1e-6)
    assert all(torch.equal(mask, clipped[name]) for name, mask in unclipped.items())


class Counted(Net):
    """Counts what a training step does beside its loss."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        logits = self.norm(self(batch[0]))
        self.accuracy(logits, batch[1])
        self.log("train_acc", self.accuracy)
        self.log_dict({"draw": torch.rand(())})
        assert self.trainer.global_step >= 0
        return {"loss": nn.functional.cross_entropy(logits, batch[1])}


def test_the_achieved_loss_change_is_logged_and_changes_nothing_else(tmp_path):
    def train(**options):
        pl.seed_everything(0, verbose=False)
        model = Counted()
        logger = CSVLogger(tmp_path, name=str(len(options)))
        trainer = make_trainer(tmp_path, [callback(**options)], logger=logger, log_every_n_steps=1)
        trainer.fit(model, Data())
        return model, trainer, logger

    plain, plain_trainer, _ = train()
    model, trainer, logger = train(log_achieved_loss=True)
    for (key, a), b in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert plain.calls == model.calls == 12
    achieved = trainer.callback_metrics.pop("nm/achieved_loss_change")
    assert achieved != 0
    for key, value in plain_trainer.callback_metrics.items():
        assert torch.equal(value, trainer.callback_metrics[key]), key
    lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    header, *rows = (line.split(",") for line in lines)
    for name in ("oscillation", "adapted_blocks", "frozen_blocks", "predicted_loss_change", "achieved_loss_change"):
        assert f"nm/{name}" in header
    column = header.index("nm/achieved_loss_change")
    values = [row[column] for row in rows if row[column]]
    assert len(values) == 12, "the value of the last adaptation is logged until the next"
    assert len(set(values)) == 5, "steps 0, 2, 4, 6 and 8 adapt"


def test_the_achieved_loss_change_needs_automatic_optimization(tmp_path):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.step(batch, "train"))
            optimizer.step()

    model = Manual()
    with pytest.raises(ValueError, match=r"Manual optimizes manually.*leave log_achieved_loss off"):
        make_trainer(tmp_path, [callback(log_achieved_loss=True)]).fit(model, Data())
    assert not any(isinstance(m, Adapter) for m in model.modules())
    nm = callback()
    look = Look(nm, lambda s: s.layers["net.6"].total_flips)
    make_trainer(tmp_path, [nm, look]).fit(Manual(), Data())
    assert look.seen[-1] > 0
