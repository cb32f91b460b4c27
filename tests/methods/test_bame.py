"""BAME against a simulation written out entry by entry, and what a user relies on."""

import copy
import gc
import io
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_nm import BAME, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.nn.move import achieved_loss_change

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.02, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.02),
    "radam": lambda p: torch.optim.RAdam(p, 0.02),
    "adamax": lambda p: torch.optim.Adamax(p, 0.02),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, 20.0, weight_decay=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "muon": lambda p: torch.optim.Muon(p, 0.02),
}


def linear(method, pattern="2:4", make=OPTIMIZERS["sgd"], dtype=torch.float64, seed=0, **options):
    """A linear layer [8, 16] under BAME, its optimizer and its layer."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(16, 8, bias=False, dtype=dtype))
    sparsifier = NMSparsifier(module, pattern, method, skip_first_last=False, **options).attach()
    optimizer = make(module.parameters())
    sparsifier.register(optimizer)
    return module, sparsifier, optimizer, sparsifier.layers["0"]


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(12, 16, generator=generator, dtype=dtype), torch.randn(12, 8, generator=generator, dtype=dtype)


def backward(module, step, windows=1):
    """A training step up to its gradients."""
    dtype = next(module.parameters()).dtype
    module.zero_grad()
    x, y = batch(step, dtype)
    for part_x, part_y in zip(x.chunk(windows), y.chunk(windows), strict=True):
        ((module(part_x) - part_y).square().mean() / windows).backward()


def run(module, sparsifier, optimizer, steps, start=0, look=lambda step: None, windows=1):
    for step in range(start, start + steps):
        backward(module, step, windows)
        sparsifier.before_step(optimizer)
        optimizer.step()
        look(step)
        sparsifier.step()


# --------------------------------------------------------------------------------------------------- the whole method


def simulate(weight, pattern, steps, *, every, start, stop, budget, score, selection, swaps, rank_by, osc, rate, mu):
    """BAME under SGD with momentum, one number at a time."""
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
                    if score == "virtual":
                        return abs(w[i][j] - eta * g[i][j])
                    return abs(g[i][j] * w[i][j]) if mask[i][j] else eta * g[i][j] ** 2

                kept = sorted((j for j in span if mask[i][j]), key=lambda j: (u(j), j))
                gone = sorted((j for j in span if not mask[i][j]), key=lambda j: (-u(j), j))
                pairs = [(p, r) for p, r in list(zip(kept, gone, strict=False))[:swaps] if u(r) > u(p)]
                gain = sum(u(r) - u(p) for p, r in pairs)
                loss = sum(-g[i][p] * w[i][p] + eta * g[i][p] ** 2 - eta * g[i][r] ** 2 for p, r in pairs)
                value = gain if rank_by == "score" else -loss
                if pairs and value > 0:
                    found.append((b, pairs, value, loss))
            progress = (t - start) / (stop - start)
            k = math.ceil(len(blocks) * budget * 0.5 * (1 + math.cos(math.pi * progress)))
            if selection == "quantile":
                threshold = sorted(f)[math.ceil(0.9 * len(f)) - 1]
                found = [item for item in found if f[item[0]] <= threshold]
                found.sort(key=lambda item: (-item[2], item[0]))
            else:
                found.sort(key=lambda item: (-item[2] / (1 + f[item[0]]), item[0]))
            chosen = found[:k]
        for i in range(rows):
            for j in range(cols):
                if mask[i][j]:
                    buffer[i][j] = mu * buffer[i][j] + g[i][j] if t else g[i][j]
                    w[i][j] -= rate * buffer[i][j]
        for b, pairs, _, _ in chosen:
            i = blocks[b][0]
            entries = [e for pair in pairs for e in pair]
            f[b] += osc == "flip" or any(exchanged[i][e] for e in entries)
            for p, r in pairs:
                mask[i][p], mask[i][r] = False, True
                w[i][p] = w[i][r] = buffer[i][p] = buffer[i][r] = 0.0
                exchanged[i][p] = exchanged[i][r] = True
        losses.append(sum(item[3] for item in chosen))
    return torch.tensor(w, dtype=torch.float64), torch.tensor(mask), f, losses, adaptations


@pytest.mark.parametrize("pattern", [(2, 4), (1, 4), (1, 16), (3, 8)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": "taylor-abs"},
        {"selection": "quantile"},
        {"max_swaps_per_block": 2},
        {"rank_by": "loss"},
        {"oscillation": "flip"},
        {"start": 3, "every": 1, "budget": 1.0},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_the_whole_method_is_what_is_written(pattern, options):
    options = {"start": 0, "stop": 20, "every": 2, "budget": 0.5, **options}
    make = lambda p: torch.optim.SGD(p, 0.4, momentum=0.5)  # noqa: E731
    module, sparsifier, optimizer, layer = linear(BAME(**options), "{}:{}".format(*pattern), make)
    weight = module[0].weight.detach().clone()
    losses = []
    run(module, sparsifier, optimizer, 24, look=lambda step: losses.append(layer.handover.move))
    losses = [0.0 if move is None else float(move.loss_change) for move in losses]
    expected, mask, f, expected_losses, adaptations = simulate(
        weight,
        pattern,
        24,
        every=options["every"],
        start=options["start"],
        stop=20,
        budget=options["budget"],
        score=options.get("score", "virtual"),
        selection=options.get("selection", "ratio"),
        swaps=min(options.get("max_swaps_per_block", 1), pattern[0], pattern[1] - pattern[0]),
        rank_by=options.get("rank_by", "score"),
        osc=options.get("oscillation", "return"),
        rate=0.4,
        mu=0.5,
    )
    assert torch.equal(layer.forward_mask, mask)
    torch.testing.assert_close(layer.weight.detach(), expected)
    assert layer.buffers["oscillation"].tolist() == f
    assert losses == pytest.approx(expected_losses)
    assert not torch.equal(mask, nmf.magnitude_mask(weight, "{}:{}".format(*pattern), dim=1)), "no mask moved"
    assert sum(f) > 0, "no block oscillated"
    assert adaptations > 8


@pytest.mark.parametrize("options", [{}, {"rank_by": "loss"}, {"score": "taylor-abs"}, {"selection": "quantile"}])
def test_the_mask_of_a_sparse_teacher_is_found(options):
    def found(method, steps=400):
        generator = torch.Generator().manual_seed(0)
        wanted = nmf.nm_mask(torch.rand(32, 64, generator=generator), "1:8", dim=1)
        teacher = torch.randn(32, 64, generator=generator)
        teacher = torch.where(wanted, teacher.sign() + teacher, 0)
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(64, 32, bias=False))
        sparsifier = NMSparsifier(module, "1:8", method, skip_first_last=False, planned_steps=steps).attach()
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
    assert found(BAME(every=20, **options)) > 0.95


# ------------------------------------------------------------------------------------------------- what is relied upon


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_weights_and_their_state_are_zero_after_every_step(name):
    module, sparsifier, optimizer, layer = linear(
        BAME(stop=30, every=3, budget=1.0, score="taylor-abs"), make=OPTIMIZERS[name], dtype=torch.float32
    )
    flips = []

    def look(step):
        pruned = ~layer.forward_mask
        assert not layer.weight[pruned].any()
        assert not torch.signbit(layer.weight[pruned]).any()
        for key, state in optimizer.state[layer.weight].items():
            if isinstance(state, torch.Tensor) and state.shape == layer.weight.shape and name != "rprop":
                # Adamax bounds its norm from below by its epsilon
                assert state[pruned].abs().max() <= (1e-8 if key == "exp_inf" else 0), key
        assert nmf.is_nm(layer.weight, "2:4")
        assert (layer.forward_mask.unflatten(1, (-1, 4)).sum(-1) == 2).all()
        flips.append(int(layer.total_flips))

    run(module, sparsifier, optimizer, 20, look=look)
    assert flips[-1] > flips[0] > 0
    assert layer.weight.count_nonzero() > 50, "it must train"


def test_between_adaptations_the_mask_stands_still_and_after_stop_for_good():
    module, sparsifier, optimizer, layer = linear(BAME(start=2, stop=11, every=4, budget=1.0))
    masks = [layer.forward_mask]
    run(module, sparsifier, optimizer, 24, look=lambda step: masks.append(layer.forward_mask))
    moved = [step for step in range(24) if not torch.equal(masks[step], masks[step + 1])]
    assert moved == [2, 6, 10]


def test_no_more_blocks_change_than_the_budget_and_the_swaps_allow():
    module, sparsifier, optimizer, layer = linear(BAME(stop=40, every=1, budget=0.2, max_swaps_per_block=2), "4:8")
    masks = [layer.forward_mask]
    run(module, sparsifier, optimizer, 40, look=lambda step: masks.append(layer.forward_mask))
    changes = []
    for step in range(40):
        changed = (masks[step] ^ masks[step + 1]).unflatten(1, (-1, 8)).sum(-1)
        assert changed.max() <= 4
        assert changed.count_nonzero() <= math.ceil(16 * 0.2 * 0.5 * (1 + math.cos(math.pi * step / 40)))
        changes.append(int(changed.count_nonzero()))
    assert changes[0] == 4


@pytest.mark.parametrize("windows", [1, 3])
def test_the_optimizer_sees_a_masked_gradient_and_the_adaptation_the_dense_mean(windows):
    module, sparsifier, optimizer, layer = linear(BAME(start=1, stop=30, every=2, budget=1.0))
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


def test_a_step_that_a_scaler_skips_leaves_the_adaptation_pending():
    def train(overflows):
        module, sparsifier, optimizer, layer = linear(BAME(start=1, stop=20, every=3, budget=1.0), dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
        step = 0
        while layer.step < 6:
            x, y = batch(layer.step, torch.float32)
            optimizer.zero_grad()
            overflow = step in overflows
            before = (layer.step, layer.forward_mask, layer.weight.detach().clone(), dict(layer.buffers))
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
                assert layer.dense_gradient == (layer.step in (1, 4))
            step += 1
        return layer

    straight, skipping = train(()), train((0, 2, 3, 6))
    assert torch.equal(straight.weight, skipping.weight)
    assert torch.equal(straight.forward_mask, skipping.forward_mask)
    assert int(straight.total_flips) == int(skipping.total_flips) > 0


def test_a_fused_step_that_skips_itself_leaves_the_adaptation_pending_even_if_only_pruned_entries_overflow():
    make = lambda p: torch.optim.SGD(p, 0.4, momentum=0.5, fused=True)  # noqa: E731
    module, sparsifier, optimizer, layer = linear(BAME(stop=20, every=2, budget=1.0), make=make, dtype=torch.float32)
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
    module, sparsifier, optimizer, _ = linear(BAME(stop=20, every=2))
    run(module, sparsifier, optimizer, 1)
    for step in (1, 2):
        backward(module, step)
        if step == 2:
            with pytest.raises(RuntimeError, match=r"before_step\(\) for layer '0'.*call sparsifier\.before_step"):
                optimizer.step()
        else:
            optimizer.step()
            sparsifier.step()


def test_a_layer_without_a_gradient_in_its_window_is_left_alone():
    _, sparsifier, optimizer, layer = linear(BAME(stop=20, every=1))
    mask = layer.forward_mask
    other = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [other]})
    for _ in range(3):
        other.grad = torch.ones(1)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert torch.equal(layer.forward_mask, mask)
    assert layer.step == 3


def test_oscillations_saturate():
    module, sparsifier, optimizer, layer = linear(BAME(stop=20, every=1, budget=1.0, oscillation="flip"))
    layer.buffers["oscillation"].fill_(254)
    run(module, sparsifier, optimizer, 8)
    assert layer.buffers["oscillation"].max() == 255
    assert layer.buffers["oscillation"].min() >= 254


@pytest.mark.parametrize("layout", ["linear", "conv", "conv-flat", "conv-groups", "channels-last"])
def test_convolutions_evolve_along_their_own_blocks(layout):
    torch.manual_seed(0)
    conv = nn.Linear(16, 8) if layout == "linear" else nn.Conv2d(16, 8, 3, groups=2 if "groups" in layout else 1)
    if layout == "channels-last":
        conv = conv.to(memory_format=torch.channels_last)
    module = nn.Sequential(conv)
    sparsifier = NMSparsifier(
        module,
        "2:4",
        BAME(stop=20, every=2, budget=1.0, dgrad="bi-mask"),
        skip_first_last=False,
        conv_layout="flat" if layout == "conv-flat" else "channels",
    ).attach()
    optimizer = torch.optim.SGD(module.parameters(), 0.3, momentum=0.9)
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    x = torch.randn(4, 16) if layout == "linear" else torch.randn(4, 16, 5, 5)
    start = layer.forward_mask
    for _ in range(8):
        optimizer.zero_grad()
        (module(x) - 1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        rows = layer.rows(layer.forward_mask)
        assert (rows.movedim(1, -1).unflatten(-1, (-1, 4)).sum(-1) == 2).all()
        assert not layer.weight[~layer.forward_mask].any()
        assert not (layer.backward_mask & ~layer.forward_mask).any()
        for group in layer.rows(layer.backward_mask)[layer.permutation].chunk(layer.groups):
            assert nmf.is_nm(group, "2:4", dim=0)
    assert (layer.forward_mask ^ start).any()


def test_dgrad_bi_mask_follows_the_weights_between_adaptations():
    method = BAME(stop=10, every=100, dgrad="bi-mask")
    with pytest.warns(UserWarning, match="adapts once"):
        module, sparsifier, optimizer, layer = linear(method)
    method._bi_mask.permute_every = 4
    marks = []
    run(module, sparsifier, optimizer, 9, look=lambda step: marks.append((layer.backward_mask, layer.flips)))
    moved = [step for step in range(8) if not torch.equal(marks[step][0], marks[step + 1][0])]
    assert set(moved) <= {3, 7}
    assert moved, "the weights moved, so the mask should have"
    assert len({int(flips) for _, flips in marks}) == 1, "the flips stay those of the last adaptation"


def test_the_flat_layout_evolves_alike_in_every_memory_format():
    def train(memory_format):
        torch.manual_seed(0)
        conv = nn.Conv2d(16, 8, 3).double().to(memory_format=memory_format)
        module = nn.Sequential(conv)
        method = BAME(stop=20, every=2, budget=1.0, score="taylor-abs")
        sparsifier = NMSparsifier(module, "2:4", method, skip_first_last=False, conv_layout="flat").attach()
        optimizer = torch.optim.AdamW(module.parameters(), 0.05)
        sparsifier.register(optimizer)
        (layer,) = sparsifier.layers.values()
        x = torch.randn(4, 16, 5, 5, dtype=torch.float64)
        for _ in range(6):
            optimizer.zero_grad()
            (module(x) - 1).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            pruned = ~layer.forward_mask
            assert not layer.weight[pruned].any()
            assert not optimizer.state[conv.weight]["exp_avg"][pruned].any()
            achieved = achieved_loss_change([layer], lambda: (module(x) - 1).square().mean())
            assert not layer.weight[pruned].any()
            sparsifier.step()
        return conv.weight.detach().contiguous(), int(layer.total_flips), achieved

    plain, channels_last = train(torch.contiguous_format), train(torch.channels_last)
    torch.testing.assert_close(plain[0], channels_last[0])
    assert plain[1] == channels_last[1] > 0


def test_the_transposed_layout_evolves_as_the_plain_one():
    from tests.kinds import hugging_face_conv1d

    torch.manual_seed(0)
    plain = nn.Linear(32, 64).double()
    transposed = hugging_face_conv1d()(64, 32).double()
    with torch.no_grad():
        transposed.weight.copy_(plain.weight.t())
        transposed.bias.copy_(plain.bias)
    weights = []
    for module in (plain, transposed):
        torch.manual_seed(1)
        sparsifier = NMSparsifier(
            nn.Sequential(module), "2:4", BAME(stop=9, every=2, budget=1.0), skip_first_last=False
        ).attach()
        optimizer = torch.optim.SGD(module.parameters(), 1.0, momentum=0.9)
        sparsifier.register(optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            (module(torch.randn(8, 32, dtype=torch.float64)) - 1).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        (layer,) = sparsifier.layers.values()
        assert layer.total_flips > 0
        weights.append(layer.rows(layer.weight.detach()))
    torch.testing.assert_close(*weights)


def test_a_permutation_that_is_due_with_an_adaptation_is_searched_once(monkeypatch):
    from lightning_nm.methods import bi_mask

    searched = []
    search = bi_mask.search_permutation
    monkeypatch.setattr(bi_mask, "search_permutation", lambda *a, **k: searched.append(1) or search(*a, **k))
    method = BAME(stop=20, every=1, dgrad="bi-mask")
    method._bi_mask.permute_every = 4
    module, sparsifier, optimizer, _ = linear(method)
    run(module, sparsifier, optimizer, 9)
    assert len(searched) == 3, "at the start and after steps 4 and 8"


def test_a_step_of_a_subclass_that_calls_its_bases_counts_once():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch hooks a class when it is first used
    module, sparsifier, optimizer, layer = linear(BAME(stop=20, every=1), make=lambda p: Twice(p, 0.1))
    run(module, sparsifier, optimizer, 5)
    assert layer.step == sparsifier.clock == 5


def test_weights_loaded_while_training_have_no_latent_values_either():
    module, sparsifier, optimizer, layer = linear(BAME(stop=20, every=2))
    run(module, sparsifier, optimizer, 3)
    module.load_state_dict({"0.weight": torch.randn(8, 16, dtype=torch.float64)})
    assert not layer.weight[~layer.forward_mask].any()
    layer.weight.data.add_(1)  # as averaging does, behind our back
    assert sparsifier.state_dict()["layers"]["0"]["latent"] is None


def test_half_precision_scores_are_computed_in_single():
    moved = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 64, bias=False))
        with torch.no_grad():
            module[0].weight.copy_((torch.randn(64, 64) * 0.02).bfloat16())
        grad = (torch.randn(64, 64) * 1e-4).bfloat16()
        module.to(dtype)
        sparsifier = NMSparsifier(module, "2:4", BAME(stop=9, every=4, score="taylor-abs"), skip_first_last=False)
        optimizer = torch.optim.SGD(module.parameters(), 10.0)
        sparsifier.attach().register(optimizer)
        module[0].weight.grad = grad.to(dtype)
        sparsifier.before_step(optimizer)
        moved.append(sparsifier.layers["0"].handover.move.adapted)
    assert moved[0] == moved[1] > 20
    assert abs(moved[2] - moved[0]) <= 0.1 * moved[0], "float16 rounds the smallest gradients themselves"


# ------------------------------------------------------------------------------------------------------- the schedule


def test_a_layer_that_joins_late_evolves_and_freezes_with_the_others():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    method = BAME(stop=8, every=2, budget=1.0, score="taylor-abs")
    sparsifier = NMSparsifier(module, "2:4", method, skip_first_last=False).attach()
    optimizer = torch.optim.SGD(module[0].parameters(), 0.5)
    sparsifier.register(optimizer)
    late = sparsifier.layers["1"]
    masks = [late.forward_mask]
    for step in range(14):
        if step == 5:
            optimizer.add_param_group({"params": module[1].parameters(), "lr": 0.5})
        optimizer.zero_grad()
        (module(torch.randn(8, 16)) - 1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        masks.append(late.forward_mask)
    moved = [step for step in range(14) if not torch.equal(masks[step], masks[step + 1])]
    assert moved == [5, 6], "at once what it missed, then with the others until they all freeze"
    assert late.step == 9
    assert not late.dense_gradient


def test_the_clock_runs_while_no_masked_layer_is_trained():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    sparsifier = NMSparsifier(
        module, "2:4", BAME(stop=8, every=2, budget=1.0, score="taylor-abs"), include="0"
    ).attach()
    optimizer = torch.optim.SGD(module[1].parameters(), 0.5)
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    masks = [layer.forward_mask]
    for step in range(14):
        if step == 5:  # the backbone is unfrozen
            optimizer.add_param_group({"params": module[0].parameters(), "lr": 0.5})
        optimizer.zero_grad()
        (module(torch.randn(8, 16)) - 1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        masks.append(layer.forward_mask)
    assert [step for step in range(14) if not torch.equal(masks[step], masks[step + 1])] == [5, 6]
    assert (sparsifier.clock, layer.step, layer.dense_gradient) == (14, 9, False)


def test_a_step_that_raises_does_not_stop_the_clock():
    module, sparsifier, optimizer, layer = linear(BAME(stop=20, every=2))

    def closure():
        raise MemoryError

    with pytest.raises(MemoryError):
        optimizer.step(closure)
    sparsifier.step()
    run(module, sparsifier, optimizer, 4)
    assert layer.step == sparsifier.clock == 4


def test_gradients_that_are_not_zeroed_do_not_revive_what_was_pruned():
    module, sparsifier, optimizer, layer = linear(BAME(stop=20, every=2, budget=1.0, score="taylor-abs"))
    for step in range(5):
        x, y = batch(step)
        (module(x) - y).square().mean().backward()  # gradients add up over the steps
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        assert not optimizer.state[layer.weight]["momentum_buffer"][~layer.forward_mask].any()
    assert layer.total_flips > 0


def test_a_window_without_a_gradient_leaves_the_adaptation_pending():
    module, sparsifier, optimizer, layer = linear(BAME(start=2, stop=6, every=3, budget=1.0))
    masks = [layer.forward_mask]
    other = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [other]})
    for step in range(8):
        backward(module, step)
        other.grad = torch.ones(1)
        if step in (2, 3):
            layer.weight.grad = None
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        masks.append(layer.forward_mask)
    assert [step for step in range(8) if not torch.equal(masks[step], masks[step + 1])] == [4, 5]


def test_two_instances_report_their_own_windows_together():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    short = BAME(stop=2, every=1, budget=1.0, score="taylor-abs")
    long = BAME(stop=100, every=1, budget=1.0, score="taylor-abs")
    rules = [{"include": "0", "method": short}]
    sparsifier = NMSparsifier(module, "2:4", long, rules=rules, skip_first_last=False).attach()
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    sparsifier.register(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        (module(torch.randn(8, 16)) - 1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    together, layers = sparsifier.stats(), sparsifier.layer_stats()
    assert layers["0"]["frozen_blocks"] == 1
    assert layers["1"]["frozen_blocks"] < 1
    for key in ("frozen_blocks", "adapted_blocks"):
        assert together[key] == pytest.approx((layers["0"][key] + layers["1"][key]) / 2)
    assert together["adapted_blocks"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": -1}, "start=-1 must be a training step"),
        ({"stop": 1.5}, r"stop=1\.5 is not a share.*an integer for training steps"),
        ({"start": 0.5, "stop": 0.2}, r"stop=0\.2 lies before start=0\.5"),
        ({"start": 10, "stop": 5}, "stop=5 lies before start=10"),
        ({"every": 0}, "every=0 must be an integer of at least 1"),
        ({"every": 2.5}, r"every=2\.5 must be an integer"),
        ({"budget": 0.0}, r"budget=0\.0 .* must lie in \(0, 1\]"),
        ({"budget": 1.1}, r"budget=1\.1"),
        ({"budget": math.nan}, "budget=nan"),
        ({"stop": math.nan}, "stop=nan is not a share"),
        ({"max_swaps_per_block": 0}, "max_swaps_per_block=0"),
        ({"score": "taylor"}, "score='taylor' is unknown: use 'virtual' or 'taylor-abs'"),
        ({"selection": "rank"}, "selection='rank'"),
        ({"rank_by": "gain"}, "rank_by='gain'"),
        ({"oscillation": "ema"}, "oscillation='ema'"),
        ({"dgrad": "transposable"}, "dgrad='transposable'"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BAME(**options)


@pytest.mark.parametrize("moment", [True, "0.5", None])
def test_moments_are_numbers(moment):
    with pytest.raises(TypeError, match=r"stop=.* must be an integer \(training steps\) or a float"):
        BAME(stop=moment)


def test_shares_need_a_plan_and_become_steps():
    module = nn.Linear(16, 8)
    with pytest.raises(ValueError, match=r"stop=0\.66 is a share.*not known.*give stop as an integer"):
        NMSparsifier(module, "2:4", "bame", skip_first_last=False).attach()
    assert type(module) is nn.Linear
    with pytest.raises(ValueError, match=r"stop=0\.1 is step 10 of 100, before start=50"):
        NMSparsifier(module, "2:4", BAME(50, 0.1), skip_first_last=False, planned_steps=100).attach()
    assert BAME(0.1, 0.5).schedule(1000) == (100, 500)
    assert BAME(1, 1.0).schedule(1000) == (1, 1000)
    assert BAME(1, 7).schedule(None) == (1, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 1.0, "stop": 1.0}, "never adapts: it starts at step 100 of 100"),
        ({"start": 200, "stop": 300}, "never adapts: it starts at step 200 of 100"),
        ({"every": 500}, "adapts once and never again: every=500 steps do not fit between step 0 and step 65"),
    ],
)
def test_an_interval_that_never_fires_is_warned_of(options, message):
    with pytest.warns(UserWarning, match=message):
        NMSparsifier(nn.Linear(16, 8), "2:4", BAME(**options), skip_first_last=False, planned_steps=100).attach()


def test_flops_follow_the_schedule():
    module, sparsifier, optimizer, _ = linear(BAME(start=1, stop=5, every=2), "1:4")
    module(torch.zeros(1, 16, dtype=torch.float64))
    shares = []
    run(module, sparsifier, optimizer, 10, look=lambda step: shares.append(sparsifier.flops_ratios()))
    r, dense = 1 / 4, 2  # steps 1 and 3 need the dense gradient
    mean = sparsifier.mean_flops_ratios()
    assert mean["paper"] == mean["arithmetic"] == pytest.approx((10 * 2 * r + dense + (10 - dense) * r) / 30)
    assert mean["eligible"] == pytest.approx((r + 2) / 3)
    with_own, sparsifier, optimizer, _ = linear(BAME(start=1, stop=5, every=2, dgrad="bi-mask"), "1:4")
    run(with_own, sparsifier, optimizer, 10)
    assert sparsifier.mean_flops_ratios()["eligible"] == pytest.approx((2 * r + 1) / 3)


# --------------------------------------------------------------------------------------------- figures of the evolution


def test_statistics_against_their_definitions():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 32))
    sparsifier = NMSparsifier(module, "2:4", BAME(stop=9, every=4, budget=0.2), skip_first_last=False).attach()
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    sparsifier.register(optimizer)
    layers = list(sparsifier.layers.values())
    assert sparsifier.stats()["adapted_blocks"] == sparsifier.stats()["oscillation"] == 0
    blocks = sum(layer.weight.numel() // 4 for layer in layers)
    for step in range(12):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        module(torch.randn(8, 16, generator=generator)).sub(1).square().mean().backward()
        sparsifier.before_step(optimizer)
        moves = [layer.handover.move for layer in layers]
        before = [layer.forward_mask for layer in layers]
        optimizer.step()
        sparsifier.step()
        stats = sparsifier.stats()
        if step in (0, 4, 8):
            changed = sum(
                int((layer.forward_mask ^ old).unflatten(1, (-1, 4)).any(-1).sum())
                for layer, old in zip(layers, before, strict=True)
            )
            assert stats["adapted_blocks"] == pytest.approx(changed / blocks)
            assert stats["predicted_loss_change"] == pytest.approx(sum(float(m.loss_change) for m in moves), rel=1e-5)
            assert stats["frozen_blocks"] == pytest.approx(sum(int(m.held) for m in moves) / blocks)
            kept = stats
        elif step < 9:
            for key in ("adapted_blocks", "predicted_loss_change", "frozen_blocks", "flip_rate"):
                assert stats[key] == kept[key], "figures of the last adaptation stay until the next"
        else:
            assert (stats["adapted_blocks"], stats["frozen_blocks"], stats["predicted_loss_change"]) == (0, 1, 0)
        f = torch.cat([layer.buffers["oscillation"] for layer in layers]).double()
        assert stats["oscillation"] == pytest.approx(f.mean().item())
    assert kept["frozen_blocks"] > 0


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_predicted_loss_change_is_achieved_for_small_steps(name):
    make = {"sgd": lambda p: torch.optim.SGD(p, 1e-4), "adam": lambda p: torch.optim.Adam(p, 1e-6)}[name]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64, dtype=torch.float64), nn.Tanh(), nn.Linear(64, 8, dtype=torch.float64))
    module[0].weight.data.mul_(1e-6)  # so that a small step is worth an exchange
    sparsifier = NMSparsifier(module, "2:4", BAME(stop=100, every=1), include="0").attach()
    optimizer = make(module.parameters())
    sparsifier.register(optimizer)
    layer = sparsifier.layers["0"]
    x, y = batch(0)

    def loss():
        return (module(x) - y).square().mean()

    optimizer.zero_grad()
    loss().backward()
    sparsifier.before_step(optimizer)
    optimizer.step()
    before = copy.deepcopy((layer.weight.detach(), layer.marks))
    predicted = float(layer.handover.move.loss_change)
    achieved = achieved_loss_change([layer], loss)
    assert predicted < 0
    assert achieved == pytest.approx(predicted, rel=0.02)
    assert torch.equal(layer.weight.detach(), before[0])
    assert torch.equal(layer.marks, before[1])
    sparsifier.step()
    assert achieved_loss_change([layer], loss) is None


# ------------------------------------------------------------------------------------------------------------- the cost


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made meanwhile held at a time."""

    def __init__(self, *known):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        key = storage._cdata
        if key not in self.seen and storage.nbytes():
            self.seen.add(key)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("pattern", ["1:16", "2:4", "1:2", "8:16"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_adaptation_needs_few_temporary_copies_of_the_weight(pattern, name):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2048, 2048, bias=False))
    method = BAME(stop=100, every=1, score="taylor-abs")
    sparsifier = NMSparsifier(module, pattern, method, skip_first_last=False).attach()
    optimizer = OPTIMIZERS[name](module.parameters())
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    for step in range(3):
        weight = layer.weight
        weight.grad = torch.randn(2048, 2048)
        states = [s for s in optimizer.state[weight].values() if isinstance(s, torch.Tensor)]
        known = [weight, weight.grad, layer.marks, *layer.buffers.values(), *states]
        gc.collect()
        with PeakMemory(*known) as found:
            sparsifier.before_step(optimizer)
        if step < 2:
            optimizer.step()
            sparsifier.step()
    with PeakMemory(*known) as applied:  # the exchanges themselves, as they follow the optimizer's step
        layer.method.after_step(layer, optimizer)
    assert layer.handover.move.adapted > 0.1 * weight.numel() / layer.pattern.m
    copies = max(found.peak, applied.peak) / (4 * weight.numel())
    assert 0.5 < copies <= 6


