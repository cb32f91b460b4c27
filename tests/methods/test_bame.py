"""BAME against a simulation written out entry by entry, and what a user relies on."""

import math

import pytest
import torch
from torch import nn

from lightning_nm import BAME, NMSparsifier
from lightning_nm import functional as nmf
from tests.support.bame import OPTIMIZERS, backward, batch, linear, run


def simulate(weight, pattern, steps, *, every, start, stop, budget, rate, mu):
    """BAME by the gradient of a batch, under SGD with momentum, one number at a time."""
    n, m = pattern
    rows, cols = weight.shape
    w = weight.tolist()
    mask = nmf.magnitude_mask(weight, f"{n}:{m}", dim=1).tolist()
    w = [[w[i][j] if mask[i][j] else 0.0 for j in range(cols)] for i in range(rows)]
    buffer = [[0.0] * cols for _ in range(rows)]
    exchanged = [[False] * cols for _ in range(rows)]
    blocks = [(i, c) for i in range(rows) for c in range(cols // m)]
    f = [0] * len(blocks)
    eta = rate / (1 - mu)
    losses, adaptations = [], 0
    for t in range(steps):
        x, y = batch(t)
        current = torch.tensor(w, dtype=torch.float64, requires_grad=True)
        (x @ current.t() - y).square().mean().backward()
        g = current.grad.tolist()
        chosen = []
        if start <= t <= stop and (t - start) % every == 0:
            adaptations += 1
            found = []
            for b, (i, c) in enumerate(blocks):
                span = range(c * m, (c + 1) * m)

                def u(j, i=i, g=g):
                    return abs(w[i][j] - eta * g[i][j])

                p = min((j for j in span if mask[i][j]), key=lambda j: (u(j), j))
                r = min((j for j in span if not mask[i][j]), key=lambda j: (-u(j), j))
                if u(r) > u(p):
                    loss = -g[i][p] * w[i][p] + eta * g[i][p] ** 2 - eta * g[i][r] ** 2
                    found.append((b, p, r, u(r) - u(p), loss))
            progress = (t - start) / (stop - start)
            k = math.ceil(len(blocks) * budget * 0.5 * (1 + math.cos(math.pi * progress)))
            found.sort(key=lambda item: (-item[3] / (1 + f[item[0]]), item[0]))
            chosen = found[:k]
        for i in range(rows):
            for j in range(cols):
                if mask[i][j]:
                    buffer[i][j] = mu * buffer[i][j] + g[i][j] if t else g[i][j]
                    w[i][j] -= rate * buffer[i][j]
        for b, p, r, _, _ in chosen:
            i = blocks[b][0]
            f[b] += exchanged[i][p] or exchanged[i][r]
            mask[i][p], mask[i][r] = False, True
            w[i][p] = w[i][r] = buffer[i][p] = buffer[i][r] = 0.0
            exchanged[i][p] = exchanged[i][r] = True
        losses.append(sum(item[4] for item in chosen))
    return torch.tensor(w, dtype=torch.float64), torch.tensor(mask), f, losses, adaptations


@pytest.mark.parametrize("pattern", [(2, 4), (1, 4), (1, 16), (3, 8)])
@pytest.mark.parametrize(
    "options", [{}, {"start": 3, "every": 1, "budget": 1.0}], ids=["default", "often"]
)
def test_the_evidence_of_a_batch_is_what_is_written(pattern, options):
    options = {"evidence": "batch", "start": 0, "stop": 20, "every": 2, "budget": 0.5, **options}
    make = lambda p: torch.optim.SGD(p, 0.4, momentum=0.5)  # noqa: E731
    module, sparsifier, optimizer, layer = linear(BAME(**options), "{}:{}".format(*pattern), make)
    weight = module[0].weight.detach().clone()
    losses = []
    run(module, sparsifier, optimizer, 24, look=lambda step: losses.append(layer.pending.exchange))
    losses = [0.0 if move is None else float(move.loss_change) for move in losses]
    expected, mask, f, expected_losses, adaptations = simulate(
        weight,
        pattern,
        24,
        every=options["every"],
        start=options["start"],
        stop=20,
        budget=options["budget"],
        rate=0.4,
        mu=0.5,
    )
    assert torch.equal(layer.forward_mask, mask)
    torch.testing.assert_close(layer.weight.detach(), expected)
    assert layer.buffers["oscillation"].tolist() == f
    assert losses == pytest.approx(expected_losses)
    assert not torch.equal(mask, nmf.magnitude_mask(weight, "{}:{}".format(*pattern), dim=1)), (
        "no mask moved"
    )
    assert sum(f) > 0, "no block oscillated"
    assert adaptations > 8


@pytest.mark.parametrize(
    "options", [{}, {"every": 5, "gradient_every": 2}, {"evidence": "batch", "every": 20}]
)
def test_the_mask_of_a_sparse_teacher_is_found(options):
    def found(method, steps=400):
        generator = torch.Generator().manual_seed(0)
        wanted = nmf.nm_mask(torch.rand(32, 64, generator=generator), "1:8", dim=1)
        teacher = torch.randn(32, 64, generator=generator)
        teacher = torch.where(wanted, teacher.sign() + teacher, 0)
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(64, 32, bias=False))
        sparsifier = NMSparsifier(
            module, "1:8", method, skip_first_last=False, planned_steps=steps
        ).attach()
        optimizer = torch.optim.SGD(module.parameters(), 0.5, momentum=0.9)
        sparsifier.register(optimizer)
        for _ in range(steps):
            x = torch.randn(64, 64, generator=generator)
            optimizer.zero_grad()
            (module(x) - x @ teacher.t()).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        return (sparsifier.layers["0"].forward_mask & wanted).sum().item() / wanted.sum().item()

    with pytest.warns(UserWarning, match="never adapts"):
        assert found(BAME(start=1.0, stop=1.0)) < 0.3
    assert found(BAME(**options)) > 0.95


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_weights_and_their_state_are_zero_after_every_step(name):
    module, sparsifier, optimizer, layer = linear(
        BAME(stop=30, every=3, budget=1.0, evidence="batch"),
        make=OPTIMIZERS[name],
        dtype=torch.float32,
    )
    layer.weight.data.mul_(0.01)  # so that a step of the optimizer is worth an exchange
    flips = []

    def look(step):
        pruned = ~layer.forward_mask
        assert not layer.weight[pruned].any()
        assert not torch.signbit(layer.weight[pruned]).any()
        for key, state in optimizer.state[layer.weight].items():
            if isinstance(state, torch.Tensor) and state.shape == layer.weight.shape:
                assert not state[pruned].any(), key
        assert nmf.is_nm(layer.weight, "2:4")
        assert (layer.forward_mask.unflatten(1, (-1, 4)).sum(-1) == 2).all()
        flips.append(int(layer.masks.total_flips))

    run(module, sparsifier, optimizer, 20, look=look)
    assert flips[-1] > flips[0] > 0
    assert layer.weight.count_nonzero() > 50, "it must train"


def test_no_more_blocks_change_than_the_budget_allows():
    module, sparsifier, optimizer, layer = linear(
        BAME(stop=40, budget=0.2, evidence_rate=0.5), "4:8"
    )
    masks = [layer.forward_mask]
    run(module, sparsifier, optimizer, 40, look=lambda step: masks.append(layer.forward_mask))
    changes = []
    for step in range(40):
        changed = (masks[step] ^ masks[step + 1]).unflatten(1, (-1, 8)).sum(-1)
        assert changed.max() <= 2
        assert changed.count_nonzero() <= math.ceil(
            16 * 0.2 * 0.5 * (1 + math.cos(math.pi * step / 40))
        )
        changes.append(int(changed.count_nonzero()))
    assert max(changes) == 4


@pytest.mark.parametrize(
    "evidence", [{"evidence": "batch"}, {"gradient_every": 2, "evidence_rate": 0.5}]
)
@pytest.mark.parametrize("windows", [1, 3])
def test_the_optimizer_sees_a_masked_gradient_and_the_adaptation_the_dense_mean(windows, evidence):
    module, sparsifier, optimizer, layer = linear(
        BAME(start=1, stop=30, every=2, budget=1.0, **evidence)
    )
    for step in range(6):
        mask = layer.forward_mask
        dense_module = nn.Linear(16, 8, bias=False, dtype=torch.float64)
        dense_module.weight.data.copy_(layer.forward_weight())
        backward(dense_module, step)
        dense = dense_module.weight.grad
        backward(module, step, windows)
        expected = dense if step % 2 == 1 else torch.where(mask, dense, 0)
        torch.testing.assert_close(layer.weight.grad, expected)
        sparsifier.before_step(optimizer)
        torch.testing.assert_close(layer.weight.grad, torch.where(mask, dense, 0))
        optimizer.step()
        sparsifier.step()


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    "evidence", [{"evidence": "batch"}, {"evidence_rate": 0.5}], ids=["batch", "accumulated"]
)
def test_a_step_that_a_scaler_skips_leaves_the_adaptation_pending(evidence, make):
    def train(overflows):
        method = BAME(start=1, stop=20, every=3, budget=1.0, **evidence)
        module, sparsifier, optimizer, layer = linear(method, dtype=torch.float32, make=make)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
        step = 0
        while layer.step < 6:
            x, y = batch(layer.step, torch.float32)
            optimizer.zero_grad()
            overflow = step in overflows
            before = (
                layer.step,
                layer.forward_mask,
                layer.weight.detach().clone(),
                dict(layer.buffers),
            )
            scaler.scale((module(x) - y).square().mean() * (math.inf if overflow else 1)).backward()
            scaler.unscale_(optimizer)
            sparsifier.before_step(optimizer)
            scaler.step(optimizer)
            scaler.update()
            sparsifier.step()
            if overflow:
                assert layer.step == before[0]
                assert torch.equal(layer.forward_mask, before[1])
                assert torch.equal(layer.weight, before[2]) or layer.step == 0
                assert layer.progress.dense_gradient == (
                    layer.step in (1, 4) or (layer.step > 0 and "evidence" not in evidence)
                )
            step += 1
        return layer

    straight, skipping = train(()), train((0, 2, 3, 6))
    assert torch.equal(straight.weight, skipping.weight)
    assert torch.equal(straight.forward_mask, skipping.forward_mask)
    assert int(straight.masks.total_flips) == int(skipping.masks.total_flips) > 0


