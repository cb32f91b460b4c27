"""STEP: when it switches, and what Adam does with a frozen second moment, against float64 loops."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from lightning_nm import STEP
from lightning_nm.callbacks.tables import phases
from lightning_nm.methods.step import CHANGES, LARGEST_STEP
from lightning_nm.training.phases import finished_phases
from tests.support.method_loop import Loop, mlp

BETAS = (0.8, 0.9)  # a window of ten steps
WEIGHT, BIAS = "0.weight", "0.bias"


def loop(method, kind=AdamW, dtype=torch.float64, **options):
    settings = {"lr": 0.01, "betas": BETAS} | options
    return Loop(method, make=lambda p: kind(p, **settings), model=mlp(16, 32, 16, dtype=dtype))


class ByFormula:
    """Adam for one weight as STEP's formulas have it, in float64, with the bound of a step."""

    def __init__(self, weight, decay, decoupled, sign):
        self.weight = weight.copy()
        self.m = self.v = np.zeros_like(weight)
        self.t = 0
        self.frozen = None
        self.settings = decay, decoupled, sign

    def step(self, gradient, sparse):
        decay, decoupled, sign = self.settings
        beta1, beta2 = BETAS
        if sparse and self.frozen is None:
            self.frozen = self.v / (1 - beta2**self.t)
        self.t += 1
        gradient = sign * gradient + (0 if decoupled else decay * self.weight)
        self.m = beta1 * self.m + (1 - beta1) * gradient
        if not sparse:
            self.v = beta2 * self.v + (1 - beta2) * gradient**2
        mean = self.m / (1 - beta1**self.t)
        square = self.v / (1 - beta2**self.t)
        if sparse:
            square = np.maximum(self.frozen, (mean / LARGEST_STEP) ** 2)
        shrink = 1 - 0.01 * decay if decoupled else 1
        self.weight = shrink * self.weight - 0.01 * mean / (np.sqrt(square) + 1e-8)


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [AdamW, Adam])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_step_with_the_frozen_moment_is_the_papers(form, kind, maximize):
    run = loop(STEP(4, latest=4), kind, weight_decay=0.1, maximize=maximize, **form)
    parameters = dict(run.model.named_parameters())
    formulas = {
        name: ByFormula(p.detach().numpy(), 0.1, kind is AdamW, -1 if maximize else 1)
        for name, p in parameters.items()
    }
    for step in range(12):
        run.backward()
        gradients = {name: p.grad.clone() for name, p in parameters.items()}
        frozen = run.state["exp_avg_sq"].clone() if step else None
        run.step()
        for name, formula in formulas.items():
            parameter, gradient = parameters[name], gradients[name]
            formula.step(gradient.numpy(), sparse=step >= 4 and "weight" in name)
            np.testing.assert_allclose(parameter.detach().numpy(), formula.weight, atol=1e-13)
            state = run.optimizer.state[parameter]
            np.testing.assert_allclose(state["exp_avg"].numpy(), formula.m, atol=1e-13)
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            assert torch.equal(parameter.grad, gradient), "the gradient is as it was"
        if step >= 4:
            assert torch.equal(run.state["exp_avg_sq"], frozen), "frozen bit by bit"
        assert run.layer.masks.has_forward == (step >= 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_entry_without_a_second_moment_steps_by_a_bounded_length(dtype):
    run = loop(STEP(4, latest=4), dtype=dtype, betas=(0.9, 0.999), weight_decay=0)
    rounding = 2 * torch.finfo(dtype).eps
    for step in range(8):
        run.backward(factor=100)
        if step < 4:  # as of a ReLU that begins to be active after the switch
            run.layer.param.grad[:, :4] = 0
        before = run.layer.param.detach().clone()
        run.step()
        moved = (run.layer.param.detach() - before).abs().double()
        assert (run.state["exp_avg_sq"][:, :4] == 0).all(), "the frozen one is saved"
        assert float(moved.max()) <= 0.01 * LARGEST_STEP + rounding
        if step >= 4:
            reached = moved[:, :4][run.state["exp_avg"][:, :4] != 0]
            assert float((reached - 0.01 * LARGEST_STEP).abs().max()) <= 1e-3 + rounding


@pytest.mark.parametrize("seed", range(6))
def test_a_network_with_inactive_units_does_not_diverge(seed):
    torch.manual_seed(seed)
    layers = (nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    run = Loop(
        STEP(),
        make=lambda p: AdamW(p, 0.03),
        model=nn.Sequential(*layers),
        planned_steps=120,
    )
    target = torch.randn(32, 8)
    losses = []
    for _ in range(120):
        x = torch.randn(32, 32)
        run.optimizer.zero_grad()
        loss = (run.model(x) - (x @ target).tanh()).square().mean()
        loss.backward()
        run.step()
        losses.append(loss.item())
    moments = [run.optimizer.state[run.model[place].weight]["exp_avg_sq"] for place in (2, 4)]
    assert any((moment == 0).any() for moment in moments), "some units were never active"
    assert max(losses) < 10


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
def test_the_switch_is_where_the_average_change_falls_below_the_threshold(mean):
    def train(threshold):
        """The averages of Z over ten steps, and after which step masks were there."""
        run = loop(STEP(3, 18, threshold, mean), Adam, lr=0.003, weight_decay=0.1)
        weights = [layer.param for layer in run.layers.values()]
        averages, zs = [], []
        before = torch.zeros(sum(map(torch.numel, weights)), dtype=torch.float64)
        for step in run.steps(18):
            masked = {layer.masks.has_forward for layer in run.layers.values()}
            assert len(masked) == 1, "all layers switch together"
            states = [run.optimizer.state[weight]["exp_avg_sq"].flatten() for weight in weights]
            after = torch.cat(states)
            change = (after - before).abs()
            zs.append(change.mean() if mean == "arithmetic" else change.log().mean().exp())
            averages.append(float(sum(zs[-10:]) / len(zs[-10:])))
            before = after
            if masked == {True}:
                return averages, step
        raise AssertionError

    averages, latest = train(1e-30)
    assert latest == 18
    assert train(1e30)[1] == 3
    # Between the averages after two steps, far from both.
    falls = [k for k in range(4, 17) if averages[k] < 0.97 * min(averages[2:k])]
    assert falls, "choose other data"
    at = falls[len(falls) // 2]
    assert train((averages[at] * min(averages[2:at])) ** 0.5)[1] == at + 1


@pytest.mark.parametrize(("eps", "switch"), [(1e-30, 8), (1e30, 2)])
def test_the_default_threshold_is_the_optimizers_epsilon(eps, switch):
    run = loop(STEP(2, latest=8), eps=eps).train(switch - 1)
    assert not run.layer.masks.has_forward
    assert run.train(1).layer.masks.has_forward


def test_the_window_of_changes_is_saved():
    """A training that resumes before the switch switches when the uninterrupted one does."""

    def train(resumes):
        run = loop(STEP(2, latest=18, threshold=1.0))
        for step in range(18):
            run.backward()
            for parameter in run.model.parameters():
                # Large at first: the average is above the threshold as long as the window holds these steps.
                parameter.grad.fill_(100.0 if step < 2 else 1.0)
            run.step()
            if run.layer.masks.has_forward:
                return step
            if step in resumes:
                run = loop(STEP(2, latest=18, threshold=1.0)).load(run.states())
        raise AssertionError

    assert train(()) == train((4, 7)) > 4


def test_a_dense_end_goes_on_by_plain_adam():
    run = loop(STEP(2, latest=3, dense_end=10))
    assert phases(run.sparsifier) == [
        "STEP: masks at the latest from training step 3 to 10; the model is dense after that"
    ]
    layers = list(run.layers.values())
    assert [run.layer.masks.has_forward for _ in run.steps(9)] == [False] * 2 + [True] * 7
    assert finished_phases(layers) == []
    run.train(1)
    assert finished_phases(layers) == ["STEP is in the dense phase that began at training step 10"]
    assert not run.layer.masks.has_forward
    assert not run.layer.buffers
    before = run.state["exp_avg_sq"].clone()
    run.train(1)
    gradient = run.layer.param.grad
    torch.testing.assert_close(run.state["exp_avg_sq"], 0.9 * before + 0.1 * gradient.square())


def test_a_layer_without_a_second_moment_is_named():
    run = loop(STEP(1, latest=2)).train(3)
    run.optimizer.state.clear()  # as where a run resumes without its optimizer
    run.backward()
    with pytest.raises(RuntimeError, match="AdamW has no second moment of layer '0'"):
        run.optimizer.step()


def test_a_new_optimizer_is_refused_once_there_are_masks():
    run = loop(STEP(2, latest=2)).train(1)
    training = run.sparsifier.training
    new, newer = (AdamW(run.model.parameters(), 0.01) for _ in range(2))
    training.follow([new])
    training.check_optimizer_states()  # nothing is frozen yet
    run.optimizer = new
    run.train(2)
    training.check_optimizer_states()
    training.follow([newer])
    with pytest.raises(ValueError, match=r"AdamW is new.*layer '0'.*ckpt_path=.*same optimizer"):
        training.check_optimizer_states()


def test_layers_of_other_methods_keep_adam():
    rules = [{"include": "2", "method": "sr-ste"}]
    run = Loop(STEP(1, latest=2), make=AdamW, rules=rules).train(3)
    weights = [layer.param for layer in run.layers.values()]
    before = [run.optimizer.state[weight]["exp_avg_sq"].clone() for weight in weights]
    run.train(2)
    after = [run.optimizer.state[weight]["exp_avg_sq"] for weight in weights]
    assert list(map(torch.equal, before, after)) == [True, False]


def test_each_optimizer_switches_for_its_own_layers():
    """Two optimizers in turn, as of a GAN: each knows its own second moments."""
    run = loop(STEP(2, latest=18, threshold=1e-2))
    first, second = (layer.param for layer in run.layers.values())
    run.sparsifier.training.follow([])
    optimizers = [AdamW([weight], 1e-3, BETAS) for weight in (first, second)]
    for optimizer in optimizers:
        run.sparsifier.register(optimizer)
    for step in range(12):
        # Steady in the first layer, so that its second moment settles.
        first.grad = torch.full_like(first, 1e-3)
        second.grad = torch.full_like(second, 10.0 * (step % 4))
        optimizers[step % 2].step()
        run.sparsifier.step()
    assert [layer.masks.has_forward for layer in run.layers.values()] == [True, False]


@pytest.mark.parametrize(("beta", "length"), [(0.999, 1000), (0.98, 50), (0.5, 2), (0.0, 1)])
def test_the_length_of_the_window(beta, length):
    run = loop(STEP(), betas=(0.9, beta))
    run.layer.buffers[CHANGES] = torch.ones(2000)
    run.train(1)
    assert len(run.layer.buffers[CHANGES]) == length
