"""SuPar: sizes of activations that do not depend on the density, and learning rates that schedulers do not see."""

import copy
import gc
import math
from contextlib import nullcontext

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from lightning_nm import (
    ASP,
    BAME,
    STE,
    NMPattern,
    NMSparsifier,
    NMSparsityCallback,
    SparsityConfig,
)
from lightning_nm.demo.exact_resume import ExactResume
from lightning_nm.functional import is_nm, nm_prune
from lightning_nm.training.scale import ScaledLearningRates, rescale_initial
from tests.support.lightning_models import Data, callback, make_trainer, new_model
from tests.support.outside import DecayingN

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}
HIDDEN = ["2", "4", "6"]


def mlp(width=256, seed=0):
    torch.manual_seed(seed)
    hidden = [module for _ in HIDDEN for module in (nn.ReLU(), nn.Linear(width, width))]
    return nn.Sequential(nn.Linear(64, width), *hidden, nn.ReLU(), nn.Linear(width, 10))


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(128, 64, generator=generator), torch.randint(
        0, 10, (128,), generator=generator
    )


def attach(model, pattern, method="asp", scale="supar", **options):
    options = {"include": HIDDEN, "skip_first_last": False, "scale": scale, **options}
    return NMSparsifier(model, pattern, method, **options).attach()


def train(model, sparsifier, optimizer, steps, after=lambda: None):
    x, y = batch()
    x = x.to(next(model.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if sparsifier is not None:
            sparsifier.before_step(optimizer)
        optimizer.step()
        if sparsifier is not None:
            sparsifier.step()
        after()


def sizes(pattern, scale, optimizer, steps=10, width=256, method="asp"):
    """The root mean square of each hidden layer's output before the first and after the last step."""
    model, found = mlp(width), []
    for name in HIDDEN:

        def note(module, args, output):
            found.append(float(output.detach().square().mean().sqrt()))

        model.get_submodule(name).register_forward_hook(note)
    sparsifier = None if pattern is None else attach(model, pattern, method, scale)
    made = OPTIMIZERS[optimizer](model.parameters())
    if sparsifier is not None:
        sparsifier.register(made)
    train(model, sparsifier, made, steps)
    model(batch()[0])
    return found[: len(HIDDEN)], found[-len(HIDDEN) :]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("width", [128, 256])
def test_activations_do_not_depend_on_the_density(width, optimizer):
    """The coordinate check of muP, over densities from 1 to 1/32."""
    dense_begin, dense_end = sizes(None, None, optimizer, width=width)
    for pattern in ("1:2", "1:4", "1:8", "1:16", "1:32"):
        begin, end = sizes(pattern, "supar", optimizer, width=width)
        assert begin == pytest.approx(dense_begin, rel=0.15), pattern
        assert end == pytest.approx(dense_end, rel=0.8), pattern
        unscaled_begin, unscaled_end = sizes(pattern, None, optimizer, width=width)
        if pattern in ("1:16", "1:32"):
            assert unscaled_begin[0] < 0.6 * dense_begin[0], "the check sees what it is for"
            assert unscaled_end[0] < 0.6 * dense_end[0]


@pytest.mark.parametrize(
    "method", ["asp", "sr-ste", "ste", "bi-mask", "transposable", BAME(stop=100)], ids=str
)
def test_the_sum_over_kept_entries_has_the_dense_variance(method):
    model = mlp()
    before = model[2].weight.detach().clone()
    sparsifier = attach(model, "2:4" if "Transposable" in str(method) else "1:4", method)
    layer = sparsifier.layers["2"]
    assert layer.forward_weight().norm() == pytest.approx(float(before.norm()), rel=1e-5)
    factor = sparsifier.initial_factors["2"]
    torch.testing.assert_close(layer.weight.detach(), before * factor)
    assert set(sparsifier.initial_factors) == set(HIDDEN)


def test_the_factor_of_a_random_mask_is_that_of_the_paper():
    model = nn.Sequential(nn.Linear(512, 512))
    sparsifier = NMSparsifier(model, "1:16", "asp", skip_first_last=False).attach()
    layer = sparsifier.layers["0"]
    with torch.no_grad():
        layer.weight.normal_()
        scores = torch.rand(512, 32, 16)
        layer.set_masks((scores == scores.amax(2, keepdim=True)).view(512, 512))
    assert rescale_initial(layer) == pytest.approx(4, rel=0.02)


def test_the_largest_of_sixteen_uniform_values():
    model = nn.Sequential(nn.Linear(1024, 512, bias=False))
    sparsifier = NMSparsifier(model, "1:16", "asp", skip_first_last=False, scale="supar").attach()
    assert sparsifier.initial_factors["0"] == pytest.approx(math.sqrt(6), rel=0.01)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_that_of_the_scaled_learning_rate(optimizer):
    """Against an optimizer with groups of its own for the masked weights."""
    model = mlp(64)
    twin = copy.deepcopy(model)
    sparsifier = attach(model, "1:8", "ste", scale="supar-lr")
    made = OPTIMIZERS[optimizer](model.parameters())
    sparsifier.register(made)
    other = attach(twin, "1:8", "ste", scale=None)
    hidden = [twin.get_submodule(name).weight for name in HIDDEN]
    rest = [p for p in twin.parameters() if all(p is not weight for weight in hidden)]
    expected = OPTIMIZERS[optimizer]([{"params": rest}, {"params": hidden}])
    expected.param_groups[1]["lr"] *= 8
    other.register(expected)
    train(model, sparsifier, made, 4)
    train(twin, other, expected, 4)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


BAMES = {
    "accumulated": lambda: BAME(stop=100, budget=1.0, evidence_rate=0.5),
    "accumulated-late": lambda: BAME(
        start=2, stop=100, every=2, gradient_every=2, budget=1.0, evidence_rate=0.5
    ),
    "batch": lambda: BAME(stop=100, every=1, budget=1.0, evidence="batch"),
}
LARGE_RATES = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 2e-2),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, 2e-2, amsgrad=True),
}


