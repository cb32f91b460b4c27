"""BAME against a simulation written out block by block; where its evidence is kept, and for how long."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_nm import BAME
from lightning_nm import functional as nmf
from lightning_nm.functional.evolution import SCALE
from tests.support.bame import OPTIMIZERS, loop
from tests.support.method_loop import Loop, mlp, one_layer

PLAIN = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.4, momentum=0.5),
    "adam": lambda p: torch.optim.Adam(p, 0.02, betas=(0.8, 0.9)),
    "adam-without-momentum": lambda p: torch.optim.AdamW(
        p, 0.02, betas=(0.0, 0.9), weight_decay=0.1
    ),
}


def simulate(run, weight, method, steps, make):
    """A parameter whose optimizer sees kept entries alone; the mask, the oscillations, and the number of exchanges."""
    n, m = run.layer.pattern.n, run.layer.pattern.m
    mask = nmf.magnitude_mask(weight, f"{n}:{m}", dim=1)
    parameter = nn.Parameter(torch.where(mask, weight, 0))
    optimizer = make([parameter])
    (group,) = optimizer.param_groups
    state = optimizer.state[parameter]
    u, v, exchanged = torch.zeros_like(weight), torch.zeros_like(weight), torch.zeros_like(mask)
    oscillations = [0] * (weight.numel() // m)
    count = swaps = 0
    for t in range(steps):
        optimizer.zero_grad()
        (run.batch(t) @ parameter.t() - 1).square().mean().backward()
        g = parameter.grad.clone()
        parameter.grad.masked_fill_(~mask, 0)
        done, adapts = t - method.start, method.start <= t < method.stop
        # One step ahead, for the evidence of this batch; that of momentum adds up to 1 / (1 - mu) steps.
        ahead = group["lr"] / (1 - group.get("momentum", 0)) * g
        seen = (parameter.detach() - ahead).abs()
        if method.evidence == "accumulated" and adapts:
            if (
                count and "exp_avg_sq" in state
            ):  # of kept entries, at the number of steps of the evidence
                own = state["exp_avg_sq"] / (1 - group["betas"][1] ** t) * (1 - 0.999**count)
                v = torch.where(mask, own, v)
            if done % method.gradient_every == 0:
                count += 1
                kept = parameter.detach()[mask].square().mean().sqrt()
                size = method.evidence_rate * method.gradient_every**0.5 * kept
                v = 0.999 * v + 0.001 * g**2
                step = size * g / ((v / (1 - 0.999**count)).sqrt() + 1e-12)
                # The pull of a gradient of one sign stops at ``reach`` times the kept weights' size.
                u = torch.where(mask, 0, u * (1 - size / kept / method.reach) - step)
        optimizer.step()
        with torch.no_grad():
            parameter.masked_fill_(~mask, 0)
        if not adapts or done % method.every:
            continue
        if method.evidence == "accumulated":
            seen = torch.where(mask, parameter.detach(), u).abs()
        found = []
        for b, (keep, value) in enumerate(zip(mask.view(-1, m), seen.view(-1, m), strict=True)):
            p, r = (
                torch.where(keep, value, torch.inf).argmin(),
                torch.where(keep, -1, value).argmax(),
            )
            if value[r] > value[p]:
                found.append((-float(value[r] - value[p]) / (1 + oscillations[b]), b, p, r))
        share = 0.5 * (1 + math.cos(math.pi * done / (method.stop - method.start)))
        for _, b, p, r in sorted(found)[: math.ceil(len(oscillations) * method.budget * share)]:
            pruned, regrown = (divmod(b * m + int(entry), weight.shape[1]) for entry in (p, r))
            oscillations[b] += bool(exchanged[pruned] or exchanged[regrown])
            exchanged[pruned] = exchanged[regrown] = True
            mask[pruned], mask[regrown] = False, True
            with torch.no_grad():
                parameter[pruned], parameter[regrown] = 0.0, u[regrown]
            u[regrown] = 0.0
            for key in {"exp_avg", "momentum_buffer", "exp_avg_sq"} & state.keys():
                state[key][pruned] = state[key][regrown] = 0.0
            if "exp_avg_sq" in state:
                correction = (1 - group["betas"][1] ** (t + 1)) / (1 - 0.999**count)
                state["exp_avg_sq"][regrown] = v[regrown] * correction
            swaps += 1
    return parameter.detach(), mask, oscillations, swaps


BATCH = {"evidence": "batch", "every": 2, "budget": 0.5}


@pytest.mark.parametrize(
    ("name", "pattern", "options"),
    [
        *(("momentum", pattern, BATCH) for pattern in ("2:4", "1:4", "1:16", "3:8")),
        ("momentum", "2:4", {**BATCH, "start": 3, "every": 1, "budget": 1.0}),
        *((name, "2:4", {}) for name in PLAIN),
        *((name, "1:4", {"every": 4, "gradient_every": 2}) for name in PLAIN),
        *((name, "1:16", {"start": 3, "every": 2, "gradient_every": 2}) for name in PLAIN),
        # Not more: after the first gradient all pruned entries of a block have the same |U|, but for rounding errors.
        *(
            (name, "3:8", {"gradient_every": 3, "budget": 0.2, "evidence_rate": 0.1})
            for name in PLAIN
        ),
    ],
)
def test_the_training_is_what_is_written(name, pattern, options):
    method = BAME(**{"stop": 20, "evidence_rate": 0.3, "budget": 0.6, **options})
    run = loop(method, pattern, PLAIN[name])
    weight = one_layer()[0].weight.detach()
    run.train(24)
    expected, mask, oscillations, swaps = simulate(run, weight, method, 24, PLAIN[name])
    assert torch.equal(run.layer.forward_mask, mask)
    torch.testing.assert_close(run.layer.weight.detach(), expected)
    assert run.layer.buffers["oscillation"].tolist() == oscillations
    assert int(run.layer.buffers["exchanges"]) == swaps > 5


@pytest.mark.parametrize(
    "options", [{}, {"every": 5, "gradient_every": 2}, {"evidence": "batch", "every": 20}]
)
def test_the_mask_of_a_sparse_teacher_is_found(options):
    wanted = nmf.nm_mask(torch.rand(32, 64, generator=torch.Generator().manual_seed(0)), "1:8")

    def found(method, steps=400):
        torch.manual_seed(0)
        teacher = torch.randn(32, 64)
        teacher = torch.where(wanted, teacher.sign() + teacher, 0)
        run = Loop(
            method,
            "1:8",
            lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
            nn.Sequential(nn.Linear(64, 32, bias=False)),
            planned_steps=steps,
        )
        for _ in range(steps):
            x = torch.randn(64, 64)
            run.optimizer.zero_grad()
            (run.model(x) - x @ teacher.t()).square().mean().backward()
            run.step()
        return (run.layer.forward_mask & wanted).sum().item() / wanted.sum().item()

    with pytest.warns(UserWarning, match="never adapts"):
        assert found(BAME(start=1.0, stop=1.0)) < 0.3
    assert found(BAME(**options)) > 0.95


@pytest.mark.parametrize("evidence", ["accumulated", "batch"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_entries_are_zero_and_their_state_is_evidence_of_the_phase(name, evidence):
    method = BAME(stop=12, every=1, evidence=evidence, evidence_rate=0.1)
    run = loop(method, make=OPTIMIZERS[name], dtype=torch.float32)
    if evidence == "batch":
        run.layer.param.data.mul_(0.01)  # so that a step of the optimizer is worth an exchange
    for step in range(16):
        run.backward()
        run.optimize()
        layer, pruned = run.layer, ~run.layer.forward_mask
        values = layer.param[pruned]
        assert not values.any()
        assert not torch.signbit(values).any()
        states = [s for s in run.state.values() if s is not None and s.shape == pruned.shape]
        holds = evidence == "accumulated" and step < 12
        assert any(bool(state[pruned].any()) for state in states) == holds
        own = [t for key, t in layer.buffers.items() if key in ("evidence", "evidence_square")]
        assert len(own) == (holds and name == "sgd"), "memory"
        run.sparsifier.step()
    assert run.layer.masks.total_flips > 0
    assert "evidence_count" not in run.layer.buffers


def test_evidence_follows_the_shape_of_the_learning_rate():
    def first(schedule):
        run = loop(BAME(stop=9), make=lambda p: torch.optim.SGD(p, 0.1, momentum=0.5))
        schedule(run.optimizer)
        run.train(1)
        assert not run.layer.param.grad[~run.layer.forward_mask].any(), "as the optimizer saw it"
        return run.state["momentum_buffer"][~run.layer.forward_mask] * SCALE

    schedulers = torch.optim.lr_scheduler
    whole = first(lambda optimizer: None)
    half = first(lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.5))
    cycle = {"total_steps": 9, "div_factor": 10}
    tenth = first(lambda optimizer: schedulers.OneCycleLR(optimizer, 0.4, **cycle))
    climbing = first(lambda optimizer: optimizer.param_groups[0].update(maximize=True))
    torch.testing.assert_close(half, whole / 2)
    torch.testing.assert_close(tenth, whole / 10)
    torch.testing.assert_close(climbing, -whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_changes_no_evidence(name):
    evidence = []
    for most in (math.inf, 1e-3):
        run = loop(BAME(stop=9, evidence_rate=1e-6), make=OPTIMIZERS[name])  # nothing is exchanged
        run.backward()
        run.sparsifier.before_step(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), most)
        run.optimizer.step()
        pruned = ~run.layer.forward_mask
        held = {**run.state, **run.layer.buffers}
        held = {key: s[pruned] for key, s in held.items() if getattr(s, "shape", 0) == pruned.shape}
        evidence.append(held)
    torch.testing.assert_close(*evidence, rtol=0, atol=0)
    assert any(bool(each.any()) for each in held.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"evidence_rate": 0.02},
            "hardly moved.* 0 exchanges in 512 blocks at 60 adaptations; raise evidence_rate=0.02 or reach=1.0",
        ),
        ({"every": 10, "evidence": "batch"}, "use evidence='accumulated'"),
    ],
)
def test_a_phase_that_exchanges_almost_nothing_is_reported_once(options, message):
    model = mlp(64, 64, 64)
    for layer in model[::2]:
        layer.bias.data.zero_()  # so that zeros as inputs make no gradient
    sgd = lambda p: torch.optim.SGD(p, 1e-6)  # noqa: E731
    run = Loop(BAME(stop=60, **options), "1:16", sgd, model, (4, 64))

    def train():
        for _ in range(62):
            run.model(torch.zeros(4, 64)).square().mean().backward()
            run.step()

    with pytest.warns(UserWarning, match=message) as said:
        train()
    assert len(said) == 1


def test_regrown_alive_is_the_share_of_exchanges_that_still_stand():
    run = loop(BAME(stop=30, evidence_rate=0.1))
    masks = [run.layer.forward_mask, *(run.layer.forward_mask for _ in run.steps(30))]
    regrown = [new & ~old for old, new in pairwise(masks)]
    standing = sum(
        (entries & torch.stack(masks[step + 1 :]).all(0)).sum()
        for step, entries in enumerate(regrown)
    )
    times = sum(entries.long() for entries in regrown)
    assert run.sparsifier.stats()["regrown_alive"] == pytest.approx(float(standing / times.sum()))
    assert 0 < standing < times.sum()
    assert times.max() > 1, "an entry was regrown, pruned and regrown"


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("event", ["detach", "other-weights", "rewind"])
def test_evidence_that_is_left_in_the_optimizer_moves_no_weight(name, event):
    """As momentum it would: U has the unit of weights, and Adam divides by the size of gradients."""
    run = loop(BAME(stop=40, evidence_rate=0.1), make=OPTIMIZERS[name])
    weight = run.layer.param

    def train(steps, detached=False):
        """The largest change of a kept weight in one step."""
        largest = 0.0
        for _ in range(steps):
            before, kept = weight.detach().clone(), run.layer.forward_mask
            run.backward(factor=1e-3)  # small gradients
            if detached:
                run.optimizer.step()
            else:
                run.step()
            if kept is not None:
                kept = kept & run.layer.forward_mask
            largest = max(largest, float((weight.detach() - before)[kept].abs().max()))
        return largest

    states = run.states()
    usual = train(10)
    if event == "detach":
        run.sparsifier.bake()
        run.sparsifier.detach()
    elif event == "other-weights":
        run.model.load_state_dict({"0.weight": torch.randn(8, 16, dtype=torch.float64) * 0.2})
    else:
        run.model.load_state_dict(states[0])
        run.sparsifier.load_state_dict(states[1])
    assert train(5, detached=event == "detach") < 5 * usual


def test_layers_that_do_not_train_keep_their_weights():
    for stop_training in (
        lambda run: run.layer.param.requires_grad_(False),
        lambda run: run.optimizer.param_groups[0].update(lr=0.0),
    ):
        run = loop(BAME(stop=40, evidence_rate=0.4), make=OPTIMIZERS["adam"]).train(5)
        stop_training(run)
        run.model.append(nn.Linear(8, 8, dtype=torch.float64))  # so that there is a gradient
        weight = run.layer.weight.detach().clone()
        assert torch.equal(run.train(5).layer.weight, weight)


def test_a_weight_that_is_replaced_is_named():
    run = loop(BAME(stop=20)).train(2)
    run.model[0].weight = nn.Parameter(run.layer.weight.detach().clone())
    run.backward()
    message = r"shape \(8, 16\) is not in SGD any more.*change weights in place"
    with pytest.raises(RuntimeError, match=message):
        run.step()


def test_another_kind_of_evidence_frees_the_first():
    states = loop(BAME(stop=12, evidence_rate=0.5)).train(10).states()
    other = loop(BAME(stop=12, every=3, evidence="batch"))
    with pytest.warns(UserWarning, match="evidence accumulated in the checkpoint, batch here"):
        other.load(states)
    other.train(1)
    assert not any(name.startswith("evidence") for name in other.layer.buffers)


def test_oscillations_saturate():
    run = loop(BAME(stop=20, budget=1.0, evidence_rate=2.0))
    run.layer.buffers["oscillation"].fill_(254)
    run.layer.buffers["exchanged"].fill_(255)
    run.train(8)
    assert run.layer.buffers["oscillation"].max() == 255
    assert run.layer.buffers["oscillation"].min() >= 254


def test_half_precision_scores_are_computed_in_single():
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        values, grad = (torch.randn(64, 64) * size for size in (0.02, 1e-3))
        model[0].weight.data.copy_(values.bfloat16())
        method = BAME(stop=9, every=4, evidence="batch")
        run = Loop(method, make=lambda p: torch.optim.SGD(p, 10.0), model=model.to(dtype))
        run.layer.param.grad = grad.bfloat16().to(dtype)
        run.sparsifier.before_step(run.optimizer)
        moved.append(run.layer.pending.exchange.blocks.numel())
    assert moved[0] == moved[1] > 20


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("dgrad", ["masked", "bi-mask"])
def test_masks_evolve_alike_on_a_gpu(name, dgrad):
    def train(device):
        method = BAME(stop=20, every=2, budget=0.5, evidence_rate=0.5, dgrad=dgrad)
        run = Loop(method, make=OPTIMIZERS[name], model=one_layer().to(device)).train(12)
        assert run.layer.masks.total_flips > 0
        return run.layer.forward_mask.cpu(), run.layer.weight.detach().cpu(), run.sparsifier.stats()

    (mask, weight, stats), (gpu_mask, gpu_weight, gpu_stats) = train("cpu"), train("cuda")
    assert torch.equal(mask, gpu_mask)
    torch.testing.assert_close(weight, gpu_weight)
    assert gpu_stats == pytest.approx(stats, rel=1e-5)
