"""STEP: when it switches, and what Adam does with a frozen second moment, against float64 loops."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from lightning_nm import SRSTE, STEP, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.callbacks.tables import phases
from lightning_nm.methods.step import CHANGES, LARGEST_STEP
from lightning_nm.training.phases import finished_phases
from tests.support.kinds import held_tensors

BETAS = (0.8, 0.9)  # a window of ten steps
FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(dtype)


def attach(model, method, planned=20, **options):
    options = {"skip_first_last": False, "planned_steps": planned} | options
    return NMSparsifier(model, "2:4", method, **options).attach()


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=generator, dtype=model[0].weight.dtype)
    loss = model(x).square().mean()
    loss.backward()
    return loss


def train(model, sparsifier, optimizer, steps, look=lambda step: None):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        look(step)


class Loop:
    """Adam for one weight as STEP's formulas have it, in float64, with the bound of a step."""

    def __init__(self, weight, lr, decay, decoupled, eps=1e-8, sign=1):
        self.weight = weight.copy()
        self.m = self.v = np.zeros_like(weight)
        self.t = 0
        self.frozen = None
        self.settings = lr, decay, decoupled, eps, sign

    def step(self, gradient, sparse):
        lr, decay, decoupled, eps, sign = self.settings
        beta1, beta2 = BETAS
        if sparse and self.frozen is None:
            self.frozen = self.v / (1 - beta2**self.t)
        self.t += 1
        gradient = sign * gradient + (0 if decoupled else decay * self.weight)
        shrink = 1 - lr * decay if decoupled else 1
        self.m = beta1 * self.m + (1 - beta1) * gradient
        if not sparse:
            self.v = beta2 * self.v + (1 - beta2) * gradient**2
        mean = self.m / (1 - beta1**self.t)
        if self.frozen is None:
            square = self.v / (1 - beta2**self.t)
        else:
            square = np.maximum(self.frozen, (mean / LARGEST_STEP) ** 2)
        update = mean / (np.sqrt(square) + eps)
        self.weight = shrink * self.weight - lr * update


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("maximize", [False, True], ids=["min", "max"])
def test_a_step_with_the_frozen_moment_is_the_papers(form, decoupled, maximize):
    model = network()
    sparsifier = attach(model, STEP(dense_start=4, latest=4))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": 0.01, "betas": BETAS, "weight_decay": 0.1, "maximize": maximize}
    optimizer = kind(model.parameters(), **settings, **form)
    sparsifier.register(optimizer)
    sign = -1 if maximize else 1
    weights = (model[0].weight, model[2].weight)
    loops = [Loop(w.detach().numpy(), 0.01, 0.1, decoupled, sign=sign) for w in weights]
    bias = Loop(model[0].bias.detach().numpy(), 0.01, 0.1, decoupled, sign=sign)
    moments = None
    for step in range(12):
        optimizer.zero_grad()
        backward(model, step)
        gradients = [w.grad.clone() for w in weights]
        bias.step(model[0].bias.grad.numpy(), sparse=False)
        optimizer.step()
        for weight, loop, gradient in zip(weights, loops, gradients, strict=True):
            loop.step(gradient.numpy(), sparse=step >= 4)
            np.testing.assert_allclose(weight.detach().numpy(), loop.weight, rtol=0, atol=1e-13)
            state = optimizer.state[weight]
            np.testing.assert_allclose(state["exp_avg"].numpy(), loop.m, rtol=0, atol=1e-13)
            np.testing.assert_allclose(state["exp_avg_sq"].numpy(), loop.v, rtol=0, atol=1e-14)
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            assert int(state["step"]) == step + 1
            assert torch.equal(weight.grad, gradient), "the gradient is as it was"
        np.testing.assert_allclose(model[0].bias.detach().numpy(), bias.weight, atol=1e-13)
        squares = [optimizer.state[w]["exp_avg_sq"].clone() for w in weights]
        if step > 4:
            assert all(map(torch.equal, squares, moments)), "frozen bit by bit"
        moments = squares
        sparsifier.step()
        assert sparsifier.layers["0"].masks.has_forward == (step >= 3)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_entry_without_a_second_moment_steps_by_a_bounded_length(form, dtype):
    model = nn.Linear(16, 8, bias=False).to(dtype)
    sparsifier = attach(model, STEP(dense_start=4, latest=4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0, **form)
    sparsifier.register(optimizer)
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        x = torch.randn(32, 16, generator=generator).to(dtype)
        if step < 4:
            x[:, :4] = 0  # as a ReLU that begins to be active after the switch
        optimizer.zero_grad()
        model(x).square().mean().backward()
        before = model.weight.detach().clone()
        optimizer.step()
        sparsifier.step()
        moved = (model.weight.detach() - before).abs().double()
        state = optimizer.state[model.weight]
        assert (state["exp_avg_sq"][:, :4] == 0).all(), "the moment that is saved is the frozen one"
        rounding = 2 * torch.finfo(dtype).eps
        assert float(moved.max()) <= 0.01 * LARGEST_STEP + rounding
        if step >= 4:
            reached = moved[:, :4][state["exp_avg"][:, :4] != 0]
            assert float((reached - 0.01 * LARGEST_STEP).abs().max()) <= 1e-3 + rounding


@pytest.mark.parametrize("seed", range(6))
def test_a_network_with_inactive_units_does_not_diverge(seed):
    torch.manual_seed(seed)
    layers = (nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    model = nn.Sequential(*layers)
    target = torch.randn(32, 8)
    sparsifier = attach(model, STEP(), planned=120)
    optimizer = torch.optim.AdamW(model.parameters(), 0.03)
    sparsifier.register(optimizer)
    losses = []
    for _ in range(120):
        x = torch.randn(32, 32)
        optimizer.zero_grad()
        loss = (model(x) - (x @ target).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        sparsifier.step()
        losses.append(loss.item())
    moments = [optimizer.state[layer.weight]["exp_avg_sq"] for layer in (model[2], model[4])]
    assert any((moment == 0).any() for moment in moments), "some units were never active"
    assert max(losses) < 10


def changes_of(optimizer, before, weights, mean):
    """Z of the last step, from the second moments before and after it."""
    moved = []
    for weight, old in zip(weights, before, strict=True):
        new = optimizer.state[weight]["exp_avg_sq"]
        moved.append((new - old).abs().flatten().numpy())
    joined = np.concatenate(moved)
    return joined.mean() if mean == "arithmetic" else np.exp(np.log(joined).mean())


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_switch_is_where_the_average_change_falls_below_the_threshold(mean, kind):
    def run(threshold, steps=24):
        model = network()
        # The first layer's gradients are smaller, so that a mean over layers is not one over entries.
        method = STEP(dense_start=3, latest=22, threshold=threshold, mean=mean)
        sparsifier = attach(model, method, planned=30)
        optimizer = kind(model.parameters(), 0.003, betas=BETAS, weight_decay=0.1)
        sparsifier.register(optimizer)
        weights = (model[0].weight, model[2].weight)
        averages, sparse, zs = [], [], []
        for step in range(steps):
            before = [
                optimizer.state[w]["exp_avg_sq"].clone() if optimizer.state else torch.zeros_like(w)
                for w in weights
            ]
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            zs.append(changes_of(optimizer, before, weights, mean) if not any(sparse) else 0)
            averages.append(np.mean(zs[-10:]))
            sparsifier.step()
            masked = {layer.masks.has_forward for layer in sparsifier.layers.values()}
            assert len(masked) == 1, "all layers switch together"
            sparse.append(masked.pop())
        return averages, sparse

    averages, never = run(1e-30)
    assert never.index(True) == 21, "the latest switch"
    assert run(1e30)[1].index(True) == 2, "the earliest"
    # Between the averages after two steps, far from both.
    falls = [k for k in range(4, 20) if averages[k] < 0.97 * min(averages[2:k])]
    assert falls, "choose other data"
    at = falls[len(falls) // 2]
    threshold = (averages[at] * min(averages[2:at])) ** 0.5
    assert run(threshold)[1].index(True) == at


def test_the_default_threshold_is_the_optimizers_epsilon():
    for eps, switch in ((1e-30, 8), (1e30, 2)):
        model = network()
        sparsifier = attach(model, STEP(dense_start=2, latest=8))
        optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=eps)
        sparsifier.register(optimizer)
        train(model, sparsifier, optimizer, range(switch - 1))
        assert not sparsifier.layers["0"].masks.has_forward
        train(model, sparsifier, optimizer, range(switch - 1, switch))
        assert sparsifier.layers["0"].masks.has_forward


def test_the_dense_phase_is_plain_adam():
    plain, phased = network(), network()
    sparsifier = attach(phased, STEP(dense_start=4, latest=6, threshold=1e-30))
    for model in (plain, phased):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if model is phased:
            sparsifier.register(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            if model is phased:
                assert [gemm.label for gemm in sparsifier.layers["0"].gemms()] == ["dense"] * 3
                sparsifier.step()
    for a, b in zip(plain.parameters(), phased.parameters(), strict=True):
        assert torch.equal(a, b)
    assert sparsifier.violations() == 0
    assert nmf.is_nm(phased.state_dict()["0.weight"], "2:4")


@pytest.mark.parametrize("at", [3, 8, 9, 13], ids=["dense", "before", "after", "sparse"])
def test_it_resumes_bit_for_bit(at):
    """Also within the window, in which averages of earlier steps are known."""

    def start(seed=0):
        model = network(torch.float32)
        with torch.no_grad():
            model[0].weight.mul_(1 + seed)
        method = STEP(dense_start=2, latest=9, threshold=1e-30)
        sparsifier = attach(model, method)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, betas=BETAS)
        sparsifier.register(optimizer)
        return model, sparsifier, optimizer

    straight = start()
    train(*straight, range(at))
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in straight], buffer)
    train(*straight, range(at, 16))
    resumed = start(seed=1)
    buffer.seek(0)
    states = torch.load(buffer, weights_only=True)
    for part, state in zip(resumed, states, strict=True):
        part.load_state_dict(state)
    train(*resumed, range(at, 16))
    for a, b in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(a, b)
    for name, layer in straight[1].layers.items():
        other = resumed[1].layers[name]
        assert layer.buffers.keys() == other.buffers.keys() == {"frozen_at"}
        assert float(layer.buffers["frozen_at"]) == float(other.buffers["frozen_at"]) == 9
    for a, b in zip(
        straight[2].state_dict()["state"].values(),
        resumed[2].state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_window_of_changes_is_saved():
    """A training that resumes before the switch switches when the uninterrupted one does."""

    def run(stops):
        model = network()
        method = STEP(dense_start=2, latest=18, threshold=1.0)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, betas=BETAS)
        sparsifier = attach(model, method)
        sparsifier.register(optimizer)
        switch = None
        for step in range(18):
            optimizer.zero_grad()
            # Large at first: the average stays above the threshold for as long as these steps are in the window.
            (backward(model, step) * 0).sum()
            for parameter in model.parameters():
                parameter.grad.fill_(100.0 if step < 2 else 1.0)
            optimizer.step()
            sparsifier.step()
            if switch is None and sparsifier.layers["0"].masks.has_forward:
                switch = step
            if step in stops:
                states = copy.deepcopy(
                    [each.state_dict() for each in (model, sparsifier, optimizer)]
                )
                model = network()
                sparsifier = attach(model, STEP(dense_start=2, latest=18, threshold=1.0))
                optimizer = torch.optim.AdamW(model.parameters(), 0.01, betas=BETAS)
                sparsifier.register(optimizer)
                for part, state in zip((model, sparsifier, optimizer), states, strict=True):
                    part.load_state_dict(state)
        return switch

    assert run(()) == run((4, 7)) != 1


def test_a_dense_end_goes_on_by_plain_adam():
    model = network()
    sparsifier = attach(model, STEP(dense_start=2, latest=3, dense_end=0.5), planned=10)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, betas=BETAS)
    sparsifier.register(optimizer)
    layer = sparsifier.layers["0"]
    phases = []
    train(model, sparsifier, optimizer, range(10), lambda _: phases.append(layer.masks.has_forward))
    assert phases == [False] * 2 + [True] * 2 + [False] * 6
    assert not layer.buffers
    before = optimizer.state[model[0].weight]["exp_avg_sq"].clone()
    train(model, sparsifier, optimizer, [10])
    gradient = model[0].weight.grad
    torch.testing.assert_close(
        optimizer.state[model[0].weight]["exp_avg_sq"], 0.9 * before + 0.1 * gradient.square()
    )


