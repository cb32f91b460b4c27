"""scale="supar" and dgrad="mvue" with weights that two processes hold together."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_nm import BAME, NMSparsifier
from tests.support.parallel import whole
from tests.support.processes import in_processes

METHODS = {
    "sr-ste": lambda: "sr-ste",
    "asp": lambda: "asp",
    "bame": lambda: BAME(stop=100, budget=1.0, evidence_rate=0.5),
    "bame-batch": lambda: BAME(stop=100, every=1, budget=1.0, evidence="batch"),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 2e-2),
}
CASES = [(method, name) for method in METHODS for name in OPTIMIZERS]


def new(shard):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()
    model[2].weight.data.mul_(0.01)  # small compared with a step, so that BAME's masks move
    if shard:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def inputs():
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def train(method, optimizer_name, shard, x=None, **options):
    """Four steps; the weights, the initial factors, the groups' rates within and after a step, and the flips."""
    model = new(shard)
    options |= {"rules": [{"include": "2", "pattern": "1:4"}], "skip_first_last": False}
    sparsifier = NMSparsifier(model, "2:4", METHODS[method](), **options).attach()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    sparsifier.register(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rates = []

    def note(optimizer):
        rates.append([group["lr"] for group in optimizer.param_groups])

    # The step itself has the scaled rates.
    handle = optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: note(args[0]))
    if x is None:
        x = inputs().chunk(2)[dist.get_rank()] if shard else inputs()
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        schedule.step()
        note(optimizer)
    handle.remove()
    assert not sparsifier.violations()
    flips = {name: int(layer.masks.total_flips) for name, layer in sparsifier.layers.items()}
    return whole(model), sparsifier.initial_factors, rates, flips


def scaled(shard=True):
    return [train(method, name, shard, scale="supar") for method, name in CASES]


@pytest.mark.slow
def test_supar_under_fsdp2_equals_one_process(tmp_path):
    expected = scaled(shard=False)
    for found in in_processes(2, tmp_path / "run", scaled):
        for (weights, factors, *rest), alone in zip(found, expected, strict=True):
            torch.testing.assert_close(weights, alone[0])
            assert factors == pytest.approx(alone[1])
            assert rest == list(alone[2:])
    _, factors, rates, _ = expected[0]
    assert set(factors) == {"0", "2", "4"}
    assert 1 not in factors.values()
    # Without the scale, twice and four times as much; the user's group has one rate.
    assert sorted(rates[0]) == [0.5, 1.0, 2.0]
    assert rates[1] == [0.25]
    moved = {name for (name, _), (*_, flips) in zip(CASES, expected, strict=True) if flips["2"]}
    assert {"bame", "bame-batch"} <= moved


def drawn(shard=True, dgrad="mvue"):
    """Of equal data and equal random numbers in both processes."""
    return train("sr-ste", "sgd", shard, inputs(), dgrad=dgrad, data_rank=0)[0]


@pytest.mark.slow
def test_drawn_backward_weights_under_fsdp2_equal_one_process(tmp_path):
    expected, exact = drawn(shard=False), drawn(shard=False, dgrad=None)
    assert not torch.allclose(expected["0.weight"], exact["0.weight"])
    for found in in_processes(2, tmp_path / "run", drawn):
        torch.testing.assert_close(found, expected)


def gradients(style, dgrad, number=100):
    """Mean and standard error of dX, where processes hold rows or columns of the weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, dtype=torch.float64))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": style()})
    options = {"dgrad": dgrad, "skip_first_last": False}
    (layer,) = NMSparsifier(model, "2:4", "sr-ste", **options).attach().layers.values()
    total = square = 0.0
    for _ in range(number):
        x = inputs().requires_grad_()
        y = model(x.chunk(2, dim=1)[dist.get_rank()] if style is RowwiseParallel else x)
        y = y.full_tensor() if hasattr(y, "full_tensor") else y
        y.square().sum().backward()
        # Each process has the part of dX that its own weights make.
        gradient = x.grad.clone()
        dist.all_reduce(gradient)
        total, square = total + gradient, square + gradient**2
        layer.draw_noise()
    mean = total / number
    return mean, (square / number - mean**2).clamp(min=0).div(max(number - 1, 1)).sqrt()


def parallel_gradients():
    for style in (ColwiseParallel, RowwiseParallel):
        exact, _ = gradients(style, None, number=1)
        mean, error = gradients(style, "mvue")
        assert error.max() > 0
        assert ((mean - exact).abs() <= 6 * error + 1e-9 * exact.abs().max()).all(), style


@pytest.mark.slow
def test_drawn_backward_weights_under_tensor_parallelism_are_exact_in_the_mean(tmp_path):
    in_processes(2, tmp_path / "run", parallel_gradients)
