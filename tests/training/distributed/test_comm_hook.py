"""What a communication hook sends: counted, and put back where it belongs."""

import copy
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
from tests.support.loop import Loop, mlp
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


def transposed():
    """Weights that are not row-major, one of them with gaps."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    model[0].weight = nn.Parameter(torch.randn(8, 16).t())
    model[1].weight = nn.Parameter(torch.randn(16, 24)[:, ::3].t())
    return model


def channels_last():
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 2))
    return model.to(memory_format=torch.channels_last)


CASES = [
    (lambda: mlp(64, 32, 64, 8), (2, 64), "1:16", None),
    (lambda: mlp(64, 32, 64, 8), (2, 64), "1:16", torch.bfloat16),
    (lambda: mlp(64, 32, 64, 8), (2, 64), "2:4", None),
    (transposed, (2, 8), "2:4", None),
    (channels_last, (2, 8, 5, 5), "2:4", None),
]


def compare_with_a_dense_hook(make_model, shape, pattern, dtype):
    """Steps of two micro-batches, the first without a collective; DDP rebuilds its buckets after the first step."""
    torch.manual_seed(0)
    model, wire, sent, all_reduce = make_model(), CommHookState(dtype), [], dist.all_reduce
    twin = copy.deepcopy(model)
    parts = []
    for module, state, hook in ((model, wire, kept_entries_hook), (twin, None, allreduce_hook)):
        sparsifier = NMSparsifier(module, pattern, ASP(), skip_first_last=False).attach()
        parts.append(
            DistributedDataParallel(module, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
        )
        parts[-1].register_comm_hook(state, hook)
        if state is not None:
            layers = sparsifier.layers.values()
            state.add(layers)

    def spy(tensor, *args, **options):
        sent.append((tensor.numel(), tensor.nbytes))
        return all_reduce(tensor, *args, **options)

    share = NMPattern.parse(pattern).density
    expected = sum(p.numel() * (share if p.dim() > 1 else 1) for p in model.parameters())
    size = 4 if dtype is None else 2
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batches = torch.randn(2, *shape, generator=generator)
        for parallel, patched in zip(parts, (spy, all_reduce), strict=True):
            parallel.zero_grad()
            with patch.object(dist, "all_reduce", patched):
                with parallel.no_sync():
                    parallel(batches[0]).square().sum().backward()
                parallel(batches[1]).square().sum().backward()
        assert [sum(each) for each in zip(*sent, strict=True)] == [expected, size * expected]
        sent.clear()
        assert wire.end_step() == size * expected / (4 * sum(p.numel() for p in model.parameters()))
        assert not any(layer.weight.grad[~layer.masks.forward_view].any() for layer in layers)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            tolerance = (
                {"rtol": 1e-2, "atol": 1e-2 * float(other.grad.abs().max())} if dtype else {}
            )
            torch.testing.assert_close(one.grad, other.grad, **tolerance)


def compare_all():
    for case in CASES:
        compare_with_a_dense_hook(*case)


@pytest.mark.slow
def test_elements_on_the_wire(tmp_path):
    in_processes(2, tmp_path / "run", compare_all)
