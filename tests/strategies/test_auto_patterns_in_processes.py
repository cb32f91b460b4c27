"""Patterns that are chosen under a budget are those of one process, with whole and with sharded weights."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_nm import SRSTE, NMSparsifier
from tests.methods.test_sensitivity import net
from tests.support.processes import in_processes


def train(way, dense_start):
    """Train four steps; the patterns by layer before and after."""
    model = net(16, 32, 16, 32, 8)
    wrapped = model
    if way == "fsdp":
        fully_shard(model)
    sparsifier = NMSparsifier(model, "auto:0.4:8", SRSTE(dense_start=dense_start)).attach()
    if way == "ddp":
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    found = []
    for step in range(4):
        found.append({name: str(layer.pattern) for name, layer in sparsifier.layers.items()})
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        wrapped(torch.randn(8, 16, generator=generator)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        if dist.is_initialized():
            sparsifier.compare_ranks()
    found.append({name: str(layer.pattern) for name, layer in sparsifier.layers.items()})
    return copy.deepcopy([list(each.items()) for each in found])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("dense_start", [0, 2])
def test_all_processes_choose_alike(tmp_path, way, dense_start):
    expected = train("plain", dense_start)
    assert (expected[0] != expected[2]) == bool(dense_start)
    assert expected[2] == expected[-1]
    for found in in_processes(2, tmp_path / way, train, way, dense_start):
        assert found == expected
