"""What a communication hook sends: counted, and put back where it belongs."""

import copy
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_nm import ASP, BAME, SRSTE, NMPattern, NMSparsifier
from lightning_nm.functional.evolution import as_blocks, from_blocks
from lightning_nm.training.comm_hook import (
    CommHookState,
    _pack,
    _unpack,
    kept_entries,
    kept_entries_hook,
)
from tests.support.kinds import KINDS, make
from tests.support.loop import Loop
from tests.support.processes import in_processes


@given(
    st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(1, 3), max_size=2), st.integers(2, 5)
)
def test_blocks_are_put_together_again(out, per_row, taps, m):
    rows = torch.randn(out, per_row * m, *taps)
    assert torch.equal(from_blocks(as_blocks(rows, m), rows.shape), rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["2:4", "1:16", "3:8"])
@pytest.mark.parametrize("layout", ["channels", "flat"])
def test_kept_entries_arrive_and_others_are_zero(kind, pattern, layout):
    module, _ = make(kind)
    sparsifier = NMSparsifier(
        module, pattern, ASP(), skip_first_last=False, conv_layout=layout
    ).attach()
    wire = CommHookState()
    wire.add(sparsifier.layers.values())
    for layer in sparsifier.layers.values():
        grad = torch.randn_like(layer.weight)
        if layer.spec.forward_reason:
            assert wire.sparse(layer.weight) is None
            continue
        assert wire.sparse(layer.weight) is layer
        sent = _pack(grad, layer, wire.entries(layer))
        assert sent.numel() == grad.numel() * layer.pattern.n // layer.pattern.m
        received = _unpack(sent, layer, wire.entries(layer))
        assert torch.equal(received, torch.where(layer.masks.forward_view, grad, 0))
        assert not torch.signbit(received[~layer.masks.forward_view]).any()


