"""RigL in blocks: exchanged entries, and when masks move. The golden traces hold its training, step by step."""

import math

import pytest
import torch

from lightning_nm import RigL
from tests.support.bame import OPTIMIZERS
from tests.support.method_loop import Loop, one_layer


def loop(*, make=OPTIMIZERS["sgd"], **options):
    return Loop(RigL(**options), make=make, model=one_layer(), planned_steps=100)


@pytest.mark.parametrize("pattern", ["1:4", "3:4", "1:16", "3:8"])
@pytest.mark.parametrize("drop", [0.5, 1.0])
def test_the_exchange_is_what_is_written(pattern, drop):
    """Drop the smallest of all entries; grow as many in each block by the gradient, dropped ones too."""
    run = Loop(RigL(2, 15, drop), pattern, OPTIMIZERS["sgd"], one_layer())
    layer, n, m = run.layer, run.layer.pattern.n, run.layer.pattern.m
    for step in range(9):
        run.backward()
        mask, weight, grad = layer.forward_mask.clone(), layer.param.abs(), layer.param.grad.abs()
        if step and step % 2 == 0:
            drops = int(mask.sum() * drop * 0.5 * (1 + math.cos(math.pi * step / 15)))
            smallest = torch.where(mask, weight, torch.inf).flatten().argsort(stable=True)
            mask.view(-1)[smallest[:drops]] = False
            for block, gains in zip(mask.view(-1, m), grad.view(-1, m), strict=True):
                best = torch.where(block, -1, gains).argsort(descending=True, stable=True)
                block[best[: n - int(block.sum())]] = True
        run.step()
        assert torch.equal(layer.forward_mask, mask)
    assert layer.masks.total_flips > 6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_exchanged_entries_starts_again(name):
    run = loop(every=2, stop=100, drop=1.0, make=OPTIMIZERS[name])
    exchanged = 0
    for _ in range(8):
        before = run.layer.forward_mask
        run.backward()
        run.optimize()
        after = run.layer.forward_mask
        grown, exchanged = after & ~before, exchanged + int((after & ~before).sum())
        assert not run.layer.param[grown | ~after].any()
        for key, state in run.state.items():
            if isinstance(state, torch.Tensor) and state.shape == after.shape:
                assert not state[before & ~after].any(), key
                assert (state[grown] > 0).all() if "sq" in key else not state[grown].any(), key
        run.sparsifier.step()
        assert torch.equal(run.layer.forward_mask, after)
    assert exchanged > 10


def test_only_the_windows_of_an_update_have_a_dense_gradient():
    run = loop(every=3, stop=10)
    dense = [0] if run.layer.progress.dense_gradient else []
    dense += [step for step in run.steps(14, windows=2) if run.layer.progress.dense_gradient]
    assert dense == [3, 6, 9]


def test_costs_are_those_of_the_present_step():
    run = loop(every=4, stop=100)
    gemms = run.layer.gemms()
    assert [gemm.kind for gemm in gemms] == ["n:m", "masked", "outputs"]
    assert [gemm.paper for gemm in gemms] == [0.5, 0.5, 0.5]
    assert [gemm.eligible for gemm in gemms] == [0.5, 1.0, 1.0]
    run.layer.progress.dense_gradient = True
    assert run.layer.gemms().wgrad.paper == 1.0


def test_the_masks_of_the_last_exchange_stay_when_the_schedule_ends():
    """Regrown entries are zero then, and would not be among the largest."""
    run = loop(every=1, stop=4)
    for step in range(6):
        before = run.layer.forward_mask
        run.backward()
        run.optimize()
        exchanged = run.layer.forward_mask
        assert torch.equal(exchanged, before) == (step not in (1, 2, 3))
        run.sparsifier.step()
        assert torch.equal(run.layer.forward_mask, exchanged)
