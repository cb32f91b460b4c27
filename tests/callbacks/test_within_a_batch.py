"""What happens within an accumulation window or a batch: swapped weights, skipped batches, failures, late joining."""

import copy
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_nm import BAME, MVUE, NMSparsityCallback
from lightning_nm.demo import ExactResume
from lightning_nm.training.statistics import mean_flip_rate
from tests.support.lightning_models import (
    Data,
    Inspect,
    Net,
    SaveAt,
    assert_equal_models,
    callback,
    make_trainer,
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
        other = {
            key: 0.9 * value if value.is_floating_point() else value
            for key, value in self.kept.items()
        }
        pl_module.load_state_dict(other)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.kept)


def test_weights_that_are_swapped_within_a_window_do_not_rewind_the_noise(tmp_path):
    def draws(*others):
        seen = []
        look = Inspect(
            lambda trainer, module: seen.append(module.net[6].nm_layers["weight"].noise.draws)
        )
        options = {
            "accumulate_grad_batches": 6,
            "val_check_interval": 1,
            "limit_val_batches": 1,
            "num_sanity_val_steps": 0,
        }
        make_trainer(tmp_path, [callback("mvue"), *others, look], **options).fit(
            new_model(), Data()
        )
        return seen

    assert draws(Swap()) == draws() == sorted(set(draws()))


@pytest.mark.parametrize("method", ["bi-mask", "transposable", "bame"])
def test_weights_that_are_swapped_leave_the_figures_alone(tmp_path, method):
    def figures(*others):
        seen = []

        def look(trainer, module):
            (nm,) = [c for c in trainer.callbacks if isinstance(c, NMSparsityCallback)]
            s = nm.sparsifier
            seen.append(
                (
                    s.stats(),
                    mean_flip_rate(s.layers.values()),
                    s.flops_ratios(mean=True),
                    s.layer_stats(),
                )
            )

        options = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
        make_trainer(tmp_path, [callback(method), *others, Inspect(look)], **options).fit(
            new_model(), Data()
        )
        return seen

    assert figures(Swap()) == figures()


def test_a_fit_that_dies_within_a_batch_leaves_none_open(tmp_path):
    class Dies(pl.Callback):
        def on_after_backward(self, trainer, pl_module):
            raise RuntimeError("out of luck")

    def draws(nm):
        seen = []
        look = Inspect(
            lambda trainer, module: seen.append(module.net[6].nm_layers["weight"].noise.draws)
        )
        make_trainer(tmp_path, [nm, look], max_epochs=1).fit(new_model(), Data())
        return seen

    nm = callback("mvue")
    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer(tmp_path, [nm, Dies()], max_epochs=1).fit(new_model(), Data())
    assert draws(nm) == draws(callback("mvue"))


def test_batches_that_are_skipped_leave_none_open(tmp_path):
    class Skips(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 4 else None

    def run(seed, **options):
        pl.seed_everything(seed, verbose=False)
        model = Skips()
        save = ModelCheckpoint(
            tmp_path / "saved", filename="{epoch}", save_top_k=-1, every_n_epochs=1
        )
        trainer = make_trainer(tmp_path, [callback("mvue"), ExactResume(), save], max_epochs=3)
        trainer.fit(model, Data(), **options)
        return model

    straight = run(0)
    assert_equal_models(straight, run(7, ckpt_path=tmp_path / "saved" / "epoch=0.ckpt"))


def test_phases_of_a_callback_that_joins_a_dense_run_are_shares_of_what_is_left(tmp_path):
    save = SaveAt(tmp_path / "dense.ckpt", 12)
    make_trainer(tmp_path, [save], max_epochs=2).fit(new_model(), Data())
    nm = NMSparsityCallback("2:4", "sr-ste", MVUE("1:2", dense_end=0.5), show_tables=False)
    seen = []

    def look(trainer, module):
        layer = module.net[6].nm_layers["weight"]
        seen.append((layer.progress.estimator_schedule, layer.progress.estimating))

    trainer = make_trainer(tmp_path, [nm, Inspect(look)], max_epochs=3)
    with pytest.warns(UserWarning, match="has no state of NMSparsityCallback"):
        trainer.fit(new_model(1), Data(), ckpt_path=tmp_path / "dense.ckpt")
    assert seen == [((0, 3), working) for working in (True, True, False, False, False, False)]


class StepsAfterwards(Net):
    """Steps in its own on_train_batch_end, which follows that of the callbacks."""

    automatic_optimization = False

    def __init__(self):
        super().__init__(dropout=0.0)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.step(batch, "train"))
        if not self.afterwards:
            optimizer.step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.afterwards:
            self.optimizers().step()


