"""SuPar: sizes of activations that do not depend on the density, and learning rates that schedulers do not see."""

import copy
import gc

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import Adafactor

from lightning_nm import BAME, STE, NMSparsifier, NMSparsityCallback, SparsityConfig
from lightning_nm.demo.exact_resume import ExactResume
from lightning_nm.functional import is_nm, nm_prune
from lightning_nm.training import scale as module
from lightning_nm.training.scale import is_rescaled
from tests.support.lightning_models import Data, callback, make_trainer, new_model
from tests.support.loop import Loop, adamw, mlp, same

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}
HIDDEN = ["2", "4", "6"]


def network(width=64):
    return mlp(64, width, width, width, width, 10)


def start(pattern="1:4", method="asp", model=None, **options):
    """Only the hidden layers are masked."""
    options = {"optimizer": adamw, "scale": "supar", "include": HIDDEN, **options}
    return Loop(model or network(), method, pattern, shape=(128, 64), **options)


def weight_of(loop, name="2"):
    return loop.model.get_submodule(name).weight


def groups_of(optimizer):
    """The groups as they are now, for a comparison."""
    return [{**group, "params": list(group["params"])} for group in optimizer.param_groups]


def rates_in_a_step(loop):
    """The learning rate of each parameter in a step, by name; the groups that others see stay."""
    names = {id(parameter): name for name, parameter in loop.model.named_parameters()}
    found, whole = {}, loop.optimizer
    before = groups_of(whole)

    def note(optimizer, args, kwargs):
        assert groups_of(whole) == before
        if optimizer is not whole:
            return  # the step of a base class within that of the optimizer
        for group in args[0].param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                assert name not in found
                found[name] = group["lr"]

    # Registered later than the sparsifier's own hook, so called after it.
    handle = whole.register_step_pre_hook(note)
    loop.sparsifier.before_step(whole)
    whole.step()
    handle.remove()
    return found


# ------------------------------------------------------------------------------------------------- what is scaled


def sizes(optimizer, pattern="1:2", **options):
    """The root mean square of each hidden layer's output before the first and after the last step."""
    loop, found = start(pattern, model=network(128), optimizer=OPTIMIZERS[optimizer], **options), []
    for name in HIDDEN:
        loop.model.get_submodule(name).register_forward_hook(
            lambda module, args, output: found.append(float(output.detach().square().mean().sqrt()))
        )
    loop.train([0] * 10)
    loop.model(loop.batch())
    return found[: len(HIDDEN)], found[-len(HIDDEN) :]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_activations_do_not_depend_on_the_density(optimizer):
    """The coordinate check of muP, over densities from 1 to 1/32."""
    dense_begin, dense_end = sizes(optimizer, method="dense", scale=None)
    for pattern in ("1:2", "1:8", "1:32"):
        begin, end = sizes(optimizer, pattern)
        assert begin == pytest.approx(dense_begin, rel=0.15), pattern
        assert end == pytest.approx(dense_end, rel=0.8), pattern
    begin, end = sizes(optimizer, "1:32", scale=None)
    assert begin[0] < 0.6 * dense_begin[0], "the check sees what it is for"
    assert end[0] < 0.6 * dense_end[0]


@pytest.mark.parametrize("base_density", [1.0, 0.5])
@pytest.mark.parametrize("method", ["asp", "sr-ste", "bi-mask", "transposable", BAME(stop=100)])
def test_the_sum_over_kept_entries_has_the_variance_of_the_base_density(method, base_density):
    before = network()[2].weight.detach()
    loop = start("2:4", method, base_density=base_density)
    factors = loop.sparsifier.initial_factors
    kept = loop.layers["2"].forward_weight()
    assert float(kept.norm() / before.norm()) == pytest.approx(base_density**0.5)
    torch.testing.assert_close(weight_of(loop).detach(), before * factors["2"])
    assert set(factors) == set(HIDDEN)


