"""NMTrainerCallback with scale="supar": each factor is applied once, schedulers see the user's rates, runs resume."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainerCallback

from lightning_nm import NMSparsifier
from lightning_nm.training.optimizers import unwrapped
from tests.support.hf_models import bert, gpt2, new, trainer
from tests.support.hf_runs import assert_equal, is_sparse, sparse

pytestmark = pytest.mark.filterwarnings(
    # Accelerate on torch 2.13.
    "ignore:.*is deprecated:FutureWarning",
)


class Watch(TrainerCallback):
    """Notes the weights when training begins, and the learning rate of each parameter within each step."""

    def __init__(self):
        self.start = {}
        self.rates = []

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        names = {id(p): name for name, p in model.named_parameters()}

        def note(optimizer, args, kwargs):
            found = {}
            for group in args[0].param_groups:
                for parameter in group["params"]:
                    assert names[id(parameter)] not in found
                    found[names[id(parameter)]] = group["lr"]
            self.rates.append(found)

        # This callback is listed behind the one with the masks, so its hook runs after that one's.
        self.handle = unwrapped(optimizer).register_step_pre_hook(note)

    def on_train_end(self, *args, **kwargs):
        self.handle.remove()


def run(model, folder, callback, resume=None, **options):
    watch = Watch()
    made = trainer(model, folder, [callback, watch], **options)
    made.train(resume_from_checkpoint=resume)
    return made, watch


def learning_rates(made):
    return [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_factor_is_applied_once(tmp_path, accumulation):
    options = {"gradient_accumulation_steps": accumulation, "warmup_steps": 2, "max_steps": 3}
    plain, dense_watch = run(new(gpt2), tmp_path, sparse("ste"), **options)
    model = new(gpt2)
    probe = NMSparsifier(new(gpt2), "2:4", "ste", scale="supar").attach()
    callback = sparse("ste", scale="supar")
    made, watch = run(model, tmp_path, callback, **options)
    factors = probe.initial_factors
    assert factors
    assert learning_rates(made) == learning_rates(plain), "schedulers and logs see the user's rates"
    for name, before in dense_watch.start.items():
        factor = factors.get(name.removesuffix(".weight"), 1.0)
        torch.testing.assert_close(watch.start[name], before * factor)
    assert len(watch.rates) == len(dense_watch.rates) == 3
    for found, unscaled in zip(watch.rates, dense_watch.rates, strict=True):
        for name, rate in unscaled.items():
            is_masked = name.removesuffix(".weight") in factors
            assert found[name] == rate * (2 if is_masked else 1)
    assert is_sparse(model)


@pytest.mark.parametrize("method", [pytest.param("sr-ste", marks=pytest.mark.slow), "bame"])
@pytest.mark.parametrize("make", [gpt2, pytest.param(bert, marks=pytest.mark.slow)])
def test_runs_resume_bit_for_bit(tmp_path, make, method):
    options = {"save_strategy": "steps", "save_steps": 2, "warmup_steps": 1}
    whole = new(make)
    run(whole, tmp_path / "whole", sparse(method, scale="supar"), **options)
    middle = tmp_path / "whole" / "checkpoint-2"
    torch.manual_seed(99)
    part = make()
    callback = sparse(method, scale="supar", resume_from=middle)
    _, watch = run(part, tmp_path / "part", callback, resume=str(middle), **options)
    assert len(watch.rates) == 2
    for name, value in whole.state_dict().items():
        assert torch.equal(value, part.state_dict()[name]), name
    saved = [
        torch.load(tmp_path / folder / "checkpoint-4" / "optimizer.pt", weights_only=True)
        for folder in ("whole", "part")
    ]
    assert_equal(*saved)


def test_a_checkpoint_of_another_scale_is_refused(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    run(new(gpt2), tmp_path, sparse("ste", scale="supar"), **options)
    middle = tmp_path / "checkpoint-2"
    made = trainer(new(gpt2), tmp_path, [sparse("ste", resume_from=middle)], **options)
    with pytest.raises(ValueError, match=r"saved with scale='supar'.*this training has scale=None"):
        made.train(resume_from_checkpoint=str(middle))


@pytest.mark.parametrize("base_density", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_a_second_training_keeps_the_trained_values(tmp_path, base_density):
    model = new(gpt2)
    run(model, tmp_path, sparse("ste", scale="supar", base_density=base_density))
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    callback = sparse("ste", scale="supar", base_density=base_density)
    _, watch = run(model, tmp_path, callback)
    for name, value in trained.items():
        assert torch.equal(watch.start[name], value), name


def test_an_optimizer_that_does_not_scale_is_refused_and_leaves_the_model(tmp_path):
    model = new(gpt2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = trainer(model, tmp_path, [sparse("ste", scale="supar-lr")], optim="adafactor")
    with pytest.raises(ValueError, match=r"scale='supar' .*not for Adafactor"):
        made.train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
