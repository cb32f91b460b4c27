"""``storage="packed"`` under a Trainer: the same run, checkpoints that fit both ways, and what is refused."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from lightning_nm import BAME, NMPrecision, NMSparsityCallback
from lightning_nm.demo import ExactResume
from lightning_nm.functional import is_nm
from tests.support.lightning_models import (
    Data,
    Inspect,
    SaveAt,
    assert_equal_models,
    make_trainer,
    new_model,
)

METHODS = {
    "asp": lambda: "asp",
    "bame": lambda: BAME(stop=6, every=2, budget=1.0, evidence_rate=0.5),
}


def callback(method, storage, scale="supar", **options):
    return NMSparsityCallback(
        "2:4",
        METHODS[method](),
        storage=storage,
        scale=scale,
        show_tables=False,
        skip_first_last=False,
        exclude="net.0",
        **options,
    )


def fit(
    path,
    method,
    storage,
    *callbacks,
    ckpt_path=None,
    optimizer="adamw",
    model=None,
    scale="supar",
    **options,
):
    model = model or new_model(optimizer=optimizer)
    nm = callback(method, storage, scale)
    trainer = make_trainer(path, [nm, *callbacks, ExactResume()], **options)
    trainer.fit(model, Data(), ckpt_path=ckpt_path)
    return model, trainer, nm


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_fit_is_that_with_dense_storage(tmp_path, method, optimizer):
    dense, _, _ = fit(tmp_path, method, "dense", optimizer=optimizer)
    dims = []
    look = Inspect(lambda trainer, model: dims.append(model.net[6].weight.dim()))
    save = SaveAt(tmp_path / "last.ckpt", 10)
    packed, trainer, _ = fit(tmp_path, method, "packed", look, save, optimizer=optimizer)
    assert dims[-1] == 3
    assert_equal_models(dense, packed)
    assert type(packed.net[6]) is torch.nn.Linear
    assert packed.net[6].weight.shape == (32, 256)
    assert is_nm(packed.net[6].weight, "2:4")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    shapes = {key: tuple(value.shape) for key, value in saved["state_dict"].items()}
    assert shapes == {key: tuple(value.shape) for key, value in packed.state_dict().items()}
    metrics = trainer.test(packed, Data(), verbose=False)
    fresh = new_model(5)
    fresh.load_state_dict(packed.state_dict())
    again = make_trainer(tmp_path).test(fresh, Data(), verbose=False)
    assert metrics == again


@pytest.mark.parametrize(
    "storages", [("packed", "packed"), ("packed", "dense"), ("dense", "packed")]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [4, 8])
def test_a_resume_is_exact(tmp_path, method, storages, at):
    before, after = storages
    whole, _, _ = fit(tmp_path, method, before, SaveAt(tmp_path / "at.ckpt", at))
    resumed, _, _ = fit(
        tmp_path,
        method,
        after,
        ckpt_path=tmp_path / "at.ckpt",
        model=new_model(7, optimizer="adamw"),
    )
    assert_equal_models(whole, resumed)


def test_a_checkpoint_of_after_the_fit_continues(tmp_path):
    whole, _, _ = fit(tmp_path, "asp", "packed", max_epochs=3)
    part, trainer, _ = fit(tmp_path, "asp", "packed", max_epochs=2)
    assert part.net[6].weight.dim() == 2
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    states = saved["optimizer_states"][0]["state"].values()
    assert (32, 64, 2) in {tuple(state["exp_avg"].shape) for state in states}
    resumed, _, _ = fit(
        tmp_path,
        "asp",
        "packed",
        max_epochs=3,
        ckpt_path=tmp_path / "after.ckpt",
        model=new_model(7, optimizer="adamw"),
    )
    assert_equal_models(whole, resumed)


@pytest.mark.parametrize("method", METHODS)
def test_a_second_fit_with_the_same_optimizer_continues(tmp_path, method):
    def run(storage, *epochs):
        model, nm = new_model(dropout=0.0, optimizer="adamw"), callback(method, storage)
        optimizer = model.configure_optimizers()
        model.configure_optimizers = lambda: optimizer
        for number in epochs:
            trainer = make_trainer(tmp_path, [nm], max_epochs=number, num_sanity_val_steps=0)
            trainer.fit(
                model,
                train_dataloaders=Data().val_dataloader(),
                val_dataloaders=Data().val_dataloader(),
            )
        return model

    assert_equal_models(run("dense", 8), run("packed", 5, 3))


def test_what_users_combine_it_with(tmp_path):
    """Accumulation, clipping, a precision plugin, a learning rate that falls and the statistics."""
    logged = {}

    class Log(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            logged.update(trainer.callback_metrics)

    options = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "logger": pl.loggers.CSVLogger(tmp_path),
        "plugins": [NMPrecision()],
    }
    model, _, _ = fit(tmp_path, "asp", "packed", Log(), **options)
    assert is_nm(model.net[6].weight, "2:4")
    assert logged["nm/density"] == 0.5
    assert logged["nm/flip_rate"] == 0


def test_a_compiled_model(tmp_path):
    model = new_model(dropout=0.0)
    model.net = torch.compile(model.net, backend="eager")
    found, _, _ = fit(tmp_path, "asp", "packed", model=model)
    plain, _, _ = fit(tmp_path, "asp", "dense", model=new_model(dropout=0.0))
    for value, other in zip(found.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other)


class Fails(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3:
            raise RuntimeError("a typo")


def test_an_exception_leaves_ordinary_modules(tmp_path):
    model = new_model()
    with pytest.raises(RuntimeError, match="a typo"):
        fit(tmp_path, "asp", "packed", Fails(), model=model)
    assert type(model.net[6]) is torch.nn.Linear
    assert model.net[6].weight.shape == (32, 256)
    assert is_nm(model.net[6].weight, "2:4")


@pytest.mark.parametrize("averages", [EMAWeightAveraging, lambda: StochasticWeightAveraging(1e-2)])
def test_averaged_weights_are_refused(tmp_path, averages):
    model, nm = new_model(), callback("asp", "packed")
    trainer = make_trainer(tmp_path, [averages(), nm])
    with pytest.raises(ValueError, match=r"Averag.* averages weights"):
        trainer.fit(model, Data())
    assert type(model.net[6]) is torch.nn.Linear


def test_an_optimizer_that_does_not_fit_is_refused_before_training(tmp_path):
    model = new_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.configure_optimizers = lambda: torch.optim.Adafactor(model.parameters())
    with pytest.raises(ValueError, match=r"gives Adafactor the kept entries of layer 'net\.3'"):
        fit(tmp_path, "asp", "packed", model=model, scale=None)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
