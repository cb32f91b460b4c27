"""Costs charged by plan are those that the same training really counts."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

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
from lightning_nm.training import phases as planned
from lightning_nm.training.phases import charge_plan

STEPS = 24


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def attached(model, steps, **options):
    return NMSparsifier(
        model, "2:4", skip_first_last=False, planned_steps=steps, **options
    ).attach()


def trained(steps=STEPS, **options):
    """The ratios that a training of so many steps counts."""
    model = net()
    sparsifier = attached(model, steps, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sparsifier.register(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 8)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    return sparsifier


def by_plan(steps=STEPS, **options):
    sparsifier = attached(net(), steps, **options)
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
    "slope": {"method": SLoPe(refresh_every=5)},
    "slope-late": {"method": SLoPe(start=0.25)},
    "rigl": {"method": RigL(every=3, stop=0.7)},
    "cast": {"method": CAST(end=0.5)},
    "cast-to-the-end": {"method": "cast"},
    "always": {"method": "sr-ste"},
    "dense start and end": {"method": SRSTE(dense_start=5, dense_end=0.25)},
    "transposable, estimator phases": {
        "method": TransposableMask(4, 1e-3, dense_start=3, dense_end=2),
        "grad_estimator": MVUE("2:4", 6, 0.3),
    },
    "estimator alone": {"method": "dense", "grad_estimator": MVUE("1:2", 2)},
    "bi-mask": {"method": BiMask(permute_every=5, dense_start=4)},
    "s-ste": {"method": SSTE(dense_start=3), "grad_estimator": "approx-mvue"},
    # Without a training, masks are taken to come at the latest moment.
    "step": {"method": STEP(latest=0.5, threshold=1e-30, dense_end=4)},
    "decaying": {"method": DecayingMask(dense_start=2, stop=0.5)},
    "decaying structure": {"method": DecayingMask("structure", dense_start=2, dense_end=3)},
    "asp": {"method": ASP(start=0.5)},
    "bame": {"method": BAME(start=2, stop=0.66)},
    "bame every 5": {"method": BAME(start=0.1, stop=20, gradient_every=5)},
    "bame of a batch": {"method": BAME(stop=0.9, evidence="batch", every=4)},
    "bame with bi-mask": {"method": BAME(stop=0.5, dgrad="bi-mask"), "grad_estimator": "mvue"},
    "drawn weights": {"method": SRSTE(dense_start=5), "dgrad": "mvue"},
    "drawn dense weights": {"method": "dense", "dgrad": "mvue"},
    "turns": {"method": Turns()},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.filterwarnings("ignore:BAME's masks hardly moved")
def test_as_a_training_counts(case):
    real, planned_ones = (make(**copy.deepcopy(case)) for make in (trained, by_plan))
    for name, layer in real.layers.items():
        there, here = mean_densities(layer), mean_densities(planned_ones.layers[name])
        for kind in ("paper", "eligible", "arithmetic"):
            # The density of a backward mask is measured, and depends on the weights.
            tolerance = 0.03 if kind == "arithmetic" and layer.masks.has_backward else 1e-12
            assert vars(here[kind]) == pytest.approx(vars(there[kind]), abs=tolerance), (name, kind)


@pytest.mark.parametrize("method", [LBC(stop=0.5), MaxQ(0.25, 20)], ids=str)
def test_masks_that_shrink_are_looked_at(method):
    """Which entries go depends on gradients, so their number in between is that of the plan only about."""
    real, planned_ones = (make(method=copy.deepcopy(method)) for make in (trained, by_plan))
    for name, layer in real.layers.items():
        there, here = mean_densities(layer), mean_densities(planned_ones.layers[name])
        for kind, tolerance in (("eligible", 1e-12), ("paper", 0.03), ("arithmetic", 0.03)):
            assert vars(here[kind]) == pytest.approx(vars(there[kind]), abs=tolerance), (name, kind)


def test_several_rules_and_dense_layers():
    rules = [
        {"include": "0", "method": SRSTE(dense_start=0.5)},
        {"include": "2", "pattern": "1:4", "method": "bame"},
    ]
    options = {"method": "sr-ste", "rules": rules, "exclude": "4"}
    real, planned_ones = trained(**options), by_plan(**options)
    planned_ones.macs.update(real.macs)
    assert planned_ones.flops_ratios(mean=True) == pytest.approx(real.flops_ratios(mean=True))


@pytest.mark.filterwarnings("ignore:BAME")
@settings(max_examples=20)
@given(
    steps=st.integers(2, 400), start=st.floats(0, 1), stop=st.floats(0, 1), every=st.integers(1, 40)
)
def test_dense_gradients_of_bame(steps, start, stop, every):
    """One per `every` steps of the window, and in an empty window one at its begin."""
    start, stop = sorted((start, stop))
    sparsifier = attached(net(), steps, method=BAME(start, stop, gradient_every=every), include="0")
    charge_plan(list(sparsifier.layers.values()), steps)
    first, last = sparsifier.layers["0"].progress.schedule
    dense = len(range(first, min(max(last, first + 1), steps), every))
    wgrad = mean_densities(sparsifier.layers["0"])["paper"].wgrad
    assert wgrad == pytest.approx(0.5 + 0.5 * dense / steps)


def test_long_phases_are_like_their_beginning(monkeypatch):
    monkeypatch.setattr(planned, "COUNTED", 100)
    sparsifier = by_plan(10_000, method=BAME(stop=0.5, gradient_every=4))
    wgrad = mean_densities(sparsifier.layers["0"])["paper"].wgrad
    assert wgrad == pytest.approx(0.5 * (0.5 + 0.5 * 0.25) + 0.5 * 0.5)


def test_without_a_plan():
    sparsifier = attached(net(), None, method="sr-ste")
    charge_plan(list(sparsifier.layers.values()), None)
    assert vars(mean_densities(sparsifier.layers["0"])["paper"]) == {
        "forward": 0.5,
        "dgrad": 1.0,
        "wgrad": 1.0,
    }
