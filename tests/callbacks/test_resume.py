"""Resume, second fits and interruptions continue exactly."""

import copy

import pytest
import torch

from lightning_nm import LBC, STEP, MaxQ, NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.demo import ExactResume
from tests.support.lightning_models import (
    Data,
    FailsAt,
    SaveAt,
    assert_equal_models,
    callback,
    fit,
    is_plain,
    is_sparse,
    make_trainer,
    new_model,
    whole_and_resumed,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)

METHODS = [
    *("dense", "ste", "sr-ste", "asp", "asp-late", "bi-mask"),
    *("bame", "bame-bi-mask", "three-gemms", "bi-mask-phases"),
    *("lbc", "maxq", "mask-logits"),
]
# The micro-batch, how many a window has, and whether the checkpoint is saved between a step and the move of the masks.
MOMENTS = {
    "epoch-end": (6, 1, False),
    "mid-epoch": (8, 1, False),
    "mid-window": (8, 3, False),
    "before-the-masks-move": (4, 1, True),
    "before-the-masks-move-accumulating": (4, 3, True),
}
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


@pytest.mark.parametrize(("method", "optimizer", "batch", "accumulate", "saves_first"), RUNS)
def test_resume_is_bit_exact(tmp_path, method, optimizer, batch, accumulate, saves_first):
    def new(seed):
        return new_model(seed, optimizer=optimizer)

    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "saves_first": saves_first}
    models = whole_and_resumed(tmp_path, lambda: [callback(method)], batch, new=new, **options)
    assert_equal_models(*models)


def test_resume_of_a_dense_run_with_the_callback_added_and_of_a_sparse_run_with_it_removed(
    tmp_path,
):
    dense, sparse = tmp_path / "dense.ckpt", tmp_path / "sparse.ckpt"
    fit(tmp_path, [SaveAt(dense, 6)])
    # A mistyped path would be another experiment.
    with pytest.warns(UserWarning, match=r"dense.ckpt' has no state of .* after its 6 steps"):
        _, model = fit(tmp_path, [callback(), SaveAt(sparse, 3)], new_model(1), ckpt_path=dense)
    assert is_sparse(model)
    # Lightning says that its state is not used.
    with pytest.warns(UserWarning, match="NMSparsityCallback"):
        _, model = fit(tmp_path, model=new_model(2), ckpt_path=sparse, max_epochs=3)
    assert not is_sparse(model)


@pytest.mark.parametrize(
    "method", ["sr-ste", "asp", "bi-mask", "bame-bi-mask", "mvue", "lbc", "maxq", "step"]
)
def test_a_second_fit_continues_exactly(tmp_path, method):
    def run(*epochs, same_trainer=False):
        # A fraction of the plan would be another step in each fit.
        made = {"lbc": LBC(6), "maxq": MaxQ(stop=6), "step": STEP(4, latest=4)}.get(method, method)
        adam = "adamw" if method == "step" else "sgd"
        model, nm = new_model(dropout=0.0, optimizer=adam), callback(made)
        # The same in all fits, so that only our own state could differ.
        optimizer = model.configure_optimizers()
        model.configure_optimizers = lambda: optimizer
        options = {"max_epochs": epochs[0], "num_sanity_val_steps": 0}
        trainer, done = make_trainer(tmp_path, [nm], **options), 0
        for number in epochs:
            if done and not same_trainer:
                trainer = make_trainer(tmp_path, [nm], **options | {"max_epochs": number})
            elif done:
                trainer.fit_loop.max_epochs = done + number
            trainer.fit(model, Data().val_dataloader(), Data().val_dataloader())
            done += number
        return model

    whole = run(8)
    assert_equal_models(whole, run(5, 3))
    assert_equal_models(whole, run(5, 3, same_trainer=True))


def assert_same_state(nm, before):
    for name, layer in nm.state_dict()["layers"].items():
        for part in ("forward_mask", "latent", "step", "buffers"):
            kept, saved = layer[part], before["layers"][name][part]
            torch.testing.assert_close(kept, saved, rtol=0, atol=0)


def test_a_second_fit_of_step_needs_the_optimizers_state(tmp_path):
    nm, model = callback(STEP(2, latest=2)), new_model(optimizer="adamw")
    first, _ = fit(tmp_path, [nm], model, max_epochs=1)
    first.save_checkpoint(tmp_path / "first.ckpt")
    weights, state = copy.deepcopy(model.state_dict()), nm.state_dict()
    with pytest.raises(ValueError, match=r"AdamW is new.*layer 'net\.3'.*ckpt_path"):
        fit(tmp_path, [nm], model)
    # Nothing was trained, and nothing is lost: the module is an ordinary one with the sparse weights.
    assert is_plain(model)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert_same_state(nm, state)
    third, _ = fit(tmp_path, [nm], model, ckpt_path=tmp_path / "first.ckpt")
    assert third.global_step == 12
    assert is_sparse(model)


