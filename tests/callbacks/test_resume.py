"""Resume, second fits and interruptions continue exactly."""

import copy

import lightning.pytorch as pl
import pytest
import torch

from lightning_nm import LBC, STEP, MaxQ, NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.demo import ExactResume
from lightning_nm.nn.adapters import Adapter
from tests.support.lightning_models import (
    Data,
    Inspect,
    SaveAt,
    assert_equal_models,
    callback,
    make_trainer,
    new_model,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)

MASKED = ("net.3.weight", "net.6.weight")
METHODS = [
    *("dense", "ste", "sr-ste", "asp", "asp-late", "bi-mask"),
    *("bame", "bame-bi-mask", "three-gemms", "bi-mask-phases"),
    *("lbc", "maxq", "mask-logits"),
]
MOMENTS = {"epoch-end": (6, 1), "mid-epoch": (8, 1), "mid-window": (8, 3)}
RUNS = [  # all pairs of a method, an optimizer and a moment
    pytest.param(method, ("sgd", "adamw")[(row + column) % 2], *moment, id=f"{name}-{method}")
    for row, method in enumerate(METHODS)
    for column, (name, moment) in enumerate(MOMENTS.items())
]
RUNS += [
    pytest.param(method, "adamw", *MOMENTS["mid-window"], id=f"mid-window-{method}")
    for method in ("slope", "rigl", "cast")
]
RUNS += [  # "step" takes Adam alone; by default it and "decaying" are on their way at these moments
    pytest.param(method, optimizer, *moment, id=f"{name}-{method}", marks=pytest.mark.slow)
    for method, optimizer in (("s-ste", "sgd"), ("decaying", "sgd"), ("step", "adamw"))
    for name, moment in MOMENTS.items()
]


@pytest.mark.parametrize(("method", "optimizer", "batch", "accumulate"), RUNS)
def test_resume_is_bit_exact(tmp_path, method, optimizer, batch, accumulate):
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    straight = new_model(optimizer=optimizer)
    save = SaveAt(tmp_path / "mid.ckpt", batch)
    make_trainer(tmp_path, [callback(method), ExactResume(), save], **options).fit(straight, Data())

    resumed = new_model(7, optimizer=optimizer)
    trainer = make_trainer(tmp_path, [callback(method), ExactResume()], **options)
    trainer.fit(resumed, Data(), ckpt_path=tmp_path / "mid.ckpt")
    assert_equal_models(straight, resumed)


def test_resume_of_a_dense_run_with_the_callback_added_and_of_a_sparse_run_with_it_removed(
    tmp_path,
):
    save = SaveAt(tmp_path / "dense.ckpt", 6)
    make_trainer(tmp_path, [save]).fit(new_model(), Data())
    model = new_model(1)
    sparse_save = SaveAt(tmp_path / "sparse.ckpt", 3)
    # A mistyped path would be another experiment.
    with pytest.warns(UserWarning, match=r"dense.ckpt' has no state of .* after its 6 steps"):
        make_trainer(tmp_path, [callback(), sparse_save]).fit(
            model, Data(), ckpt_path=tmp_path / "dense.ckpt"
        )
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)

    model = new_model(2)
    trainer = make_trainer(tmp_path, max_epochs=3)
    with pytest.warns(
        UserWarning, match="NMSparsityCallback"
    ):  # Lightning says that its state is not used
        trainer.fit(model, Data(), ckpt_path=tmp_path / "sparse.ckpt")
    assert not nmf.is_nm(model.state_dict()["net.6.weight"], "2:4", dim=1)


@pytest.mark.parametrize(
    "method", ["sr-ste", "asp", "bi-mask", "bame-bi-mask", "mvue", "lbc", "maxq", "step"]
)
def test_a_second_fit_continues_exactly(tmp_path, method):
    def run(*epochs):
        # A share of the plan would be another step in each fit.
        made = {"lbc": LBC(6), "maxq": MaxQ(stop=6), "step": STEP(4, latest=4)}.get(method)
        adam = "adamw" if method == "step" else "sgd"
        model, nm = new_model(dropout=0.0, optimizer=adam), callback(made or method)
        optimizer = (
            model.configure_optimizers()
        )  # the same in all fits, so that only our own state could differ
        model.configure_optimizers = lambda: optimizer
        for number in epochs:
            trainer = make_trainer(tmp_path, [nm], max_epochs=number, num_sanity_val_steps=0)
            trainer.fit(
                model,
                train_dataloaders=Data().val_dataloader(),
                val_dataloaders=Data().val_dataloader(),
            )
        return model

    assert_equal_models(run(8), run(5, 3))


