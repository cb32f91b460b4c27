"""What users of a Trainer do by habit, each with every method."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_nm import NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.commands.verify import main as verify
from lightning_nm.demo import ExactResume
from tests.support.features import ends_sparse, fit, methods, sparse
from tests.support.lightning_models import (
    Data,
    Inspect,
    Net,
    assert_equal_models,
    make_trainer,
    new_model,
)

pytestmark = pytest.mark.parametrize("method", methods("bame"))


def images():
    return DataLoader(Data().val_set.tensors[0], batch_size=16)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_fit_goes_on_from_the_last_checkpoint(method, tmp_path):
    def run(folder, seed=0, stops=False, **options):
        stop = LambdaCallback(
            on_train_epoch_end=lambda trainer, _: setattr(
                trainer, "should_stop", stops and trainer.current_epoch == 1
            )
        )
        save = ModelCheckpoint(tmp_path / folder, save_last=True)
        model, trainer = (
            new_model(seed),
            make_trainer(tmp_path, [stop, sparse(method), ExactResume(), save], max_epochs=3),
        )
        trainer.fit(model, Data(), **options)
        return trainer, model

    _, straight = run("straight")
    stopped, _ = run("resumed", stops=True)
    assert stopped.global_step == 12
    trainer, resumed = run("resumed", seed=5, ckpt_path="last")
    assert trainer.global_step == 18
    assert_equal_models(straight, resumed)


def test_every_checkpoint_is_kept_and_sparse(method, tmp_path):
    save = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_train_steps=2)
    fit(tmp_path, method, save)
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == 6
    for file in files:
        assert verify([str(file)]) == 0
        model = Net.load_from_checkpoint(file, weights_only=True)
        assert nmf.is_nm(model.net[6].weight, "2:4", dim=1)


def test_evaluation_with_the_best_checkpoint(method, tmp_path):
    save = ModelCheckpoint(tmp_path / "kept", monitor="val_loss")
    trainer, model = fit(tmp_path, method, save)
    (best,) = trainer.test(model, Data(), ckpt_path="best", verbose=False)
    assert best["val_loss"] == pytest.approx(float(save.best_model_score), rel=1e-6)
    loaded = Net.load_from_checkpoint(save.best_model_path, weights_only=True)
    (fresh,) = make_trainer(tmp_path).validate(loaded, Data(), verbose=False)
    assert fresh["val_loss"] == pytest.approx(best["val_loss"], rel=1e-6)
    trainer.predict(model, images(), ckpt_path="best")
    ends_sparse(model)


@pytest.mark.parametrize("names", [(None, None), (None, "other"), ("one", "other")])
@pytest.mark.parametrize("disjoint", [False, True])
def test_two_of_them(method, names, disjoint, tmp_path):
    parts = []
    for name, layer in zip(names, ["net.3", "net.6"], strict=True):
        part = sparse(method, include=layer if disjoint else None)
        part.name = name
        parts.append(part)
    if names == (None, None):
        with pytest.raises(
            RuntimeError, match="more than one stateful callback of type `NMSparsityCallback`"
        ):
            make_trainer(tmp_path, parts)
        return
    save = ModelCheckpoint(tmp_path / "kept")
    trainer, model = make_trainer(tmp_path, [*parts, save]), new_model()
    if not disjoint:
        with pytest.raises(ValueError, match=r"'net\.3' is masked already.*disjoint `include`"):
            trainer.fit(model, Data())
        return
    trainer.fit(model, Data())
    ends_sparse(model)
    assert verify([save.best_model_path]) == 0


def test_copies_of_the_model_while_it_trains(method, tmp_path):
    def look(trainer, model):
        copied = copy.deepcopy(model)
        model.eval(), copied.eval()
        x = next(iter(images()))
        with torch.no_grad():
            assert torch.equal(model(x), copied(x))
        assert_equal_models(model, copied)
        model.train()
        copied.net[3].weight.data.zero_()
        assert model.net[3].weight.any()

    inspect = Inspect(look)
    _, model = fit(tmp_path, method, inspect)
    assert inspect.calls == 12
    ends_sparse(model)


def test_observers_change_nothing(method, tmp_path):
    pytest.importorskip("psutil", reason="DeviceStatsMonitor asks it for a CPU's figures")
    _, alone = fit(tmp_path, method)
    observers = [
        LearningRateMonitor("step"),
        DeviceStatsMonitor(cpu_stats=True),
        Timer(),
        RichProgressBar(),
    ]
    logger = CSVLogger(tmp_path)
    _, model = fit(
        tmp_path, method, *observers, logger=logger, profiler="simple", enable_progress_bar=True
    )
    assert_equal_models(alone, model)
    written = (
        (tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
        .read_text()
        .splitlines()[0]
        .split(",")
    )
    assert {"lr-SGD", "nm/density", "nm/flip_rate", "train_loss"} <= set(written)


def test_a_timer_that_stops(method, tmp_path):
    timer = Timer(duration={"seconds": 3600}, interval="step")

    class Late(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 7:
                timer._duration = 0.0

    trainer, model = fit(tmp_path, method, Late(), timer, max_epochs=9)
    assert trainer.global_step == 8
    ends_sparse(model)


@pytest.mark.filterwarnings(
    "ignore:`.fit.ckpt_path=None.` was called without a model",  # it looks for the checkpoint of the last failure
    "ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint",
)
def test_a_checkpoint_on_exceptions(method, tmp_path):
    _, straight = fit(tmp_path, method, ExactResume(), max_epochs=3)

    class Fails(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            if trainer.global_step == 12:
                raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(
            tmp_path,
            method,
            ExactResume(),
            Fails(),
            OnExceptionCheckpoint(tmp_path, "failed"),
            max_epochs=3,
        )
    assert verify([str(tmp_path / "failed.ckpt")]) == 0
    resumed = new_model(5)
    trainer = make_trainer(tmp_path, [sparse(method), ExactResume()], max_epochs=3)
    trainer.fit(resumed, Data(), ckpt_path=tmp_path / "failed.ckpt")
    ends_sparse(resumed)
    assert trainer.global_step == 18
    assert_equal_models(straight, resumed)


def test_batch_size_finder_callback(method, tmp_path):
    data = Data()
    _, model = fit(
        tmp_path, method, BatchSizeFinder(steps_per_trial=1, init_val=16, max_trials=1), data=data
    )
    assert data.batch_size == 16
    ends_sparse(model)


def test_other_clipping_and_loaders_that_are_made_again(method, tmp_path):
    class Clips(Net):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))

    pl.seed_everything(0, verbose=False)
    model = Clips()
    model.norms = []
    fit(
        tmp_path,
        method,
        model=model,
        reload_dataloaders_every_n_epochs=1,
        enable_model_summary=True,
    )
    assert max(model.norms) < 0.1 * 1.001
    ends_sparse(model)


def test_the_sparse_weights_of_a_checkpoint_start_another_training(method, tmp_path):
    """Of another callback, with masks made anew, and of none."""
    save = ModelCheckpoint(tmp_path / "kept", save_weights_only=True)
    fit(tmp_path, method, save)
    model = Net.load_from_checkpoint(save.best_model_path, weights_only=True)
    make_trainer(tmp_path, [NMSparsityCallback("1:4", "ste", show_tables=False)]).fit(model, Data())
    assert nmf.is_nm(model.net[6].weight, "1:4", dim=1)
    model = Net.load_from_checkpoint(save.best_model_path, weights_only=True)
    make_trainer(tmp_path).fit(model, Data())
    assert not nmf.is_nm(model.net[6].weight, "2:4", dim=1)