@pytest.mark.parametrize("optimizer", LARGE_RATES)
@pytest.mark.parametrize("name", BAMES)
def test_bame_sees_the_learning_rates_of_the_step(name, optimizer):
    """Against groups of its own: exchanges, regrown values and the optimizer's state of regrown entries.

    A schedule changes the rates, of which accumulated evidence reads the ratio, and that of a batch the value.
    """
    runs = []
    for scale in ("supar-lr", None):
        model = mlp(64).double()
        with torch.no_grad():
            model[2].weight.mul_(0.01)  # small beside a step, so that masks move
        sparsifier = attach(model, "1:8", BAMES[name](), scale=scale, include="2")
        masked = model[2].weight
        if scale is None:
            rest = [p for p in model.parameters() if p is not masked]
            made = LARGE_RATES[optimizer]([{"params": rest}, {"params": [masked]}])
            made.param_groups[1]["lr"] *= 8
        else:
            made = LARGE_RATES[optimizer](model.parameters())
        sparsifier.register(made)
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
        train(model, sparsifier, made, 6, schedule.step)
        runs.append((model, sparsifier.layers["2"], made.state[masked]))
    (model, layer, state), (twin, twin_layer, twin_state) = runs
    assert int(layer.masks.total_flips) > 0
    assert torch.equal(layer.masks.bits, twin_layer.masks.bits)
    for key, value in state.items():
        torch.testing.assert_close(value, twin_state[key])
    for key, value in layer.buffers.items():
        torch.testing.assert_close(value, twin_layer.buffers[key])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


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
    method = Reading()
    model = nn.Sequential(nn.Linear(16, 16))
    sparsifier = NMSparsifier(
        model, "1:4", method, skip_first_last=False, scale="supar-lr"
    ).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sparsifier.register(optimizer)
    outside = []

    def closure():
        outside.append([group["lr"] for group in optimizer.param_groups])
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).sum()
        loss.backward()
        if way == "lightning's closure":
            sparsifier.before_step(optimizer)
            outside.append([group["lr"] for group in optimizer.param_groups])
        return loss

    if way == "lightning's closure":
        optimizer.step(closure)
    else:
        closure()
        sparsifier.before_step(optimizer)
        outside.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step(closure if way == "closure" else None)
    sparsifier.step()
    outside.append([group["lr"] for group in optimizer.param_groups])
    assert method.rates == [2.0] * 3
    assert all(rates == [0.5] for rates in outside)


