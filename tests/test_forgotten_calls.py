"""Calls that a plain loop forgets are told once each; warnings are errors here, so all else must be silent."""

import warnings

import pytest
import torch

from lightning_nm import ASP, BAME, SRSTE, STE, NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.training.watch import STEPS_WITHOUT_END, ForgottenCallWarning
from tests.support.lightning_models import Data, make_trainer, new_model
from tests.support.loop import Loop, mlp


class Damped(STE):
    """A method of a user, with both hooks."""

    def penalty(self, layer):
        return layer.weight.square().sum()

    def before_step(self, layer, optimizer):
        layer.view.local_grad.mul_(0.5)


BEFORE_STEP = "without sparsifier.before_step(optimizer), so the decay of pruned weights is missing"
STEP = f"made {STEPS_WITHOUT_END} steps without sparsifier.step(): masks stand still"
BAKE = "without bake() after training gives back the latent weights of 2 layers, such as '0'"
CASES = [
    *(("before_step", method, BEFORE_STEP) for method in ("sr-ste", "bi-mask", "transposable")),
    (
        "before_step",
        Damped(),
        "so Damped.penalty() and Damped.before_step() is missing at layer '0'",
    ),
    *(("before_step", method, None) for method in ("ste", "asp", "dense", SRSTE(decay=0))),
    ("before_step", SRSTE(decay_at="after-clipping"), None),
    ("before_step", SRSTE(dense_start=50), None),
    ("before_step", BAME(0, 0), None),  # its only adaptation is at the first step
    *(("step", method, STEP) for method in ("ste", "sr-ste", "asp", ASP(start=3), "dense")),
    *(("bake", method, BAKE) for method in ("ste", "sr-ste", "bi-mask")),
    *(("bake", method, None) for method in ("asp", "dense", ASP(start=50), SRSTE(dense_start=50))),
    *(("", method, None) for method in ("sr-ste", "bi-mask", "asp", BAME(0, 10, every=1))),
]


@pytest.mark.parametrize(("left_out", "method", "message"), CASES)
def test_what_is_left_out_is_told_once_where_something_is_lost(left_out, method, message):
    """After a complete step, with two micro-batches to each step."""
    loop = Loop(mlp(16, 16, 16), method)
    loop.train([0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2 * STEPS_WITHOUT_END):
            loop.backward(number)
            if left_out != "step":
                loop.sparsifier.step()
            loop.model(loop.batch()).square().mean().backward()
            if left_out != "before_step":
                loop.sparsifier.before_step(loop.optimizer)
            loop.optimizer.step()
            if left_out != "step":
                loop.sparsifier.step()
        if left_out != "bake":
            loop.sparsifier.bake()
        loop.sparsifier.detach()
    assert all(issubclass(warning.category, ForgottenCallWarning) for warning in caught)
    assert len(caught) == (message is not None)
    assert all(message in str(warning.message) for warning in caught)
    if message == BAKE:
        assert not nmf.is_nm(loop.model[0].weight, "2:4")


def test_several_steps_in_a_batch_are_not_told():
    loop = Loop(mlp(16, 16))
    for number in range(3 * (STEPS_WITHOUT_END - 1)):
        loop.backward(number)
        loop.sparsifier.before_step(loop.optimizer)
        loop.optimizer.step()
        if number % (STEPS_WITHOUT_END - 1) == 0:
            loop.sparsifier.step()


def test_a_step_after_bake_asks_for_another():
    loop = Loop(mlp(16, 16))
    loop.backward()
    loop.sparsifier.bake()
    loop.step()
    with pytest.warns(ForgottenCallWarning, match=r"detach\(\) without bake\(\)"):
        loop.sparsifier.detach()


def test_evaluation_and_loading_are_told_nothing():
    loop, evaluated = Loop(mlp(16, 16)), Loop(mlp(16, 16))
    loop.train(range(3))
    evaluated.load(loop.save())
    with torch.no_grad():
        evaluated.model(evaluated.batch())
    evaluated.sparsifier.detach()


class ManySteps(type(new_model())):
    """Manual optimization that steps often within one batch, as some reinforcement learning does."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(STEPS_WITHOUT_END + 1):
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def test_the_callback_forgets_nothing(tmp_path):
    nm = NMSparsityCallback("2:4", "bi-mask", show_tables=False)
    make_trainer(tmp_path, [nm], max_epochs=1, limit_train_batches=2).fit(ManySteps(), Data())
