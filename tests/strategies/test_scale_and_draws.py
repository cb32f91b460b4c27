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
from tests.strategies.test_fsdp import whole
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


def new(shard):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()
    with torch.no_grad():
        model[2].weight.mul_(0.01)  # small beside a step, so that BAME's masks move
    if shard:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def inputs():
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def train(method, optimizer_name, shard, same_data=False, **options):
    """Four steps; the weights, the initial factors, the groups' rates within and after a step, and the flips."""
    model = new(shard)
    rules = [{"include": "2", "pattern": "1:4"}]
    sparsifier = NMSparsifier(
        model, "2:4", METHODS[method](), rules=rules, skip_first_last=False, **options
    ).attach()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    sparsifier.register(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rates = []
    handle = optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: rates.append([g["lr"] for g in args[0].param_groups])
    )
    x = inputs()
    if shard and not same_data:
        x = x.chunk(2)[dist.get_rank()]
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        schedule.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    handle.remove()
    assert not sparsifier.violations()
    flips = {name: int(layer.masks.total_flips) for name, layer in sparsifier.layers.items()}
    return whole(model), sparsifier.initial_factors, rates, flips


CASES = [(method, name) for method in METHODS for name in OPTIMIZERS]


def scaled():
    return [train(method, name, True, scale="supar") for method, name in CASES]


@pytest.mark.slow
def test_supar_under_fsdp2_equals_one_process(tmp_path):
    expected = [train(method, name, False, scale="supar") for method, name in CASES]
    for found in in_processes(2, tmp_path / "run", scaled):
        for here, alone in zip(found, expected, strict=True):
            weights, factors, rates, flips = here
            torch.testing.assert_close(weights, alone[0])
            assert factors == pytest.approx(alone[1])
            assert rates == alone[2]
            assert flips == alone[3]
    factors, rates, _ = expected[0][1:]
    assert set(factors) == {"0", "2", "4"}
    assert all(factor != 1 for factor in factors.values())
    # Without the scale, twice and four times as much; the user's group has one rate.
    assert sorted(rates[0]) == [0.5, 1.0, 2.0]
    assert rates[1] == [0.25]
    assert all(
        flips["2"] > 0
        for (name, _), (*_, flips) in zip(CASES, expected, strict=True)
        if "bame" in name
    )


def drawn():
    """FSDP2 with equal data and equal random numbers in both processes."""
    options = {"dgrad": "mvue", "data_rank": 0}
    return train("sr-ste", "sgd", True, same_data=True, **options)[0]


@pytest.mark.slow
def test_drawn_backward_weights_under_fsdp2_equal_one_process(tmp_path):
    expected = train("sr-ste", "sgd", False, dgrad="mvue", data_rank=0)[0]
    exact = train("sr-ste", "sgd", False)[0]
    assert not torch.allclose(expected["0.weight"], exact["0.weight"])
    for found in in_processes(2, tmp_path / "run", drawn):
        torch.testing.assert_close(found, expected)


def parallel_gradients():
    """Mean, standard error and exact value of dX, where processes hold rows or columns of the weight."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for style in (ColwiseParallel, RowwiseParallel):
        results = []
        for dgrad in (None, "mvue"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 16, dtype=torch.float64))
            parallelize_module(model, mesh, {"0": style()})
            sparsifier = NMSparsifier(
                model, "2:4", "sr-ste", dgrad=dgrad, skip_first_last=False
            ).attach()
            (layer,) = sparsifier.layers.values()
            total = square = 0.0
            number = 100
            for _ in range(number):
                x = inputs().requires_grad_()
                if style is RowwiseParallel:
                    y = model(x.chunk(2, dim=1)[dist.get_rank()])
                else:
                    y = model(x)
                y = y.full_tensor() if hasattr(y, "full_tensor") else y
                y.square().sum().backward()
                # Each process has the part of dX that its own weights make.
                gradient = x.grad.clone()
                dist.all_reduce(gradient)
                total, square = total + gradient, square + gradient**2
                layer.draw_noise()
            mean = total / number
            error = (square / number - mean**2).clamp(min=0).div(number - 1).sqrt()
            results.append((mean, error))
        found.append(results)
    return found


@pytest.mark.slow
def test_drawn_backward_weights_under_tensor_parallelism_are_exact_in_the_mean(tmp_path):
    for found in in_processes(2, tmp_path / "run", parallel_gradients):
        for (exact, _), (mean, error) in found:
            assert error.max() > 0
            assert ((mean - exact).abs() <= 6 * error + 1e-9 * exact.abs().max()).all()
