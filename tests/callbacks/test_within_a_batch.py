"""What happens within an accumulation window or a batch: swapped weights, skipped batches, failures, late joining."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_nm import MVUE, NMSparsityCallback
from lightning_nm.demo import ExactResume
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
            seen.append((s.stats(), s.mean_flip_rate(), s.mean_flops_ratios(), s.layer_stats()))

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
