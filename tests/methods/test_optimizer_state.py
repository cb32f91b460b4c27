"""The effective step against the steps that optimizers really make; the state of entries that come and go."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, RAdam

from lightning_nm import BAME, NMPattern
from lightning_nm.functional import magnitude_mask
from lightning_nm.functional.evolution import as_blocks
from lightning_nm.methods.bame.exchange import Exchange, make_exchange
from lightning_nm.methods.optimizer_state import entry_states, step_size
from lightning_nm.nn.layer import LayerSpec, NMLayer
from lightning_nm.training.phases import zero_pruned_state

ENTRYWISE = {
    "sgd": lambda p: SGD(p, 0.1),
    "sgd-momentum": lambda p: SGD(p, 0.1, momentum=0.9),
    "sgd-dampening": lambda p: SGD(p, 0.1, momentum=0.8, dampening=0.5),
    "adam": lambda p: Adam(p, 1e-2),
    "adam-maximize": lambda p: Adam(p, 1e-2, maximize=True),
    "adamw-tensor-lr": lambda p: AdamW(p, torch.tensor(1e-2), weight_decay=0.0),
    "adam-no-epsilon": lambda p: Adam(p, 1e-2, eps=0),
    "radam": lambda p: RAdam(p, 1e-2),
    "amsgrad": lambda p: Adam(p, 1e-2, amsgrad=True),
}
STATEFUL = {**ENTRYWISE, "nadam": lambda p: NAdam(p, 1e-2)}


class Stepped:
    """A weight after some steps under one constant gradient, whose dense gradient of the next step is there."""

    def __init__(self, make, steps, dtype=torch.float64):
        generator = torch.Generator().manual_seed(0)
        module = nn.Linear(32, 16, dtype=dtype)
        self.weight = module.weight
        values, grad = torch.randn(2, 16, 32, generator=generator, dtype=dtype)
        self.weight.data.copy_(values)
        self.mask = magnitude_mask(values, "2:4", dim=1)
        self.layer = NMLayer(LayerSpec("l", module, "weight", NMPattern(2, 4), method=BAME()))
        self.optimizer = make([self.weight])
        for _ in range(steps):
            self.step(grad)
        self.weight.grad = grad.clone()

    def step(self, grad):
        """A step by the gradient of kept entries; how each entry moved."""
        before = self.weight.detach().clone()
        self.weight.grad = torch.where(self.mask, grad, 0)
        self.optimizer.step()
        return self.weight.detach() - before

    def size(self):
        """The predicted step sizes."""
        blocks = (as_blocks(tensor, 4) for tensor in (self.weight.grad, self.mask))
        size = torch.as_tensor(step_size(self.layer, self.optimizer, *blocks))
        return size.expand(128, 4).reshape(16, 32)


@pytest.mark.parametrize(
    ("name", "steps"),
    # momentum reaches its effective step only after a while
    [(name, k) for name in ENTRYWISE for k in (0, 3, 100) if k == 100 or name[:4] != "sgd-"],
)
def test_the_effective_step_is_what_the_optimizer_does(name, steps):
    made = Stepped(ENTRYWISE[name], steps)
    expected = (made.size() * made.weight.grad) * (1 if name == "adam-maximize" else -1)
    moved = made.step(made.weight.grad)
    torch.testing.assert_close(moved[made.mask], expected[made.mask], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 50])
@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_preconditioner_is_that_of_the_coming_step(amsgrad, factor, steps):
    """AMSGrad divides by the largest second moment, that of a gradient that grows or shrinks included."""
    made = Stepped(lambda p: Adam(p, 1e-2, amsgrad=amsgrad), steps)
    made.weight.grad *= factor
    size, moved = made.size(), made.step(made.weight.grad)
    direction = made.optimizer.state[made.weight]["exp_avg"] / (1 - 0.9 ** (steps + 1))
    expected = -(size * direction)[made.mask]
    torch.testing.assert_close(moved[made.mask], expected, rtol=1e-6, atol=1e-9)


def test_momentum_of_one_has_no_end_and_counts_as_none():
    assert (Stepped(lambda p: SGD(p, 0.1, momentum=1.0), 3).size() == 0.1).all()


@pytest.mark.parametrize("steps", [0, 3, 100])
def test_the_size_of_the_step_is_close_where_the_formula_is_another(steps):
    made = Stepped(STATEFUL["nadam"], steps, dtype=torch.float32)
    predicted = (made.size() * made.weight.grad)[made.mask].square().mean().sqrt()
    moved = made.step(made.weight.grad)[made.mask].square().mean().sqrt()
    assert 0.5 < predicted / moved < 2


def test_a_pruned_entry_takes_its_blocks_mean_and_never_moves_further_than_the_rate():
    made = Stepped(ENTRYWISE["adam"], 5)
    made.weight.grad[0, 0:4] *= 1000
    grad, mask = made.weight.grad, made.mask
    moment = made.optimizer.state[made.weight]["exp_avg_sq"]
    second = (0.999 * moment + 0.001 * grad.square()) / (1 - 0.999**6)
    mean = torch.where(mask, second, 0).unflatten(1, (-1, 4)).sum(-1) / 2
    of_pruned = torch.maximum(mean.repeat_interleave(4, 1), grad.square())
    expected = 0.01 / (torch.where(mask, second, of_pruned).sqrt() + 1e-8)
    torch.testing.assert_close(made.size(), expected)
    assert (made.size() * grad).abs()[~mask].max() <= 0.01


@pytest.mark.parametrize("name", STATEFUL)
def test_state_of_pruned_entries_is_zeroed_and_that_of_regrown_ones_started(name):
    made = Stepped(STATEFUL[name], 4, dtype=torch.float32)
    layer, mask, optimizer = made.layer, made.mask, made.optimizer
    BAME().check_optimizer(layer, optimizer)
    states = entry_states(layer, optimizer)
    whole = {key for key, value in optimizer.state[made.weight].items() if value.dim() == 2}
    assert set(states) == whole
    zero_pruned_state(layer, mask, [optimizer])
    assert all(not state[~mask].any() for state in states.values())

    before = {key: state.clone() for key, state in states.items()}
    blocks = torch.tensor([0, 5, 5, 127])
    keep = as_blocks(mask, 4)[blocks]
    turn = [0, 0, 1, 1]  # block 5 exchanges both of its entries
    first = 4 * blocks
    pruned = first + keep.nonzero()[:, 1].view(4, 2)[range(4), turn]
    regrown = first + (~keep).nonzero()[:, 1].view(4, 2)[range(4), turn]
    make_exchange(layer, optimizer, mask, Exchange(blocks, pruned, regrown))
    for key, state in states.items():
        expected = before[key].clone().flatten()
        mean = torch.where(keep, as_blocks(before[key], 4)[blocks], 0).sum(1) / 2
        expected[pruned] = 0
        expected[regrown] = mean if key in {"exp_avg_sq", "max_exp_avg_sq"} else 0
        torch.testing.assert_close(state.flatten(), expected)


class Keeps(SGD):
    """Has a state of its own, as 8-bit and second-order optimizers do."""

    kept = None

    def step(self, closure=None):
        (weight,) = self.param_groups[0]["params"]
        self.state[weight]["kept"] = self.kept


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (torch.zeros(16, 32, dtype=torch.uint8), r"torch.uint8 of shape \(16, 32\)"),
        (torch.zeros(7), r"torch.float32 of shape \(7,\) for a weight of shape \(16, 32\)"),
        (torch.zeros(16, 1), r"torch.float32 of shape \(16, 1\)"),
        ([torch.zeros(16, 16), torch.zeros(32, 32)], "a list"),
        ({"left": torch.zeros(16, 16)}, "a dict"),
        *((kept, None) for kept in (None, 3, "text", torch.zeros(()), [])),
    ],
)
def test_state_that_belongs_to_no_entry_is_refused_but_numbers_are_left_alone(kept, message):
    made = Stepped(lambda p: Keeps(p, 0.1), 0)
    Keeps.kept = kept
    made.step(made.weight.grad)
    if message is None:
        BAME().check_optimizer(made.layer, made.optimizer)
        assert entry_states(made.layer, made.optimizer) == {}
        return
    with pytest.raises(ValueError, match=f"Keeps keeps 'kept' as {message}.*layer 'l'.*use SGD"):
        BAME().check_optimizer(made.layer, made.optimizer)