@given(st.integers(2, 300), st.data())
@settings(max_examples=25)
def test_blocks_that_keep_fewer_are_filled_up_with_zeros(m, data):
    n = data.draw(st.integers(1, m - 1))
    module = nn.Linear(2 * m, 3)
    sparsifier = NMSparsifier(module, NMPattern(n, m), ASP(), skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    kept = torch.rand(3, 2 * m).lt(0.5) & layer.forward_mask
    layer.set_masks(kept)
    places = kept_entries(layer)
    assert places.shape == (6, n)
    assert all(len(set(row.tolist())) == n for row in places)
    grad = torch.randn(3, 2 * m)
    received = _unpack(_pack(grad, layer, places), layer, places)
    assert torch.equal(received, torch.where(kept, grad, 0))


def test_entries_follow_the_masks():
    sparsifier = NMSparsifier(nn.Linear(8, 4), "1:4", ASP(), skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    wire = CommHookState()
    first = wire.entries(layer)
    assert wire.entries(layer) is first
    layer.set_masks(layer.forward_mask.roll(1, 1).view(4, 2, 4).flip(2).view(4, 8))
    assert torch.equal(wire.entries(layer), kept_entries(layer))
    assert not torch.equal(wire.entries(layer), first)


def test_what_methods_need():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    rules = [
        {"include": "0", "method": ASP(start=1)},
        {"include": "1", "method": BAME(start=1, stop=2, every=1)},
        {"include": "2", "method": SRSTE()},
    ]
    loop = Loop(model, ASP(), rules=rules)
    layers = list(loop.layers.values())
    wire = CommHookState()
    wire.add(layers)
    seen = []
    for number in range(3):
        seen.append([wire.sparse(layer.weight) is not None for layer in layers])
        loop.train([number])
    # ASP prunes at step 1; BAME adapts in the second window; SR-STE always needs all; ASP from the start.
    assert seen == [
        [False, True, False, True],
        [True, False, False, True],
        [True, True, False, True],
    ]
    wire.remove(layers[:1])
    assert wire.sparse(model[0].weight) is None
    assert wire.sparse(model[3].weight) is not None
    assert wire.sparse(model[3].bias) is None


def counted(pattern, dtype):
    """Elements on the wire, and gradients beside those of a dense hook, of a step before and one after the rebuild."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 8))
    twin = copy.deepcopy(model)
    sparsifiers = [
        NMSparsifier(m, pattern, ASP(), skip_first_last=False).attach() for m in (model, twin)
    ]
    wire = CommHookState(dtype)
    wire.add(sparsifiers[0].layers.values())
    size = {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True}
    parallel, other = DistributedDataParallel(model, **size), DistributedDataParallel(twin, **size)
    parallel.register_comm_hook(wire, kept_entries_hook)
    other.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sparsifiers[0].register(optimizer)
    sent, all_reduce = [], dist.all_reduce

    def spy(tensor, *args, **kwargs):
        sent.append((tensor.numel(), tensor.element_size()))
        return all_reduce(tensor, *args, **kwargs)

    results = []
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        twin.zero_grad()
        for k, micro in enumerate(x.split(2)):  # the first without a collective
            with (
                parallel.no_sync() if k == 0 else nullcontext(),
                patch.object(dist, "all_reduce", spy),
            ):
                parallel(micro).square().sum().backward()
            with other.no_sync() if k == 0 else nullcontext():
                other(micro).square().sum().backward()
        grads = [[p.grad.clone() for p in m.parameters()] for m in (model, twin)]
        zeros = [
            bool(layer.weight.grad[~layer.masks.forward_view].any())
            for layer in sparsifiers[0].layers.values()
        ]
        results.append(
            (sum(n for n, _ in sent), sum(n * b for n, b in sent), *grads, zeros, wire.end_step())
        )
        sent.clear()
    return results


def strided(kind):
    """Gradients of weights that are not row-major, beside those of a dense hook."""
    torch.manual_seed(0)
    if kind == "channels-last":
        model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 2)).to(
            memory_format=torch.channels_last
        )
        shape = (4, 8, 5, 5)
    else:
        model, shape = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), (4, 8)
        model[0].weight = nn.Parameter(torch.randn(8, 16).t())
        model[1].weight = nn.Parameter(torch.randn(16, 24)[:, ::3].t())  # with gaps
    sparsifier = NMSparsifier(model, "2:4", ASP(), skip_first_last=False).attach()
    grads = []
    for hook, wire in ((allreduce_hook, None), (kept_entries_hook, CommHookState())):
        parallel = DistributedDataParallel(model)
        parallel.register_comm_hook(wire, hook)
        if wire is not None:
            wire.add(sparsifier.layers.values())
        for step in range(2):
            model.zero_grad()
            parallel(
                torch.randn(shape, generator=torch.Generator().manual_seed(step))
            ).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert wire.end_step() < 0.7
    return grads


CASES = [("1:16", None), ("1:16", torch.bfloat16), ("2:4", None)]


def counted_in_all_cases():
    kinds = ("channels-last", "transposed")
    return [counted(pattern, dtype) for pattern, dtype in CASES], [strided(kind) for kind in kinds]


@pytest.mark.slow
def test_elements_on_the_wire(tmp_path):
    weights, biases = 64 * 32 + 32 * 64 + 64 * 8, 32 + 64 + 8
    for cases, strides in in_processes(2, tmp_path / "run", counted_in_all_cases):
        for (pattern, dtype), results in zip(CASES, cases, strict=True):
            expected = int(weights * NMPattern.parse(pattern).density) + biases
            for elements, sent, grads, dense, nonzero, ratio in results:
                assert elements == expected
                assert sent == expected * (4 if dtype is None else 2)
                assert ratio == sent / (4 * (weights + biases))
                assert nonzero == [False] * 3
                tolerance = {}
                if dtype:
                    largest = max(float(each.abs().max()) for each in dense)
                    tolerance = {"rtol": 1e-2, "atol": 1e-2 * largest}
                torch.testing.assert_close(grads, dense, **tolerance)
        for dense, kept in strides:
            torch.testing.assert_close(dense, kept)
