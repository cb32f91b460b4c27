"""Calls that a plain loop forgets are told once each; warnings are errors here, so all else must be silent."""

import warnings

import pytest
import torch
from torch import nn

from lightning_nm import ASP, BAME, SRSTE, STE, NMSparsifier, NMSparsityCallback
from lightning_nm import functional as nmf
from lightning_nm.training.watch import STEPS_WITHOUT_END, ForgottenCallWarning
from tests.support.lightning_models import Data, make_trainer, new_model


def start(method="sr-ste", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False, **options).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    sparsifier.register(optimizer)
    return model, sparsifier, optimizer


def loop(model, sparsifier, optimizer, steps, leave_out=(), accumulate=1):
    """A plain loop; returns the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            for k in range(accumulate):
                model(torch.randn(8, 16)).square().mean().backward()
                if k + 1 == accumulate:
                    if "before_step" not in leave_out:
                        sparsifier.before_step(optimizer)
                    optimizer.step()
                if "step" not in leave_out:
                    sparsifier.step()
        if "bake" not in leave_out:
            sparsifier.bake()
        sparsifier.detach()
    assert all(issubclass(warning.category, ForgottenCallWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "transposable"])
def test_sr_ste_without_before_step_is_told_of_its_decay(method):
    (message,) = loop(*start(method), 5, leave_out={"before_step"})
    assert (
        "without sparsifier.before_step(optimizer), so the decay of pruned weights is missing at layer"
        in message
    )


class Damped(STE):
    """A method of a user, with both hooks."""

    def penalty(self, layer):
        return layer.weight.square().sum()

    def before_step(self, layer, optimizer):
        layer.view.local_grad.mul_(0.5)


def test_a_method_from_outside_is_told_of_its_hooks():
    (message,) = loop(*start(Damped()), 3, leave_out={"before_step"})
    assert "so Damped.penalty() and Damped.before_step() is missing at layer '0'" in message


@pytest.mark.parametrize(
    "method",
    [
        "ste",
        "asp",
        "dense",
        SRSTE(decay=0),
        SRSTE(decay_at="after-clipping"),
        SRSTE(dense_start=50),
        BAME(0, 0),
    ],
)
def test_without_before_step_nothing_is_said_where_nothing_is_lost(method):
    model, sparsifier, optimizer = start(method)
    if isinstance(
        method, BAME
    ):  # its only adaptation is at the first step, and raises an error of its own
        model(torch.randn(8, 16)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert loop(model, sparsifier, optimizer, 5, leave_out={"before_step"}) == []


@pytest.mark.parametrize("method", ["ste", "sr-ste", "asp", ASP(start=3), "dense"])
def test_any_method_without_step_is_told(method):
    (message,) = loop(*start(method), 2 * STEPS_WITHOUT_END, leave_out={"step"})
    assert f"made {STEPS_WITHOUT_END} steps without sparsifier.step(): masks stand still" in message


def test_several_steps_in_a_batch_are_not_told():
    model, sparsifier, optimizer = start()
    for _ in range(5):
        for _ in range(STEPS_WITHOUT_END - 1):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
        sparsifier.step()


@pytest.mark.parametrize("method", ["ste", "sr-ste", "bi-mask"])
def test_detach_without_bake_is_told(method):
    model, sparsifier, optimizer = start(method)
    (message,) = loop(model, sparsifier, optimizer, 3, leave_out={"bake"})
    assert (
        "detach() without bake() after training gives back the latent weights of 2 layers, such as '0'"
        in message
    )
    assert not nmf.is_nm(model[0].weight.detach(), "2:4")


@pytest.mark.parametrize("method", ["asp", "dense", ASP(start=10), SRSTE(dense_start=10)])
def test_detach_without_bake_is_not_told_where_the_weights_are_what_was_used(method):
    assert loop(*start(method), 3, leave_out={"bake"}) == []


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "asp", BAME(0, 10, every=1)])
def test_a_complete_loop_is_told_nothing(method, accumulate):
    assert loop(*start(method), 2 * STEPS_WITHOUT_END, accumulate=accumulate) == []


def test_a_step_after_bake_asks_for_another():
    model, sparsifier, optimizer = start()
    model(torch.randn(8, 16)).square().mean().backward()
    sparsifier.before_step(optimizer)
    sparsifier.bake()
    optimizer.step()
    sparsifier.step()
    with pytest.warns(ForgottenCallWarning, match="detach\\(\\) without bake\\(\\)"):
        sparsifier.detach()


def test_evaluation_and_loading_are_told_nothing():
    model, sparsifier, optimizer = start()
    for _ in range(3):
        model(torch.randn(8, 16)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    other, evaluated, _ = start()
    other.load_state_dict(model.state_dict())
    evaluated.load_state_dict(sparsifier.state_dict())
    with torch.no_grad():
        other(torch.randn(8, 16))
    evaluated.detach()


def test_steps_that_a_scaler_skips_are_told_nothing():
    model, sparsifier, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(2 * STEPS_WITHOUT_END):
        optimizer.zero_grad()
        scaler.scale(
            model(torch.full((8, 16), float("inf") if step % 2 else 1.0)).square().mean()
        ).backward()
        scaler.unscale_(optimizer)
        sparsifier.before_step(optimizer)
        scaler.step(optimizer)
        scaler.update()
        sparsifier.step()
    sparsifier.bake()
    sparsifier.detach()


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


@pytest.mark.parametrize("method", ["sr-ste", "bi-mask"])
def test_the_callback_forgets_nothing(tmp_path, method):
    nm = NMSparsityCallback("2:4", method, show_tables=False)
    make_trainer(tmp_path, [nm], max_epochs=1, limit_train_batches=2).fit(ManySteps(), Data())
