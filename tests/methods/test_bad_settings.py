"""What methods and estimators refuse by name: settings when they are made, plans when they are attached, optimizers."""

import math

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, NAdam, RAdam

from lightning_nm import (
    ASP,
    BAME,
    CAST,
    LBC,
    MVUE,
    SRSTE,
    SSTE,
    STE,
    STEP,
    ApproxMVUE,
    BiMask,
    DecayingMask,
    MaskLogits,
    MaxQ,
    NMSparsifier,
    RigL,
    SLoPe,
    TopN,
    TransposableMask,
)

WITH_PHASES = (STE, SSTE, SRSTE, TransposableMask, BiMask, DecayingMask, MVUE, ApproxMVUE, TopN)
SETTINGS = [
    *((cls, {"dense_start": 1.5}, r"dense_start=1\.5 is not a fraction") for cls in WITH_PHASES),
    (STE, {"dense_start": -1}, "dense_start=-1 must be a training step, 0 or later"),
    (STE, {"dense_start": True}, r"dense_start=True must be an integer \(training steps\) or"),
    (STE, {"dense_end": -2}, "dense_end=-2"),
    (STE, {"dense_start": 0.6, "dense_end": 0.4}, "whole training dense"),
    (STE, {"dense_start": 1.0}, "whole training dense"),
    (STE, {"dense_end": 1.0}, "whole training dense"),
    (SRSTE, {"decay": "x"}, "decay='x' must be a number, not str"),
    (SRSTE, {"decay": -1}, "decay=-1 must be 0 or a positive number"),
    (SRSTE, {"decay_at": "clipping"}, "'clipping' is unknown: use 'before-clipping' or 'after-"),
    (SRSTE, {"decay_scale": -1}, "decay_scale=-1 must be .* number: a factor, or 'world-size'"),
    (BiMask, {"decay_scale": "ranks"}, "decay_scale='ranks' must be a number, .* or 'world-size'"),
    (BiMask, {"first_search": -1}, "first_search=-1 must be an integer of at least 0"),
    (TransposableMask, {"update_every": 0}, "update_every=0"),
    (TransposableMask, {"first_update": 0}, "first_update=0 must be an integer of at least 1"),
    (TransposableMask, {"decay_at": ""}, "decay_at='' is unknown"),
    (TransposableMask, {"decay": -1}, "decay=-1"),
    (ASP, {"start": 1.5}, r"start=1\.5"),
    (ASP, {"start": "1"}, "start='1'"),
    (SLoPe, {"refresh_every": 2.5}, r"refresh_every=2\.5 must be an integer of at least 1"),
    (SLoPe, {"first_refresh": 0}, "first_refresh=0 must be an integer of at least 1"),
    (RigL, {"every": True}, "every=True must be an integer of at least 1"),
    (RigL, {"drop": 0}, "drop=0 must be a positive number of at most 1"),
    (RigL, {"drop": 1.5}, r"drop=1\.5"),
    (RigL, {"stop": 1.5}, r"stop=1\.5"),
    (CAST, {"decay": math.inf}, "decay=inf"),
    (CAST, {"refresh_every": 0}, "refresh_every=0"),
    (CAST, {"scale_groups": -1}, "scale_groups=-1"),
    (CAST, {"end": 0}, "end=0 leaves no step"),
    (CAST, {"end": 1.5}, r"end=1\.5"),
    (LBC, {"stop": -1}, "stop=-1"),
    (MaxQ, {"ramp": "log"}, "ramp='log' is unknown"),
    (MaxQ, {"temperature": 0}, "temperature=0 must be a positive number"),
    (MaxQ, {"start": 5, "stop": 4}, "stop=4 lies before start=5: give a later"),
    (MaxQ, {"start": 0.5}, r"stop=0\.25 lies before start=0\.5"),
    (MaxQ, {"decay": -1}, "decay=-1"),
    (MaskLogits, {"temperature": (4, 0)}, r"temperature=\(4, 0\) must be two positive numbers"),
    (MaskLogits, {"temperature": 3}, "temperature=3 must be two positive"),
    (MaskLogits, {"scale": (1, 2, 3)}, r"scale=\(1, 2, 3\) must be two positive numbers"),
    (MaskLogits, {"scale": (4, "x")}, r"scale=\(4, 'x'\) must be two positive"),
    (MaskLogits, {"prior_strength": -1}, "prior_strength=-1 must be 0 or a positive number"),
    (MaskLogits, {"weight_reg": "x"}, "weight_reg='x' must be a number"),
    (MaskLogits, {"stop": 1.5}, r"stop=1\.5"),
    (MaskLogits, {"prior": "x.pt"}, r"prior='x\.pt' must be the state dict"),
    (DecayingMask, {"decay": "cosine"}, "decay='cosine' is unknown: use 'linear' or"),
    (DecayingMask, {"rate": 0.0}, "rate=0.0 must be a positive number"),
    (DecayingMask, {"stop": 1.5}, "stop=1.5 is not a fraction"),
    (STEP, {"latest": 1.5}, "latest=1.5 is not a fraction"),
    (STEP, {"threshold": 0.0}, "threshold=0.0 must be a positive number"),
    (STEP, {"mean": "median"}, "mean='median' is unknown"),
    (BAME, {"start": -1}, "start=-1"),
    (BAME, {"stop": math.nan}, "stop=nan is not a fraction"),
    (BAME, {"stop": None}, r"stop=None must be an integer \(training steps\) or a float"),
    (BAME, {"start": 10, "stop": 5}, "stop=5 lies before start=10: no adaptation"),
    (BAME, {"every": 0}, "every=0 must be an integer of at least 1"),
    (BAME, {"gradient_every": 0}, "gradient_every=0 must be an integer of at least 1"),
    (BAME, {"gradient_every": None}, "gradient_every=None"),
    (BAME, {"evidence": "batch", "gradient_every": 2}, "gradient_every=2 has no meaning for"),
    (BAME, {"evidence": "mean"}, "evidence='mean' is unknown: use 'accumulated' or 'batch'"),
    (BAME, {"evidence_rate": math.nan}, "evidence_rate=nan must be a positive number"),
    (BAME, {"budget": 0.0}, r"budget=0\.0 .* must lie in \(0, 1\]"),
    (BAME, {"budget": 1.1}, r"budget=1\.1"),
    (BAME, {"dgrad": "transposable"}, "dgrad='transposable'"),
    (MVUE, {"pattern": "4:4"}, "4:4"),
    (TopN, {"pattern": "0:4"}, "0:4"),
]