@pytest.mark.parametrize("method", ["sr-ste", "asp-late", "bi-mask", "bame"])
def test_a_step_after_the_batch_moves_the_masks_before_they_are_used(tmp_path, method):
    """What trains, validates and is saved is what the same steps within their batches give."""
    seen = {}
    for afterwards in (False, True):

        class Looks(pl.Callback):
            def __init__(self, states):
                self.states = states

            def look(self, trainer, pl_module):
                if not trainer.sanity_checking:
                    self.states.append(copy.deepcopy(pl_module.state_dict()))

            on_validation_epoch_start = on_train_epoch_end = on_train_end = look

        pl.seed_everything(0, verbose=False)
        model = StepsAfterwards()
        model.afterwards = afterwards
        nm, states = callback(BAME(stop=9, every=2) if method == "bame" else method), []
        trainer = make_trainer(tmp_path, [nm, Looks(states)], val_check_interval=3)
        trainer.fit(model, Data())
        seen[afterwards] = (states, model.state_dict(), nm.state_dict()["clock"])
    (before, end, clock), (after, other_end, other_clock) = seen.values()
    assert len(before) == len(after) > 4
    assert clock == other_clock == 12
    for straight, late in zip([*before, end], [*after, other_end], strict=True):
        assert all(map(torch.equal, straight.values(), late.values()))


class Stock(pl.LightningDataModule):
    """Stock DataLoaders, which know nothing of where they were."""

    def __init__(self, shuffle):
        super().__init__()
        self.shuffle = shuffle

    def train_dataloader(self):
        return DataLoader(Data().val_dataloader().dataset, 16, shuffle=self.shuffle)

    def val_dataloader(self):
        return Data().val_dataloader()


class Endless(IterableDataset):
    """Does not tell how long it is."""

    def __iter__(self):
        return iter(Data().val_dataloader().dataset)


class Stream(Stock):
    def __init__(self):
        super().__init__(shuffle=False)

    def train_dataloader(self):
        return DataLoader(Endless(), 16)


@pytest.mark.parametrize(
    ("data", "batch", "told"),
    [
        (lambda: Stock(shuffle=False), 4, True),
        (lambda: Stock(shuffle=True), 6, True),  # all batches of the epoch, which has not ended
        (lambda: Stock(shuffle=False), 6, False),
        (Data, 4, False),
        (lambda: Stream(), 4, True),
        (lambda: Stream(), 6, False),
    ],
    ids=["within", "last-shuffled", "last", "resumable", "stream", "stream-last"],
)
def test_a_resume_with_other_batches_is_told_once(tmp_path, data, batch, told):
    path = tmp_path / "saved.ckpt"
    make_trainer(tmp_path, [callback("sr-ste"), SaveAt(path, batch)]).fit(new_model(), data())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path, [callback("sr-ste")], max_epochs=3).fit(
            new_model(1), data(), ckpt_path=path
        )
    # A checkpoint of the epoch's end has nothing to tell.
    folder = tmp_path / "ends"
    saving = ModelCheckpoint(folder, save_on_train_epoch_end=True, filename="end")
    make_trainer(tmp_path, [callback("sr-ste"), saving], max_epochs=1).fit(new_model(), data())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Be aware that when using|.*LeafSpec.*")
        make_trainer(tmp_path, [callback("sr-ste")], max_epochs=2).fit(
            new_model(1), data(), ckpt_path=folder / "end.ckpt"
        )
    text = "the checkpoint was saved within an epoch, and this DataLoader cannot resume there"
    assert sum(text in str(warning.message) for warning in caught) == told
