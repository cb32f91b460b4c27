"""Layers under tensor parallelism, alone and with FSDP2, train as those of one process."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_nm import SRSTE, NMPattern, NMSparsifier
from lightning_nm.functional import is_nm, magnitude_mask
from tests.support.parallel import FIRST_MASKS_STAY, STEPS, Net, assert_equal, data, train
from tests.support.processes import in_processes

METHODS = ("sr-ste", "asp", "bame", "transposable", "bi-mask", "slope", "rigl", "cast")
PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


def parallel(model, mesh):
    return parallelize_module(model, mesh, {name: style() for name, style in PLAN.items()})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x[:, :8] + self.down(torch.tanh(self.up(x))))


class Parallel(Net):
    def build(self):
        return Block()

    def shard(self, mesh):
        parallel(self.net, mesh["tensor_parallel"])
        if mesh["data_parallel"].size() > 1:
            for part in (self.net.up, self.net.down, self.net):
                fully_shard(part, mesh=mesh["data_parallel"])


def run(method, groups=1, tensor=1, **options):
    world = groups * tensor
    strategy = ModelParallelStrategy(groups, tensor) if world > 1 else "auto"
    loader = data(16, batch_size=8)
    return train(method, world, strategy, Parallel("adamw"), loader=loader, **options)


def runs(groups, tensor, folder):
    found, resumed = [run(method, groups, tensor) for method in METHODS], []
    for method, estimator in (("bame", None), ("bi-mask", "mvue")):
        options = {"estimator": estimator, "max_epochs": 2}
        path = f"{folder}/{method}.ckpt"
        straight = run(method, groups, tensor, **options)
        run(method, groups, tensor, save=path, max_steps=STEPS, **options)
        resumed.append((straight, run(method, groups, tensor, ckpt_path=path, **options)))
    return found, resumed


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "tensor"), [(1, 2), (2, 2)])
def test_tensor_parallel_layers_train_as_whole_ones(tmp_path, groups, tensor):
    everyone = in_processes(groups * tensor, tmp_path / "run", runs, groups, tensor, str(tmp_path))
    for _, resumed in everyone:
        for straight, again in resumed:
            assert_equal(again, straight, 0)
    for k, method in enumerate(METHODS):
        alone = run(method)
        for found, _ in everyone:
            assert_equal(found[k], everyone[0][0][k], 0, method)
            # The permutation of bi-mask must not leave a process's rows, so it is another.
            if method != "bi-mask":
                assert_equal(found[k], alone, 1e-9, method)
        moved = any(layer["total_flips"] for layer in alone[1].values())
        assert moved or method in FIRST_MASKS_STAY


def decayed(decay):
    """The decay of a weight that is cut along `out` and of one along `in`, in float32, is that of one process."""
    torch.manual_seed(0)
    model = Block()
    parallel(model, init_device_mesh("cpu", (2,)))
    sparsifier = NMSparsifier(model, "2:4", SRSTE(decay), skip_first_last=False).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    grads = [torch.randn(32, 16), torch.randn(8, 32)]
    for layer, grad in zip((model.up, model.down), grads, strict=True):
        layer.weight.grad = distribute_tensor(
            grad, layer.weight.device_mesh, layer.weight.placements
        )
    sparsifier.before_step(optimizer)
    for layer, grad in zip((model.up, model.down), grads, strict=True):
        weight = layer.weight.full_tensor().detach()
        kept = magnitude_mask(weight, "2:4")
        pruned = torch.where(kept, 0, weight)
        size = grad[kept].norm() / 2 / pruned.norm() if decay == "relative" else decay
        torch.testing.assert_close(layer.weight.grad.full_tensor(), grad + size * pruned)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.5, "relative"])
def test_each_process_decays_the_pruned_entries_of_its_shard(tmp_path, decay):
    in_processes(2, tmp_path / "run", decayed, decay)


def cut(hidden):
    mesh = init_device_mesh("cpu", (2,))
    layers = {"up": nn.Linear(16, hidden), "act": nn.ReLU(), "down": nn.Linear(hidden, 8)}
    model = nn.Sequential(OrderedDict(**layers, conv=nn.Conv1d(8, 8, 1)))
    parallel(model, mesh)
    sharded = distribute_tensor(model.conv.weight.detach(), mesh, [Shard(0)])
    model.conv.weight = nn.Parameter(sharded)
    sparsifier = NMSparsifier(model, "2:4", "bi-mask", skip_first_last=False).attach()
    found = {
        name: [(gemm.label, gemm.reason) for gemm in layer.gemms()[:2]]
        for name, layer in sparsifier.layers.items()
    }
    assert list(sparsifier.skipped) == ["conv"]
    up, rank = sparsifier.layers["up"], dist.get_rank()
    if up.masks.has_backward:
        own = up.masks.permutation.chunk(2)[rank]
        assert own.sort().values.tolist() == [*range(8 * rank, 8 * rank + 8)], "no row leaves it"
        assert is_nm(up.view.rows(up.masks.backward)[own], NMPattern(2, 4), dim=0)
    sparsifier.detach()
    with pytest.raises(
        ValueError,
        match=r"'conv' is named by `include` but cannot be masked: sharded while it runs",
    ):
        NMSparsifier(model, "2:4", "bi-mask", include="conv").attach()

    gathered = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.ReLU())
    fully_shard(gathered, mesh=mesh)
    of_a_part = NMSparsifier(gathered[0], "2:4", "sr-ste", skip_first_last=False).attach()
    with pytest.raises(
        RuntimeError, match=r"layer '0' was taken for tensor parallel, but FSDP gathers its weight"
    ):
        gathered(torch.randn(4, 8))
    of_a_part.detach()
    return found


@pytest.mark.slow
def test_blocks_that_a_cut_would_split_are_named(tmp_path):
    sparse, reason = ("2:4", ""), "20 / 2 processes % 4 != 0 (M = 2, 5, 10 would fit)"
    for found in in_processes(2, tmp_path / "fit", cut, 16):
        assert found["up"] == found["down"] == [sparse, sparse]
    for found in in_processes(2, tmp_path / "split", cut, 20):
        assert found["up"][1] == ("masked", f"out {reason}")
        assert found["down"][0] == ("dense", f"in {reason}")
