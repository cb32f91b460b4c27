"""NMTrainerCallback with scale="supar": each factor is applied once, schedulers see the user's rates, runs resume."""

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainerCallback

from lightning_nm import NMSparsifier
from lightning_nm.training.optimizers import unwrapped
from tests.support.hf_models import bert, gpt2, new
from tests.support.hf_runs import (
    SAVES,
    assert_equal,
    assert_resumes,
    is_sparse,
    sparse,
    train,
)

pytestmark = pytest.mark.filterwarnings(
    # Accelerate on torch 2.13.
    "ignore:.*is deprecated:FutureWarning",
)
supar = partial(sparse, "ste", scale="supar")


class Watch(TrainerCallback):
    """Notes the weights when training begins, and the learning rate of each parameter within each step."""

    def __init__(self):
        self.rates = []

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        names = {id(p): name for name, p in model.named_parameters()}

        def note(optimizer, args, kwargs):
            rates = [
                (names[id(parameter)], group["lr"])
                for group in args[0].param_groups
                for parameter in group["params"]
            ]
            assert len(dict(rates)) == len(rates)
            self.rates.append(dict(rates))

        # This callback is listed behind the one with the masks, so its hook runs after that one's.
        self.handle = unwrapped(optimizer).register_step_pre_hook(note)

    def on_train_end(self, *args, **kwargs):
        self.handle.remove()


def learning_rates(made):
    return [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]


def test_each_factor_is_applied_once():
    options = {"gradient_accumulation_steps": 2, "warmup_steps": 2, "max_steps": 3}
    model, plain_watch, watch = new(gpt2), Watch(), Watch()
    plain = train(new(gpt2), ".", [sparse("ste"), plain_watch], **options)
    made = train(model, ".", [supar(), watch], **options)
    factors = NMSparsifier(new(gpt2), "2:4", "ste", scale="supar").attach().initial_factors
    assert factors
    assert learning_rates(made) == learning_rates(plain), "schedulers and logs see the user's rates"
    for name, before in plain_watch.start.items():
        factor = factors.get(name.removesuffix(".weight"), 1.0)
        torch.testing.assert_close(watch.start[name], before * factor)
    assert len(watch.rates) == 3
    assert watch.rates == [
        {
            name: rate * (1 + (name.removesuffix(".weight") in factors))
            for name, rate in rates.items()
        }
        for rates in plain_watch.rates
    ]
    assert is_sparse(model)


@pytest.mark.parametrize(
    ("make", "method"),
    [(gpt2, "bame"), pytest.param(bert, "sr-ste", marks=pytest.mark.slow)],
)
def test_runs_resume_bit_for_bit(make, method):
    assert_resumes(make, partial(sparse, method, scale="supar"), warmup_steps=1)


def test_a_checkpoint_of_another_scale_is_refused():
    train(new(gpt2), ".", [supar()], **SAVES, max_steps=2)
    resumed = sparse("ste", resume_from="checkpoint-2", scale=None)
    with pytest.raises(ValueError, match=r"saved with scale='supar'.*this training has scale=None"):
        train(new(gpt2), ".", [resumed], "checkpoint-2")


@pytest.mark.parametrize("base_density", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_a_second_training_keeps_the_trained_values(base_density):
    model, watch = new(gpt2), Watch()
    train(model, ".", [supar(base_density=base_density)])
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, ".", [supar(base_density=base_density), watch])
    assert_equal(watch.start, trained)


def test_an_optimizer_that_does_not_scale_is_refused_and_leaves_the_model():
    model = new(gpt2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"scale='supar' .*not for Adafactor"):
        train(model, ".", [sparse("ste", scale="supar-lr")], optim="adafactor")
    assert_equal(dict(model.state_dict()), before)