def test_a_checkpoint_holds_two_bits_a_weight_and_a_byte_a_block():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(512, 512, bias=False))
    sparsifier = NMSparsifier(module, "1:16", BAME(stop=50, every=2), skip_first_last=False).attach()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    sparsifier.register(optimizer)
    for _ in range(3):
        module[0].weight.grad = torch.randn(512, 512)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    buffer = io.BytesIO()
    torch.save(sparsifier.state_dict(), buffer)
    weights = 512 * 512
    assert len(buffer.getvalue()) < weights / 4 + weights / 16 + 6000


@pytest.mark.parametrize("dgrad", ["masked", "bi-mask"])
def test_a_state_restores_the_middle_of_the_evolution(dgrad):
    def make(seed):
        adam = lambda p: torch.optim.Adam(p, 0.1)  # noqa: E731
        return linear(BAME(stop=30, every=3, budget=0.5, dgrad=dgrad), "1:4", adam, seed=seed)

    module, sparsifier, optimizer, layer = make(0)
    run(module, sparsifier, optimizer, 9)
    states = copy.deepcopy((module.state_dict(), sparsifier.state_dict(), optimizer.state_dict()))
    statistics = sparsifier.stats()
    assert layer.dense_gradient, "the next window adapts"
    assert states[1]["layers"]["0"]["latent"] is None, "there is nothing beside the sparse weight"
    run(module, sparsifier, optimizer, 9, start=9)

    other, other_sparsifier, other_optimizer, other_layer = make(1)
    for thing, state in zip((other, other_sparsifier, other_optimizer), states, strict=True):
        thing.load_state_dict(state)
    assert other_sparsifier.stats() == statistics
    assert statistics["flip_rate"] > 0
    run(other, other_sparsifier, other_optimizer, 9, start=9)
    assert torch.equal(layer.weight, other_layer.weight)
    assert sparsifier.stats() == other_sparsifier.stats()
    for name, tensor in layer.buffers.items():
        assert torch.equal(tensor, other_layer.buffers[name]), name