@pytest.mark.parametrize(("cls", "options", "message"), SETTINGS)
def test_bad_settings_are_named(cls, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cls(**options)


LENGTH = 20  # planned steps
PLANS = [
    (STE(dense_start=20), "dense_start=20 ends at step 20 and dense_end=0 begins at step 20 of 20"),
    (STEP(latest=0), "latest=0 leaves no dense step"),
    (STEP(0.6, latest=0.5), "its earliest step, 12 by dense_start=0.6, comes after the latest"),
    (STEP(dense_end=0.7), "latest=0.5 ends at step 10 and dense_end=0.7"),
    (DecayingMask(dense_start=0.5, stop=0.2), "stop=0.2 is step 4, .* dense_start=0.5 at step 10"),
    (DecayingMask(stop=20), "would never be N:M: stop=20 is step 20"),
    (DecayingMask(stop=0.8, dense_end=0.3), "stop=0.8 is step 16, .* at step 14"),
    (CAST(end=30), "end=30 is step 30 of 20, so the model would stay dense"),
    (MaxQ(0.5, 5), r"stop=5 is step 5 of 20, before start=0\.5 \(10\)"),
    (BAME(10, 0.1), r"stop=0\.1 is step 2 of 20, before start=10"),
]


def attach(method, estimator=None, pattern="2:4", planned=LENGTH):
    model = nn.Sequential(nn.Linear(16, 8))
    options = {"skip_first_last": False, "planned_steps": planned}
    try:
        return NMSparsifier(model, pattern, method, estimator, **options).attach()
    except ValueError:
        assert type(model[0]) is nn.Linear, "nothing was touched"
        raise


@pytest.mark.parametrize(("method", "message"), PLANS)
def test_plans_that_cannot_be_are_refused(method, message):
    with pytest.raises(ValueError, match=message):
        attach(method)


@pytest.mark.parametrize(
    ("estimator", "planned", "message"),
    [
        (MVUE(dense_end=0.1), None, r"MVUE's dense_end=0\.1 is a fraction .* leave dense_end out"),
        (MVUE(dense_end=0.1), 0, "would never be sparse"),
        (MVUE(dense_start=6, dense_end=5), 10, "ends at step 6 and dense_end=5 begins at step 5"),
        (MVUE(dense_end=5), None, "dense_end=5 counts from the end .* not known: leave dense_end"),
    ],
)
def test_plans_of_estimators_that_cannot_be_are_refused(estimator, planned, message):
    with pytest.raises(ValueError, match=message):
        attach("dense", estimator, planned=planned)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ASP(200), "ASP never prunes: start=200 is step 200 of 20, so the model stays dense"),
        (LBC(stop=30), "LBC's masks never become N:M: stop=30 is step 30 of 20"),
        (MaxQ(stop=30), "MaxQ's masks never become N:M: stop=30 is step 30 of 20"),
        (MaskLogits(stop=30), "stay soft: stop=30 is step 30 of 20"),
        ("rigl", r"RigL never moves a mask: every=100 .* before step 15"),
        (BAME(1.0, 1.0), "never adapts: it starts at step 20 of 20"),
        (BAME(200, 300), "never adapts: it starts at step 200 of 20"),
        (BAME(every=500), "once and never again: every=500 .* between step 0 and step 12"),
    ],
)
def test_moments_that_do_nothing_are_warned_of(method, message):
    with pytest.warns(UserWarning, match=message):
        attach(method)