def test_a_second_fit_of_step_needs_the_optimizers_state(tmp_path):
    nm, model = callback(STEP(2, latest=2)), new_model(optimizer="adamw")
    first = make_trainer(tmp_path, [nm], max_epochs=1)
    first.fit(model, Data())
    first.save_checkpoint(tmp_path / "first.ckpt")
    weights = copy.deepcopy(model.state_dict())
    state = nm.state_dict()

    second = make_trainer(tmp_path, [nm], max_epochs=2)
    with pytest.raises(ValueError, match=r"AdamW is new.*layer 'net\.3'.*ckpt_path"):
        second.fit(model, Data())
    # Nothing was trained, and nothing is lost: the module is an ordinary one with the sparse weights.
    assert second.global_step == 0
    assert type(model.net[3]) is torch.nn.Conv2d
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    for name, layer in nm.state_dict()["layers"].items():
        for part in ("forward_mask", "latent", "step", "buffers"):
            kept, before = layer[part], state["layers"][name][part]
            torch.testing.assert_close(kept, before, rtol=0, atol=0)

    third = make_trainer(tmp_path, [nm], max_epochs=2)
    third.fit(model, Data(), ckpt_path=tmp_path / "first.ckpt")
    assert third.global_step == 12
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)


@pytest.mark.parametrize("method", [STEP(2, latest=2), "bame"], ids=["step", "bame"])
def test_a_refused_second_fit_loses_nothing(tmp_path, method):
    """Both refuse another optimizer when it is registered: the state was restored by then, latent values included."""
    nm, model = callback(method), new_model(optimizer="adamw")
    make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())
    weights, state = copy.deepcopy(model.state_dict()), nm.state_dict()

    adamw = model.configure_optimizers
    model.configure_optimizers = lambda: torch.optim.Rprop(model.parameters(), 1e-3)
    with pytest.raises(ValueError, match="Rprop"):
        make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)
    for name, layer in nm.state_dict()["layers"].items():
        for part in ("forward_mask", "latent", "step"):
            torch.testing.assert_close(layer[part], state["layers"][name][part], rtol=0, atol=0)

    if method == "bame":  # step needs the optimizer of the first fit
        model.configure_optimizers = adamw
        make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())
        assert nm.state_dict()["clock"] > state["clock"]


def test_saving_after_fit_resumes_exactly(tmp_path):
    straight = new_model()
    make_trainer(tmp_path, [callback(), ExactResume()], max_epochs=3).fit(straight, Data())

    first = new_model()
    trainer = make_trainer(tmp_path, [callback(), ExactResume()], max_epochs=2)
    trainer.fit(first, Data())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed = new_model(5)
    make_trainer(tmp_path, [callback(), ExactResume()], max_epochs=3).fit(
        resumed, Data(), ckpt_path=tmp_path / "after.ckpt"
    )
    assert_equal_models(straight, resumed)


def test_a_reused_callback_on_another_model_starts_anew(tmp_path):
    nm = callback()
    make_trainer(tmp_path, [nm], max_epochs=1).fit(new_model(), Data())
    model = new_model(1)
    with pytest.warns(UserWarning, match=r"starts again.*net\.3"):
        make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)