def test_a_hook_that_fails_leaves_the_users_groups():
    class Failing(STE):
        def fail(self, layer, optimizer):
            raise RuntimeError("out of memory")

    for hook in ("before_step", "after_clipping"):
        method = Failing()
        setattr(method, hook, method.fail)
        model = mlp(64)
        sparsifier = attach(model, "1:4", method)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        sparsifier.register(optimizer)
        before = [dict(group) for group in optimizer.param_groups]
        with pytest.raises(RuntimeError, match="out of memory"):
            train(model, sparsifier, optimizer, 1)
        assert optimizer.param_groups == before


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "warm-up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [4],
    ),
}


@pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step:UserWarning"
)  # SequentialLR of torch 2.6
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_and_checkpoints_see_the_users_groups(scheduler):
    seen = {}
    for scale in (None, "supar"):
        model = mlp(64)
        sparsifier = attach(model, "1:4", scale=scale)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        sparsifier.register(optimizer)
        schedule = SCHEDULERS[scheduler](optimizer)
        rates = []

        def after(optimizer=optimizer, schedule=schedule, rates=rates):
            (group,) = optimizer.param_groups
            rates.append((group["lr"], len(group["params"]), sorted(group)))
            schedule.step(*([1.0] if scheduler == "plateau" else []))

        train(model, sparsifier, optimizer, 8, after)
        seen[scale] = rates, optimizer.state_dict()["param_groups"]
    assert seen[None] == seen["supar"]


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


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["closure", "step", "step with closure"])
def test_a_step_that_fails_leaves_the_users_groups(where, error):
    model = mlp(64)
    sparsifier = attach(model, "1:4")
    optimizer = Stopping(model.parameters(), 1e-2)
    sparsifier.register(optimizer)
    train(model, sparsifier, optimizer, 1)
    groups = optimizer.param_groups
    (group,) = groups
    before = {**group, "params": list(group["params"])}
    x, y = batch()
    fails = True

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        sparsifier.before_step(optimizer)
        if where == "closure" and fails:
            raise error
        return loss

    def step():
        if where == "step":
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)

    optimizer.error = error
    with pytest.raises(type(error)):
        step()
    optimizer.error = None
    assert optimizer.param_groups is groups
    assert len(groups) == 1
    assert groups[0] is group
    assert {**group, "params": list(group["params"])} == before

    # What is saved then loads, and a scheduler that is made then has the user's rate.
    other = torch.optim.AdamW(model.parameters(), 1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [g["lr"] for g in other.param_groups] == [1e-2]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert schedule.base_lrs == [1e-2]

    # The next step is a whole one, also if the batch that failed was not ended.
    steps = sparsifier.layers["2"].step
    fails = False
    step()
    assert optimizer.parts == 2
    assert sparsifier.layers["2"].step == steps + 1
    assert not sparsifier.violations()
    assert optimizer.param_groups is groups
    sparsifier.step()
    schedule.step()
    rates = groups_in_a_step(sparsifier, optimizer)
    assert rates[id(model[2].weight)] == 4 * 5e-3
    assert rates[id(model[0].weight)] == 5e-3


@pytest.mark.parametrize("scale", [None, "supar-lr"])
def test_the_step_after_one_that_failed_counts(scale):
    """A loop that skips a batch whose step runs out of memory, and with it sparsifier.step()."""
    model = mlp(64)
    sparsifier = attach(model, "1:4", scale=scale)
    optimizer = Stopping(model.parameters(), 1e-2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    sparsifier.register(optimizer)
    for step in range(4):
        optimizer.error = RuntimeError("out of memory") if step == 1 else None
        try:
            train(model, sparsifier, optimizer, 1)
        except RuntimeError:
            continue
        assert not sparsifier.violations()
        assert sparsifier.layers["2"].step == sparsifier.clock == max(step, 1)


def test_two_sparsifiers_scale_the_rates_of_one_optimizer():
    model = mlp(64)
    first = attach(model, "1:8", include="2", scale="supar-lr")
    second = attach(model, "1:4", include="4", scale="supar-lr")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for sparsifier in (first, second):
        sparsifier.register(optimizer)
    for _ in range(2):
        rates = groups_in_a_step(first, optimizer)
        first.step()
        second.step()
        found = {name: rates[id(p)] / 0.5 for name, p in model.named_parameters()}
        assert found == dict.fromkeys(found, 1.0) | {"2.weight": 8.0, "4.weight": 4.0}
        assert [group["lr"] for group in optimizer.param_groups] == [0.5]


def test_what_a_fit_leaves_is_taken_by_a_second_one():
    """Ctrl-C within a step ends the first one."""
    model = mlp(64)
    optimizer = Stopping(model.parameters(), 1e-2)
    parts = []
    for error in (KeyboardInterrupt(), None):
        sparsifier = attach(model, "1:4", scale="supar-lr")
        sparsifier.register(optimizer)
        optimizer.error = error
        if error is not None:
            with pytest.raises(KeyboardInterrupt):
                train(model, sparsifier, optimizer, 1)
        else:
            train(model, sparsifier, optimizer, 2, lambda: parts.append(optimizer.parts))
        sparsifier.detach()
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2]
    assert parts == [2, 2]
    optimizer.step()
    assert optimizer.parts == 1


def test_a_checkpoint_of_a_trainer_that_failed_within_a_step_goes_on(tmp_path):
    path = tmp_path / "failed.ckpt"

    def run(error=None, **options):
        model = new_model()
        made = Stopping(model.parameters(), 1e-2)
        model.configure_optimizers = lambda: made
        save = LambdaCallback(on_exception=lambda trainer, *_: trainer.save_checkpoint(path))
        trainer = make_trainer(tmp_path, [callback("asp", scale="supar"), save], max_epochs=1)
        rates = []

        def note(optimizer, args, kwargs):
            if optimizer is not made:
                return  # AdamW's own step runs hooks, too, once any AdamW was made
            rates.append([group["lr"] for group in optimizer.param_groups])
            made.error = error if len(rates) == 3 else None

        made.register_step_pre_hook(note)
        with nullcontext() if error is None else pytest.raises(RuntimeError, match="out of memory"):
            trainer.fit(model, Data(), **options)
        return trainer, made, rates

    trainer, made, _ = run(RuntimeError("out of memory"))
    assert trainer.interrupted
    assert trainer.global_step == 2
    assert [group["lr"] for group in made.param_groups] == [1e-2]
    saved = torch.load(path, weights_only=False)
    assert [group["lr"] for group in saved["optimizer_states"][0]["param_groups"]] == [1e-2]
    trainer, _, rates = run(ckpt_path=path)
    assert not trainer.interrupted
    assert len(rates) > 1


class Lent(torch.optim.SGD):
    """Has more than groups, and gives something back when it is deleted, as DeepSpeed's does."""

    returned = 0

    def step(self, closure=None):
        self.made = getattr(self, "made", 0) + 1
        return super().step(closure)

    def __del__(self):
        Lent.returned += 1


def test_a_step_works_on_the_optimizer_itself():
    model = mlp(64)
    sparsifier = attach(model, "1:4")
    optimizer = Lent(model.parameters(), 0.1, momentum=0.9)
    sparsifier.register(optimizer)
    train(model, sparsifier, optimizer, 3)
    assert optimizer.made == 3
    assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters())
    sparsifier.detach()
    del sparsifier
    gc.collect()
    assert Lent.returned == 0


