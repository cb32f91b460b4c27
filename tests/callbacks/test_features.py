"""What Lightning offers, each with every method: training stays N:M, and the model is an ordinary one afterwards."""

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

from lightning_nm import NMSparsifier, NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.commands.verify import main as verify
from lightning_nm.nn.adapters import Adapter
from tests.support.features import ends_sparse, fit, methods, sparse
from tests.support.lightning_models import (
    Data,
    Inspect,
    Net,
    assert_equal_models,
    make_trainer,
    new_model,
)

pytestmark = [
    pytest.mark.parametrize("method", methods("sr-ste", "bame", "three-gemms")),
    pytest.mark.filterwarnings(
        "ignore:You requested to overfit but enabled train dataloader shuffling"
    ),
]


OPTIONS = {
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation that leaves a rest": {"accumulate_grad_batches": 4},
    "clipping by norm": {"gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "overfit batches": {"overfit_batches": 2},
    "limited batches": {"limit_train_batches": 0.5, "limit_val_batches": 1},
    "validation within an epoch": {"val_check_interval": 2},
    "no validation": {"limit_val_batches": 0, "num_sanity_val_steps": 0},
    "float64": {"precision": "64-true"},
    "bfloat16": {"precision": "bf16-true"},
    "mixed precision": {"precision": "bf16-mixed"},
    "inference mode off": {"inference_mode": False},
    "anomaly detection": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "fast dev run": {"fast_dev_run": 3},
}


@pytest.fixture
def settings_of_torch():
    yield
    torch.use_deterministic_algorithms(False)  # a Trainer leaves it on


@pytest.mark.usefixtures("settings_of_torch")
@pytest.mark.parametrize("name", OPTIONS)
def test_trainer_options(method, name, tmp_path):
    options = OPTIONS[name]
    trainer, model = fit(tmp_path, method, **options)
    ends_sparse(model)
    assert trainer.global_step > 0


def test_accumulation_that_changes(method, tmp_path):
    if method == "bame":
        with pytest.raises(ValueError, match=r"stop=0\.9 is a share of the planned training steps"):
            fit(tmp_path, method, GradientAccumulationScheduler({0: 1, 1: 3}))
        return
    _, model = fit(tmp_path, method, GradientAccumulationScheduler({0: 1, 1: 3}))
    ends_sparse(model)


class Manual(Net):
    """Two optimizers, each for a part of the model, of which one steps every second batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.net[:4].parameters(), 0.05),
            torch.optim.AdamW(self.net[4:].parameters(), 1e-3),
        ]

    def training_step(self, batch, batch_idx):
        loss = self.step(batch, "train")
        for k, optimizer in enumerate(self.optimizers()):
            if (batch_idx + k) % 2 == 0:
                continue
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()


def test_manual_optimization_with_two_optimizers(method, tmp_path):
    pl.seed_everything(0, verbose=False)
    if method == "bame":
        with pytest.raises(ValueError, match="share of the planned training steps"):
            fit(tmp_path, method, model=Manual())
        return
    _, model = fit(tmp_path, method, model=Manual())
    ends_sparse(model)


class Tuned(Net):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.05, 16


@pytest.mark.parametrize("how", ["tuner", "callback"])
def test_learning_rate_finder(method, how, tmp_path):
    pl.seed_everything(0, verbose=False)
    model, data = Tuned(), Data()
    finder = [LearningRateFinder(num_training_steps=3)] if how == "callback" else []
    trainer = make_trainer(tmp_path, [sparse(method), *finder])
    if how == "tuner":
        Tuner(trainer).lr_find(model, data, num_training=3)
    trainer.fit(model, data)
    ends_sparse(model)


def test_batch_size_finder(method, tmp_path):
    pl.seed_everything(0, verbose=False)
    model, data = Tuned(), Data()
    trainer = make_trainer(tmp_path, [sparse(method)])
    Tuner(trainer).scale_batch_size(model, datamodule=data, steps_per_trial=1, max_trials=1)
    data.batch_size = 16
    trainer.fit(model, data)
    ends_sparse(model)


def test_averaged_weights_are_masked_where_they_are_used_and_saved(method, tmp_path):
    found = []

    class Validated(pl.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                weights = pl_module.state_dict()
                found.append(
                    all(
                        nmf.is_nm(weights[key], "2:4", dim=1)
                        for key in ("net.3.weight", "net.6.weight")
                    )
                )

    checkpoint = ModelCheckpoint(tmp_path / "kept", save_last=True)
    _, model = fit(tmp_path, method, Validated(), checkpoint, first=[EMAWeightAveraging(decay=0.9)])
    assert found
    assert all(found)
    ends_sparse(model)
    include = ["--include", "net.3", "--include", "net.6"]
    assert (
        verify(
            [str(tmp_path / "kept" / "last.ckpt"), "--pattern", "2:4", "--allow-dense", *include]
        )
        == 0
    )


def test_stochastic_weight_averaging(method, tmp_path):
    _, model = fit(
        tmp_path, method, StochasticWeightAveraging(1e-3, swa_epoch_start=1), max_epochs=3
    )
    assert not any(isinstance(module, Adapter) for module in model.modules())


@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoints_hold_the_model_that_was_validated(method, weights_only, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "kept", save_weights_only=weights_only)
    trainer, model = fit(tmp_path, method, checkpoint)
    fresh = Net()
    saved = torch.load(checkpoint.best_model_path, weights_only=True)
    fresh.load_state_dict(saved["state_dict"])
    assert_equal_models(fresh, model)
    expected = float(trainer.callback_metrics["val_loss"])
    (result,) = make_trainer(tmp_path).validate(fresh, Data(), verbose=False)
    assert result["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert ("callbacks" in saved) != weights_only


def test_early_stopping(method, tmp_path):
    stopping = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    trainer, model = fit(tmp_path, method, stopping, max_epochs=9)
    assert trainer.current_epoch < 9
    ends_sparse(model)


def test_evaluation_without_a_fit(method, tmp_path):
    model = new_model()
    before = copy.deepcopy(model)
    trainer = make_trainer(tmp_path, [sparse(method)])
    trainer.validate(model, Data(), verbose=False)
    trainer.test(model, Data(), verbose=False)
    trainer.predict(model, DataLoader(Data().val_set.tensors[0], batch_size=16))
    assert_equal_models(model, before)


@pytest.mark.filterwarnings("ignore:this training began with BAME scheduled")
def test_a_second_fit_goes_on(method, tmp_path):
    trainer, model = fit(tmp_path, method, max_epochs=1)
    (nm,) = (callback for callback in trainer.callbacks if isinstance(callback, NMSparsityCallback))
    first = nm.state_dict()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, Data())
    ends_sparse(model)
    second = nm.state_dict()
    assert (first["clock"], second["clock"], trainer.global_step) == (6, 12, 12)
    for name, layer in second["layers"].items():
        assert (first["layers"][name]["step"], layer["step"]) == (6, 12)


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()])
def test_interrupted_in_the_middle(method, error, tmp_path):
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                raise error

    model = new_model()
    with pytest.raises(RuntimeError if isinstance(error, RuntimeError) else SystemExit):
        fit(tmp_path, method, Fails(), model=model)
    ends_sparse(model)


class Lazy(Net):
    """Makes its layers when the Trainer asks for them."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = Net().net


def test_layers_that_are_made_late(method, tmp_path):
    pl.seed_everything(0, verbose=False)
    _, model = fit(tmp_path, method, model=Lazy())
    ends_sparse(model)


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[:4])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:4], optimizer, lr=0.01)