@pytest.mark.parametrize("method", [STEP(2, latest=2), "bame"], ids=["step", "bame"])
def test_a_refused_second_fit_loses_nothing(tmp_path, method):
    """Both refuse another optimizer when it is registered: the state was restored by then, latent values included."""
    nm, model = callback(method), new_model(optimizer="adamw")
    fit(tmp_path, [nm], model, max_epochs=1)
    weights, state = copy.deepcopy(model.state_dict()), nm.state_dict()

    adamw = model.configure_optimizers
    model.configure_optimizers = lambda: torch.optim.Rprop(model.parameters(), 1e-3)
    with pytest.raises(ValueError, match="Rprop"):
        fit(tmp_path, [nm], model, max_epochs=1)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert_same_state(nm, state)
    if method == "bame":  # step needs the optimizer of the first fit
        model.configure_optimizers = adamw
        fit(tmp_path, [nm], model, max_epochs=1)
        assert nm.state_dict()["clock"] > state["clock"]


def test_saving_after_fit_resumes_exactly(tmp_path):
    _, straight = fit(tmp_path, [callback(), ExactResume()], max_epochs=3)
    trainer, _ = fit(tmp_path, [callback(), ExactResume()])
    path = tmp_path / "after.ckpt"
    trainer.save_checkpoint(path)
    own = [callback(), ExactResume()]
    _, resumed = fit(tmp_path, own, new_model(5), ckpt_path=path, max_epochs=3)
    assert_equal_models(straight, resumed)


def test_a_fit_that_fails_leaves_a_sparse_model_and_its_state(tmp_path):
    model = new_model()
    trainer = make_trainer(tmp_path, [callback(), FailsAt("on_train_batch_end", 4)])
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(model, Data())
    assert is_plain(model)
    assert is_sparse(model)
    trainer.save_checkpoint(tmp_path / "crash.ckpt")
    state = torch.load(tmp_path / "crash.ckpt")["callbacks"]["NMSparsityCallback"]
    assert state["layers"]["net.6"]["step"] == 4
    assert state["layers"]["net.6"]["latent"].numel() == 256 * 32 // 2


@pytest.mark.filterwarnings("ignore:ASP never prunes")
@pytest.mark.parametrize("method", ["bi-mask", "asp-late"])
def test_a_callback_that_is_used_again_for_another_model_starts_anew(tmp_path, method):
    """Also if a checkpoint was evaluated in between."""
    nm = callback(method)
    for fold in range(2):
        model = new_model(fold)
        trainer = make_trainer(tmp_path, [nm], max_epochs=1, limit_train_batches=3)
        if fold:
            with pytest.warns(UserWarning, match=r"starts again.*net\.3"):
                trainer.fit(model, Data())
        else:
            trainer.fit(model, Data())
        assert is_sparse(model) == (method == "bi-mask"), "ASP prunes in its fourth step"
        path = tmp_path / "fold.ckpt"
        trainer.save_checkpoint(path)
        trainer.test(model, Data(), ckpt_path=path, verbose=False, weights_only=True)


def test_a_future_schema_is_refused():
    with pytest.raises(ValueError, match=r"schema 99.*reads schema 1"):
        NMSparsityCallback().load_state_dict({"schema": 99, "layers": {}})


@pytest.mark.parametrize(
    "hook",
    [
        *("on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_batch_start"),
        "on_before_optimizer_step",
    ],
)
@pytest.mark.parametrize("method", ["bi-mask", "asp", "bame"])
def test_a_crash_before_the_first_step_leaves_the_model_as_it_came(tmp_path, hook, method):
    model = new_model()
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [callback(method), FailsAt(hook)], model)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert is_plain(model)


def test_a_fit_that_could_not_end_does_not_make_the_next_one_dense(tmp_path):
    nm, first, second = callback(), new_model(), new_model(1)
    rude = FailsAt("on_train_batch_start")
    rude.on_exception = rude.fail
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [rude, nm], first)
    fit(tmp_path, [nm], second, max_epochs=1)
    assert is_sparse(second)
    assert is_plain(first)
    assert not nmf.is_nm(first.net[6].weight, "2:4"), "it was never trained"