def test_what_a_step_writes_to_a_group_is_kept():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    model = mlp(64)
    sparsifier = attach(model, "1:4")
    optimizer = Counting(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    train(model, sparsifier, optimizer, 3)
    assert [group["count"] for group in optimizer.param_groups] == [3]


def test_the_rate_follows_the_masks():
    model = mlp(64)
    sparsifier = attach(model, "1:4", ASP(start=2))
    assert sparsifier.initial_factors == {}, (
        "its masks come later, to weights that are trained by then"
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sparsifier.register(optimizer)
    rates = ScaledLearningRates()
    factors = []
    train(
        model,
        sparsifier,
        optimizer,
        4,
        lambda: factors.append(rates.factor(sparsifier.layers["2"])),
    )
    assert factors == [1, 4, 4, 4]
    assert ScaledLearningRates(0.5).factor(sparsifier.layers["2"]) == 2


def test_a_run_resumes_bit_for_bit():
    def begin(state=None, weights=None):
        model = mlp(64)
        if weights is not None:
            model.load_state_dict(weights)
        sparsifier = NMSparsifier(
            model, "1:4", "sr-ste", include=HIDDEN, skip_first_last=False, scale="supar"
        )
        sparsifier.attach(state)
        if state is not None:
            sparsifier.load_state_dict(state)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        sparsifier.register(optimizer)
        return model, sparsifier, optimizer

    model, sparsifier, optimizer = begin()
    train(model, sparsifier, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), sparsifier.state_dict(), optimizer.state_dict()))
    train(model, sparsifier, optimizer, 3)
    resumed, other, again = begin(saved[1], saved[0])
    again.load_state_dict(saved[2])
    train(resumed, other, again, 3)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_states_of_another_scale_are_refused():
    saved = mlp(64)
    state = attach(saved, "1:4", scale=None).state_dict()
    words = r"saved with scale=None, base_density=1\.0, and .* scale='supar', base_density=0\.5"
    with pytest.raises(ValueError, match=words):
        attach(mlp(64), "1:4", base_density=0.5).load_state_dict(state)
    model = mlp(64)
    model.load_state_dict(saved.state_dict())
    attach(model, "1:4", scale=None).load_state_dict(state)


