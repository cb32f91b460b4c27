"""The effective step against the steps that optimizers really make; the state of entries that come and go."""

import pytest
import torch
from torch import nn

from lightning_nm import BAME
from lightning_nm.functional import magnitude_mask
from lightning_nm.functional.evolution import as_blocks
from lightning_nm.methods.bame.exchange import Exchange, make_exchange
from lightning_nm.methods.optimizer_state import (
    entry_states,
    step_size,
)
from lightning_nm.nn.layer import LayerSpec, NMLayer
from lightning_nm.pattern import NMPattern
from lightning_nm.training.phases import zero_pruned_state

ENTRYWISE = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sgd-dampening": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adam-maximize": lambda p: torch.optim.Adam(p, 1e-2, maximize=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), weight_decay=0.0),
    "adam-no-epsilon": lambda p: torch.optim.Adam(p, 1e-2, eps=0),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
}
CLOSE = {"nadam": lambda p: torch.optim.NAdam(p, 1e-2)}
STATEFUL = {
    **ENTRYWISE,
    **CLOSE,
    "adam-capturable-like": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
}


def stepped(make, steps, seed=0, dtype=torch.float64):
    """A weight after some steps under one constant gradient, its mask, and the optimizer."""
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.randn(16, 32, generator=generator, dtype=dtype))
    mask = magnitude_mask(weight.detach(), "2:4", dim=1)
    grad = torch.randn(16, 32, generator=generator, dtype=dtype)
    optimizer = make([weight])
    for _ in range(steps):
        weight.grad = torch.where(mask, grad, 0)
        optimizer.step()
    weight.grad = grad.clone()
    return weight, mask, optimizer


def layer_of(weight, name="l"):
    module = nn.Linear(32, 16)
    module.weight = weight
    return NMLayer(LayerSpec(name, module, "weight", NMPattern(2, 4), method=BAME()))


def size_of(optimizer, weight, mask):
    """The step size of the blocks of a weight ``[out, in]``."""
    return step_size(layer_of(weight), optimizer, as_blocks(weight.grad, 4), as_blocks(mask, 4))


@pytest.mark.parametrize(
    ("name", "steps"),
    # momentum reaches its effective step only after a while
    [
        (name, steps)
        for name in ENTRYWISE
        for steps in (0, 3, 100)
        if steps == 100 or name[:4] != "sgd-"
    ],
)
def test_the_effective_step_is_what_the_optimizer_does(name, steps):
    weight, mask, optimizer = stepped(ENTRYWISE[name], steps)
    grad = as_blocks(weight.grad, 4)
    eta = size_of(optimizer, weight, mask)
    expected = -(eta * grad).view_as(weight) * (-1 if name == "adam-maximize" else 1)
    before = weight.detach().clone()
    weight.grad = torch.where(mask, weight.grad, 0)
    optimizer.step()
    torch.testing.assert_close(
        (weight.detach() - before)[mask], expected[mask], rtol=1e-4, atol=1e-9
    )


@pytest.mark.parametrize("steps", [1, 5, 50])
@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_preconditioner_is_that_of_the_coming_step(amsgrad, factor, steps):
    """AMSGrad divides by the largest second moment, that of a gradient that grows or shrinks included."""
    rate, beta = 1e-2, 0.9
    weight, mask, optimizer = stepped(lambda p: torch.optim.Adam(p, rate, amsgrad=amsgrad), steps)
    weight.grad *= factor
    eta = size_of(optimizer, weight, mask).view_as(weight)
    before = weight.detach().clone()
    weight.grad = torch.where(mask, weight.grad, 0)
    optimizer.step()
    direction = optimizer.state[weight]["exp_avg"] / (1 - beta ** (steps + 1))
    torch.testing.assert_close(
        (before - weight.detach())[mask], (eta * direction)[mask], rtol=1e-6, atol=1e-9
    )


def test_momentum_of_one_has_no_end_and_counts_as_none():
    weight, mask, optimizer = stepped(lambda p: torch.optim.SGD(p, 0.1, momentum=1.0), 3)
    assert size_of(optimizer, weight, mask) == 0.1


@pytest.mark.parametrize("steps", [0, 3, 100])
@pytest.mark.parametrize("name", CLOSE)
def test_the_size_of_the_step_is_close_where_the_formula_is_another(name, steps):
    weight, mask, optimizer = stepped(CLOSE[name], steps, dtype=torch.float32)
    grad = as_blocks(weight.grad, 4)
    eta = torch.as_tensor(size_of(optimizer, weight, mask)).expand_as(grad)
    predicted = (eta * grad).view_as(weight)[mask].square().mean().sqrt()
    before = weight.detach().clone()
    weight.grad = torch.where(mask, weight.grad, 0)
    optimizer.step()
    made = (weight.detach() - before)[mask].square().mean().sqrt()
    assert 0.5 < predicted / made < 2


