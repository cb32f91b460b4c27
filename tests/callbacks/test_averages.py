"""Averaged weights: masked where they are used and saved, and a resumed run goes on with the whole average."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint

from lightning_nm import NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.callbacks.saved_state import mask_average
from lightning_nm.commands.verify import main as verify
from lightning_nm.demo import ExactResume
from tests.support.lightning_models import (
    MASKED,
    FailsAt,
    Inspect,
    SaveAt,
    assert_equal_models,
    callback,
    fit,
    is_sparse,
    new_model,
    whole_and_resumed,
)
from tests.support.outside import ScaledMask, SoftThreshold

SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("asp-late", "transposable", "bame-bi-mask")
]
SPARSE_IN_THE_END = ["sr-ste", "bi-mask", "bame", *SLOW]
METHODS = [*SPARSE_IN_THE_END, "three-gemms"]
OUTSIDE = {"scaled-mask": ScaledMask, "soft-threshold": SoftThreshold}
LONGER = pytest.mark.filterwarnings(
    "ignore:this training began with .* scheduled at steps", "ignore:.* is over since"
)


class Average(EMAWeightAveraging):
    """Keeps the average as it was when training ended."""

    def __init__(self):
        super().__init__(decay=0.7)

    @property
    def weights(self):
        named = self._average_model.module.named_parameters()
        return {name: tensor.detach().clone() for name, tensor in named}

    def on_train_end(self, trainer, pl_module):
        self.last = self.weights
        super().on_train_end(trainer, pl_module)


class Validated(pl.Callback):
    """What is validated is sparse."""

    def on_validation_epoch_end(self, trainer, pl_module):
        assert trainer.sanity_checking or is_sparse(pl_module)


def run(tmp_path, method, *callbacks, **options):
    """The Trainer, the model, and the average."""
    average = Average()
    trainer, model = fit(
        tmp_path, [average, callback(method), ExactResume(), *callbacks], **options
    )
    return trainer, model, average.last


@pytest.mark.parametrize("batch", [8, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS + list(OUTSIDE))
def test_a_resumed_average_is_the_uninterrupted_one(tmp_path, method, batch):
    averages = []

    def callbacks():
        averages.append(Average())
        return [averages[-1], callback(OUTSIDE.get(method, lambda: method)())]

    assert_equal_models(*whole_and_resumed(tmp_path, callbacks, batch, max_epochs=3))
    expected, found = (average.last for average in averages)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert not is_sparse(found), "the average must hold more than the mask keeps"


@pytest.mark.parametrize("method", METHODS)
def test_what_the_checkpoint_holds_beside_the_masked_average(tmp_path, method):
    path, seen = tmp_path / "mid.ckpt", {}

    class See(pl.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            seen.update(trainer.callbacks[0].weights)

    run(tmp_path, method, See(), SaveAt(path, 8))
    checkpoint = torch.load(path)
    state = checkpoint["callbacks"]["NMSparsityCallback"]
    for key in MASKED:
        weight, layer = checkpoint["state_dict"][key], state["layers"][key.removesuffix(".weight")]
        if not layer["masked"]:
            assert state["averages"][key]["dropped"] is None
            assert torch.equal(weight, seen[key])
            continue
        assert nmf.is_nm(weight, "2:4", dim=1)
        mask = nmf.unpack_mask(layer["forward_mask"], tuple(weight.shape))
        assert torch.equal(weight, torch.where(mask, seen[key], 0))
        dropped = state["averages"][key]["dropped"]
        assert torch.equal(dropped, seen[key][~mask])  # half of the weight
    assert set(state["averages"]) == set(MASKED)
    if layer["masked"]:
        assert verify([str(path)]) == 0


@LONGER
@pytest.mark.parametrize("method", SPARSE_IN_THE_END)
def test_saved_after_the_fit(tmp_path, method):
    path = tmp_path / "after.ckpt"
    trainer, model, average = run(tmp_path, method, Validated())
    trainer.save_checkpoint(path)
    assert verify([str(path)]) == 0
    checkpoint = torch.load(path)
    for name, parameter in model.named_parameters():
        weight, kept = checkpoint["state_dict"][name], parameter != 0
        assert torch.equal(weight, parameter)
        assert torch.equal(weight[kept], average[name][kept])
    layer = checkpoint["callbacks"]["NMSparsityCallback"]["layers"]["net.6"]
    assert method not in ("bame", "bame-bi-mask") or layer["latent"] is None
    run(tmp_path, method, model=new_model(3), max_epochs=3, ckpt_path=path)


@LONGER
@pytest.mark.filterwarnings(
    "ignore:`.fit.ckpt_path=None.` was called without a model",  # without a checkpoint, too
    "ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint",
)
@pytest.mark.parametrize("method", SPARSE_IN_THE_END)
def test_saved_when_a_fit_fails(tmp_path, method):
    path, fails = tmp_path / "failed.ckpt", FailsAt("on_train_batch_end", 7)
    with pytest.raises(RuntimeError, match="out of luck"):
        run(tmp_path, method, fails, OnExceptionCheckpoint(tmp_path, "failed"))
    assert verify([str(path)]) == 0
    _, model, _ = run(tmp_path, method, model=new_model(3), max_epochs=3, ckpt_path=path)
    assert is_sparse(model)


def test_averages_begin_anew_where_the_checkpoint_has_none(tmp_path):
    path = tmp_path / "plain.ckpt"
    fit(tmp_path, [callback(), ExactResume(), SaveAt(path, 8)])
    with pytest.warns(UserWarning, match="was not created with WeightAveraging"):
        run(tmp_path, "bi-mask", max_epochs=3, ckpt_path=path)


def test_the_average_must_come_first(tmp_path):
    with pytest.raises(ValueError, match="EMAWeightAveraging comes after NMSparsityCallback"):
        fit(tmp_path, [callback(), EMAWeightAveraging()])


def test_weights_alone_are_those_of_the_model_not_its_average(tmp_path):
    """Lightning asks no callback then."""
    see = Inspect(
        lambda _, model: {key: value.clone() for key, value in model.state_dict().items()}
    )
    save = ModelCheckpoint(tmp_path, "weights", save_weights_only=True, every_n_train_steps=8)
    run(tmp_path, "bi-mask", see, save, max_steps=8)
    weights = torch.load(save.best_model_path)["state_dict"]
    assert all(torch.equal(weights[key], see.seen[-1][key]) for key in weights)
    assert is_sparse(weights)


def test_a_module_that_the_model_holds_twice_is_masked_under_both_keys():
    model = torch.nn.ModuleDict({"one": torch.nn.Sequential(torch.nn.Linear(16, 16))})
    model["two"] = torch.compile(model["one"], backend="eager")
    layers = NMSparsifier(model, "2:4", "bi-mask", skip_first_last=False).attach().layers
    names = ("one.0.weight", "two._orig_mod.0.weight", "three.0.weight")
    average = {key: torch.randn(16, 16) for key in names}
    weights = dict(average)
    dropped = mask_average(weights, model, layers)
    assert set(dropped) == {"one.0.weight", "two._orig_mod.0.weight"}
    for key in dropped:
        assert torch.equal(weights[key], torch.where(layers["one.0"].forward_mask, average[key], 0))
    assert weights["three.0.weight"] is average["three.0.weight"]