def test_steps_that_a_fused_optimizer_skips_change_nothing():
    model = network(torch.float32)
    sparsifier = attach(model, STEP(dense_start=2, latest=2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    sparsifier.register(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(number, factor=1.0):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 8, generator=generator)
        scaler.scale(factor * model(x).square().mean()).backward()
        sparsifier.before_step(optimizer, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        sparsifier.step()

    for number in range(4):
        step(number)

    def states():
        layers = [held_tensors(layer) for layer in sparsifier.layers.values()]
        return copy.deepcopy([[*model.parameters()], layers, optimizer.state_dict()["state"]])

    before = states()
    step(9, factor=torch.inf)
    torch.testing.assert_close(states(), before, rtol=0, atol=0)
    step(5)
    assert sparsifier.clock == 5
    # Unscaled gradients reach the first moment, as without a scaler.
    twin = network(torch.float32)
    plain = attach(twin, STEP(dense_start=2, latest=2))
    other = torch.optim.AdamW(twin.parameters(), 0.01, fused=True)
    plain.register(other)
    train(twin, plain, other, [0, 1, 2, 3, 5])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), "SGD is neither Adam nor AdamW"),
        (lambda p: torch.optim.NAdam(p, 0.1), "NAdam is neither Adam nor AdamW"),
        (lambda p: torch.optim.RAdam(p, 0.1), "RAdam is neither Adam nor AdamW"),
        (lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True), "AdamW has amsgrad=True"),
        (lambda p: torch.optim.Adam(p, 0.1, betas=(0.0, 0.9)), "Adam has beta1=0"),
    ],
)
def test_optimizers_that_it_refuses(optimizer, why):
    model = network()
    sparsifier = attach(model, STEP())
    with pytest.raises(ValueError, match=rf"{why}.*layer '0'.*use Adam or AdamW, or .*'sr-ste'"):
        sparsifier.register(optimizer(model.parameters()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"latest": 0}, "latest=0 leaves no dense step"),
        ({"dense_start": 0.6, "latest": 0.5}, "its earliest step, 12 by dense_start=0.6, comes"),
        ({"dense_end": 0.7}, "latest=0.5 ends at step 10 and dense_end=0.7"),
        ({"latest": 1.5}, "latest=1.5 is not a share"),
        ({"threshold": 0.0}, "threshold=0.0 must be a positive number"),
        ({"mean": "median"}, "mean='median' is unknown"),
    ],
)
def test_settings_that_it_refuses(settings, words):
    with pytest.raises(ValueError, match=words):
        STEP(**settings).schedule(20)