@pytest.mark.parametrize("base_density", [1.0, 0.5])
def test_a_weight_that_is_nm_already_keeps_its_values(base_density):
    model = network()
    with torch.no_grad():
        model[2].weight.copy_(nm_prune(model[2].weight, "1:4", dim=1))
    before = model[2].weight.detach().clone()
    loop = start(model=model, base_density=base_density)
    assert torch.equal(model[2].weight, before)
    assert loop.sparsifier.initial_factors["2"] == 1
    assert loop.sparsifier.initial_factors["4"] != 1


def test_a_fit_that_failed_does_not_rescale_twice():
    first = start()
    weight, model = weight_of(first).detach().clone(), first.model
    first.sparsifier.detach()
    second = start(model=model)
    assert torch.equal(model[2].weight, weight)
    assert second.sparsifier.initial_factors == first.sparsifier.initial_factors
    second.end()
    assert is_nm(model[2].weight, "1:4")
    assert start(model=model).sparsifier.initial_factors["2"] == pytest.approx(1)


def by_groups(make, factor):
    """The optimizer with a group of its own for the hidden weights, of a rate that is scaled once and for all."""

    def made(parameters):
        parameters = list(parameters)
        hidden = [p for p in parameters if p.shape == (64, 64)][1:]
        rest = [p for p in parameters if all(p is not weight for weight in hidden)]
        optimizer = make([{"params": rest}, {"params": hidden}])
        optimizer.param_groups[1]["lr"] *= factor
        return optimizer

    return made


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_that_of_the_scaled_learning_rate(optimizer):
    make = OPTIMIZERS[optimizer]
    loop = start("1:8", "ste", scale="supar-lr", optimizer=make)
    expected = start("1:8", "ste", scale=None, optimizer=by_groups(make, 8))
    for each in (loop, expected):
        each.train(range(4))
    torch.testing.assert_close(loop.weights(), expected.weights(), rtol=1e-5, atol=1e-7)


BAMES = {
    "accumulated": lambda: BAME(stop=100, budget=1.0, evidence_rate=0.5),
    "accumulated-late": lambda: BAME(
        start=2, stop=100, every=2, gradient_every=2, budget=1.0, evidence_rate=0.5
    ),
    "batch": lambda: BAME(stop=100, every=1, budget=1.0, evidence="batch"),
}
LARGE_RATES = {
    "sgd": lambda p: torch.optim.SGD(p, 5.0, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 2e-2),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, 2e-2, amsgrad=True),
}


@pytest.mark.parametrize(("name", "optimizer"), list(zip(BAMES, LARGE_RATES, strict=True)))
def test_bame_sees_the_learning_rates_of_the_step(name, optimizer):
    """Against groups of its own: exchanges, regrown values and the optimizer's state of regrown entries.

    A schedule changes the rates, of which accumulated evidence reads the ratio, and that of a batch the value.
    """
    make, runs = LARGE_RATES[optimizer], []
    for scale, optimizer_of in (("supar-lr", make), (None, by_groups(make, 8))):
        model = network().double()
        with torch.no_grad():
            model[2].weight.mul_(0.01)  # small compared with a step, so that masks move
        loop = start("1:8", BAMES[name](), model, scale=scale, optimizer=optimizer_of)
        schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1 / (1 + step))
        for number in range(6):
            loop.train([number])
            schedule.step()
        runs.append(loop)
    layer, other = (loop.layers["2"] for loop in runs)
    assert int(layer.masks.total_flips) > 0
    assert torch.equal(layer.masks.bits, other.masks.bits)
    states = [loop.optimizer.state[weight_of(loop)] for loop in runs]
    torch.testing.assert_close(*states)
    torch.testing.assert_close(dict(layer.buffers), dict(other.buffers))
    torch.testing.assert_close(runs[0].weights(), runs[1].weights())