class Trainable(Net):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)


@pytest.mark.filterwarnings("ignore:no optimizer trains these masked layers")
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
def test_layers_that_are_frozen_at_first(method, tmp_path):
    pl.seed_everything(0, verbose=False)
    model = Trainable()
    frozen = model.net[3].weight.detach().clone()
    during = []
    look = Inspect(
        lambda trainer, module: during.append(
            (trainer.current_epoch, module.net[3].weight.detach().clone())
        )
    )
    fit(tmp_path, method, look, model=model, first=[Thaw()])
    ends_sparse(model)
    kept = [weight for epoch, weight in during if epoch == 0]
    nonzero = kept[0] != 0
    assert all(torch.equal(weight[nonzero], frozen[nonzero]) for weight in kept)
    assert not torch.equal(during[-1][1], during[0][1])


def test_frozen_layers_stay_as_they_are(method, tmp_path):
    pl.seed_everything(0, verbose=False)
    model = Trainable()
    model.net[3].weight.requires_grad_(False)
    frozen = model.net[3].weight.detach().clone()
    with pytest.warns(UserWarning, match="no optimizer trains these masked layers"):
        make_trainer(tmp_path, [sparse(method, frozen="mask")]).fit(model, Data())
    weight = model.net[3].weight.detach()
    assert nmf.is_nm(weight, "2:4", dim=1)
    assert torch.equal(weight[weight != 0], frozen[weight != 0])


def test_model_summary_and_sizes(method, tmp_path, capsys):
    counts = []

    class Counts(ModelSummary):
        def summarize(self, *args, **kwargs):
            counts.append(kwargs.get("total_parameters", args[1] if len(args) > 1 else None))

    _, model = fit(tmp_path, method, Counts(), max_epochs=1)
    assert counts == [sum(p.numel() for p in model.parameters())]


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def test_learning_rate_schedules(method, tmp_path):
    pl.seed_everything(0, verbose=False)
    _, model = fit(tmp_path, method, model=Scheduled())
    ends_sparse(model)


class Exotic(pl.LightningModule):
    """Tied weights, weight norm, hooks, and a layer that is called with keywords."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.other = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.other.weight
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.masked = nn.Linear(16, 16)
        self.seen = []
        self.masked.register_forward_pre_hook(lambda *args: self.seen.append("before"))
        self.masked.register_forward_hook(lambda *args: self.seen.append("after"))

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)[:, :16]
        x = self.norm(self.other(self.tied(self.first(x))))
        return F.mse_loss(self.masked(input=x), x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
def test_what_cannot_be_masked_is_left_with_its_reason(method, tmp_path):
    pl.seed_everything(0, verbose=False)
    model, part = Exotic(), sparse(method, include=["first", "m*", "*"], skip_first_last=False)
    reasons = {}

    class Skipped(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            reasons.update(part.sparsifier.skipped)

    make_trainer(tmp_path, [part, Skipped()], limit_val_batches=0).fit(model, Data())
    assert "shared with" in reasons["tied"] + reasons["other"]
    assert "computed, not stored" in reasons["norm"]
    assert nmf.is_nm(model.masked.weight, "2:4", dim=1)
    assert set(model.seen) == {"before", "after"}


@pytest.mark.filterwarnings(  # torch 2.6 says so of the masks, and keeps them
    "ignore:Attempted to insert a get_attr Node:UserWarning",
    "ignore:.* does not reference an nn.Module:UserWarning",
    "ignore:Additional .* warnings suppressed about get_attr:UserWarning",
)
def test_export_while_installed(method):
    model = new_model().eval()
    x = torch.randn(2, 1, 8, 8)
    part = sparse(method)
    NMSparsifier(model, config=part.config, planned_steps=10).attach()
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