@pytest.mark.parametrize("method", [LBC(stop=5), MaskLogits(stop=5)])
def test_too_many_patterns_are_refused_by_name(method):
    message = r"layer '0'.*8:16.*= 12870 patterns.*smaller M.*another method"
    with pytest.raises(ValueError, match=message):
        attach(method, pattern="8:16")


STEP_ALONE = r"{}.*layer '0'.*use Adam or AdamW, or .*'sr-ste'"
OPTIMIZERS = [
    (STEP(), lambda p: SGD(p, 0.1), STEP_ALONE.format("SGD is neither Adam nor AdamW")),
    (STEP(), NAdam, STEP_ALONE.format("NAdam is neither Adam nor AdamW")),
    (STEP(), RAdam, STEP_ALONE.format("RAdam is neither Adam nor AdamW")),
    (STEP(), lambda p: AdamW(p, amsgrad=True), STEP_ALONE.format("AdamW has amsgrad=True")),
    (STEP(), lambda p: Adam(p, betas=(0.0, 0.9)), STEP_ALONE.format("Adam has beta1=0")),
    (CAST(), NAdam, "not for NAdam"),
    (CAST(), lambda p: Adam(p, weight_decay=0.1), r"weight_decay=0\.1 .*layer '0'.* use AdamW"),
    (CAST(), lambda p: Adam(p, maximize=True), "maximize=True"),
    (BAME(), type("AdamW8bit", (AdamW,), {}), "AdamW8bit quantises its state.*such as 'asp'"),
    (BAME(), LBFGS, "LBFGS is neither SGD nor of the Adam family.*layer '0'.*use SGD, Adam"),
    *(
        (BAME(), getattr(torch.optim, name), f"{name} is neither SGD nor of the Adam family")
        for name in ("Adagrad", "Adamax", "RMSprop")
    ),
]


@pytest.mark.parametrize(("method", "make", "message"), OPTIMIZERS)
def test_optimizers_that_a_method_refuses(method, make, message):
    sparsifier = attach(method)
    with pytest.raises(ValueError, match=message):
        sparsifier.register(make(sparsifier.model.parameters()))