@pytest.mark.parametrize("groups", ["one", "two", "named"])
def test_each_layer_has_the_factor_of_its_own_density(groups):
    """Rules give the layers of one group other densities: it is split, and whole again after the step."""

    def make(_):
        if groups == "one":
            return torch.optim.AdamW(model.parameters(), 0.25)
        if groups == "named":
            return torch.optim.AdamW(model.named_parameters(), 0.25)
        first = [model[2].weight, model[4].weight, model[2].bias]
        rest = [p for p in model.parameters() if all(p is not other for other in first)]
        return torch.optim.AdamW([{"params": first, "lr": 0.5}, {"params": rest}], 0.25)

    model = network()
    rules = [{"include": "2", "pattern": "1:8"}, {"include": "4", "pattern": "2:4"}]
    loop = start(model=model, rules=rules, base_density=0.5, optimizer=make)
    loop.backward()
    before = groups_of(loop.optimizer)
    rates = rates_in_a_step(loop)
    own = {id(p): group["lr"] for group in before for p in group["params"]}
    factors = {name: rates[name] / own[id(p)] for name, p in model.named_parameters()}
    expected = {"2.weight": 4.0, "4.weight": 1.0, "6.weight": 2.0}
    assert factors == dict.fromkeys(factors, 1.0) | expected
    assert groups_of(loop.optimizer) == before


def test_the_rate_follows_the_masks():
    """Of the step: dense, then 3:4, then the layer's 2:4. Weights are trained when their masks come."""
    schedule = {"dense_start": 1, "ramp": ["3:4"], "ramp_ends": [3]}
    loop = start("2:4", "sr-ste", schedule=schedule, planned_steps=10)
    assert loop.sparsifier.initial_factors == {}
    rates = []
    for number in range(4):
        loop.backward(number)
        rates.append(rates_in_a_step(loop)["2.weight"])
        loop.sparsifier.step()
    assert rates == pytest.approx([0.01, 0.01 / 0.75, 0.01 / 0.75, 0.02])


def test_two_sparsifiers_scale_the_rates_of_one_optimizer():
    first = start("1:8", include="2", scale="supar-lr")
    options = {"include": "4", "scale": "supar-lr", "optimizer": lambda _: first.optimizer}
    second = start("1:4", model=first.model, **options)
    for _ in range(2):
        rates = rates_in_a_step(first)
        first.sparsifier.step()
        second.sparsifier.step()
        assert rates == dict.fromkeys(rates, 0.01) | {"2.weight": 0.08, "4.weight": 0.04}


# ----------------------------------------------------------------------------------------------- who sees the rates


class Reading(STE):
    """Notes the learning rate of its weight in every hook of a step."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def note(self, layer, optimizer):
        (group,) = [g for g in optimizer.param_groups if any(p is layer.param for p in g["params"])]
        self.rates.append(group["lr"])

    before_step = after_clipping = after_step = note


@pytest.mark.parametrize("way", ["plain", "closure", "lightning's closure"])
def test_hooks_of_a_step_read_the_scaled_rate_and_nobody_else_does(way):
    method, outside = Reading(), []
    loop = start("1:4", method, include="2", scale="supar-lr")

    def look():
        outside.extend(group["lr"] for group in loop.optimizer.param_groups)

    def closure():
        look()
        loop.backward()
        if way == "lightning's closure":
            loop.sparsifier.before_step(loop.optimizer)
            look()

    if way == "lightning's closure":
        loop.optimizer.step(closure)
    else:
        closure()
        loop.sparsifier.before_step(loop.optimizer)
        look()
        loop.optimizer.step(closure if way == "closure" else None)
    loop.sparsifier.step()
    look()
    assert method.rates == [0.04] * 3
    assert set(outside) == {0.01}


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)


def test_schedulers_and_checkpoints_see_the_users_groups():
    seen = []
    for scale in (None, "supar"):
        loop = start(scale=scale)
        schedule = one_cycle(loop.optimizer)
        for number in range(4):
            loop.train([number])
            schedule.step()
        seen.append((schedule.get_last_lr(), loop.optimizer.state_dict()["param_groups"]))
    assert seen[0] == seen[1]


class Lent(torch.optim.SGD):
    """Keeps something, counts in a group, and gives something back when it is deleted, as DeepSpeed's does."""

    returned = 0

    def step(self, closure=None):
        self.made = getattr(self, "made", 0) + 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)

    def __del__(self):
        Lent.returned += 1


