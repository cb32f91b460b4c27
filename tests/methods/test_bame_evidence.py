"""Accumulated evidence against a simulation written out entry by entry; where it is kept, and for how long."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from lightning_nm import BAME, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.functional.evolution import SCALE
from lightning_nm.methods.bame.exchange import Exchange
from tests.support.bame import OPTIMIZERS, backward, batch, linear, run

PLAIN = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.02, betas=(0.8, 0.9)),
    "adam-without-momentum": lambda p: torch.optim.AdamW(
        p, 0.02, betas=(0.0, 0.9), weight_decay=0.1
    ),
}


def simulate(weight, pattern, steps, make, *, start, stop, every, gradient_every, rate, budget):
    """A dense parameter whose optimizer sees kept entries alone; evidence in lists of numbers."""
    n, m = pattern
    rows, cols = weight.shape
    mask = nmf.magnitude_mask(weight, f"{n}:{m}", dim=1)
    parameter = nn.Parameter(torch.where(mask, weight, 0))
    optimizer = make([parameter])
    u = [[0.0] * cols for _ in range(rows)]
    v = [[0.0] * cols for _ in range(rows)]
    f = [0] * (rows * cols // m)
    exchanged = torch.zeros_like(mask)
    count, swaps = 0, 0
    for t in range(steps):
        x, y = batch(t)
        optimizer.zero_grad()
        (x @ parameter.t() - y).square().mean().backward()
        g = parameter.grad.tolist()
        parameter.grad.masked_fill_(~mask, 0)
        for (
            i,
            j,
        ) in (
            mask.nonzero().tolist()
        ):  # Adam's own second moment, at the number of steps of the evidence
            if count and start <= t < stop and "exp_avg_sq" in optimizer.state[parameter]:
                own = optimizer.state[parameter]["exp_avg_sq"][i, j].item()
                v[i][j] = (
                    own / (1 - optimizer.param_groups[0]["betas"][1] ** t) * (1 - 0.999**count)
                )
        if start <= t < stop and (t - start) % gradient_every == 0:
            count += 1
            size = (
                rate
                * math.sqrt(gradient_every)
                * math.sqrt(sum(w * w for w in parameter[mask].tolist()) / mask.sum())
            )
            for i in range(rows):
                for j in range(cols):
                    v[i][j] = 0.999 * v[i][j] + 0.001 * g[i][j] ** 2
                    if not mask[i, j]:
                        u[i][j] -= (
                            size * g[i][j] / (math.sqrt(v[i][j] / (1 - 0.999**count)) + 1e-12)
                        )
        optimizer.step()
        with torch.no_grad():
            parameter.masked_fill_(~mask, 0)
        if not (start <= t < stop and (t - start) % every == 0):
            continue
        found = []
        for b in range(len(f)):
            i, first = divmod(b * m, cols)
            span = range(first, first + m)
            p = min((j for j in span if mask[i, j]), key=lambda j: (abs(parameter[i, j].item()), j))
            r = min((j for j in span if not mask[i, j]), key=lambda j: (-abs(u[i][j]), j))
            gain = abs(u[i][r]) - abs(parameter[i, p].item())
            if gain > 0:
                found.append((b, i, p, r, gain))
        found.sort(key=lambda item: (-item[4] / (1 + f[item[0]]), item[0]))
        allowed = math.ceil(
            len(f) * budget * 0.5 * (1 + math.cos(math.pi * (t - start) / (stop - start)))
        )
        for b, i, p, r, _ in found[:allowed]:
            f[b] += bool(exchanged[i, p] or exchanged[i, r])
            exchanged[i, p] = exchanged[i, r] = True
            mask[i, p], mask[i, r] = False, True
            with torch.no_grad():
                parameter[i, p], parameter[i, r] = 0.0, u[i][r]
            u[i][r] = 0.0
            for key, state in optimizer.state[parameter].items():
                if isinstance(state, torch.Tensor) and state.shape == parameter.shape:
                    if key == "exp_avg_sq":
                        beta, done = optimizer.param_groups[0]["betas"][1], t + 1
                        state[i, r] = v[i][r] / (1 - 0.999**count) * (1 - beta**done)
                    else:
                        state[i, r] = 0.0
                    state[i, p] = 0.0
            swaps += 1
    return parameter.detach(), mask, f, swaps


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ((2, 4), {}),
        ((1, 4), {"every": 4, "gradient_every": 2}),
        ((1, 16), {"start": 3, "every": 2, "gradient_every": 2}),
        # Not more: after the first gradient all pruned entries of a block have the same |U|, but for rounding errors.
        ((3, 8), {"gradient_every": 3, "budget": 0.2, "evidence_rate": 0.1}),
    ],
)
def test_accumulated_evidence_is_what_is_written(pattern, options, name):
    options = {
        "start": 0,
        "stop": 20,
        "every": 1,
        "gradient_every": 1,
        "evidence_rate": 0.2,
        "budget": 0.6,
        **options,
    }
    module, sparsifier, optimizer, layer = linear(
        BAME(**options), "{}:{}".format(*pattern), PLAIN[name]
    )
    weight = module[0].weight.detach().clone()
    run(module, sparsifier, optimizer, 24)
    rate = options.pop("evidence_rate")
    expected, mask, f, swaps = simulate(weight, pattern, 24, PLAIN[name], rate=rate, **options)
    assert torch.equal(layer.forward_mask, mask)
    torch.testing.assert_close(layer.weight.detach(), expected)
    assert layer.buffers["oscillation"].tolist() == f
    assert int(layer.buffers["exchanges"]) == swaps > 5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_model_never_holds_evidence_and_nothing_of_it_stays(name):
    method = BAME(stop=12, evidence_rate=0.1)
    module, sparsifier, optimizer, layer = linear(
        method, make=OPTIMIZERS[name], dtype=torch.float32
    )
    held = []

    def look(step):
        pruned = ~layer.forward_mask
        assert not layer.weight[pruned].any()
        state = {
            k: s for k, s in optimizer.state[layer.weight].items() if s.shape == layer.weight.shape
        }
        held.append(sum(int(s[pruned].count_nonzero()) for s in state.values()))
        own = sum(
            t.numel() for n, t in layer.buffers.items() if n in ("evidence", "evidence_square")
        )
        assert own == (layer.weight.numel() if name == "sgd" and step < 12 else 0), "memory"

    run(module, sparsifier, optimizer, 16, look=look)
    assert min(held[:12]) > 0
    assert not any(held[12:])
    assert layer.masks.total_flips > 0
    assert "evidence_count" not in layer.buffers


@pytest.mark.parametrize("windows", [1, 2])
def test_what_an_optimizer_does_to_pruned_state_does_not_matter(windows):
    """AMSGrad, decay and clipping act on state that holds evidence; the masks are those of evidence kept apart."""

    class Apart(torch.optim.AdamW):
        pass

    def train(own_buffers, monkeypatch):
        if own_buffers:
            monkeypatch.setattr(
                "lightning_nm.methods.bame.exchange._places", lambda *_: (None, None)
            )
        make = lambda p: Apart(p, 0.02, weight_decay=0.1)  # noqa: E731
        module, sparsifier, optimizer, layer = linear(BAME(stop=20, evidence_rate=0.1), make=make)
        for step in range(20):
            backward(module, step, windows)
            sparsifier.before_step(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            optimizer.step()
            sparsifier.step()
        return layer

    with pytest.MonkeyPatch.context() as monkeypatch:
        inside = train(False, monkeypatch)
        apart = train(True, monkeypatch)
    assert inside.masks.total_flips > 10
    # The second moments of kept entries differ: clipped in the optimizer's state, not in a buffer of their own.
    assert (inside.forward_mask == apart.forward_mask).double().mean() > 0.8


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "options", [{"evidence": "batch", "every": 2}, {"evidence_rate": 0.5, "gradient_every": 2}]
)
def test_a_second_call_before_a_step_changes_nothing(options, clip):
    def train(calls):
        module, sparsifier, optimizer, layer = linear(
            BAME(stop=12, budget=1.0, **options), make=OPTIMIZERS["adamw"]
        )
        for step in range(14):
            backward(module, step)
            sparsifier.before_step(optimizer)
            if clip:
                layer.weight.grad.mul_(0.5)
            for _ in range(calls - 1):
                sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        return layer

    once, twice = train(1), train(2)
    assert torch.equal(once.forward_mask, twice.forward_mask)
    assert torch.equal(once.weight, twice.weight)
    assert int(once.buffers["exchanges"]) == int(twice.buffers["exchanges"]) > 5


@pytest.mark.parametrize("options", [{"evidence": "batch"}, {"evidence_rate": 0.5}])
def test_the_last_gradient_before_a_step_counts(options):
    """Of a closure that is called twice, or after a step that a scaler skipped."""

    def train(bring):
        module, sparsifier, optimizer, layer = linear(BAME(stop=9, every=1, budget=1.0, **options))
        for step in range(9):
            bring(module, sparsifier, optimizer, step)
            backward(module, step)
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        return layer

    def another(module, sparsifier, optimizer, step):
        backward(module, step + 50)
        sparsifier.before_step(optimizer)

    def skipped(module, sparsifier, optimizer, step):
        another(module, sparsifier, optimizer, step)
        sparsifier.step()

    plain = train(lambda *_: None)
    for bring in (another, skipped):
        layer = train(bring)
        assert torch.equal(layer.weight, plain.weight)
        assert torch.equal(layer.forward_mask, plain.forward_mask)


def test_zeros_after_a_skipped_step_are_a_gradient():
    def train(scales):
        module, sparsifier, optimizer, layer = linear(BAME(stop=9, budget=1.0, evidence_rate=0.5))
        for scale in scales:
            optimizer.zero_grad()
            x, y = batch(layer.step)
            ((module(x) - y).square().mean() * scale).backward()
            sparsifier.before_step(optimizer)
            if math.isfinite(scale):
                optimizer.step()
            sparsifier.step()
        return layer

    straight, skipping = train([1, 0, 1, 1]), train([1, math.inf, 0, 1, 1])
    assert torch.equal(straight.weight, skipping.weight)
    assert torch.equal(straight.buffers["evidence_square"], skipping.buffers["evidence_square"])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("at", [1, 5, 11, 12, 13])
def test_a_resume_in_the_middle_is_exact(name, at):
    method = BAME(stop=12, every=2, gradient_every=2, evidence_rate=0.1)

    def start():
        return linear(copy.deepcopy(method), make=OPTIMIZERS[name], dtype=torch.float32)

    module, sparsifier, optimizer, layer = start()
    run(module, sparsifier, optimizer, at)
    saved = copy.deepcopy((module.state_dict(), sparsifier.state_dict(), optimizer.state_dict()))
    run(module, sparsifier, optimizer, 18 - at, start=at)

    other, again, optimizer_again, layer_again = start()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    optimizer_again.load_state_dict(saved[2])
    run(other, again, optimizer_again, 18 - at, start=at)
    assert torch.equal(layer.weight, layer_again.weight)
    assert torch.equal(layer.forward_mask, layer_again.forward_mask)
    assert layer.masks.total_flips > 0


def test_evidence_follows_the_shape_of_the_learning_rate():
    def steps(schedule):
        module, sparsifier, optimizer, layer = linear(
            BAME(stop=9), make=lambda p: torch.optim.SGD(p, 0.1, momentum=0.5)
        )
        schedule(optimizer)
        run(module, sparsifier, optimizer, 1)
        return optimizer.state[layer.weight]["momentum_buffer"][~layer.forward_mask] * SCALE

    whole = steps(lambda optimizer: None)
    half = steps(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5))
    cycle = steps(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.4, total_steps=9, div_factor=10
        )
    )
    torch.testing.assert_close(half, whole / 2)
    torch.testing.assert_close(cycle, whole / 10)
    climbing = steps(lambda optimizer: optimizer.param_groups[0].update(maximize=True))
    torch.testing.assert_close(climbing, -whole)


def test_a_phase_that_exchanges_almost_nothing_is_reported_once():
    def train(method, rate):
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False)
        )
        sparsifier = NMSparsifier(module, "1:16", method, skip_first_last=False).attach()
        optimizer = torch.optim.SGD(module.parameters(), rate)
        sparsifier.register(optimizer)
        for _ in range(62):
            optimizer.zero_grad()
            module(torch.zeros(4, 64)).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()

    message = "hardly moved.* 0 exchanges in 512 blocks at 60 adaptations; raise evidence_rate=0.02"
    with pytest.warns(UserWarning, match=message) as said:
        train(BAME(stop=60, evidence_rate=0.02), 1e-3)
    assert len(said) == 1
    with pytest.warns(UserWarning, match="use evidence='accumulated'"):
        train(BAME(stop=60, every=10, evidence="batch"), 1e-6)


def test_regrown_alive_is_the_share_of_exchanges_that_still_stand():
    module, sparsifier, optimizer, layer = linear(BAME(stop=30, evidence_rate=0.1))
    masks = [layer.forward_mask]
    run(module, sparsifier, optimizer, 30, look=lambda step: masks.append(layer.forward_mask))
    regrown = sum((new & ~old).long() for old, new in itertools.pairwise(masks))
    expected = ((regrown > 0) & masks[-1]).sum() / regrown.sum()
    assert sparsifier.stats()["regrown_alive"] == pytest.approx(expected.item())
    assert 0 < expected < 1
    standing, regrowths = 0, 0  # the same, exchange by exchange
    for step, (old, new) in enumerate(itertools.pairwise(masks)):
        ever_since = torch.stack(masks[step + 1 :]).all(0)
        standing += int((new & ~old & ever_since).sum())
        regrowths += int((new & ~old).sum())
    assert sparsifier.stats()["regrown_alive"] == pytest.approx(standing / regrowths)
    assert regrown.max() > 1, "an entry was regrown, pruned and regrown"


def test_an_exchange_that_was_undone_does_not_stand_though_its_entry_came_back():
    """In one block of 1:4, entries 1, 3 and 1 are regrown: of three exchanges the last one stands."""
    _, sparsifier, optimizer, layer = linear(BAME(stop=30), pattern="1:4")
    first = torch.zeros_like(layer.forward_mask)
    first[:, ::4] = True
    layer.set_masks(first)
    nothing = torch.zeros(())
    kept = 0
    for regrown in (1, 3, 1):
        numbers = [torch.tensor([entry]) for entry in (kept, regrown)]  # in the first row
        exchange = Exchange(torch.tensor([0]), *numbers, nothing)
        layer.spec.method._exchange(layer, optimizer, layer.forward_mask, exchange, None)
        kept = regrown
    assert layer.forward_mask[0, :4].tolist() == [False, True, False, False]
    assert sparsifier.stats()["regrown_alive"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("event", ["detach", "other-weights", "rewind"])
def test_evidence_that_is_left_in_the_optimizer_moves_no_weight(name, event):
    """As momentum it would: U has the unit of weights, and Adam divides by the size of gradients."""
    module, sparsifier, optimizer, layer = linear(
        BAME(stop=40, evidence_rate=0.1), make=OPTIMIZERS[name]
    )

    def train(steps, start):
        """The largest change of a weight in one step."""
        largest = 0.0
        for step in range(start, start + steps):
            x, y = batch(step)
            module.zero_grad()
            (1e-3 * (module(x) - y).square().mean()).backward()  # small gradients
            if event != "detach" or step < 10:
                sparsifier.before_step(optimizer)
            before = module[0].weight.detach().clone()
            mask = layer.forward_mask
            optimizer.step()
            kept = (
                torch.ones_like(before, dtype=torch.bool)
                if mask is None
                else mask & layer.forward_mask
            )
            largest = max(largest, (module[0].weight.detach() - before)[kept].abs().max().item())
            if event != "detach" or step < 10:
                sparsifier.step()
        return largest

    states = copy.deepcopy((module.state_dict(), sparsifier.state_dict()))
    usual = train(10, 0)
    if event == "detach":
        sparsifier.bake()
        sparsifier.detach()
    elif event == "other-weights":
        module.load_state_dict({"0.weight": torch.randn(8, 16, dtype=torch.float64) * 0.2})
    else:
        module.load_state_dict(states[0])
        sparsifier.load_state_dict(states[1])
    assert train(5, 10) < 5 * usual


def test_layers_that_do_not_train_keep_their_weights():
    for stop_training in (
        lambda module, optimizer: module[0].weight.requires_grad_(False),
        lambda module, optimizer: optimizer.param_groups[0].update(lr=0.0),
    ):
        module, sparsifier, optimizer, layer = linear(
            BAME(stop=40, evidence_rate=0.4), make=OPTIMIZERS["adam"]
        )
        run(module, sparsifier, optimizer, 5)
        stop_training(module, optimizer)
        module.append(
            nn.Linear(8, 8, bias=False, dtype=torch.float64)
        )  # so that there is a gradient
        optimizer.zero_grad()
        weight = layer.weight.detach().clone()
        run(module, sparsifier, optimizer, 5, start=5)
        assert torch.equal(layer.weight, weight)


def test_a_forgotten_before_step_is_named_between_dense_gradients_too():
    module, sparsifier, optimizer, _ = linear(
        BAME(stop=20, gradient_every=3), make=OPTIMIZERS["adam"]
    )
    run(module, sparsifier, optimizer, 1)
    backward(module, 1)
    with pytest.raises(RuntimeError, match=r"before_step\(\) for layer '0'"):
        optimizer.step()


def test_a_weight_that_is_replaced_is_named():
    module, sparsifier, optimizer, _ = linear(BAME(stop=20))
    run(module, sparsifier, optimizer, 2)
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    backward(module, 2)
    with pytest.raises(
        RuntimeError, match=r"shape \(8, 16\) is not in SGD any more.*change weights in place"
    ):
        sparsifier.before_step(optimizer)


def test_turns_begin_with_the_phase_and_another_kind_of_evidence_frees_the_first():
    module, sparsifier, optimizer, layer = linear(
        BAME(start=5, stop=12, every=3, evidence_rate=0.5, budget=1.0)
    )
    masks = [layer.forward_mask]
    run(module, sparsifier, optimizer, 10, look=lambda step: masks.append(layer.forward_mask))
    moved = [step for step, pair in enumerate(itertools.pairwise(masks)) if not torch.equal(*pair)]
    assert moved == [5, 8]
    saved = sparsifier.state_dict()
    other, again, other_optimizer, other_layer = linear(
        BAME(start=5, stop=12, every=3, evidence="batch")
    )
    other.load_state_dict(module.state_dict())
    with pytest.warns(
        UserWarning, match="BAME's evidence accumulated in the checkpoint, batch here"
    ):
        again.load_state_dict(saved)
    other_optimizer.load_state_dict(optimizer.state_dict())
    run(other, again, other_optimizer, 1, start=10)
    assert not any(name.startswith("evidence") for name in other_layer.buffers)
