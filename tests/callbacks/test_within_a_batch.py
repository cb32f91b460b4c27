"""What happens within an accumulation window or a batch: swapped weights, skipped batches, failures, late joining."""

import copy
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_nm import BAME, MVUE
from lightning_nm.demo import ExactResume
from lightning_nm.training.statistics import mean_flip_rate
from tests.support.lightning_models import (
    Data,
    FailsAt,
    Inspect,
    Net,
    SaveAt,
    assert_equal_models,
    callback,
    fit,
    new_model,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


class Swap(pl.Callback):
    """Validates other weights, as averaging does."""

    def on_validation_start(self, trainer, pl_module):
        self.kept = {key: value.clone() for key, value in pl_module.state_dict().items()}
        other = {key: (0.9 * value).to(value.dtype) for key, value in self.kept.items()}
        pl_module.load_state_dict(other)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.kept)


def draws_of(trainer, module):
    """How often the noise of a layer was drawn."""
    return module.net[6].nm_layers["weight"].noise.draws


@pytest.mark.parametrize(
    ("method", "accumulate", "every"),
    [("mvue", 6, 1), ("bi-mask", 1, 2), ("transposable", 1, 2), ("bame", 1, 2)],
)
def test_weights_that_are_swapped_for_a_validation_leave_noise_and_figures_alone(
    tmp_path, method, accumulate, every
):
    def figures(*others):
        nm = callback(method)

        def look(trainer, module):
            s = nm.sparsifier
            means = mean_flip_rate(s.layers.values()), s.flops_ratios(mean=True)
            return draws_of(trainer, module), s.stats(), s.layer_stats(), means

        inspect = Inspect(look)
        options = {"val_check_interval": every, "accumulate_grad_batches": accumulate}
        options |= {"limit_val_batches": 1, "num_sanity_val_steps": 0}
        fit(tmp_path, [nm, *others, inspect], **options)
        return inspect.seen

    alone = figures()
    assert figures(Swap()) == alone
    draws = [draw for draw, *_ in alone]
    assert method != "mvue" or draws == sorted(set(draws)), "each micro-batch has noise of its own"


def test_a_fit_that_dies_within_a_batch_leaves_none_open(tmp_path):
    def draws(nm):
        look = Inspect(draws_of)
        fit(tmp_path, [nm, look], max_epochs=1)
        return look.seen

    nm = callback("mvue")
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [nm, FailsAt("on_after_backward")], max_epochs=1)
    assert draws(nm) == draws(callback("mvue"))


def test_batches_that_are_skipped_leave_none_open(tmp_path):
    class Skips(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 4 else None

    def run(seed, ckpt_path=None):
        save = ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
        callbacks, model = [callback("mvue"), ExactResume(), save], new_model(seed, Skips)
        fit(tmp_path, callbacks, model, ckpt_path=ckpt_path, max_epochs=3)
        return model

    assert_equal_models(run(0), run(7, tmp_path / "saved" / "epoch=0.ckpt"))


def test_phases_of_a_callback_that_joins_a_dense_run_are_shares_of_what_is_left(tmp_path):
    path = tmp_path / "dense.ckpt"
    fit(tmp_path, [SaveAt(path, 12)])

    def look(trainer, module):
        progress = module.net[6].nm_layers["weight"].progress
        return progress.estimator_schedule, progress.estimating

    nm, inspect = callback("sr-ste", grad_estimator=MVUE("1:2", dense_end=0.5)), Inspect(look)
    with pytest.warns(UserWarning, match="has no state of NMSparsityCallback"):
        fit(tmp_path, [nm, inspect], new_model(1), ckpt_path=path, max_epochs=3)
    assert inspect.seen == [((0, 3), working) for working in [True] * 2 + [False] * 4]


class Steps(Net):
    """Steps in its training step, or in its own on_train_batch_end, which follows that of the callbacks."""

    automatic_optimization = False

    def __init__(self, afterwards):
        super().__init__(dropout=0.0)
        self.afterwards = afterwards

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(self.step(batch, "train"))
        if not self.afterwards:
            self.optimizers().step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.afterwards:
            self.optimizers().step()


class Looks(pl.Callback):
    """The models that are validated and saved."""

    def __init__(self):
        self.states = []

    def look(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.states.append(copy.deepcopy(pl_module.state_dict()))

    on_validation_epoch_start = on_train_epoch_end = on_train_end = look


@pytest.mark.parametrize("method", ["sr-ste", "asp-late", "bi-mask", "bame"])
def test_a_step_after_the_batch_moves_the_masks_before_they_are_used(tmp_path, method):
    """What trains, validates and is saved is what the same steps within their batches give."""
    runs = []
    for afterwards in (False, True):
        nm = callback(BAME(stop=9, every=2) if method == "bame" else method)
        looks, model = Looks(), new_model(of=Steps, afterwards=afterwards)
        fit(tmp_path, [nm, looks], model, val_check_interval=3)
        assert nm.state_dict()["clock"] == 12
        runs.append([*looks.states, model.state_dict()])
    assert len(runs[0]) > 5
    for straight, late in zip(*runs, strict=True):
        assert all(map(torch.equal, straight.values(), late.values()))


class Endless(IterableDataset):
    """Does not tell how long it is."""

    def __iter__(self):
        return iter(Data().val_dataloader().dataset)


class Stock(pl.LightningDataModule):
    """Stock DataLoaders, which know nothing of where they were."""

    def __init__(self, shuffle=False, endless=False):
        super().__init__()
        self.shuffle, self.endless = shuffle, endless

    def train_dataloader(self):
        data = Endless() if self.endless else Data().val_dataloader().dataset
        return DataLoader(data, 16, shuffle=self.shuffle)

    def val_dataloader(self):
        return Data().val_dataloader()


@pytest.mark.parametrize(
    ("data", "batch", "told"),
    [
        (Stock, 4, True),
        (lambda: Stock(shuffle=True), 6, True),  # all batches of the epoch, which has not ended
        (Stock, 6, False),
        (Data, 4, False),
        (lambda: Stock(endless=True), 4, True),
        (lambda: Stock(endless=True), 6, False),
        (lambda: Stock(shuffle=True), None, False),  # a checkpoint of the epoch's end
        (lambda: Stock(endless=True), None, False),
    ],
)
def test_a_resume_with_other_batches_is_told_once(tmp_path, data, batch, told):
    path, save = tmp_path / "saved.ckpt", SaveAt(tmp_path / "saved.ckpt", batch)
    if batch is None:
        save = ModelCheckpoint(tmp_path, "saved", save_on_train_epoch_end=True)
    fit(tmp_path, [callback("sr-ste"), save], data=data(), max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, [callback("sr-ste")], new_model(1), data(), path)
    text = "the checkpoint was saved within an epoch, and this DataLoader cannot resume there"
    assert sum(text in str(warning.message) for warning in caught) == told