def test_a_training_of_unknown_length():
    with pytest.raises(
        ValueError, match=r"STEP's latest=0\.5 is a share .* write STEP\(dense_start="
    ):
        STEP().schedule(None)
    assert STEP(dense_start=5, latest=50).schedule(None) == (5, 50)


def test_a_layer_without_a_second_moment_is_named():
    model = network()
    sparsifier = attach(model, STEP(dense_start=1, latest=2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    sparsifier.register(optimizer)
    train(model, sparsifier, optimizer, range(3))
    optimizer.state.clear()  # as where a run resumes without its optimizer
    optimizer.zero_grad()
    backward(model, 3)
    with pytest.raises(RuntimeError, match="AdamW has no second moment of layer '0'"):
        optimizer.step()


def test_a_new_optimizer_is_refused_once_there_are_masks():
    model = network()
    sparsifier = attach(model, STEP(dense_start=2, latest=2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    sparsifier.register(optimizer)
    train(model, sparsifier, optimizer, range(1))
    new = torch.optim.AdamW(model.parameters(), 0.01)
    sparsifier.training.follow([new])
    sparsifier.training.check_optimizer_states()  # nothing is frozen yet
    train(model, sparsifier, new, range(1, 3))
    sparsifier.training.check_optimizer_states()
    sparsifier.training.follow([optimizer])
    sparsifier.training.check_optimizer_states()  # it has a state, if an old one
    sparsifier.training.follow([torch.optim.AdamW(model.parameters(), 0.01)])
    with pytest.raises(ValueError, match=r"AdamW is new.*layer '0'.*ckpt_path=.*same optimizer"):
        sparsifier.training.check_optimizer_states()


def test_layers_of_other_methods_keep_adam():
    model = network()
    rules = [{"include": "2", "method": SRSTE(0.1)}]
    sparsifier = attach(model, STEP(dense_start=1, latest=2), rules=rules)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    sparsifier.register(optimizer)
    train(model, sparsifier, optimizer, range(3))
    frozen, free = (optimizer.state[model[k].weight]["exp_avg_sq"].clone() for k in (0, 2))
    train(model, sparsifier, optimizer, range(3, 5))
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg_sq"], frozen)
    assert not torch.equal(optimizer.state[model[2].weight]["exp_avg_sq"], free)


def test_each_optimizer_switches_for_its_own_layers():
    """Two optimizers in turn, as of a GAN: each knows its own second moments."""
    model = network()
    sparsifier = attach(model, STEP(dense_start=2, latest=18, threshold=1e-2))
    optimizers = [
        torch.optim.AdamW(model[0].parameters(), 1e-3, betas=BETAS),
        torch.optim.AdamW(model[2].parameters(), 1e-3, betas=BETAS),
    ]
    for optimizer in optimizers:
        sparsifier.register(optimizer)
    for step in range(12):
        model.zero_grad()
        backward(model, step)
        # Steady in the first layer, so that its second moment settles.
        model[0].weight.grad.fill_(1e-3)
        model[2].weight.grad.fill_(10.0 * (step % 4))
        optimizers[step % 2].step()
        sparsifier.step()
    assert sparsifier.layers["0"].masks.has_forward
    assert not sparsifier.layers["2"].masks.has_forward


def test_tables_and_warnings_know_the_phases():
    model = network()
    sparsifier = attach(model, STEP(dense_start=2, latest=3, dense_end=0.5), planned=10)
    assert phases(sparsifier) == [
        "STEP: masks at the latest from training step 3 to 5; the model is dense after that"
    ]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sparsifier.register(optimizer)
    layers = list(sparsifier.layers.values())
    train(model, sparsifier, optimizer, range(4))
    assert finished_phases(layers) == []
    train(model, sparsifier, optimizer, range(4, 5))
    assert finished_phases(layers) == ["STEP is in the dense phase that began at training step 5"]


@pytest.mark.parametrize(
    ("beta", "length"), [(0.999, 1000), (0.95, 20), (0.98, 50), (0.9, 10), (0.5, 2), (0.0, 1)]
)
def test_the_length_of_the_window(beta, length):
    model = network()
    sparsifier = attach(model, STEP())
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, beta))
    sparsifier.register(optimizer)
    for layer in sparsifier.layers.values():
        layer.buffers[CHANGES] = torch.ones(2000)
    train(model, sparsifier, optimizer, range(1))
    assert [len(layer.buffers[CHANGES]) for layer in sparsifier.layers.values()] == [length] * 2
