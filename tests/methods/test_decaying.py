"""Decaying masks: what the forward weight is at each step, and that nothing calls it N:M before it is."""

import math
from itertools import chain

import pytest
import torch

from lightning_nm import DecayingMask, NMPattern
from lightning_nm import functional as nmf
from lightning_nm.methods.decaying import narrowing_patterns
from tests.support.method_loop import Loop, mlp


@pytest.mark.parametrize("decay", ["linear", "exponential"])
def test_pruned_entries_fade_and_the_layer_counts_as_dense_meanwhile(decay):
    run = Loop(DecayingMask(decay, dense_start=4, stop=12, dense_end=3, rate=4.0))
    for clock in run.steps(20):
        layer, share = run.layer, (clock - 4) / 8
        weight, hard = layer.weight.detach(), 12 <= clock < 17
        factor = 0.0 if hard else 1.0
        if 4 <= clock < 12:
            factor = 1 - share if decay == "linear" else math.exp(-4 * share)
        expected = torch.where(nmf.magnitude_mask(weight, "2:4"), weight, weight * factor)
        torch.testing.assert_close(layer.forward_weight(), expected)
        assert layer.masks.has_forward == hard
        assert bool(layer.buffers) == (4 <= clock < 12)
        assert (run.sparsifier.violations() == 0) == hard
        labels = [gemm.label for gemm in layer.gemms()]
        assert labels == (["2:4", "masked", "dense"] if hard else ["dense"] * 3)
        assert run.sparsifier.stats()["density"] == (0.5 if hard else 1.0)
        ratio = pytest.approx(5 / 6 if hard else 1.0)
        assert run.sparsifier.flops_ratios()["eligible"] == ratio
    for kind in ("eligible", "paper"):  # five of twenty steps at 5/6
        mean = run.sparsifier.flops_ratios(mean=True)[kind]
        assert mean == pytest.approx(1 - 5 / 20 / 6)


def test_patterns_narrow_by_halves():
    for m in (2, 3, 5, 6, 8, 12, 16):
        for n in range(1, m):
            halves = [m - 1, *(m // 2**k for k in range(1, 5))]
            expected = list(dict.fromkeys([each for each in halves if each > n] + [n]))
            assert [each.n for each in narrowing_patterns(NMPattern(n, m))] == expected


@pytest.mark.parametrize(
    ("pattern", "settings", "frames"),
    [
        ("1:16", {}, [(0, 15), (4, 8), (8, 4), (12, 2), (16, 1)]),
        ("2:4", {"dense_start": 4, "dense_end": 4}, [(4, 3), (10, 2)]),
        ("1:4", {"dense_start": 0.1, "stop": 0.5}, [(2, 3), (6, 2), (10, 1)]),
        ("1:2", {"stop": 9}, [(0, 1)]),
    ],
)
def test_frames_have_equal_lengths(pattern, settings, frames):
    run = Loop(DecayingMask("structure", **settings), pattern)
    layer, m = run.layer, run.layer.pattern.m
    for clock in chain([0], run.steps(20)):
        begun = [n for start, n in frames if start <= clock]
        kept = float((layer.forward_weight() != 0).double().mean())
        if not begun or clock >= 20 - settings.get("dense_end", 0):
            assert kept == 1 or clock == 20
            assert not layer.masks.has_forward or clock == 20
            continue
        assert kept == layer.gemms().forward.eligible == begun[-1] / m
        assert str(layer.spec.method.current_pattern(layer)) == f"{begun[-1]}:{m}"
        assert run.sparsifier.violations() == 0


@pytest.mark.parametrize("decay", ["linear", "structure"])
def test_a_resumed_run_keeps_its_frames(decay):
    """Each pattern has its own; they are those of the plan that is saved, not of another one."""
    rules = [{"include": "2", "pattern": "1:16"}]
    run = Loop(DecayingMask(decay, dense_start=2), rules=rules).train(5)
    if decay == "structure":
        schedules = [layer.progress.schedule for layer in run.layers.values()]
        assert schedules == [(2, 11), (2, 6, 9, 12, 16)]
    resumed = Loop(
        DecayingMask(decay, dense_start=2),
        model=mlp(16, 32, 16, seed=1),
        rules=rules,
        planned_steps=99,
    )
    with pytest.warns(UserWarning, match="which stays"):
        resumed.load(run.states())
    for _ in zip(run.steps(15), resumed.steps(15), strict=True):
        for layer, other in zip(run.layers.values(), resumed.layers.values(), strict=True):
            assert torch.equal(layer.forward_weight(), other.forward_weight())