def test_a_step_works_on_the_optimizer_itself():
    loop = start(optimizer=lambda p: Lent(p, 0.1, momentum=0.9))
    optimizer = loop.optimizer
    loop.train(range(3))
    assert optimizer.made == 3
    assert [group["count"] for group in optimizer.param_groups] == [3]
    assert all("momentum_buffer" in optimizer.state[p] for p in loop.model.parameters())
    loop.sparsifier.detach()
    del loop
    gc.collect()
    assert Lent.returned == 0


@pytest.mark.parametrize("hook", ["before_step", "after_clipping"])
def test_a_hook_that_fails_leaves_the_users_groups(hook):
    def fail(layer, optimizer):
        raise RuntimeError("out of memory")

    method = type("Failing", (STE,), {hook: staticmethod(fail)})()
    loop = start("1:4", method)
    before = groups_of(loop.optimizer)
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.train([0])
    assert groups_of(loop.optimizer) == before


class Stopping(torch.optim.AdamW):
    """Raises an exception within its step, once the first part of its groups has stepped."""

    error = None

    def _init_group(self, *args):
        result = super()._init_group(*args)
        self.parts += 1
        if self.error is not None and self.parts == 2:
            raise self.error
        return result

    def step(self, closure=None):
        self.parts = 0
        return super().step(closure)


@pytest.mark.parametrize("where", ["closure", "step", "step with closure"])
def test_a_step_that_fails_leaves_the_users_groups(where):
    """By Ctrl-C, at worst. What is saved then loads, and a scheduler that is made then has the user's rate."""
    loop = start(optimizer=lambda p: Stopping(p, 1e-2))
    optimizer = loop.optimizer
    loop.train([0])
    groups, before = optimizer.param_groups, groups_of(optimizer)
    fails = True

    def closure():
        loop.backward()
        loop.sparsifier.before_step(optimizer)
        if where == "closure" and fails:
            raise KeyboardInterrupt

    def step():
        if where == "step":
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)

    optimizer.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        step()
    optimizer.error = None
    assert optimizer.param_groups is groups
    assert groups_of(optimizer) == before
    other = adamw(loop.model.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in other.param_groups] == [1e-2]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert schedule.base_lrs == [1e-2]

    # The next step is a whole one, also if the batch that failed was not ended.
    steps, fails = loop.layers["2"].step, False
    step()
    assert optimizer.parts == 2
    assert loop.layers["2"].step == steps + 1
    assert not loop.sparsifier.violations()
    assert optimizer.param_groups is groups
    loop.sparsifier.step()
    schedule.step()
    rates = rates_in_a_step(loop)
    assert (rates["2.weight"], rates["0.weight"]) == (4 * 5e-3, 5e-3)


@pytest.mark.parametrize("scale", [None, "supar-lr"])
def test_the_step_after_one_that_failed_counts(scale):
    """A loop that skips a batch whose step runs out of memory, and with it sparsifier.step()."""
    loop = start(scale=scale, optimizer=lambda p: Stopping(p, 1e-2))
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    for step in range(4):
        loop.optimizer.error = RuntimeError("out of memory") if step == 1 else None
        try:
            loop.train([step])
        except RuntimeError:
            continue
        assert not loop.sparsifier.violations()
        assert loop.layers["2"].step == loop.sparsifier.clock == max(step, 1)


# ------------------------------------------------------------------------------------------------------- resuming


