"""What Lightning offers and users do by habit, with every method: training stays N:M, and ends with a plain model."""

from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_nm import BAME, NMSparsifier
from lightning_nm.commands.verify import main as verify
from lightning_nm.demo import ExactResume
from tests.support.features import NAMES, ends_sparse, fit, methods, sparse
from tests.support.lightning_models import (
    Data,
    FailsAt,
    Inspect,
    Net,
    TwoOptimizers,
    assert_equal_models,
    callback,
    is_plain,
    is_sparse,
    make_trainer,
    new_model,
)
from tests.support.lightning_models import fit as fit_with
from tests.support.pairs import mostly_slow

every_method = pytest.mark.parametrize("method", methods("bame"))


class Lazy(Net):
    """Makes its layers when the Trainer asks for them."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = Net().net


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Clips(Net):
    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Hooked(Net):
    """Has hooks, and calls a masked layer with keywords."""

    def __init__(self):
        super().__init__()
        self.ran = set()
        self.net[6].register_forward_pre_hook(lambda *_: self.ran.add("before"))
        self.net[6].register_forward_hook(lambda *_: self.ran.add("after"))

    def forward(self, x):
        hidden = self.net[6](input=self.net[:6](x))
        assert self.ran == {"before", "after"}
        return self.net[7:](hidden)


class Late(Timer):
    """Has no time left after the seventh step."""

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 7:
            self._duration = 0.0


FEATURES = {
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation that leaves a rest": {"accumulate_grad_batches": 4},
    "accumulation that changes": {
        "callback": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
    },
    "clipping by norm": {"gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clipping of its own": {"model": Clips},
    "overfit batches": {"overfit_batches": 2},
    "limited batches": {"limit_train_batches": 0.5, "limit_val_batches": 1},
    "loaders made again": {"reload_dataloaders_every_n_epochs": 1},
    "validation within an epoch": {"val_check_interval": 2},
    "no validation": {"limit_val_batches": 0, "num_sanity_val_steps": 0},
    "float64": {"precision": "64-true"},
    "bfloat16": {"precision": "bf16-true"},
    "mixed precision": {"precision": "bf16-mixed"},
    "inference mode off": {"inference_mode": False},
    "anomaly detection": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "fast dev run": {"fast_dev_run": 3},
    "model summary": {"enable_model_summary": True},
    "two optimizers": {"model": TwoOptimizers},
    "learning rate schedule": {"model": Scheduled},
    "layers made late": {"model": Lazy},
    "hooks and keywords": {"model": Hooked},
    "batch-size finder": {
        "callback": lambda: BatchSizeFinder(steps_per_trial=1, init_val=16, max_trials=1),
    },
    "early stopping": {
        "callback": lambda: EarlyStopping("val_loss", patience=1, min_delta=100.0),
        "max_epochs": 9,
    },
    "timer": {
        "callback": lambda: Late(duration={"seconds": 3600}, interval="step"),
        "max_epochs": 9,
    },
    "stochastic weight averaging": {
        "callback": lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=1),
        "max_epochs": 3,
    },
}
WITHOUT_A_PLAN = ("accumulation that changes", "two optimizers")


@pytest.fixture
def settings_of_torch():
    yield
    torch.use_deterministic_algorithms(False)  # a Trainer leaves it on


@pytest.mark.usefixtures("settings_of_torch")
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuf")
@pytest.mark.parametrize(
    ("method", "feature"), mostly_slow(list(product(NAMES, FEATURES)), every=4)
)
def test_training_ends_sparse(method, feature, tmp_path):
    options = dict(FEATURES[feature])
    model, other = new_model(of=options.pop("model", Net)), options.pop("callback", pl.Callback)
    part = sparse(method)
    if method == "bame" and feature in WITHOUT_A_PLAN:  # its moments are fractions of it
        part = callback(BAME(stop=9, every=2))
    trainer, _ = fit_with(tmp_path, [part, other()], model, **options)
    assert trainer.global_step > 0
    if feature == "stochastic weight averaging":
        assert is_plain(model)
    else:
        assert trainer.global_step <= 18, "it stops"
        ends_sparse(model)


class Tuned(Net):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.05, 16


@every_method
@pytest.mark.parametrize("how", ["tuner", "callback before", "callback after"])
def test_searches_before_the_training_leave_no_trace(method, how, tmp_path):
    model, data, nm = new_model(of=Tuned), Data(), sparse(method)
    latent = model.net[6].weight.detach().clone()
    finder = LearningRateFinder(num_training_steps=3)
    callbacks = {"callback before": [finder, nm], "callback after": [nm, finder]}.get(how, [nm])
    look = Inspect(lambda *_: (nm.sparsifier.planned_steps, nm.sparsifier.layers["net.6"].step))
    trainer = make_trainer(tmp_path, [*callbacks, look])
    if how == "tuner":
        tuner = Tuner(trainer)
        tuner.lr_find(model, data, num_training=3)
        tuner.scale_batch_size(model, datamodule=data, steps_per_trial=1, max_trials=1)
        data.batch_size = 16
        assert torch.equal(model.net[6].weight, latent)
        assert is_plain(model)
    trainer.fit(model, data)
    # Methods with moments of their own know the steps of the training, not those of the search.
    planned = 12 if method in ("rigl", "bame", "bame-bi-mask") else None
    assert look.seen[-12:] == [(planned, step) for step in range(1, 13)]
    ends_sparse(model)


@every_method
@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoints_hold_the_model_that_was_validated(method, weights_only, tmp_path):
    save = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", save_weights_only=weights_only)
    trainer, model = fit(tmp_path, method, save)
    best = float(save.best_model_score)
    loaded = Net.load_from_checkpoint(save.best_model_path, weights_only=True)
    ends_sparse(loaded)
    assert ("callbacks" in torch.load(save.best_model_path)) != weights_only
    (fresh,) = make_trainer(tmp_path).validate(loaded, Data(), verbose=False)
    assert fresh["val_loss"] == pytest.approx(best, rel=1e-6)
    if not weights_only:
        assert verify([save.best_model_path]) == 0
        (tested,) = trainer.test(model, Data(), ckpt_path="best", verbose=False)
        assert tested["val_loss"] == pytest.approx(best, rel=1e-6)
        images = DataLoader(Data().val_set.tensors[0], batch_size=16)
        trainer.predict(model, images, ckpt_path="best")
        ends_sparse(model)
    # It starts another training: of another callback, and of none.
    fit_with(tmp_path, [callback("ste", pattern="1:4")], loaded)
    assert is_sparse(loaded, "1:4")
    fit_with(tmp_path, model=loaded)
    assert not is_sparse(loaded)


@every_method
@pytest.mark.filterwarnings(
    "ignore:`.fit.ckpt_path=None.` was called without a model",  # it looks for the checkpoint of the last failure
    "ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint",
)
@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()])
def test_a_fit_that_is_interrupted_resumes_exactly(method, error, tmp_path):
    _, straight = fit(tmp_path, method, ExactResume(), max_epochs=3)
    model, save = new_model(), OnExceptionCheckpoint(tmp_path, "failed")
    fails = FailsAt("on_validation_end", 12, error)
    with pytest.raises(RuntimeError if isinstance(error, RuntimeError) else SystemExit):
        fit(tmp_path, method, ExactResume(), fails, save, model=model, max_epochs=3)
    ends_sparse(model)
    file = tmp_path / "failed.ckpt"
    assert verify([str(file)]) == 0
    resumed = new_model(5)
    fit(tmp_path, method, ExactResume(), model=resumed, ckpt_path=file, max_epochs=3)
    assert_equal_models(straight, resumed)


@every_method
def test_observers_change_nothing(method, tmp_path):
    pytest.importorskip("psutil", reason="DeviceStatsMonitor asks it for a CPU's figures")
    _, alone = fit(tmp_path, method)
    observers = [LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True)]
    observers += [Timer(), RichProgressBar()]
    options = {"logger": CSVLogger(tmp_path), "profiler": "simple", "enable_progress_bar": True}
    _, model = fit(tmp_path, method, *observers, **options)
    assert_equal_models(alone, model)


@pytest.mark.filterwarnings(  # torch 2.6 says so of the masks, and keeps them
    "ignore:Attempted to insert a get_attr Node:UserWarning",
    "ignore:.* does not reference an nn.Module:UserWarning",
    "ignore:Additional .* warnings suppressed about get_attr:UserWarning",
)
@every_method
def test_export_while_installed(method):
    model, x = new_model().eval(), torch.randn(2, 1, 8, 8)
    NMSparsifier(model, config=sparse(method).config, planned_steps=10).attach()
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
