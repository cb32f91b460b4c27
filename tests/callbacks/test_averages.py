"""Averaged weights: masked where they are used and saved, and a resumed run goes on with the whole average."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint

from lightning_nm import NMSparsifier, NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.callbacks.state import mask_average
from lightning_nm.commands.verify import main as verify
from lightning_nm.demo import ExactResume
from tests.support.lightning_models import (
    Data,
    SaveAt,
    assert_equal_models,
    callback,
    make_trainer,
    new_model,
)
from tests.support.outside import ScaledMask, SoftThreshold

MASKED = ["net.3.weight", "net.6.weight"]
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("asp-late", "transposable", "bame-bi-mask")
]
SPARSE_IN_THE_END = ["sr-ste", "bi-mask", "bame", *SLOW]
METHODS = [*SPARSE_IN_THE_END, "three-gemms"]
OUTSIDE = {"scaled-mask": ScaledMask, "soft-threshold": SoftThreshold}


def sparse(method):
    if method in OUTSIDE:
        return NMSparsityCallback("2:4", OUTSIDE[method](), show_tables=False)
    return callback(method)


class Average(EMAWeightAveraging):
    """Shows the average as it was last updated."""

    def __init__(self):
        super().__init__(decay=0.7)

    @property
    def weights(self):
        return {
            name: tensor.detach().clone()
            for name, tensor in self._average_model.module.named_parameters()
        }

    def on_train_end(self, trainer, pl_module):
        self.last = self.weights
        super().on_train_end(trainer, pl_module)


def run(tmp_path, method, *callbacks, model=None, **options):
    model, average = new_model() if model is None else model, Average()
    ckpt_path = options.pop("ckpt_path", None)
    trainer = make_trainer(
        tmp_path, [average, sparse(method), ExactResume(), *callbacks], **options
    )
    trainer.fit(model, Data(), ckpt_path=ckpt_path)
    return trainer, model, average.last


@pytest.mark.parametrize("batch", [8, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS + list(OUTSIDE))
def test_a_resumed_average_is_the_uninterrupted_one(tmp_path, method, batch):
    path = tmp_path / "mid.ckpt"
    _, straight, expected = run(tmp_path, method, SaveAt(path, batch), max_epochs=3)
    _, resumed, average = run(tmp_path, method, model=new_model(7), max_epochs=3, ckpt_path=path)
    assert_equal_models(straight, resumed)
    for name, weight in expected.items():
        assert torch.equal(average[name], weight), name
    assert not nmf.is_nm(average["net.6.weight"], "2:4"), (
        "the average must hold more than the mask keeps"
    )


@pytest.mark.parametrize("method", METHODS)
def test_what_the_checkpoint_holds_beside_the_masked_average(tmp_path, method):
    path, seen = tmp_path / "mid.ckpt", {}

    class See(pl.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            seen.update(trainer.callbacks[0].weights)

    run(tmp_path, method, See(), SaveAt(path, 8))
    checkpoint = torch.load(path, weights_only=True)
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
        assert torch.equal(
            state["averages"][key]["dropped"], seen[key][~mask]
        )  # half of the weight
    assert set(state["averages"]) == set(MASKED)
    if layer["masked"]:
        assert verify([str(path)]) == 0


LONGER = pytest.mark.filterwarnings(
    "ignore:this training began with .* scheduled at steps", "ignore:.* is over since"
)


@LONGER
@pytest.mark.parametrize("method", SPARSE_IN_THE_END)
def test_saved_after_the_fit(tmp_path, method):
    trainer, model, average = run(tmp_path, method)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert verify([str(tmp_path / "after.ckpt")]) == 0
    weights = torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"]
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter)
        assert torch.equal(weights[name][parameter != 0], average[name][parameter != 0])
    run(tmp_path, method, model=new_model(3), max_epochs=3, ckpt_path=tmp_path / "after.ckpt")


@LONGER
@pytest.mark.filterwarnings(
    "ignore:`.fit.ckpt_path=None.` was called without a model",  # without a checkpoint, too
    "ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint",
)
@pytest.mark.parametrize("method", SPARSE_IN_THE_END)
def test_saved_when_a_fit_fails(tmp_path, method):
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 7:
                raise RuntimeError("out of luck")

    path = tmp_path / "failed.ckpt"
    with pytest.raises(RuntimeError, match="out of luck"):
        run(tmp_path, method, Fails(), OnExceptionCheckpoint(tmp_path, "failed"))
    assert verify([str(path)]) == 0
    _, model, _ = run(tmp_path, method, model=new_model(3), max_epochs=3, ckpt_path=path)
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)


def test_averages_begin_anew_where_the_checkpoint_has_none(tmp_path):
    path = tmp_path / "plain.ckpt"
    make_trainer(tmp_path, [callback(), ExactResume(), SaveAt(path, 8)]).fit(new_model(), Data())
    with pytest.warns(UserWarning, match="was not created with WeightAveraging"):
        run(tmp_path, "bi-mask", max_epochs=3, ckpt_path=path)


def test_weights_alone_are_those_of_the_model_not_its_average(tmp_path):
    """Lightning asks no callback then."""
    seen = {}

    class See(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.update({key: value.clone() for key, value in pl_module.state_dict().items()})

    save = ModelCheckpoint(tmp_path, "weights", save_weights_only=True, every_n_train_steps=8)
    run(tmp_path, "bi-mask", See(), save, max_steps=8)
    weights = torch.load(save.best_model_path, weights_only=True)["state_dict"]
    assert all(torch.equal(weights[key], seen[key]) for key in weights)
    assert all(nmf.is_nm(weights[key], "2:4", dim=1) for key in MASKED)


def test_a_module_that_the_model_holds_twice_is_masked_under_both_keys():
    model = torch.nn.ModuleDict({"one": torch.nn.Sequential(torch.nn.Linear(16, 16))})
    model["two"] = torch.compile(model["one"], backend="eager")
    layers = NMSparsifier(model, "2:4", skip_first_last=False).attach().layers
    average = {
        key: torch.randn(16, 16)
        for key in ("one.0.weight", "two._orig_mod.0.weight", "three.0.weight")
    }
    weights = dict(average)
    dropped = mask_average(weights, model, layers)
    assert set(dropped) == {"one.0.weight", "two._orig_mod.0.weight"}
    for key in dropped:
        assert torch.equal(weights[key], torch.where(layers["one.0"].forward_mask, average[key], 0))
    assert weights["three.0.weight"] is average["three.0.weight"]