def test_states_of_another_scale_are_refused():
    saved = start(scale=None).save()
    words = r"saved with scale=None, base_density=1\.0, and .* scale='supar', base_density=0\.5"
    with pytest.raises(ValueError, match=words):
        start(base_density=0.5).load(saved)
    start(scale=None).load(saved)


def test_weights_that_were_rescaled_beneath_a_state_are_noticed():
    loop = start()
    loop.train(range(2))
    weights, state, _ = loop.save()
    model = network()
    model.load_state_dict(weights)
    with torch.no_grad():
        model[2].weight += 0.01  # not N:M any more: attach() rescales
    late = start(model=model).sparsifier
    with pytest.raises(
        ValueError, match=r"attach\(\) has rescaled the weight of layer '2'.*attach\(state\)"
    ):
        late.load_state_dict(state)
    model.load_state_dict(weights)
    late.load_state_dict(state)


def fabric_run(with_fabric, states=None):
    """A loop of three steps, with or without Fabric; goes on from a state."""
    model = network()
    if states:
        model.load_state_dict(states[0])
    loop = start("1:8", "sr-ste", model, state=states and states[1])
    begin, optimizer = loop.weights(), loop.optimizer
    if with_fabric:
        loop.model, loop.optimizer = Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
        loop.sparsifier.register(loop.optimizer)
    schedule = one_cycle(optimizer)
    if states:
        loop.sparsifier.load_state_dict(states[1])
        optimizer.load_state_dict(states[2])
        schedule.load_state_dict(states[3])
    for number in range(3):
        loop.train([number])
        schedule.step()
    parts = (model, loop.sparsifier, optimizer, schedule)
    return begin, [copy.deepcopy(part.state_dict()) for part in parts], loop


def test_fabric_scales_once_and_resumes_bit_for_bit():
    plain_begin, plain, _ = fabric_run(False)
    begin, states, loop = fabric_run(True)
    assert same((begin, states), (plain_begin, plain))
    expected = network()[2].weight * loop.sparsifier.initial_factors["2"]
    torch.testing.assert_close(begin[2], expected.detach())
    loaded, end, resumed = fabric_run(True, states)
    assert resumed.sparsifier.initial_factors == {}, "trained weights are not rescaled"
    assert same(loaded, list(states[0].values()))
    assert same(end, fabric_run(False, plain)[1])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_a_trainer_resumes_bit_for_bit(tmp_path):
    def fit(epochs, path=None, **options):
        save = ModelCheckpoint(tmp_path)
        nm = callback("bi-mask", seed=3, **options)
        trainer = make_trainer(tmp_path, [nm, ExactResume(), save], max_epochs=epochs)
        model = new_model()
        trainer.fit(model, Data(), ckpt_path=path)
        return list(model.parameters()), save.best_model_path

    whole, _ = fit(2, scale="supar")
    _, path = fit(1, scale="supar")
    resumed, _ = fit(2, path, scale="supar")
    assert same(whole, resumed)
    # Where no scale is asked for, the training goes on with its own.
    resumed, _ = fit(2, path, scale="auto")
    assert same(whole, resumed)
    with pytest.raises(ValueError, match=r"saved with scale='supar'.*this training has scale=None"):
        fit(2, path, scale=None)


def test_the_scale_of_bame_is_supar_unless_something_else_is_asked_for_or_was_saved():
    def started(method, state=None, **options):
        model = network()
        made = NMSparsifier(model, "1:4", method, planned_steps=10, **options).attach(state)
        return made, model

    assert SparsityConfig().scale == "auto"
    for method in ("bame", BAME()):
        assert started(method)[0].scale == "supar"
    assert started("bame", scale=None)[0].scale is None
    assert started("asp")[0].scale is None
    # Of version 0.3, whose `bame` had none: it goes on without, and no initial value is touched.
    saved = started("bame", scale=None)[0].state_dict()
    made, model = started("bame", saved)
    assert made.scale is None
    assert not made.initial_factors
    assert same(list(model.parameters()), list(network().parameters()))
    # In a plain loop that loads after attach(), too: the rates are those of the state from then on.
    made, model = started("bame")
    model.load_state_dict(network().state_dict())
    made.load_state_dict(saved)
    assert made.scale is None