def test_weights_that_were_rescaled_beneath_a_state_are_noticed():
    model = mlp(64)
    sparsifier = attach(model, "1:4")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sparsifier.register(optimizer)
    train(model, sparsifier, optimizer, 2)
    weights, state = copy.deepcopy((model.state_dict(), sparsifier.state_dict()))
    fresh = mlp(64)
    fresh.load_state_dict(weights)
    with torch.no_grad():
        fresh[2].weight += 0.01  # not N:M any more: attach() rescales
    late = attach(fresh, "1:4")
    with pytest.raises(
        ValueError, match=r"attach\(\) has rescaled the weight of layer '2'.*attach\(state\)"
    ):
        late.load_state_dict(state)
    fresh.load_state_dict(weights)
    late.load_state_dict(state)


def test_a_fit_that_failed_does_not_rescale_twice():
    model = mlp(64)
    first = attach(model, "1:4")
    weight = model[2].weight.detach().clone()
    first.detach()
    second = attach(model, "1:4")
    assert torch.equal(model[2].weight, weight)
    assert second.initial_factors == first.initial_factors
    second.bake()
    second.detach()
    assert is_nm(model[2].weight, NMPattern(1, 4))
    third = attach(model, "1:4")
    assert third.initial_factors["2"] == pytest.approx(1), (
        "a weight that is N:M already keeps its values"
    )


@pytest.mark.parametrize("base_density", [1.0, 0.5])
def test_a_weight_that_is_nm_already_keeps_its_values(base_density):
    model = mlp(64)
    with torch.no_grad():
        model[2].weight.copy_(nm_prune(model[2].weight, "1:4", dim=1))
    before = model[2].weight.detach().clone()
    sparsifier = attach(model, "1:4", base_density=base_density)
    assert torch.equal(model[2].weight, before)
    assert sparsifier.initial_factors["2"] == 1
    assert sparsifier.initial_factors["4"] != 1


