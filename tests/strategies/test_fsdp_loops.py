"""FSDP2 in loops without Lightning."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_nm import SRSTE, NMSparsifier
from tests.support.parallel import whole
from tests.support.processes import in_processes


def sparse(model, method="sr-ste", optimizer=torch.optim.SGD, rate=0.1):
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    made = optimizer(model.parameters(), rate)
    sparsifier.register(made)
    return sparsifier, made


def plain_loop(settings, evaluate_first):
    """Weights after a loop without Lightning that evaluates whenever it can; sharded unless ``settings`` is None."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    here = x
    if settings is not None:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh, **settings)
        fully_shard(model, mesh=mesh, **settings)
        here = x.chunk(2)[dist.get_rank()]

    @torch.no_grad()
    def evaluate():
        return model(x)

    if evaluate_first:
        evaluate()
    # nothing is clipped, so the place does not matter
    method = SRSTE(0.5, decay_at="after-clipping" if evaluate_first else "before-clipping")
    sparsifier, optimizer = sparse(model, method)
    assert not sparsifier.training.unowned()
    for _ in range(3):
        evaluate()
        optimizer.zero_grad()
        model(here).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        evaluate()
        with torch.inference_mode():
            sparsifier.stats()
            assert not sparsifier.violations()
    sparsifier.bake()
    baked = evaluate()
    sparsifier.detach()
    torch.testing.assert_close(evaluate(), baked)
    return whole(model)


def steps_that_are_none():
    """Steps are counted where the rate is 0 and one process holds no row, so no gradient; others are no steps."""
    model = nn.Linear(8, 1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    sparsifier, optimizer = sparse(model, "asp", rate=0.0)
    model(torch.ones(2, 8)).sum().backward()
    sparsifier.before_step(optimizer)
    optimizer.step()
    sparsifier.step()
    model.zero_grad()
    get_optimizer_state_dict(model, optimizer)  # makes a step that is none, to allocate the state
    assert sparsifier.clock == 1


def not_ready():
    """Sharded too late, or without values yet."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(8, 8))
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", skip_first_last=False).attach()
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"layer '0' was sharded after its masks were installed"):
        sparsifier.register(torch.optim.SGD(model.parameters(), 0.1))
    with torch.device("meta"):
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    with pytest.raises(ValueError, match="on the meta device"):
        sparse(model)


def plain_loops():
    not_ready()
    steps_that_are_none()
    forms = [{}, {"reshard_after_forward": False}]
    return [plain_loop(form, evaluate_first) for form in forms for evaluate_first in (False, True)]


@pytest.mark.slow
def test_loops_without_lightning(tmp_path):
    """What an evaluation leaves gathered is sharded again."""
    expected = plain_loop(None, False)
    for rank in in_processes(2, tmp_path / "run", plain_loops):
        for weights in rank:
            torch.testing.assert_close(weights, expected)