def test_what_fails_while_it_attaches_or_loads_changes_nothing(monkeypatch):
    model = network()
    before = [parameter.clone() for parameter in model.parameters()]
    calls = []

    def short_of_memory(tensor):
        calls.append(tensor)
        if len(calls) == 3:
            raise MemoryError("none left")
        return float(tensor.detach().double().square().sum())

    sparsifier = NMSparsifier(model, "1:4", planned_steps=10)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_square", short_of_memory)
        with pytest.raises(MemoryError):
            sparsifier.attach()
    assert not sparsifier.attached
    assert same(list(model.parameters()), before)

    # The scale of a state that does not fit is not taken over.
    other = NMSparsifier(network(), "1:4", "asp").attach().state_dict()
    with pytest.raises(ValueError, match="method asp in the checkpoint, bame here"):
        sparsifier.attach(other).load_state_dict(other)
    sparsifier.detach()
    assert sparsifier.attach().scale == "supar"
    assert set(sparsifier.initial_factors) == {"0", *HIDDEN}

    # Nor one that a registered optimizer cannot follow.
    scaled = NMSparsifier(network(), "1:4", "asp", scale="supar").attach()
    asp = NMSparsifier(scaled.model, "1:4", "asp")
    scaled.bake()
    state = scaled.state_dict()
    scaled.detach()
    asp.attach().register(Adafactor(asp.model.parameters()))
    with pytest.raises(ValueError, match="not for Adafactor"):
        asp.load_state_dict(state)
    assert asp.scale is None


def test_a_layer_that_is_unfrozen_is_refused_before_it_is_masked():
    model = network()
    model[2].requires_grad_(False)
    sparsifier = NMSparsifier(model, "1:4", "asp", scale="supar").attach()
    sparsifier.register(adamw(model[0].parameters()))
    sparsifier.register(Adafactor(model[2].parameters()))
    model[2].requires_grad_(True)
    with pytest.raises(ValueError, match=r"layer '2'.*not for Adafactor"):
        sparsifier.mask_unfrozen()
    assert "2" not in sparsifier.layers
    assert type(model[2]) is nn.Linear