def test_a_fused_step_that_skips_itself_leaves_the_adaptation_pending_even_if_only_pruned_entries_overflow():
    make = lambda p: torch.optim.SGD(p, 0.4, momentum=0.5, fused=True)  # noqa: E731
    module, sparsifier, optimizer, layer = linear(
        BAME(stop=20, budget=1.0, evidence_rate=9.0), make=make, dtype=torch.float32
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = batch(0, torch.float32)
    scaler.scale((module(x) - y).square().mean()).backward()
    layer.weight.grad[~layer.forward_mask] = math.inf
    mask = layer.forward_mask
    sparsifier.before_step(optimizer, scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    sparsifier.step()
    assert torch.equal(layer.forward_mask, mask)
    assert layer.weight.isfinite().all()


def test_a_forgotten_before_step_is_named():
    module, sparsifier, optimizer, _ = linear(BAME(stop=20, every=2, evidence="batch"))
    run(module, sparsifier, optimizer, 1)
    for step in (1, 2):
        backward(module, step)
        if step == 2:
            with pytest.raises(
                RuntimeError, match=r"before_step\(\) for layer '0'.*call sparsifier\.before_step"
            ):
                optimizer.step()
        else:
            optimizer.step()
            sparsifier.step()


def test_oscillations_saturate():
    module, sparsifier, optimizer, layer = linear(BAME(stop=20, budget=1.0, evidence_rate=2.0))
    layer.buffers["oscillation"].fill_(254)
    layer.buffers["exchanged"].fill_(255)
    run(module, sparsifier, optimizer, 8)
    assert layer.buffers["oscillation"].max() == 255
    assert layer.buffers["oscillation"].min() >= 254


def test_half_precision_scores_are_computed_in_single():
    moved = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 64, bias=False))
        with torch.no_grad():
            module[0].weight.copy_((torch.randn(64, 64) * 0.02).bfloat16())
        grad = (torch.randn(64, 64) * 1e-3).bfloat16()
        module.to(dtype)
        sparsifier = NMSparsifier(
            module, "2:4", BAME(stop=9, every=4, evidence="batch"), skip_first_last=False
        )
        optimizer = torch.optim.SGD(module.parameters(), 10.0)
        sparsifier.attach().register(optimizer)
        module[0].weight.grad = grad.to(dtype)
        sparsifier.before_step(optimizer)
        moved.append(sparsifier.layers["0"].pending.exchange.blocks.numel())
    assert moved[0] == moved[1] > 20
    assert abs(moved[2] - moved[0]) <= 0.1 * moved[0], (
        "float16 rounds the smallest gradients themselves"
    )


