"""Costs charged by plan are those that the same training really counts."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import (
    ASP,
    BAME,
    CAST,
    LBC,
    MVUE,
    SRSTE,
    SSTE,
    STEP,
    BiMask,
    DecayingMask,
    MaxQ,
    NMSparsifier,
    RigL,
    SLoPe,
    TransposableMask,
)
from lightning_nm.methods import MaskMethod
from lightning_nm.nn.costs import mean_densities
from lightning_nm.training import phases
from lightning_nm.training.phases import charge_plan
from tests.support.loop import Loop, adamw, mlp

STEPS = 24


def net():
    return mlp(8, 16, 8, 4)


def trained(method, grad_estimator=None, dgrad=None, **options):
    """What a training of so many steps counts."""
    options |= {"grad_estimator": grad_estimator, "dgrad": dgrad, "planned_steps": STEPS}
    loop = Loop(net(), method, optimizer=adamw, shape=(8, 8), **options)
    loop.train(range(STEPS))
    return loop.sparsifier


def by_plan(method, grad_estimator=None, dgrad=None, steps=STEPS, **options):
    options |= {"grad_estimator": grad_estimator, "dgrad": dgrad, "planned_steps": steps}
    sparsifier = NMSparsifier(net(), "2:4", method, skip_first_last=False, **options).attach()
    charge_plan(list(sparsifier.layers.values()), steps)
    return sparsifier


class Turns(MaskMethod):
    """Layers whose dense gradients alternate."""

    def needs_dense_gradient(self, layer):
        return layer.progress.clock % 3 == len(layer.name) % 2 + int(layer.name)

    def gradient_at_pruned(self, layer):
        return layer.progress.dense_gradient

    def init_masks(self, layer):
        layer.set_masks(layer.weight.detach() > 0)


CASES = {
    "slope": [SLoPe(refresh_every=5)],
    "slope-late": [SLoPe(start=0.25)],
    "rigl": [RigL(every=3, stop=0.7)],
    "cast": [CAST(end=0.5)],
    "cast-to-the-end": ["cast"],
    "always": ["sr-ste"],
    "dense start and end": [SRSTE(dense_start=5, dense_end=0.25)],
    "transposable, estimator phases": [
        TransposableMask(4, 1e-3, dense_start=3, dense_end=2),
        MVUE("2:4", 6, 0.3),
    ],
    "estimator alone": ["dense", MVUE("1:2", 2)],
    "bi-mask": [BiMask(permute_every=5, dense_start=4)],
    "s-ste": [SSTE(dense_start=3), "approx-mvue"],
    # Without a training, masks are taken to come at the latest moment.
    "step": [STEP(latest=0.5, threshold=1e-30, dense_end=4)],
    "decaying": [DecayingMask(dense_start=2, stop=0.5)],
    "decaying structure": [DecayingMask("structure", dense_start=2, dense_end=3)],
    "asp": [ASP(start=0.5)],
    "bame": [BAME(start=2, stop=0.66)],
    "bame every 5": [BAME(start=0.1, stop=20, gradient_every=5)],
    "bame of a batch": [BAME(stop=0.9, evidence="batch", every=4)],
    "bame with bi-mask": [BAME(stop=0.5, dgrad="bi-mask"), "mvue"],
    "drawn weights": [SRSTE(dense_start=5), None, "mvue"],
    "drawn dense weights": ["dense", None, "mvue"],
    "turns": [Turns()],
    "lbc": [LBC(stop=0.5)],
    "maxq": [MaxQ(0.25, 20)],
}
"""A method, an estimator and the method of dgrad."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:BAME's masks hardly moved")
def test_as_a_training_counts(case):
    real, plan = (make(*copy.deepcopy(CASES[case])) for make in (trained, by_plan))
    for name, layer in real.layers.items():
        there, here = mean_densities(layer), mean_densities(plan.layers[name])
        # Which entries go depends on gradients, so their number in between is that of the plan only about.
        measured = {"paper", "arithmetic"} if case in ("lbc", "maxq") else set()
        if layer.masks.has_backward:
            measured.add("arithmetic")  # the density of a backward mask depends on the weights
        for kind in ("paper", "eligible", "arithmetic"):
            tolerance = 0.03 if kind in measured else 1e-12
            assert vars(here[kind]) == pytest.approx(vars(there[kind]), abs=tolerance), (name, kind)


def test_several_rules_and_dense_layers():
    rules = [
        {"include": "0", "method": SRSTE(dense_start=0.5)},
        {"include": "2", "pattern": "1:4", "method": "bame"},
    ]
    real, plan = (make("sr-ste", rules=rules, exclude="4") for make in (trained, by_plan))
    plan.macs.update(real.macs)
    assert plan.flops_ratios(mean=True) == pytest.approx(real.flops_ratios(mean=True))


def wgrad(sparsifier):
    return mean_densities(sparsifier.layers["0"])["paper"].wgrad


@pytest.mark.filterwarnings("ignore:BAME")
@settings(max_examples=20)
@given(
    steps=st.integers(2, 400), start=st.floats(0, 1), stop=st.floats(0, 1), every=st.integers(1, 40)
)
def test_dense_gradients_of_bame(steps, start, stop, every):
    """One per `every` steps of the window, and in an empty window one at its begin."""
    start, stop = sorted((start, stop))
    sparsifier = by_plan(BAME(start, stop, gradient_every=every), steps=steps, include="0")
    first, last = sparsifier.layers["0"].progress.schedule
    dense = len(range(first, min(max(last, first + 1), steps), every))
    assert wgrad(sparsifier) == pytest.approx(0.5 + 0.5 * dense / steps)


def test_long_phases_are_like_their_beginning(monkeypatch):
    monkeypatch.setattr(phases, "COUNTED", 100)
    sparsifier = by_plan(BAME(stop=0.5, gradient_every=4), steps=10_000)
    assert wgrad(sparsifier) == pytest.approx(0.5 * (0.5 + 0.5 * 0.25) + 0.5 * 0.5)


def test_without_a_plan():
    found = mean_densities(by_plan("sr-ste", steps=None).layers["0"])["paper"]
    assert vars(found) == {"forward": 0.5, "dgrad": 1.0, "wgrad": 1.0}