def groups_in_a_step(sparsifier, optimizer):
    """The learning rate of each parameter while the optimizer steps, by the parameter's id."""
    found = {}
    whole = optimizer
    before = [group["lr"] for group in whole.param_groups]

    def note(optimizer, args, kwargs):
        assert [group["lr"] for group in whole.param_groups] == before
        if optimizer is not whole:
            return  # the step of a base class within that of the optimizer
        for group in args[0].param_groups:
            for parameter in group["params"]:
                assert id(parameter) not in found
                found[id(parameter)] = group["lr"]

    # Registered later than the sparsifier's own hook, so called after it.
    handle = optimizer.register_step_pre_hook(note)
    sparsifier.before_step(optimizer)
    optimizer.step()
    handle.remove()
    return found


@pytest.mark.parametrize("groups", ["one", "two", "named"])
def test_each_layer_has_the_factor_of_its_own_density(groups):
    """Rules give the layers of one group other densities: it is split, and whole again after the step."""
    model = mlp(64)
    rules = [{"include": "2", "pattern": "1:8"}, {"include": "4", "pattern": "2:4"}]
    sparsifier = attach(model, "1:4", "asp", rules=rules, base_density=0.5)
    named = dict(model.named_parameters())
    if groups == "one":
        optimizer = torch.optim.AdamW(model.parameters(), 0.25)
    elif groups == "named":
        optimizer = torch.optim.AdamW(model.named_parameters(), 0.25)
    else:
        first = [named["2.weight"], named["4.weight"], named["2.bias"]]
        rest = [p for p in model.parameters() if all(p is not other for other in first)]
        optimizer = torch.optim.AdamW([{"params": first, "lr": 0.5}, {"params": rest}], 0.25)
    sparsifier.register(optimizer)
    before = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    rates = groups_in_a_step(sparsifier, optimizer)
    own = {id(p): group["lr"] for group in before for p in group["params"]}
    factors = {name: rates[id(p)] / own[id(p)] for name, p in named.items()}
    expected = dict.fromkeys(named, 1.0)
    expected |= {"2.weight": 4.0, "4.weight": 1.0, "6.weight": 2.0}
    assert factors == expected
    assert len(optimizer.param_groups) == len(before)
    for group, saved in zip(optimizer.param_groups, before, strict=True):
        assert {**group, "params": list(group["params"])} == saved
    assert set(sparsifier.initial_factors) == set(HIDDEN)


def test_the_rate_follows_a_pattern_that_changes():
    """Of the step, as the masks then are: 3:4 for two steps, then the layer's 2:4."""
    model = mlp(64)
    sparsifier = attach(model, "2:4", DecayingN())
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    sparsifier.register(optimizer)
    x, y = batch()
    rates, densities = [], []
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        layer = sparsifier.layers["2"]
        densities.append(layer.forward_mask.float().mean().item())
        rates.append(groups_in_a_step(sparsifier, optimizer)[id(layer.param)])
        sparsifier.step()
    assert densities == [0.75, 0.75, 0.5, 0.5]
    assert rates == pytest.approx([0.25 / density for density in densities])


@pytest.mark.parametrize(
    ("preset", "method"), [("paper", "sr-ste"), ("paper", "bi-mask"), ("fst", "transposable")]
)
def test_presets_are_scaled_as_their_methods_are(preset, method):
    model = mlp(64)
    sparsifier = attach(model, "2:4", method, preset=preset, planned_steps=6)
    optimizer = torch.optim.AdamW(model.parameters(), 0.25)
    sparsifier.register(optimizer)
    x, y = batch()
    rates = []
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        rates.append(groups_in_a_step(sparsifier, optimizer)[id(model[2].weight)])
        sparsifier.step()
    # FST's last sixth of the training is dense.
    assert rates == [0.5] * 5 + ([0.25] if preset == "fst" else [0.5])
    assert all(factor > 1 for factor in sparsifier.initial_factors.values())