def test_gradients_that_are_not_zeroed_do_not_revive_what_was_pruned():
    module, sparsifier, optimizer, layer = linear(
        BAME(stop=20, every=2, budget=1.0, evidence="batch")
    )
    for step in range(5):
        x, y = batch(step)
        (module(x) - y).square().mean().backward()  # gradients add up over the steps
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        assert not optimizer.state[layer.weight]["momentum_buffer"][~layer.forward_mask].any()
    assert layer.masks.total_flips > 0


def test_an_optimizer_that_cannot_be_matched_is_refused_before_training():
    module = nn.Sequential(nn.Linear(16, 8))
    sparsifier = NMSparsifier(module, "2:4", BAME(stop=10, every=5), skip_first_last=False).attach()
    with pytest.raises(ValueError, match=r"LBFGS.*layer '0'"):
        sparsifier.register(torch.optim.LBFGS(module.parameters()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("dgrad", ["masked", "bi-mask"])
def test_masks_evolve_alike_on_a_gpu(name, dgrad):
    def train(device):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.float64)).to(device)
        method = BAME(stop=20, every=2, budget=0.5, evidence_rate=0.5, dgrad=dgrad)
        sparsifier = NMSparsifier(module, "2:4", method, skip_first_last=False).attach()
        optimizer = OPTIMIZERS[name](module.parameters())
        sparsifier.register(optimizer)
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(32, 64, generator=generator, dtype=torch.float64).to(device)
            optimizer.zero_grad()
            (module(x) - 1).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        (layer,) = sparsifier.layers.values()
        assert layer.masks.total_flips > 0
        return layer.forward_mask.cpu(), layer.weight.detach().cpu(), sparsifier.stats()

    (mask, weight, stats), (gpu_mask, gpu_weight, gpu_stats) = train("cpu"), train("cuda")
    assert torch.equal(mask, gpu_mask)
    torch.testing.assert_close(weight, gpu_weight)
    assert gpu_stats == pytest.approx(stats, rel=1e-5)