def test_a_state_keeps_its_schedule_and_says_so():
    def make(stop, planned):
        return linear(BAME(stop=stop, every=2), planned_steps=planned)

    module, sparsifier, optimizer, layer = make(0.5, 20)
    run(module, sparsifier, optimizer, 12)
    frozen = layer.forward_mask
    states = copy.deepcopy((module.state_dict(), sparsifier.state_dict()))
    for stop, planned in ((0.5, 40), (20, None)):  # a longer run; another setting
        other, other_sparsifier, other_optimizer, layer = make(stop, planned)
        other.load_state_dict(states[0])
        with pytest.warns(UserWarning, match=r"BAME scheduled at steps \(0, 10\), which stays; .* \(0, 20\)"):
            other_sparsifier.load_state_dict(states[1])
        assert layer.schedule == (0, 10)
        run(other, other_sparsifier, other_optimizer, 4, start=12)
        assert torch.equal(layer.forward_mask, frozen), "frozen for good"
    other, other_sparsifier, _, _ = make(0.5, 20)
    other.load_state_dict(states[0])
    other_sparsifier.load_state_dict(states[1])  # the same plan: no warning


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
        method = BAME(stop=20, every=2, budget=0.5, score="taylor-abs", dgrad=dgrad)
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
        assert layer.total_flips > 0
        return layer.forward_mask.cpu(), layer.weight.detach().cpu(), sparsifier.stats()

    (mask, weight, stats), (gpu_mask, gpu_weight, gpu_stats) = train("cpu"), train("cuda")
    assert torch.equal(mask, gpu_mask)
    torch.testing.assert_close(weight, gpu_weight)
    assert gpu_stats == pytest.approx(stats, rel=1e-5)