def test_interruption_leaves_a_model_that_resumes(tmp_path):
    def stop(trainer, module):
        if trainer.global_step == 4:
            raise RuntimeError("out of luck")

    model, nm = new_model(), callback()
    trainer = make_trainer(tmp_path, [nm, Inspect(stop)])
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(model, Data())
    assert not any(isinstance(m, Adapter) for m in model.modules())
    assert all(nmf.is_nm(model.state_dict()[key], "2:4", dim=1) for key in MASKED)
    trainer.save_checkpoint(tmp_path / "crash.ckpt")
    state = torch.load(tmp_path / "crash.ckpt", weights_only=True)["callbacks"][
        "NMSparsityCallback"
    ]
    assert state["layers"]["net.6"]["step"] == 4
    assert state["layers"]["net.6"]["latent"].numel() == 256 * 32 // 2


def test_a_future_schema_is_refused():
    with pytest.raises(ValueError, match=r"schema 99.*reads schema 1"):
        NMSparsityCallback().load_state_dict({"schema": 99, "layers": {}})


@pytest.mark.parametrize(
    "method",
    ["sr-ste", "bi-mask", "asp-late", "bame", "bame-bi-mask", "three-gemms", "bi-mask-phases"],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_checkpoint_between_a_step_and_the_move_of_the_masks_resumes_exactly(
    tmp_path, method, accumulate
):
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    straight = new_model()
    save = SaveAt(tmp_path / "early.ckpt", 4)  # before our callback
    make_trainer(tmp_path, [save, callback(method), ExactResume()], **options).fit(straight, Data())
    resumed = new_model(7)
    trainer = make_trainer(tmp_path, [callback(method), ExactResume()], **options)
    trainer.fit(resumed, Data(), ckpt_path=tmp_path / "early.ckpt")
    assert_equal_models(straight, resumed)


def test_evaluating_a_checkpoint_between_fits_does_not_break_the_next(tmp_path):
    nm = callback()
    for fold in range(2):
        model = new_model(fold)
        trainer = make_trainer(tmp_path, [nm], max_epochs=1)
        if fold:
            with pytest.warns(UserWarning, match="starts again"):
                trainer.fit(model, Data())
        else:
            trainer.fit(model, Data())
        assert model.net[6].weight.count_nonzero() == 256 * 32 // 2
        trainer.save_checkpoint(tmp_path / "fold.ckpt")
        trainer.test(
            model, Data(), ckpt_path=tmp_path / "fold.ckpt", verbose=False, weights_only=True
        )


class Fails(pl.Callback):
    def __init__(self, hook):
        setattr(self, hook, self.fail)

    def fail(self, *args):
        raise RuntimeError("a typo")


@pytest.mark.parametrize(
    "hook", ["on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_batch_start"]
)
@pytest.mark.parametrize("method", ["bi-mask", "asp", "bame"])
def test_a_crash_before_the_first_step_leaves_the_model_as_it_came(tmp_path, hook, method):
    model = new_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="a typo"):
        make_trainer(tmp_path, [callback(method), Fails(hook)]).fit(model, Data())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(isinstance(m, Adapter) for m in model.modules())


def test_a_fit_that_could_not_end_does_not_make_the_next_one_dense(tmp_path):
    class Rude(pl.Callback):
        def on_train_batch_start(self, *args):
            raise RuntimeError("first")

        def on_exception(self, *args):
            raise RuntimeError("second")

    nm, first, second = callback(), new_model(), new_model(1)
    with pytest.raises(RuntimeError, match="second"):
        make_trainer(tmp_path, [Rude(), nm]).fit(first, Data())
    make_trainer(tmp_path, [nm], max_epochs=1).fit(second, Data())
    assert all(nmf.is_nm(second.state_dict()[key], "2:4", dim=1) for key in MASKED)
    assert not any(isinstance(m, Adapter) for m in first.modules())


@pytest.mark.filterwarnings("ignore:ASP never prunes")
def test_folds_before_pruning_do_not_share_a_clock(tmp_path):
    nm = callback("asp-late")
    for fold in range(2):
        model = new_model(fold)
        trainer = make_trainer(tmp_path, [nm], max_epochs=1, limit_train_batches=3)
        if fold:
            with pytest.warns(UserWarning, match="starts again"):
                trainer.fit(model, Data())
        else:
            trainer.fit(model, Data())
        assert not nmf.is_nm(model.net[6].weight, "2:4"), "pruned before its time"