def test_weights_of_a_dense_run_that_is_resumed_keep_their_values(tmp_path):
    class Begin(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.weights = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    trainer = make_trainer(tmp_path, [], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(tmp_path / "dense.ckpt")
    saved = torch.load(tmp_path / "dense.ckpt")["state_dict"]
    begin = Begin()
    trainer = make_trainer(tmp_path, [NMSparsityCallback("1:4"), begin], max_epochs=2)
    with pytest.warns(UserWarning, match="it is of a dense training"):
        trainer.fit(new_model(), Data(), ckpt_path=tmp_path / "dense.ckpt")
    assert same(begin.weights, {name: saved[name] for name in begin.weights})


def test_a_training_that_never_stepped_leaves_the_initial_values():
    model = network()
    before = [parameter.clone() for parameter in model.parameters()]
    sparsifier = NMSparsifier(model, "1:4", "bame", planned_steps=10).attach()
    assert not same(list(model.parameters()), before)
    sparsifier.detach()
    assert same(list(model.parameters()), before)
    # Nor does the next one multiply twice, wherever the memory has moved in between.
    NMSparsifier(model, "1:4", "bame", planned_steps=10).attach().detach()
    moved = NMSparsifier(model, "1:4", "bame", planned_steps=10).attach()
    model.double()
    moved.detach()
    torch.testing.assert_close([p.float() for p in model.parameters()], before)
    # After a step they are trained weights, of which nothing is undone or kept.
    loop = start(method=BAME(), planned_steps=10)
    assert all(is_rescaled(layer) for layer in loop.layers.values())
    loop.train([0])
    assert not any(layer.view.optimizer_param in module._rescaled for layer in loop.layers.values())
    trained = [parameter.clone() for parameter in loop.model.parameters()]
    loop.sparsifier.bake()
    loop.sparsifier.detach()
    assert same(list(loop.model.parameters()), trained)


def test_the_table_says_what_is_scaled(tmp_path, capsys):
    nm = NMSparsityCallback("1:16", "asp", scale="supar")
    make_trainer(tmp_path, [nm], max_epochs=1).fit(new_model(), Data())
    out = " ".join(capsys.readouterr().out.split())
    assert "scale='supar': learning rates of masked weights x16, their initial values x2.4" in out


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "mup"}, "scale='mup' is unknown: use 'auto', 'supar', 'supar-lr' or None"),
        ({"scale": "supar", "base_density": 0}, r"base_density=0 must lie in \(0, 1\]"),
        ({"scale": "supar", "base_density": 1.5}, r"base_density=1\.5"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SparsityConfig("1:4", **options)


def named(path, *bases):
    """A class like that of another package, whose step is that of SGD."""
    module, _, name = path.rpartition(".")
    return type(name, bases or (torch.optim.Optimizer,), {"__module__": module, "step": None})


def made(kind, parameters):
    is_torchs = kind.__init__ is not torch.optim.Optimizer.__init__
    return kind(parameters) if is_torchs else kind(parameters, {"lr": 1e-3})


TAKEN = [
    *(getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam")),
    *(getattr(torch.optim, name) for name in ("RAdam", "Adagrad", "RMSprop")),
    type("MyAdam", (torch.optim.AdamW,), {}),
    named("bitsandbytes.optim.adamw.PagedAdamW8bit"),
    named("my.training.Mine", named("bitsandbytes.optim.adam.Adam8bit")),
    named("torchao.optim.adam.AdamWFp8"),
    named("__main__.Lion"),
]
REFUSED = [
    *(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Rprop", "ASGD", "SparseAdam")),
    *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []),
    named("schedulefree.AdamWScheduleFree"),
    named("galore_torch.adamw.AdamW"),
    named("galore_torch.adamw8bit.AdamW8bit", named("bitsandbytes.optim.Optimizer2State")),
    named("bitsandbytes.optim.lamb.LAMB"),
]


def kind_name(kind):
    return f"{kind.__module__}.{kind.__name__}"


@pytest.mark.parametrize("kind", TAKEN, ids=kind_name)
def test_optimizers_that_step_each_entry_in_proportion_to_the_rate_are_taken(kind):
    start(optimizer=lambda parameters: made(kind, parameters))


@pytest.mark.parametrize("kind", REFUSED, ids=kind_name)
def test_optimizers_whose_step_is_not_known_to_scale_are_refused(kind):
    sparsifier = start(scale="supar-lr").sparsifier
    held = [module.weight for module in sparsifier.model[::2]]
    words = rf"scale='supar' multiplies the learning rate of layer '2'.*not for {kind.__name__}: .*or use scale=None"
    with pytest.raises(ValueError, match=words):
        sparsifier.register(made(kind, held))
    # It may train what is not masked, and masked weights without a scale.
    sparsifier.register(made(kind, held[:1]))
    start(scale=None, optimizer=lambda p: made(kind, [q for q in p if q.dim() == 2]))


def test_a_weight_that_joins_an_optimizer_later_is_refused_too():
    loop = start(scale="supar-lr", optimizer=lambda p: torch.optim.Adafactor([next(p)]))
    loop.optimizer.add_param_group({"params": [weight_of(loop, "4")]})
    with pytest.raises(ValueError, match=r"layer '4'.*not for Adafactor"):
        loop.sparsifier.before_step(loop.optimizer)