def fabric_run(optimizer_name, scheduler, with_fabric, state=None):
    """A loop of three steps, with or without Fabric; goes on from a state."""
    model = mlp(64)
    if state is not None:
        model.load_state_dict(state["model"])
    sparsifier = NMSparsifier(
        model, "1:8", "sr-ste", include=HIDDEN, skip_first_last=False, scale="supar"
    )
    sparsifier.attach(None if state is None else state["sparsifier"])
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in HIDDEN}
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    backward = torch.Tensor.backward
    runs = model
    stepping = optimizer
    if with_fabric:
        fabric = Fabric(accelerator="cpu", devices=1)
        runs, stepping = fabric.setup(model, optimizer)
        backward = fabric.backward
    sparsifier.register(stepping)
    schedule = SCHEDULERS[scheduler](optimizer)
    if state is not None:
        sparsifier.load_state_dict(state["sparsifier"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    x, y = batch()
    rates = []
    for _ in range(3):
        stepping.zero_grad()
        backward(F.cross_entropy(runs(x), y))
        sparsifier.before_step(stepping)
        stepping.step()
        sparsifier.step()
        schedule.step()
        rates.append(schedule.get_last_lr())
    saved = {
        "model": model.state_dict(),
        "sparsifier": sparsifier.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
    }
    return copy.deepcopy(saved), rates, weights, sparsifier.initial_factors


@pytest.mark.parametrize("scheduler", ["lambda", "one-cycle"])
def test_fabric_scales_once_and_resumes_bit_for_bit(scheduler):
    plain, plain_rates, plain_start, plain_factors = fabric_run("adamw", scheduler, False)
    found, rates, start, factors = fabric_run("adamw", scheduler, True)
    assert rates == plain_rates
    assert factors == plain_factors
    assert all(len(group) == 1 for group in rates)
    untouched = mlp(64)
    for name in HIDDEN:
        assert torch.equal(start[name], plain_start[name])
        expected = untouched.get_submodule(name).weight * factors[name]
        torch.testing.assert_close(start[name], expected)
    for name, value in plain["model"].items():
        assert torch.equal(found["model"][name], value)

    further, further_rates, loaded, none = fabric_run("adamw", scheduler, True, found)
    expected, expected_rates, _, _ = fabric_run("adamw", scheduler, False, plain)
    assert none == {}, "trained weights are not rescaled"
    for name in HIDDEN:
        assert torch.equal(loaded[name], found["model"][f"{name}.weight"])
    assert further_rates == expected_rates
    for name, value in expected["model"].items():
        assert torch.equal(further["model"][name], value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "mup"}, "scale='mup' is unknown: use 'supar', 'supar-lr' or None"),
        ({"scale": "supar", "base_density": 0}, r"base_density=0 must lie in \(0, 1\]"),
        ({"scale": "supar", "base_density": 1.5}, r"base_density=1\.5"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SparsityConfig("1:4", **options)


class MyAdam(torch.optim.AdamW):
    pass


def named(path, *bases):
    """A class like that of another package, whose step is that of SGD."""
    module, _, name = path.rpartition(".")
    return type(name, bases or (torch.optim.Optimizer,), {"__module__": module, "step": None})


@pytest.mark.parametrize(
    "kind",
    [
        *(getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam")),
        *(getattr(torch.optim, name) for name in ("RAdam", "Adagrad", "RMSprop")),
        MyAdam,
        named("bitsandbytes.optim.adamw.PagedAdamW8bit"),
        named("my.training.Mine", named("bitsandbytes.optim.adam.Adam8bit")),
        named("bitsandbytes.optim.lion.Lion8bit"),
        named("torchao.optim.adam.AdamWFp8"),
        named("lion_pytorch.lion_pytorch.Lion"),
        named("__main__.Lion"),
    ],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
def test_optimizers_that_step_each_entry_in_proportion_to_the_rate_are_taken(kind):
    model = mlp(64)
    made = kind(model.parameters(), **({} if kind.step else {"defaults": {"lr": 1e-3}}))
    attach(model, "1:4").register(made)


REFUSED = [
    *(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Rprop", "ASGD", "SparseAdam")),
    *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []),
    named("muon.MuonWithAuxAdam"),
    named("schedulefree.AdamWScheduleFree"),
    named("dadaptation.DAdaptAdam"),
    named("galore_torch.adamw.AdamW"),
    named(
        "galore_torch.adamw8bit.AdamW8bit", named("bitsandbytes.optim.optimizer.Optimizer2State")
    ),
    named("apex.optimizers.FusedAdam"),
    named("bitsandbytes.optim.lamb.LAMB"),
    named("adam_mini.Adam_mini"),
]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_optimizers_whose_step_is_not_known_to_scale_are_refused(kind):
    model = mlp(64)
    sparsifier = attach(model, "1:4", scale="supar-lr")
    held = [module.weight for module in model[::2]]
    options = {} if kind.step else {"defaults": {"lr": 1e-3}}
    with pytest.raises(
        ValueError,
        match=rf"scale='supar' multiplies the learning rate of layer '2'.*not for {kind.__name__}: .*or use scale=None",
    ):
        sparsifier.register(kind(held, **options))
    # It may train what is not masked, and masked weights without a scale.
    sparsifier.register(kind([model[0].weight], **options))
    sparsifier.detach()
    attach(model, "1:4", scale=None).register(kind(held, **options))


@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop"]
)
def test_the_rule_is_true_of_those_of_torch(kind):
    """A step is proportional to the rate, and that of an entry does not see the others' gradients."""
    torch.manual_seed(0)
    grads = torch.randn(6, 8, 8, dtype=torch.float64)
    others = torch.where(torch.eye(8, dtype=torch.bool), grads, torch.randn_like(grads))

    def moved(rate, grads):
        weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
        optimizer = getattr(torch.optim, kind)([weight], rate, weight_decay=0)
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
        return weight.detach()

    once = moved(1e-3, grads)
    torch.testing.assert_close(moved(8e-3, grads), 8 * once)
    torch.testing.assert_close(moved(1e-3, others).diagonal(), once.diagonal())


def test_a_weight_that_joins_an_optimizer_later_is_refused_too():
    model = mlp(64)
    sparsifier = attach(model, "1:4", scale="supar-lr")
    optimizer = torch.optim.Adafactor([model[0].weight])
    sparsifier.register(optimizer)
    optimizer.add_param_group({"params": [model[4].weight]})
    with pytest.raises(ValueError, match=r"layer '4'.*not for Adafactor"):
        sparsifier.before_step(optimizer)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.parametrize("method", ["asp", "bi-mask"])
def test_a_trainer_resumes_bit_for_bit(tmp_path, method):
    options = {"scale": "supar", "seed": 3}
    whole, model = (
        make_trainer(tmp_path, [callback(method, **options), ExactResume()], max_epochs=2),
        new_model(),
    )
    whole.fit(model, Data())
    save = ModelCheckpoint(tmp_path / "half")
    half, first = (
        make_trainer(tmp_path, [callback(method, **options), ExactResume(), save], max_epochs=1),
        new_model(),
    )
    half.fit(first, Data())
    saves = ModelCheckpoint(tmp_path / "half")
    again, second = (
        make_trainer(tmp_path, [callback(method, **options), ExactResume(), saves], max_epochs=2),
        new_model(),
    )
    again.fit(second, Data(), ckpt_path=save.best_model_path)
    for a, b in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    other = make_trainer(
        tmp_path,
        [callback(method, seed=3), ExactResume(), ModelCheckpoint(tmp_path / "half")],
        max_epochs=2,
    )
    with pytest.raises(ValueError, match=r"saved with scale='supar'.*this training has scale=None"):
        other.fit(new_model(), Data(), ckpt_path=save.best_model_path)


def test_the_table_says_what_is_scaled(tmp_path, capsys):
    trainer = make_trainer(
        tmp_path, [NMSparsityCallback("1:16", "asp", scale="supar")], max_epochs=1
    )
    trainer.fit(new_model(), Data())
    out = " ".join(capsys.readouterr().out.split())
    assert "scale='supar': learning rates of masked weights x16, their initial values x2.4" in out
