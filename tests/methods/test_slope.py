"""SLoPe against a simulation written out entry by entry, and what a user relies on."""

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier, SLoPe
from lightning_nm import functional as nmf
from tests.methods.plain_loop import sgd_steps
from tests.support.bame import OPTIMIZERS, batch, linear, run


def largest(magnitudes, n):
    """The places of the n largest, of equal ones the first."""
    return set(sorted(range(len(magnitudes)), key=lambda k: (-magnitudes[k], k))[:n])


def forward_of(w, n, m):
    kept = set()
    for i, row in enumerate(w):
        for c in range(0, len(row), m):
            kept |= {(i, c + k) for k in largest([abs(v) for v in row[c : c + m]], n)}
    return kept


def backward_of(w, forward, n, m):
    kept = set()
    for j in range(len(w[0])):
        for r in range(0, len(w), m):
            column = [abs(w[i][j]) if (i, j) in forward else 0.0 for i in range(r, r + m)]
            kept |= {(r + k, j) for k in largest(column, n)}
    return kept & forward


def simulate(weight, pattern, steps, *, every, first, rate, mu, decay):
    """SLoPe under SGD with momentum and weight decay, one number at a time."""
    n, m = pattern
    w = weight.tolist()
    forward = forward_of(w, n, m)
    backward = backward_of(w, forward, n, m)
    buffer = dict.fromkeys(forward, 0.0)
    backwards = []
    for t in range(steps):
        x, y = batch(t)
        used = [
            [v if (i, j) in forward else 0.0 for j, v in enumerate(row)] for i, row in enumerate(w)
        ]
        current = torch.tensor(used, dtype=torch.float64, requires_grad=True)
        (x @ current.t() - y).square().mean().backward()
        for i, j in forward:
            g = current.grad[i, j].item() + decay * w[i][j]
            buffer[i, j] = mu * buffer[i, j] + g if t else g
            w[i][j] -= rate * buffer[i, j]
        w = [
            [v if (i, j) in forward else 0.0 for j, v in enumerate(row)] for i, row in enumerate(w)
        ]
        done = t + 1
        if done >= first and (done - first) % every == 0:
            backward = backward_of(w, forward, n, m)
        backwards.append(backward)
    return torch.tensor(w, dtype=torch.float64), forward, backwards


def places(mask):
    return {tuple(place) for place in mask.nonzero().tolist()}


@pytest.mark.parametrize("pattern", [(2, 4), (1, 4), (3, 8)])
@pytest.mark.parametrize(("every", "first"), [(5, None), (5, 4), (1, None)])
def test_the_training_is_what_is_written(pattern, every, first):
    def make(parameters):
        return torch.optim.SGD(parameters, 0.4, momentum=0.5, weight_decay=0.01)

    method = SLoPe(refresh_every=every, first_refresh=first)
    module, sparsifier, optimizer, layer = linear(method, "{}:{}".format(*pattern), make)
    start = module[0].weight.detach().clone()
    found = []
    for step in range(12):
        run(module, sparsifier, optimizer, 1, start=step)
        found.append(places(layer.masks.backward))
    settings = {"every": every, "first": first or every, "rate": 0.4, "mu": 0.5, "decay": 0.01}
    weight, forward, backwards = simulate(start, pattern, 12, **settings)
    torch.testing.assert_close(layer.weight.detach(), weight)
    assert places(layer.forward_mask) == forward
    assert found == backwards
    assert len({frozenset(backward) for backward in found}) > 1, "no backward mask moved"
    assert int(layer.masks.total_flips) == 0, "the forward mask moved"


def test_the_input_gradient_is_that_of_the_double_pruned_weight():
    module, sparsifier, optimizer, layer = linear(SLoPe())
    run(module, sparsifier, optimizer, 3)  # the values follow the weight, not the mask
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 8, dtype=torch.float64)
    module(x).backward(dy)
    twice_pruned = torch.where(layer.masks.backward, layer.weight.detach(), 0)
    torch.testing.assert_close(x.grad, dy @ twice_pruned)
    assert nmf.is_nm(twice_pruned, "2:4", dim=0)
    assert nmf.is_nm(twice_pruned, "2:4", dim=1)
    assert not torch.equal(twice_pruned, layer.weight)


def test_the_share_that_is_lost_twice_is_that_of_random_weights():
    """3/32 of all entries at 2:4: the sum over j > N of C(M, j) s^j (1 - s)^(M - j) (j - N) / M."""
    torch.manual_seed(0)
    module = nn.Linear(256, 512, bias=False)
    sparsifier = NMSparsifier(module, "2:4", SLoPe(), skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    lost = 0.5 - layer.masks.backward.double().mean().item()
    assert lost == pytest.approx(3 / 32, abs=0.005)
    assert layer.masks.backward_density == pytest.approx(0.5 - lost)


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_each_product_is_pruned_where_it_can_be():
    model = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 10), nn.Linear(8, 8))
    sparsifier = NMSparsifier(model, "2:4", SLoPe(), skip_first_last=False).attach()
    kinds = {
        name: [gemm.kind for gemm in layer.gemms()] for name, layer in sparsifier.layers.items()
    }
    assert kinds == {
        "0": ["dense", "n:m", "dense"],
        "1": ["n:m", "masked", "outputs"],
        "2": ["n:m", "n:m", "outputs"],
    }
    gemms = sparsifier.layers["2"].gemms()
    assert [gemm.paper for gemm in gemms] == [0.5, 0.5, 1.0]
    assert [gemm.eligible for gemm in gemms] == [0.5, 0.5, 1.0]
    assert gemms.dgrad.arithmetic == sparsifier.layers["2"].masks.backward_density < 0.5


def test_it_can_start_later():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(10, 16))
    sparsifier = NMSparsifier(
        model[:1], "2:4", SLoPe(refresh_every=1, start=0.5), skip_first_last=False, planned_steps=6
    ).attach()
    (layer,) = sparsifier.layers.values()
    pruned = []
    for _ in sgd_steps(model[:1], sparsifier, 6, (8, 16)):
        pruned.append(layer.masks.has_forward and layer.masks.has_backward)
    assert pruned == [False, False, True, True, True, True]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_resumed_training_ends_with_the_same_bits(name):
    def trained(steps, states=None):
        method = SLoPe(refresh_every=4, first_refresh=3)
        module, sparsifier, optimizer, layer = linear(method, make=OPTIMIZERS[name])
        first = 0
        if states is not None:
            first = 5
            for part, state in zip((module, sparsifier, optimizer), states, strict=True):
                part.load_state_dict(state)
        run(module, sparsifier, optimizer, steps - first, start=first)
        return layer, [part.state_dict() for part in (module, sparsifier, optimizer)]

    whole, _ = trained(10)
    _, states = trained(5)
    resumed, _ = trained(10, states)
    assert torch.equal(whole.weight, resumed.weight)
    assert torch.equal(whole.masks.bits, resumed.masks.bits)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    weights = []
    for windows in (1, 3):
        module, sparsifier, optimizer, layer = linear(SLoPe(refresh_every=2))
        run(module, sparsifier, optimizer, 6, windows=windows)
        weights.append(layer.weight.detach())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("options", [{"refresh_every": 0}, {"first_refresh": 0}])
def test_bad_settings_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be an integer of at least 1"):
        SLoPe(**options)