def test_a_pruned_entry_takes_its_blocks_mean_and_never_moves_further_than_the_rate():
    weight, mask, optimizer = stepped(ENTRYWISE["adam"], 5)
    weight.grad[0, 0:4] *= 1000
    grad, keep = as_blocks(weight.grad, 4), as_blocks(mask, 4)
    moment = as_blocks(optimizer.state[weight]["exp_avg_sq"], 4)
    eta = size_of(optimizer, weight, mask)
    second = (0.999 * moment + 0.001 * grad.square()) / (1 - 0.999**6)
    for b in range(len(grad)):
        mean = second[b][keep[b]].mean()
        for k in range(4):
            v = second[b, k] if keep[b, k] else max(mean, grad[b, k] ** 2)
            assert eta[b, k].item() == pytest.approx((0.01 / (v.sqrt() + 1e-8)).item())
    assert (eta * grad).abs()[~keep].max() <= 0.01


@pytest.mark.parametrize("name", STATEFUL)
def test_state_of_pruned_entries_is_zeroed_and_that_of_regrown_ones_started(name):
    weight, mask, optimizer = stepped(STATEFUL[name], 4, dtype=torch.float32)
    BAME().check_optimizer(layer_of(weight), optimizer)
    sizes = {"exp_avg_sq", "max_exp_avg_sq"}
    states = entry_states(layer_of(weight), optimizer)
    assert set(states) == {
        key
        for key, value in optimizer.state[weight].items()
        if isinstance(value, torch.Tensor) and value.dim() == 2
    }
    zero_pruned_state(layer_of(weight), mask, [optimizer])
    assert all(not state[~mask].any() for state in states.values())

    before = {key: state.clone() for key, state in states.items()}
    blocks = torch.tensor([0, 5, 5, 127])
    keep = as_blocks(mask, 4)
    kept = [keep[b].nonzero().squeeze(1) for b in blocks]
    gone = [(~keep[b]).nonzero().squeeze(1) for b in blocks]
    turn = [0, 0, 1, 1]  # block 5 exchanges both of its entries
    pruned = torch.stack([k[t] for k, t in zip(kept, turn, strict=True)])
    regrown = torch.stack([g[t] for g, t in zip(gone, turn, strict=True)])
    at_pruned, at_regrown = (4 * blocks + entries for entries in (pruned, regrown))
    layer = layer_of(weight)
    nothing = torch.zeros(())
    make_exchange(layer, optimizer, mask, Exchange(blocks, at_pruned, at_regrown, nothing))
    for key, state in states.items():
        expected = before[key].clone()
        for b, p, r in zip(blocks.tolist(), pruned.tolist(), regrown.tolist(), strict=True):
            row, first = divmod(b * 4, 32)
            mean = before[key].view(-1, 4)[b][keep[b]].mean()
            expected[row, first + p] = 0
            expected[row, first + r] = mean if key in sizes else 0
        torch.testing.assert_close(state, expected)


class Blockwise(torch.optim.SGD):
    """Keeps a state of its own, as 8-bit and second-order optimizers do."""

    kept = torch.zeros(3)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self.kept


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (
            torch.zeros(16, 32, dtype=torch.uint8),
            r"Blockwise keeps 'kept' as torch.uint8 of shape \(16, 32\)",
        ),
        (
            torch.zeros(7),
            r"Blockwise keeps 'kept' as torch.float32 of shape \(7,\) for a weight of shape \(16, 32\)",
        ),
        (torch.zeros(16, 1), r"Blockwise keeps 'kept' as torch.float32 of shape \(16, 1\)"),
        ([torch.zeros(16, 16), torch.zeros(32, 32)], "Blockwise keeps 'kept' as a list"),
        ({"left": torch.zeros(16, 16)}, "Blockwise keeps 'kept' as a dict"),
    ],
)
def test_state_that_belongs_to_no_entry_is_refused(kept, message):
    Blockwise.kept = kept
    weight, _, optimizer = stepped(lambda p: Blockwise(p, 0.1), 1)
    with pytest.raises(ValueError, match=message + r".*layer 'blocks\.3'.*use SGD"):
        BAME().check_optimizer(layer_of(weight, "blocks.3"), optimizer)


@pytest.mark.parametrize("kept", [None, 3, "text", torch.zeros(()), []])
def test_numbers_are_left_alone(kept):
    Blockwise.kept = kept
    weight, _, optimizer = stepped(lambda p: Blockwise(p, 0.1), 1)
    BAME().check_optimizer(layer_of(weight), optimizer)
    assert entry_states(layer_of(weight), optimizer) == {}


OTHERS = {
    "LBFGS": torch.optim.LBFGS,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "RMSprop": torch.optim.RMSprop,
}
if hasattr(torch.optim, "Muon"):
    OTHERS["Muon"] = torch.optim.Muon


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_refused_by_name_before_any_step(name):
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(
        ValueError, match=rf"{name} is neither SGD nor of the Adam family.*layer 'l'.*use SGD, Adam"
    ):
        BAME().check_optimizer(layer_of(weight), OTHERS[name]([weight]))
